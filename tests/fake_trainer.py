"""A trainer that prints made-up steps, and the results of such trainers in a race."""

import dataclasses
from pathlib import Path
from typing import Any

from benchmarks import contestants, race, running, trainers
from benchmarks.contestants import Contestant, Place, Step
from benchmarks.sizes import Size

SMALL = Size(1, 2, 16, 256, 32, 2)

FAKE_TRAINER = """
import itertools, sys, time
for n in itertools.count():
    time.sleep(0.01)
    print(f"iter {n}: loss {9 - n / 10:.4f}, time {10 + n}.50ms, mfu -100.00%", flush=True)
    if len(sys.argv) > 1 and n == int(sys.argv[1]):
        sys.exit("out of luck")
"""


def place_in(folder: Path) -> Place:
    folder.mkdir(parents=True, exist_ok=True)
    return Place(folder, folder / "data", folder / "tiktoken", "cpu")


def fake_trainer(folder: Path, *flags: str) -> Contestant:
    place = place_in(folder)
    (folder / "fake.py").write_text(FAKE_TRAINER)
    read = contestants._lines(r"iter \d+: loss (?P<loss>[\d.]+), time (?P<ms>[\d.]+)ms")
    return Contestant("fake", (str(folder / "fake.py"), *flags), place, read, SMALL)


def plan(**changes: Any) -> trainers.Plan:
    plain = trainers.Plan(("tiny256",), (), ("auto",), "cpu", 1, 1, 2, 30.0, False, False)
    return dataclasses.replace(plain, **changes)


def entry_of(name: str, *rounds: list[float]) -> race.Entry:
    place = Place(Path(), Path(), Path(), "cpu")
    trainer = Contestant(name, (), place, contestants._our_steps, SMALL)
    steps = [tuple(Step(s, 5.0 - i) for i, s in enumerate([9.0, *each])) for each in rounds]
    runs = [running.Run(of_round, 1, 2.0, 100, 0.1) for of_round in steps]
    return race.Entry(trainer, runs)
