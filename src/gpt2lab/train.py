"""Entry point for torchrun where gpt2lab is installed: torchrun --nproc_per_node=4 -m gpt2lab.train ..."""

import signal
import sys

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of half-loaded modules

from gpt2lab.training.stop import end_at_once_on

if __name__ == "__main__":
    end_at_once_on()  # before the slow imports

from gpt2lab.commands import verbs
from gpt2lab.commands.entry import run

if __name__ == "__main__":
    sys.exit(run(lambda argv: verbs.main(["train", *argv])))
if __name__ != "__mp_main__":  # that of a process which multiprocessing starts
    raise ImportError("an entry point for `python -m`; in Python call gpt2lab.train(...)")
