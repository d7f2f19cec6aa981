"""Cut the power at every point of a run: rebuild what a disk may then hold, resume from it, compare; print a table.

    python tests/faults/power_cut.py FOLDER [--sample N] [--minutes M] [--seed N] [--jobs N]

The calls by which a run changes its folder are logged once. After each of them a power cut leaves what had been flushed
and any part of the rest: a disk may write data after names, names after data, and both in another order than they were
made (Pillai et al., All File Systems Are Not Created Equal, OSDI 2014). A file or folder that was flushed has its
content; a name is on the disk when the folder that holds it was flushed. Checked of every such disk: each checkpoint
that has a name is whole, `--resume auto` goes on from the newest one that was committed or a newer one, and comes to
the end of the run that nothing disturbed, bit by bit. Ends with 1 if anything differs.
"""

import hashlib
import itertools
import os
import random
import re
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import disk
from disk import Call, Trainer
from syscall_sweep import one_line

from gpt2lab import fmt
from plain_log import read_events

# Each is a list of starts in one folder, and what is being written.
SCENES = {
    "a run from its start to its end": ((),),
    "a stop, and a resume from an earlier step": (("--stop_after_steps=3",), ("--resume=2",)),
}
MIXTURES = 2  # random states for each point of the log
ROOT = 0  # the number of the folder that holds all

Tree = dict[str, bytes | None]  # path -> content, None for a folder
Change = Callable[[int, bytes], bytes | None]  # of what the op of a number writes


class DataOp(NamedTuple):
    """A write to a file, or its new length."""

    at: int
    data: bytes | None


class NameOp(NamedTuple):
    """Changes of folders that happen together: what each name stands for from then on, None for nothing."""

    names: tuple[tuple[int, str, int | None], ...]  # folder, name, file or folder


@dataclass
class Log:
    """The calls of some starts as changes of numbered files and folders."""

    ops: list[DataOp | NameOp | None] = field(default_factory=list)  # None for a flush
    # The file that is written, the file or folder flushed.
    of: list[int] = field(default_factory=list)
    folders: set[int] = field(default_factory=lambda: {ROOT})
    # (op, path) of a checkpoint's name.
    commits: list[tuple[int, str]] = field(default_factory=list)

    @classmethod
    def read(cls, calls: list[Call]) -> "Log":
        log, names, numbers = cls(), {"": ROOT}, itertools.count(1)

        def place(path: str) -> tuple[int, str]:
            parent, _, name = path.rpartition("/")
            return names[parent], name

        for call in calls:
            op: DataOp | NameOp | None = None
            about = names.get(call.path, -1)
            if call.error or call.kind in ("open_to_read", "open_to_write"):
                continue
            if about < 0 and call.kind in ("write", "fsync", "truncate"):
                continue  # of a file that has no name any more
            match call.kind:
                case "create" | "mkdir":
                    names[call.path] = about = next(numbers)
                    op = NameOp(((*place(call.path), about),))
                    log.folders |= {about} if call.kind == "mkdir" else set()
                case "write":
                    op = DataOp(call.at, call.data)
                case "truncate" | "empty":
                    op = DataOp(call.at, None)
                case "unlink" | "rmdir":
                    op = NameOp(((*place(call.path), None),))
                    del names[call.path]
                case "rename":
                    op = NameOp(((*place(call.path), None), (*place(call.to), about)))
                    names.pop(call.to, None)
                    if re.fullmatch(r"run/step_\d+", call.to):
                        log.commits.append((len(log.ops), call.to))
                    for path in [p for p in names if f"{p}/".startswith(f"{call.path}/")]:
                        names[call.to + path[len(call.path) :]] = names.pop(path)
                case "fsync":
                    pass
                case _:
                    raise NotImplementedError(f"a replay does not know {call.kind} ({call.path})")
            log.ops.append(op)
            log.of.append(about)
        return log

    def pending(self, end: int) -> tuple[list[int], list[int]]:
        """Return the writes and the changes of names among the first `end` ops that no flush has put on the disk."""
        flushed: set[int] = set()
        data, names = [], []
        for number in range(end - 1, -1, -1):
            op = self.ops[number]
            if op is None:
                flushed.add(self.of[number])
            elif isinstance(op, DataOp):
                data += [] if self.of[number] in flushed else [number]
            elif not any(folder in flushed for folder, _, _ in op.names):
                names.append(number)
        return data[::-1], names[::-1]

    def committed(self, end: int) -> int:
        """Return the newest step whose checkpoint must be there after a power cut, 0 for none."""
        _, pending = self.pending(end)
        there = {path: n for n, path in self.commits if n < end and n not in pending}
        for path, number in list(there.items()):
            folder, name, _ = self.ops[number].names[-1]  # type: ignore[union-attr]
            later = [op for op in self.ops[number + 1 : end] if isinstance(op, NameOp)]
            if any((folder, name, None) in op.names for op in later):
                del there[path]
        return max((int(path[-8:]) for path in there), default=0)

    def state(self, end: int, lost: set[int], change: Change = lambda _, data: data) -> Tree:
        """Return the disk after `end` ops without the `lost` ones; `change` may spoil or drop what is written."""
        content: dict[int, bytearray] = defaultdict(bytearray)
        entries: dict[int, dict[str, int]] = defaultdict(dict)
        for number in range(end):
            op = self.ops[number]
            if op is None or number in lost:
                continue
            if isinstance(op, DataOp):
                data = op.data if op.data is None else change(number, op.data)
                file = content[self.of[number]]
                if op.data is None:  # the file ends there
                    del file[op.at :]
                if data is not None or op.data is None:
                    file.extend(bytes(max(0, op.at - len(file))))
                    file[op.at : op.at + len(data or b"")] = data or b""
                continue
            for folder, name, stands_for in op.names:
                if stands_for is None:
                    entries[folder].pop(name, None)
                else:
                    entries[folder][name] = stands_for

        def tree(folder: int, path: str) -> Iterator[tuple[str, bytes | None]]:
            for name, number in sorted(entries[folder].items()):
                if number in self.folders:
                    yield f"{path}{name}", None
                    yield from tree(number, f"{path}{name}/")
                else:
                    yield f"{path}{name}", bytes(content[number])

        return dict(tree(ROOT, ""))


def states_after(log: Log, end: int, dice: random.Random) -> Iterator[tuple[str, Tree]]:
    """Yield what a power cut after `end` ops may leave, each with a name."""
    data, names = log.pending(end)
    yield "as issued", log.state(end, set())
    yield "data lost", log.state(end, set(data))
    zeros = {number: bytes(len(log.ops[number].data or b"")) for number in data}  # type: ignore[union-attr]
    yield "data lost, lengths kept", log.state(end, set(), lambda n, written: zeros.get(n, written))
    yield "names lost", log.state(end, set(names))
    yield "data and names lost", log.state(end, {*data, *names})
    for _ in range(MIXTURES):
        fates = {number: dice.choice(("kept", "lost", "torn")) for number in data}

        def spoil(number: int, written: bytes, fates: dict[int, str] = fates) -> bytes | None:
            fate = fates.get(number, "kept")
            torn = written[: len(written) // 2]
            return {"kept": written, "lost": None, "torn": torn}[fate]

        # A folder keeps the order of its changes; one may be on the disk before those of another.
        cuts = defaultdict[int, int](lambda: dice.randrange(end + 1))
        folders = {number: [one[0] for one in log.ops[number].names] for number in names}  # type: ignore[union-attr]
        gone = {n for n in names if any(n >= cuts[folder] for folder in folders[n])}
        yield "at random", log.state(end, gone, spoil)


class State(NamedTuple):
    """A disk to resume from."""

    scene: str
    after: int  # ops
    how: str
    committed: int  # the step that must not be lost
    tree: Tree

    def __str__(self) -> str:
        return f"{self.scene}, after {self.after} calls, {self.how}"


def all_states(scene: str, log: Log, dice: random.Random) -> Iterator[State]:
    """Yield the different states of a log."""
    seen: set[tuple[bytes, int]] = set()
    contents: dict[bytes | None, bytes | None] = {}  # of all files of all states, each once
    for end in range(len(log.ops) + 1):
        committed = log.committed(end)
        for how, tree in states_after(log, end, dice):
            digest = hashlib.sha256()
            for path, data in sorted(tree.items()):
                size = None if data is None else len(data)
                digest.update(f"{path}\0{size}\0".encode() + (data or b""))
            if (key := (digest.digest(), committed)) not in seen:
                seen.add(key)
                tree = {path: contents.setdefault(data, data) for path, data in tree.items()}
                yield State(scene, end, how, committed, tree)


def judge(trainer: Trainer, folder: Path, state: State, reference: dict[str, object]) -> list[str]:
    """Resume from a state, and say what is wrong."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, content in state.tree.items():
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)
    run = folder / "run"
    wrong = disk.unsound(run)
    life = trainer.run(folder, "--resume=auto")
    wrong += one_line(life)
    if life.code == 0:
        wrong += disk.unsound(run) + disk.unlike(run, reference)
        log = read_events(run)
        begins = [event["step"] for event in log if event["event"] == "begin"]
        from_step = disk.LAST if "already complete" in life.said else begins[-1]
        if from_step < state.committed:
            wrong.append(f"went on from step {from_step}, {state.committed} was committed")
        steps = Counter((e["attempt"], e["step"]) for e in log if e["event"] == "step")
        wrong += [f"step {step} is twice in the log" for (_, step), n in steps.items() if n > 1]
    else:
        wrong.append(f"the resume ended with {life.code}: {life.errors[-500:]}")
    shutil.rmtree(folder)
    return wrong


def log_of(trainer: Trainer, folder: Path, starts: tuple[tuple[str, ...], ...]) -> Log:
    """Run the starts of a scene one after the other, and return their log."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    calls: list[Call] = []
    for number, flags in enumerate(starts):
        trace = folder.with_name(f"{folder.name}-{number}.trace")
        trace.unlink(missing_ok=True)
        life = trainer.run(folder, *flags, trace=trace)
        assert life.code == 0, life.errors
        calls += disk.read_trace(trace, folder)
    log = Log.read(calls)
    on_disk = {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }
    found = log.state(len(log.ops), set())
    assert found == on_disk, sorted(dict(found.items() ^ on_disk.items()))
    return log


def main() -> int:
    """Replay, and print what came of it."""
    wanted = disk.arguments(str(__doc__))
    folder, dice = wanted.folder, random.Random(wanted.seed)
    with disk.trainer(folder) as trainer:
        states: list[State] = []
        rows = []
        for number, (scene, starts) in enumerate(SCENES.items()):
            log = log_of(trainer, folder / f"quiet-{number}", starts)
            found = list(all_states(scene, log, dice))
            rows.append([scene, str(len(log.ops)), str(len(found))])
            states += found
        header = ["scene", "calls that change or flush", "different disks"]
        print(fmt.table(header, rows), flush=True)
        reference = disk.bits(folder / "quiet-0" / "run")
        if wanted.sample is not None:
            states = dice.sample(states, wanted.sample)
        else:
            dice.shuffle(states)
        counts, bad = Counter[str](), Counter[str]()

        def of_worker(state: State) -> tuple[State, list[str]]:
            wrong = judge(trainer, folder / f"case-{os.getpid()}", state, reference)
            return state._replace(tree={}), wrong

        for state, wrong in disk.judged(of_worker, states, wanted):
            counts[state.how] += 1
            bad[state.how] += bool(wrong)
    rows = [[how, str(count), str(bad[how])] for how, count in sorted(counts.items())]
    print(fmt.table(["after the power cut", "resumed", "wrong"], rows))
    print(f"{counts.total():,} disks resumed, seed {wanted.seed}, {bad.total()} wrong")
    return 1 if bad.total() else 0


if __name__ == "__main__":
    sys.exit(main())
