"""Lets a script import gpt2lab and benchmarks from a plain clone, in any working directory, without an install."""

import signal
import sys
from pathlib import Path

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until `run`: no traceback of half-loaded modules

_ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_ROOT / "src"), str(_ROOT)]

from gpt2lab.commands.entry import run as run  # noqa: E402 - needs the path
