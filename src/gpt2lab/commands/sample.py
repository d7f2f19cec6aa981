"""Continue prompts with a run's newest checkpoint, one checkpoint, or a Hugging Face GPT-2.

python scripts/sample.py gpt2-124m --prompt "Once upon a time" --num_samples 3
python scripts/sample.py gpt2-124m --interactive
python scripts/sample.py hf:gpt2 --batch prompts.txt --out texts.jsonl --temperature 0
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional

from gpt2lab.config.command_line import option, run_tyro
from gpt2lab.errors import ConfigError
from gpt2lab.evaluation.style import Style, refuse_style

if TYPE_CHECKING:
    from gpt2lab.evaluation.completion import Completer


@dataclass(frozen=True)
class Sample:
    """Continue prompts with a run, a checkpoint, or a Hugging Face GPT-2."""

    target: Positional[str] = field(
        metadata={"help": "a run (name or folder), a checkpoint's folder, or a Hugging Face GPT-2"}
    )
    prompt: str | None = option(None, "text to continue; '' = begin with nothing")
    interactive: bool = option(False, "read prompts from the terminal, until an empty line")
    batch: Path | None = option(None, "file of prompts, one a line")
    out: Path | None = option(None, "with --batch: file to write, one JSON object a text")
    num_samples: int = option(1, "texts for each prompt")
    style: Style = option(Style(), "how a text is drawn")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto = cuda if there is one")
    dtype: Literal["auto", "fp32", "bf16"] = option("fp32", "matmul precision")
    checkpoint_dir: Path | None = option(None, "folder of the runs; default checkpoints/")


def main(argv: list[str]) -> int:
    """Load the model and continue what is asked for."""
    flags = run_tyro(Sample, argv)
    from gpt2lab import paths

    _refuse(flags)
    from gpt2lab.evaluation.completion import Completer, complete_file  # torch

    def typed(path: Path) -> Path:
        return paths.from_working_directory(path)

    runs = flags.checkpoint_dir
    completer = Completer(
        flags.target,
        checkpoint_dir=typed(runs) if runs else paths.from_repository(Path("checkpoints")),
        device=flags.device,
        dtype=flags.dtype,
        style=flags.style,
    )
    for warning in completer.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if flags.batch is not None:
        complete_file(
            completer, typed(flags.batch), typed(flags.out), num_samples=flags.num_samples
        )
    elif flags.interactive:
        _converse(completer, flags.num_samples)
    else:
        ids = completer.encode(flags.prompt)
        for found in completer.complete(ids, num_samples=flags.num_samples):
            print(f"{flags.prompt}{found.text}", end="\n" if flags.num_samples == 1 else "\n---\n")
    print(completer.describe_speed(), file=sys.stderr)
    return 0


def _refuse(flags: Sample) -> None:
    ways = [flags.prompt is not None, flags.interactive, flags.batch is not None]
    if sum(ways) != 1:
        raise ConfigError("give one of --prompt TEXT, --interactive, --batch IN.txt")
    if (flags.batch is None) != (flags.out is None):
        raise ConfigError("--batch IN.txt and --out OUT.jsonl go together")
    if flags.num_samples < 1:
        raise ConfigError(f"num_samples {flags.num_samples} must be at least 1")
    refuse_style(flags.style)


def _converse(completer: "Completer", num_samples: int) -> None:
    """Continue each line that is typed, showing the text as it comes."""
    number = 0
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        prompt = line.rstrip("\n")
        if not prompt:
            print(
                end="" if line else "\n", file=sys.stderr
            )  # Ctrl+D leaves the cursor where it was
            return
        try:
            ids = completer.encode(prompt)
        except ConfigError as refusal:
            print(f"error: {refusal}", file=sys.stderr)
            continue
        for place in range(num_samples):
            print(prompt, end="", flush=True)
            for piece in completer.stream(ids, number=number, place=place):
                print(piece, end="", flush=True)
            print()
        number += 1
