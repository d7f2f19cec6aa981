"""Write a run's weights as a Hugging Face folder, checked against transformers before it appears.

python scripts/export_hf.py gpt2-124m --out exports/gpt2-124m
python scripts/export_hf.py checkpoints/gpt2-124m/step_00000250 --out small --dtype bfloat16
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from gpt2lab.config.command_line import option, run_tyro


@dataclass(frozen=True)
class Export:
    """Write a run's weights as a Hugging Face folder, checked against transformers before it appears."""

    target: Positional[str] = field(
        metadata={"help": "a run (name or folder), a checkpoint's folder, or a Hugging Face GPT-2"}
    )
    out: Path = field(metadata={"help": "folder to write; must not exist"})
    dtype: Literal["float32", "bfloat16"] = option("float32", "of the weights in the file")
    push_to_hub: str | None = option(None, "also upload to this name on the Hugging Face Hub")
    checkpoint_dir: Path | None = option(None, "folder of the runs; default checkpoints/")
    json: bool = option(False, "print one JSON object")


def main(argv: list[str]) -> int:
    """Export, check and print."""
    flags = run_tyro(Export, argv)
    from gpt2lab import paths
    from gpt2lab.huggingface.export import export  # torch

    runs = flags.checkpoint_dir
    report = export(
        flags.target,
        checkpoint_dir=paths.from_working_directory(runs)
        if runs
        else paths.from_repository(Path("checkpoints")),
        out=paths.from_working_directory(flags.out),
        dtype=flags.dtype,
        push_to_hub=flags.push_to_hub,
    )
    for warning in report.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    found = report.numbers
    print(
        json.dumps(found)
        if flags.json
        else f"{paths.for_people(Path(found['out']))}: {found['parameters']:,} parameters, {found['dtype']}; "
        f"transformers' logits differ by at most {found['max_abs_diff']:.1e} of {found['max_abs_logit']:.1f}"
    )
    return 0
