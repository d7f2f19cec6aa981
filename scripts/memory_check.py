"""Compare what a run needs at its peak, by category, with the memory that is free here. Flags as estimate_time.py.

python scripts/memory_check.py --model gpt2 --mini_batch_size 32
python scripts/memory_check.py --model gpt2-xl --gpu H100
"""

import sys

import _bootstrap  # noqa: F401
from gpt2lab.door import run


def main(argv: list[str]) -> int:
    """Print the comparison; 3 if it does not fit."""
    from gpt2lab.flags import run_tyro
    from gpt2lab.planning.ask import Ask
    from gpt2lab.planning.gpu_report import print_memory

    return print_memory(run_tyro(Ask, argv))


if __name__ == "__main__":
    sys.exit(run(main))
