"""Entry point for torchrun where gpt2lab is installed: torchrun --nproc_per_node=4 -m gpt2lab.finetune ..."""

import sys

from gpt2lab.training.stop import end_at_once_on

if __name__ == "__main__":
    end_at_once_on()  # before the imports, which take time

from gpt2lab.commands import verbs
from gpt2lab.commands.entry import run

if __name__ == "__main__":
    sys.exit(run(lambda argv: verbs.main(["finetune", *argv])))
if __name__ != "__mp_main__":  # that of a process which multiprocessing starts
    raise ImportError("an entry point for `python -m`; in Python call gpt2lab.train(...)")
