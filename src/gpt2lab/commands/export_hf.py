"""Write a run's weights as a Hugging Face folder, checked against transformers before it appears.

gpt2lab export gpt2-124m --out exports/gpt2-124m
gpt2lab export my_run/step_00000250 --out small --dtype bfloat16
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from gpt2lab import fmt, paths
from gpt2lab.checkpoint.target import find_target
from gpt2lab.config.command_line import TARGET, argument, option, run_tyro
from gpt2lab.errors import ConfigError


@dataclass(frozen=True)
class Export:
    """Write a run's weights as a Hugging Face folder, checked against transformers before it appears."""

    target: Positional[str] = argument(TARGET)
    out: Path = argument("folder to write; must not exist")
    dtype: Literal["float32", "bfloat16"] = option("float32", "of the weights in the file")
    max_shard_size: str | None = option(
        None, "split larger weights into files of this size, such as 200MB; default 5GB"
    )
    push_to_hub: str | None = option(None, "also upload to this name on the Hugging Face Hub")
    checkpoint_dir: Path | None = option(None, "folder of the runs; default checkpoints/")
    json: bool = option(False, "print one JSON object")


def main(argv: list[str]) -> int:
    """Export, check and print."""
    flags = run_tyro(Export, argv)
    limit = _shard_bytes(flags)
    target = find_target(flags.target, paths.runs_folder(flags.checkpoint_dir))
    from gpt2lab.huggingface.export import (
        SHARD_BYTES,
        export,
    )  # torch, which a wrong name does not wait for

    found, warnings = export(
        target,
        out=paths.from_working_directory(flags.out),
        dtype=flags.dtype,
        push_to_hub=flags.push_to_hub,
        shard_bytes=limit or SHARD_BYTES,
    )
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(
        json.dumps(found)
        if flags.json
        else f"{paths.for_people(Path(found['out']))}: {found['parameters']:,} parameters, {found['dtype']}; "
        f"transformers' logits differ by at most {found['max_abs_diff']:.1e} of {found['max_abs_logit']:.1f}"
    )
    return 0


def _shard_bytes(flags: Export) -> int | None:
    """Return the largest size of a file that was typed, None if none was."""
    if flags.max_shard_size is None:
        return None
    try:
        found = fmt.parse_bytes(flags.max_shard_size)
    except ValueError as error:
        raise ConfigError(f"--max_shard_size {error}") from error
    if found < 1:
        raise ConfigError(f"--max_shard_size {flags.max_shard_size} must be above 0")
    return found
