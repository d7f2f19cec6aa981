"""Entry point for torchrun where gpt2lab is installed: torchrun --nproc_per_node=4 -m gpt2lab.finetune ..."""

import sys

if __name__ == "__main__":
    from gpt2lab.__main__ import program

    sys.exit(program("finetune"))
if __name__ != "__mp_main__":  # that of a process which multiprocessing starts
    raise ImportError("an entry point for `python -m`; in Python call gpt2lab.train(...)")
