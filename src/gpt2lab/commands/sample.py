"""Continue prompts with a run's newest checkpoint, one checkpoint, or a Hugging Face GPT-2.

gpt2lab sample latest --prompt "Once upon a time" --num_samples 3
gpt2lab sample latest --interactive
gpt2lab sample hf:gpt2 --batch prompts.txt --out texts.jsonl --temperature 0
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2lab import paths
from gpt2lab.commands.parser import AmongRuns, OnDevice, parse_flags
from gpt2lab.config.flags import TARGET, argument, option
from gpt2lab.errors import ConfigError, DataError
from gpt2lab.evaluation.completion import Completer, SamplingParams, check_sampling, complete_file
from gpt2lab.runs.console import doing, say


@dataclass(frozen=True)
class Sample(AmongRuns, OnDevice):
    """Continue prompts with a run, a checkpoint, or a Hugging Face GPT-2."""

    target: str = argument(TARGET)
    prompt: str | None = option(None, "text to continue; '' = begin with nothing")
    interactive: bool = option(
        False,
        "read prompts from the terminal, until an empty line; the default on a terminal without --prompt",
    )
    batch: Path | None = option(None, "file of prompts, one a line")
    out: Path | None = option(None, "with --batch: file to write, one JSON object a text")
    num_samples: int = option(1, "texts for each prompt", least=1)
    style: SamplingParams = option(SamplingParams(), "how a text is drawn")


_COMMON = (  # flags of the short help
    *("target", "prompt", "interactive", "batch", "out", "num_samples", "max_new_tokens"),
    *("temperature", "top_k", "seed", "device", "checkpoint_dir"),
)


def main(argv: list[str]) -> int:
    """Load the model and continue the prompts."""
    flags = parse_flags(Sample, argv, common=_COMMON)
    ways = [flags.prompt is not None, flags.interactive, flags.batch is not None]
    if not any(ways) and not sys.stdin.isatty():
        raise ConfigError("nothing to continue: give --prompt TEXT, --interactive or --batch FILE")
    if sum(ways) > 1:
        raise ConfigError("give one of --prompt TEXT, --interactive, --batch IN.txt")
    if (flags.batch is None) != (flags.out is None):
        raise ConfigError("--batch IN.txt and --out OUT.jsonl go together")
    completer = load(flags, flags.style)
    if flags.batch is not None:
        source, out = map(paths.from_working_directory, (flags.batch, flags.out))
        complete_file(completer, source, out, num_samples=flags.num_samples)
    elif flags.prompt is None:
        _converse(completer, flags.num_samples)
    else:
        ids = completer.encode(flags.prompt)
        if flags.num_samples == 1:
            _print_as_drawn(completer, flags.prompt, ids)
        else:
            for found in completer.complete(ids, num_samples=flags.num_samples):
                print(f"{flags.prompt}{found.text}\n---", flush=True)
    say(completer.describe_speed())
    return 0


def load(flags: Any, style: SamplingParams) -> Completer:
    """Load the model that the flags of sample, chat or serve name, and print its warnings.

    Raises: ConfigError, CheckpointError.
    """
    check_sampling(style)
    completer = Completer(
        flags.target,
        checkpoint_dir=paths.runs_folder(flags.checkpoint_dir),
        device=flags.device,
        dtype=flags.dtype,
        style=style,
    )
    for warning in completer.warnings:
        say(f"warning: {warning}")
    return completer


def typed_lines() -> Iterator[str]:
    """Ask for lines on the terminal until the input ends."""
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        with doing(""):
            line = sys.stdin.readline()
        if not line:
            say()  # Ctrl+D does not end the line
            return
        yield line


def _converse(completer: Completer, num_samples: int) -> None:
    number = 0
    for line in typed_lines():
        prompt = line.rstrip("\n")
        if not prompt:
            return
        try:
            ids = completer.encode(prompt)
        except (ConfigError, DataError) as error:
            say(f"error: {error}")
            continue
        for place in range(num_samples):
            _print_as_drawn(completer, prompt, ids, number=number, place=place)
        number += 1


def _print_as_drawn(
    completer: Completer, prompt: str, ids: list[int], *, number: int = 0, place: int = 0
) -> None:
    print(prompt, end="", flush=True)
    for text in completer.stream(ids, number=number, place=place):
        print(text, end="", flush=True)
    print()
