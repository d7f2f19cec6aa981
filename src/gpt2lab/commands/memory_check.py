"""Compare what a run needs at its peak, by category, with the memory that is free here. Flags as estimate_time.py.

python scripts/memory_check.py --model gpt2 --mini_batch_size 32
python scripts/memory_check.py --model gpt2-xl --gpu H100
"""


def main(argv: list[str]) -> int:
    """Print the comparison; 3 if it does not fit."""
    from gpt2lab.config.command_line import run_tyro
    from gpt2lab.planner.ask import Ask
    from gpt2lab.planner.gpu_report import print_memory

    return print_memory(run_tyro(Ask, argv))
