"""Lets a script import gpt2lab from a plain clone, in any working directory, without an install."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
