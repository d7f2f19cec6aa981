"""Predict a run before it starts: time, memory, cost, loss; or tell how long the newest run still takes.

python scripts/estimate_time.py
python scripts/estimate_time.py --gpu H100 --gpus 8 --model gpt2 --tokens 10B
python scripts/estimate_time.py --measure --deadline 12h
"""

import sys

import _bootstrap  # noqa: F401
from gpt2lab.door import run


def main(argv: list[str]) -> int:
    """Answer the question on the command line."""
    from gpt2lab.flags import run_tyro
    from gpt2lab.planning.ask import Ask
    from gpt2lab.planning.planner import answer

    return answer(run_tyro(Ask, argv))


if __name__ == "__main__":
    sys.exit(run(main))
