"""Evaluate a run's newest checkpoint, one checkpoint, or a Hugging Face GPT-2.

python scripts/evaluate.py my_run
python scripts/evaluate.py checkpoints/my_run/step_00000250 --val data/fineweb_edu --hellaswag
torchrun --nproc_per_node=4 scripts/evaluate.py gpt2 --hellaswag --save results/gpt2
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from gpt2lab.config.command_line import option, run_tyro
from gpt2lab.errors import ConfigError


@dataclass(frozen=True)
class Evaluate:
    """Evaluate a run, a checkpoint, or a Hugging Face GPT-2."""

    target: Positional[str] = field(
        metadata={"help": "a run (name or folder), a checkpoint's folder, or a Hugging Face GPT-2"}
    )
    hellaswag: bool = option(False, "score HellaSwag")
    val: Path | None = option(
        None, "folder of token shards; without it and --hellaswag: the run's own"
    )
    val_tokens: int | None = option(None, "validation tokens; default as the run, else 10,485,760")
    hellaswag_path: Path | None = option(None, "HellaSwag items; default the run's, or downloaded")
    hellaswag_limit: int | None = option(
        None, "score a fixed random subset of N items, 0 = all; default as the run, else all"
    )
    hellaswag_metrics: Literal["all", "harness", "tutorial"] | None = option(
        None,
        "harness = acc, acc_norm; tutorial = acc_token_norm; half the time each; default as the run, else all",
    )
    batch_size: int = option(8, "validation windows per forward pass; only rounding depends on it")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto = cuda if there is one")
    dtype: Literal["auto", "fp32", "bf16"] = option(
        "auto", "matmul precision; auto = what the run trained in, else as in training"
    )
    eval_generate: bool = option(
        False, "of a fine-tuned run: also let it answer what was held out, and compare (ROUGE-L)"
    )
    save: Path | None = option(None, "folder to write results item by item to, for compare.py")
    checkpoint_dir: Path | None = option(None, "folder of the runs; default checkpoints/")
    json: bool = option(False, "print one JSON object")


def main(argv: list[str]) -> int:
    """Evaluate and print."""
    flags = run_tyro(Evaluate, argv)
    from gpt2lab import paths

    for name, least in (("val_tokens", 1), ("batch_size", 1), ("hellaswag_limit", 0)):
        value = getattr(flags, name)
        if value is not None and value < least:
            raise ConfigError(f"{name} {value} must be at least {least}")
    from gpt2lab.commands.evaluation_report import Wanted, describe, evaluate  # torch

    def typed(path: Path | None) -> Path | None:
        return paths.from_working_directory(path) if path else None

    report = evaluate(
        Wanted(
            target=flags.target,
            checkpoint_dir=typed(flags.checkpoint_dir)
            or paths.from_repository(Path("checkpoints")),
            hellaswag=flags.hellaswag,
            hellaswag_path=typed(flags.hellaswag_path),
            hellaswag_limit=flags.hellaswag_limit,
            hellaswag_metrics=flags.hellaswag_metrics,
            val=typed(flags.val),
            val_tokens=flags.val_tokens,
            batch_size=flags.batch_size,
            device=flags.device,
            dtype=flags.dtype,
            save=typed(flags.save),
            generate=flags.eval_generate,
        )
    )
    if report is None:  # not the first of several processes
        return 0
    for warning in report.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(json.dumps(report.numbers) if flags.json else describe(report))
    return 0
