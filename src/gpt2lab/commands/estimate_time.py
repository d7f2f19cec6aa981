"""Predict a run before it starts: time, memory, cost, loss; or tell how long the newest run still takes.

python scripts/estimate_time.py
python scripts/estimate_time.py --gpu H100 --gpus 8 --model gpt2 --tokens 10B
python scripts/estimate_time.py --measure --deadline 12h
"""


def main(argv: list[str]) -> int:
    """Answer the question on the command line."""
    from gpt2lab.config.command_line import run_tyro
    from gpt2lab.planner.ask import Ask
    from gpt2lab.planner.planner import answer

    return answer(run_tyro(Ask, argv))
