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

from gpt2lab.config.command_line import TARGET, argument, option, run_tyro


@dataclass(frozen=True)
class Export:
    """Write a run's weights as a Hugging Face folder, checked against transformers before it appears."""

    target: Positional[str] = argument(TARGET)
    out: Path = argument("folder to write; must not exist")
    dtype: Literal["float32", "bfloat16"] = option("float32", "of the weights in the file")
    push_to_hub: str | None = option(None, "also upload to this name on the Hugging Face Hub")
    checkpoint_dir: Path | None = option(None, "folder of the runs; default checkpoints/")
    json: bool = option(False, "print one JSON object")


def main(argv: list[str]) -> int:
    """Export, check and print."""
    flags = run_tyro(Export, argv)
    from gpt2lab import paths
    from gpt2lab.checkpoint.target import find_target

    target = find_target(flags.target, paths.runs_folder(flags.checkpoint_dir))
    from gpt2lab.huggingface.export import export  # torch, which a wrong name does not wait for

    found, warnings = export(
        target,
        out=paths.from_working_directory(flags.out),
        dtype=flags.dtype,
        push_to_hub=flags.push_to_hub,
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
