"""Train GPT-2 on token shards.

python src/train.py --model gpt2-micro
torchrun --nproc_per_node=4 src/train.py --resume latest
python src/train.py --list_checkpoints
"""

import signal
import sys

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of half-loaded modules

from gpt2lab.training.stop import end_at_once_on

if __name__ == "__main__":
    end_at_once_on()  # before the slow imports

from gpt2lab.commands.entry import run


def main(argv: list[str]) -> int:
    """Do what the command line says and return the exit code."""
    from gpt2lab.commands.train import main as train

    return train(argv, "pretrain")


if __name__ == "__main__":
    sys.exit(run(main))
