"""Kill a run that saves after every step, again and again at random instants; print what was lost, as JSON.

    python tests/faults/kill_storm.py DATA FOLDER KILLS SEED

Each life is a fork of this process, which has torch loaded already: seconds of start-up would otherwise be most of
what there is to hit. A life is a whole start of the trainer: it locks, sweeps, verifies, loads, trains, saves, retires.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "src"), str(Path(__file__).parents[1])]

import torch  # noqa: E402

import launch  # noqa: E402
from gpt2lab.checkpoint import catalog  # noqa: E402
from tiny import TINY, parse, pretrain  # noqa: E402

FLAGS = (
    *(*TINY, "--log_freq=1000", "--sample_freq=0", "--eval_freq=7"),
    *("--checkpoint_freq=1", "--keep_checkpoints=2", "--max_steps=100000", "--run_name=run"),
)


def live(data: Path, folder: Path, *more: str) -> int:
    """Fork a life and return its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        pretrain(parse([*FLAGS, f"--data_dir={data}", f"--checkpoint_dir={folder}", *more]))
        code = 0
    finally:
        os._exit(code)


def main() -> None:
    """Kill, resume, compare."""
    data, folder = Path(sys.argv[1]), Path(sys.argv[2])
    kills, dice = int(sys.argv[3]), random.Random(int(sys.argv[4]))
    torch.set_num_threads(1)
    run, wrong, lost, in_save = folder / "cut" / "run", 0, 0, 0
    for number in range(kills):
        before = max((int(p.name[5:]) for p in run.glob("step_*")), default=0)
        lines = len(launch.events(run, "step"))
        child = live(data, folder / "cut", "--resume=auto")
        if (
            number % 4
        ):  # most kills land in the midst of training, every fourth anywhere from the start on
            while len(launch.events(run, "step")) <= lines and os.waitpid(child, os.WNOHANG) == (
                0,
                0,
            ):
                time.sleep(0.005)
        time.sleep(dice.uniform(0, 0.5))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            wrong += 1  # it ended by itself: an error
        in_save += bool(list(run.glob(".tmp-*")) or list(run.glob(".del-*")))
        resumes = [e for e in launch.events(run, "resume") if e["attempt"] > 1]
        if resumes and lines < len(launch.events(run, "step")) and before:
            lost += before - resumes[-1]["from_step"]
        infos, damaged = catalog.list_checkpoints(run)
        wrong += len(damaged) + len(list(run.glob("corrupt-*")))
    last = max((info.step for info in infos), default=0) + 3
    for name, more in (("cut", ["--resume=auto"]), ("straight", [])):
        child = live(data, folder / name, f"--stop_after_steps={last}", *more)
        assert os.waitpid(child, 0)[1] == 0, name
    straight = folder / "straight" / "run"
    replayed: dict[int, set[str]] = {}
    for event in launch.events(run, "step"):
        replayed.setdefault(event["step"], set()).add(float.hex(event["loss"]))
    expected = launch.losses(straight)
    wrong += sum(losses != {expected[step]} for step, losses in replayed.items())
    wrong += sorted(replayed) != list(range(1, last + 1))
    wrong += launch.parameter_hash(run, last) != launch.parameter_hash(straight, last)
    starts = len(launch.events(run, "begin"))
    told = {"kills": kills, "starts": starts, "within_a_save": in_save, "steps": last}
    print(json.dumps({**told, "lost_commits": lost, "wrong": wrong}))


if __name__ == "__main__":
    main()
