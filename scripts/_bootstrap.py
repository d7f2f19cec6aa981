"""Lets a script import gpt2lab and benchmarks from a plain clone, in any working directory, without an install."""

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_ROOT / "src"), str(_ROOT)]

from gpt2lab.commands.entry import run as run  # noqa: E402 - needs the path
