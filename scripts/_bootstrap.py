"""Lets a script run its verb of gpt2lab from a plain clone, in any working directory, without an install."""

import signal
import sys
from pathlib import Path

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of half-loaded modules

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from gpt2lab.training.stop import end_at_once_on

end_at_once_on(signal.SIGINT)


def run(verb: str) -> int:
    """Do what the verb says and return the exit code."""
    from gpt2lab.commands import entry, verbs

    return entry.run(lambda argv: verbs.main([verb, *argv]))
