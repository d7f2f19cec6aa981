"""`gpt2lab VERB`, also as `python -m gpt2lab VERB` and `torchrun ... -m gpt2lab VERB`."""

import signal
import sys

if __name__ != "__mp_main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of half-loaded modules

from pathlib import Path

from gpt2lab.training.stop import STOP_SIGNALS, end_at_once_on

if __name__ != "__mp_main__":  # before the slow imports
    is_trainer = {"train", "finetune"} & {Path(sys.argv[0]).stem, *sys.argv[1:2]}
    end_at_once_on(*STOP_SIGNALS if is_trainer else [signal.SIGINT])

from gpt2lab.commands.entry import run
from gpt2lab.commands.verbs import main


def program(*verb: str) -> int:
    """Run a verb, by default the one on the command line, and return its exit code."""
    return run(lambda argv: main([*verb, *argv]))


if __name__ == "__main__":
    sys.exit(program())
