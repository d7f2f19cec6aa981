"""Disturb one run at random for a while, resume it after every blow, and compare it with a run left in peace.

    python tests/faults/soak.py DATA FOLDER MINUTES SEED

Every life of the run draws its number of processes, what befalls it and when. Checked after each: what is on the disk
under a checkpoint's name is whole, a stop that was asked for lost nothing, the next life goes on from the newest
intact checkpoint. Checked at the end, bit by bit because of `--reduce exact`: the loss and the batch of every step
that any life took, the final weights and moments. Prints a table and ends with 1 if anything differs.
"""

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "src"), str(Path(__file__).parents[1])]

from harness import FaultRun  # noqa: E402

from gpt2lab import fmt  # noqa: E402
from gpt2lab.checkpoint import catalog  # noqa: E402

FLAGS = (
    *("--checkpoint_freq=5", "--keep_checkpoints=4", "--eval_freq=30", "--max_steps=100000"),
    *("--reduce=exact", "--warmup_steps=20"),
)
PACE = "step:sleep0.04@*"
KILLS = ("kill -9 a worker", "kill -9 the launcher", "kill -9 all at once")
STOPS = ("SIGTERM", "SIGINT", "STOP file")
PASSING = ("SAVE file", "SIGUSR1 to a worker", "frozen for a second")  # the life goes on
FULL_DISK = ("checkpoint.model.safetensors", "checkpoint.state.json", "checkpoint.before_rename")
DAMAGE = ("bit flipped", "cut short", "file missing")


@dataclass
class Soak:
    """The run under attack, and the account of it."""

    run: FaultRun
    dice: random.Random
    events: list[dict[str, Any]] = field(default_factory=list)  # all of metrics.jsonl so far
    offset: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)  # steps to take again, by what befell
    wrong: list[str] = field(default_factory=list)
    spoilt: int | None = None  # step that we damaged, until a start sets it aside

    def live(self) -> None:
        """Start the run, let something happen to it, and see what is left."""
        before, done = self.newest_intact(), self.steps_done()
        world = self.dice.choice((1, 2))
        fate = self.dice.choice(KILLS + STOPS)
        fault, disk_fills = PACE, self.dice.random() < 0.25
        if disk_fills:
            point = self.dice.choice(FULL_DISK)
            fault += f";{point}:enospc@{5 * (before // 5 + self.dice.randrange(1, 5))}"
        # After each step: kills within a save.
        saves = f"--checkpoint_freq={self.dice.choice((1, 5))}"
        process = self.run.start("--resume=auto", saves, world=world, FAULT=fault)
        # Stops are asked of what trains: before, there is nothing to save. Kills strike at any time.
        if fate in STOPS or self.dice.random() < 0.75:
            self.wait_for_first_step(process)
        time.sleep(self.dice.uniform(0, 3))
        if fate in STOPS and self.dice.random() < 0.5:
            passing = self.dice.choice(PASSING)
            self.counts[passing] += 1
            self.befall(passing, process, world)
            time.sleep(self.dice.uniform(0.5, 2))
        self.befall(fate, process, world)
        self.run.end_of(process)
        self.counts[fate] += 1
        self.account(fate, before, done, disk_fills)

    def wait_for_first_step(self, process: Popen[str]) -> None:
        metrics = self.run.path / "metrics.jsonl"

        def has_step() -> bool:
            if not metrics.exists():
                return False
            with open(metrics, "rb") as file:
                file.seek(self.offset)
                return b'"step_seconds"' in file.read()

        self.run.wait_until(process, has_step, "first step")

    def befall(self, what: str, process: Popen[str], world: int) -> None:
        """Do it to the processes of a life."""
        workers = list(self.run.workers(process).values()) if world > 1 else [process.pid]
        worker = self.dice.choice(workers or [process.pid])  # none yet: torchrun is still starting
        match what:
            case "kill -9 a worker":
                kill([worker], signal.SIGKILL)
            case "kill -9 the launcher":
                kill([process.pid], signal.SIGKILL)
            case "kill -9 all at once":
                kill([process.pid, *workers], signal.SIGKILL)
            case "SIGTERM" | "SIGINT":
                kill([process.pid], signal.Signals[what])
            case "STOP file" | "SAVE file":
                (self.run.path / what[:4]).touch()
            case "SIGUSR1 to a worker":
                kill([worker], signal.SIGUSR1)
            case "frozen for a second":
                kill([worker], signal.SIGSTOP)
                time.sleep(1)
                kill([worker], signal.SIGCONT)

    def account(self, fate: str, before: int, done: int, disk_fills: bool) -> None:
        """Compare what the life left on the disk with what it should have."""
        events = self.read_new_events()
        full = [e for e in events if e["event"] == "warning" and "No space left" in e["message"]]
        self.counts["disk full in a save"] += len(full)
        begins = [event for event in events if event["event"] == "begin"]
        for begin in begins:
            self.counts["starts that came to train"] += 1
            self.counts[f"of them with {begin['world_size']} processes"] += 1
            if begin["step"] != before:
                self.wrong.append(f"{fate}: went on from {begin['step']}, {before} was intact")
        if begins:
            self.spoilt = None
        saved = [step for step in self.run.saved() if step != self.spoilt]
        if fate in STOPS:
            unsaved = disk_fills and self.run.status()["exit_code"] == 75
            if not unsaved and (not saved or saved[-1] != self.steps_done()):
                self.wrong.append(f"{fate}: step {self.steps_done()} done, {saved[-1:]} saved")
        if self.newest_intact() != (saved[-1] if saved else 0):
            self.wrong.append(f"{fate}: step {saved[-1]} is not whole")
        # A survivor may save a step that the dead first process never wrote a line of.
        self.lost[fate] += max(0, self.steps_done() - self.newest_intact()) if begins else 0

    def damage_newest(self) -> None:
        """Spoil a file of the newest checkpoint; the one before must serve."""
        steps = self.run.saved()
        if len(steps) < 2 or self.spoilt is not None:
            return
        what, before = self.dice.choice(DAMAGE), self.newest_intact()
        folder = self.run.path / f"step_{steps[-1]:08d}"
        path = self.dice.choice(sorted(folder.iterdir()))
        data = bytearray(path.read_bytes())
        if what == "file missing":
            path.unlink()
        elif what == "cut short":
            path.write_bytes(data[: self.dice.randrange(len(data))])
        else:
            data[self.dice.randrange(len(data))] ^= 1 << self.dice.randrange(8)
            path.write_bytes(data)
        self.spoilt, after = steps[-1], self.newest_intact()
        if after != steps[-2]:
            self.wrong.append(f"{what} in {path.name}: newest intact is {after}, not {steps[-2]}")
        name = f"newest checkpoint damaged: {what}"
        self.counts[name] += 1
        self.lost[name] += before - after

    def newest_intact(self) -> int:
        info, _ = catalog.newest_valid(self.run.path, set_aside=False)
        return 0 if info is None else info.step

    def steps_done(self) -> int:
        """Return the last step of the run's present line."""
        begin_or_step = [e["step"] for e in self.events if e["event"] in ("begin", "step")]
        return begin_or_step[-1] if begin_or_step else 0

    def read_new_events(self) -> list[dict[str, Any]]:
        metrics = self.run.path / "metrics.jsonl"
        if not metrics.exists():
            return []
        with open(metrics, "rb") as file:
            file.seek(self.offset)
            whole = file.read().rpartition(b"\n")[0]
        new = [json.loads(line) for line in whole.splitlines()]
        self.offset += len(whole) + bool(whole)
        self.events += new
        return new

    def compare(self, reference: FaultRun, last: int) -> None:
        """Compare every step that any life took, and the end, with the run left in peace."""
        self.read_new_events()
        expected, seen = reference.steps(), set()
        taken = [event for event in self.events if event["event"] == "step"]
        for event in taken:
            seen.add(event["step"])
            for key in ("loss", "batch_hash", "lr", "grad_norm"):
                if event[key] != expected[event["step"]][key]:
                    self.wrong.append(f"step {event['step']}: another {key}")
        begun_from = {event["step"] for event in self.events if event["event"] == "begin"}
        unwritten = set(range(1, last + 1)) - seen
        if not unwritten <= begun_from:
            self.wrong.append(f"steps that no life took: {sorted(unwritten - begun_from)}")
        runs = (run.path / f"step_{last:08d}" / "manifest.json" for run in (self.run, reference))
        hashes = [json.loads(path.read_text())["files"] for path in runs]
        for name in ("model.safetensors", "optim.safetensors"):
            if hashes[0][name] != hashes[1][name]:
                self.wrong.append(f"{name} of step {last} differs")
        self.counts["steps of the run"] = last
        self.counts["steps taken, with those taken again"] = len(taken)
        self.counts["steps saved by a survivor without a line"] = len(unwritten)


def kill(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it ended between the look and the blow
            os.kill(pid, number)


def main() -> int:
    """Soak for some minutes, then compare."""
    data, folder = Path(sys.argv[1]), Path(sys.argv[2])
    minutes, seed = float(sys.argv[3]), int(sys.argv[4])
    print(f"soak of {minutes:g} minutes, seed {seed}", flush=True)
    soak = Soak(FaultRun(data, folder / "soak", FLAGS), random.Random(seed))
    until = time.monotonic() + 60 * minutes
    try:
        while time.monotonic() < until:
            soak.live()
            if soak.dice.random() < 0.2:
                soak.damage_newest()
        soak.read_new_events()
        taken = [event["step"] for event in soak.events if event["event"] == "step"]
        last = max(soak.newest_intact() + 3, *taken)  # a killed life may have gone further
        peace = FaultRun(data, folder / "peace", FLAGS)
        for run in (soak.run, peace):
            process = run.start("--resume=auto", f"--stop_after_steps={last}")
            code = run.end_of(process, seconds=60 * minutes + 120)
            if code != 0:
                soak.wrong.append(f"the last start of {run.folder.name} ended with {code}")
        soak.compare(peace, last)
    finally:
        soak.run.clean_up()
    rows = [[what, str(soak.counts[what]), str(soak.lost.get(what, ""))] for what in soak.counts]
    print(fmt.table(["what", "times", "steps to take again"], sorted(rows)))
    print(f"{'; '.join(soak.wrong) or 'nothing wrong: every step has the bits of the quiet run'}")
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
