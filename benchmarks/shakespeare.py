"""The quickstart's settings and nanoGPT's line for a CPU on the same characters of Tiny Shakespeare, in turns.

git clone https://github.com/karpathy/nanoGPT CHECKOUT
PYTHONPATH=src:. python -m benchmarks.shakespeare CHECKOUT input.txt

`input.txt` is what CHECKOUT/data/shakespeare_char/prepare.py would download; it is split as that program does. Ours is
measured on the whole validation split; nanoGPT measures 20 batches of 768 characters, drawn at random.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from gpt2lab.commands import entry
from gpt2lab.commands.parser import parse_flags
from gpt2lab.config.flags import argument, option

_ROOT = Path(__file__).resolve().parents[1]
# README of nanoGPT, "I only have a macbook"
_NANOGPT = [
    *("--device=cpu", "--compile=False", "--eval_iters=20", "--log_interval=1", "--block_size=64"),
    *("--batch_size=12", "--n_layer=4", "--n_head=4", "--n_embd=128", "--max_iters=2000"),
    *("--lr_decay_iters=2000", "--dropout=0.0"),
]


@dataclass(frozen=True)
class Flags:
    """The other program and the text."""

    checkout: Path = argument("clone of karpathy/nanoGPT")
    text: Path = argument("Tiny Shakespeare")
    rounds: int = option(1, "runs of each")


def _run(words: list[str], folder: Path) -> tuple[str, float]:
    began = time.monotonic()
    done = subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout, time.monotonic() - began


def main(argv: list[str]) -> int:
    """Train both, and print for each the validation loss in nats a character and the seconds of the whole program."""
    flags = parse_flags(Flags, argv)
    with tempfile.TemporaryDirectory() as name:
        peer = Path(name, "nanoGPT")
        shutil.copytree(flags.checkout, peer, ignore=shutil.ignore_patterns(".git"))
        data = peer / "data" / "shakespeare_char"
        shutil.copy(flags.text, data / "input.txt")
        _run([sys.executable, "prepare.py"], data)
        _run([sys.executable, "-m", "gpt2lab", "data", "import", str(data)], _ROOT / "src")
        ours = [sys.executable, "-m", "gpt2lab.train", f"--config={_ROOT}/examples/quickstart.toml"]
        ours += [f"--data_dir={data}", f"--checkpoint_dir={name}/runs", "--val_tokens=200_000"]
        theirs = [sys.executable, "train.py", "config/train_shakespeare_char.py", *_NANOGPT]
        for number in range(flags.rounds):
            _, seconds = _run([*ours, f"--run_name={number}"], _ROOT / "src")
            lines = Path(name, "runs", str(number), "metrics.jsonl").read_text().splitlines()
            done = next(e for e in map(json.loads, lines) if e["event"] == "done")
            print(f"ours     {done['val_loss']:.4f} nats a character, {seconds:.0f} s", flush=True)
            said, seconds = _run(theirs, peer)
            loss = re.findall(r"val loss ([\d.]+)", said)[-1]
            print(f"nanoGPT  {loss} nats a character, {seconds:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main))
