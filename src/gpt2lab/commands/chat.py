r"""Talk to a fine-tuned run, checkpoint or export, line by line; also from a pipe.

python scripts/chat.py my_tuned_run
printf 'Hello!\nWho are you?\n' | python scripts/chat.py my_tuned_run --temperature 0
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
    from gpt2lab.finetuning.chat import Chat

HELP = "/reset forgets what was said, /quit ends"


@dataclass(frozen=True)
class Talk:
    """Talk to a model that was fine-tuned with src/finetune.py: /reset forgets what was said, /quit ends."""

    target: Positional[str] = field(
        metadata={"help": "a run (name or folder), a checkpoint's folder, or a Hugging Face GPT-2"}
    )
    style: Style = option(Style(max_new_tokens=200, temperature=0.7), "how an answer is drawn")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto = cuda if there is one")
    dtype: Literal["auto", "fp32", "bf16"] = option("fp32", "matmul precision")
    checkpoint_dir: Path | None = option(None, "folder of the runs; default checkpoints/")


def main(argv: list[str]) -> int:
    """Load the model and answer until the input ends."""
    flags = run_tyro(Talk, argv)
    from gpt2lab import paths

    refuse_style(flags.style)
    from gpt2lab.checkpoint.target import was_tuned
    from gpt2lab.evaluation.completion import Completer  # torch
    from gpt2lab.finetuning.chat import Chat

    runs = flags.checkpoint_dir
    completer = Completer(
        flags.target,
        checkpoint_dir=paths.from_working_directory(runs)
        if runs
        else paths.from_repository(Path("checkpoints")),
        device=flags.device,
        dtype=flags.dtype,
        style=flags.style,
    )
    for warning in completer.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if not was_tuned(completer.target):
        print(
            f"warning: {flags.target} was not fine-tuned on conversations: it continues text, and its answers "
            f"mean little; see src/finetune.py",
            file=sys.stderr,
        )
    print(HELP, file=sys.stderr)
    _converse(Chat(completer))
    return 0


def _converse(chat: "Chat") -> None:
    """Answer each line of the input, showing the answer as it comes."""
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        text = line.strip()
        if not line or text == "/quit":
            print(end="" if line else "\n", file=sys.stderr)
            return
        if text == "/reset":
            chat.reset()
        elif text.startswith("/"):
            print(HELP, file=sys.stderr)
        elif text:
            _answer(chat, text)


def _answer(chat: "Chat", text: str) -> None:
    before = len(chat.turns)
    try:
        for piece in chat.ask(text):
            print(piece, end="", flush=True)
    except ConfigError as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return
    print()
    if forgotten := before + 2 - len(chat.turns):
        print(
            f"({forgotten // 2} earlier exchanges did not fit into the context and were forgotten)",
            file=sys.stderr,
        )
