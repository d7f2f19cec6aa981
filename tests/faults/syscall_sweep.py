"""Let every system call by which a run changes its folder fail, one run for each, and resume; print a table.

    python tests/faults/syscall_sweep.py FOLDER [--sample N] [--seed N] [--jobs N]

Each call fails with EIO, once and with all that come after it; a sample of them with ENOSPC, EROFS, and writes that
are torn. Checked of every run: it goes on, or ends with an exit code of ours and one line; every checkpoint that has a
name is sound; and without the failure `--resume auto` comes to the end of the run that nothing disturbed, bit by bit.
Ends with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import errno
import multiprocessing
import os
import random
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import disk
from disk import Call, Failure, Trainer

from gpt2lab import fmt

EXIT_CODES = {0, 1, 2, 75}


class Case(NamedTuple):
    """One run: the call that fails, and how."""

    call: Call
    how: str  # EIO, ENOSPC, EROFS, torn
    and_later: bool

    def __str__(self) -> str:
        later = " and later" if self.and_later else ""
        return f"call {self.call.number}{later} ({self.call.kind} {self.call.path}): {self.how}"


class Verdict(NamedTuple):
    """What came of a case."""

    case: Case
    code: int
    said: str  # what it said of the failure, the last line
    wrong: list[str]


def cases_of(calls: list[Call], dice: random.Random, sample: int | None) -> list[Case]:
    """Return all cases, or some at random."""
    cases = [Case(call, "EIO", later) for call in calls for later in (False, True)]
    some = [
        Case(call, how, dice.random() < 0.5)
        for how in ("ENOSPC", "EROFS")
        for call in dice.sample(calls, len(calls) // 3)
    ]
    writes = [call for call in calls if call.kind == "write"]
    cases += some + [Case(call, "torn", dice.random() < 0.5) for call in writes]
    return cases if sample is None else dice.sample(cases, sample)


def one_line(life: disk.Life) -> list[str]:
    """Say what is wrong with how a start ended."""
    if life.code not in EXIT_CODES:
        return [f"exit code {life.code}: {life.errors[-300:]}"]
    lines = life.errors.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    others = [line for line in lines if not line.startswith(("error: ", "warning: "))]
    if others or len(errors) != (life.code != 0):
        return [f"exit code {life.code}, and stderr has: {' / '.join(lines)[-600:]}"]
    return []


def judge(trainer: Trainer, folder: Path, case: Case, reference: dict[str, object]) -> Verdict:
    """Run a case and resume it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run = folder / "run"
    number = errno.EIO if case.how == "torn" else getattr(errno, case.how)
    failure = Failure(case.call.number, number, case.and_later, case.how == "torn")
    life = trainer.run(folder, failure=failure)
    wrong = one_line(life) + disk.unsound(run)
    if life.code == 0:
        wrong += disk.unlike(run, reference)
    resumed = trainer.run(folder, "--resume=auto")
    if resumed.code != 0:
        wrong.append(f"the resume ended with {resumed.code}: {resumed.errors[-600:]}")
    wrong += [f"resumed: {what}" for what in disk.unsound(run) + disk.unlike(run, reference)]
    spoken = [line for line in (life.said + life.errors).splitlines() if "warning: " in line]
    shutil.rmtree(folder)
    return Verdict(case, life.code, (life.errors.splitlines() or spoken or [""])[-1], wrong)


_state: tuple[Trainer, Path, dict[str, object]]


def _judge_in_worker(case: Case) -> Verdict:
    trainer, folder, reference = _state
    return judge(trainer, folder / f"case-{os.getpid()}", case, reference)


def table_of(calls: list[Call], verdicts: list[Verdict]) -> str:
    """Count calls by kind, and how the runs ended in which one of them failed."""
    header = ["call", "in a run", "failed", "once: went on", "ended", "and later: went on", "ended"]
    rows = []
    for kind, count in Counter(call.kind for call in calls).most_common():
        of_kind = [verdict for verdict in verdicts if verdict.case.call.kind == kind]
        ends = Counter((verdict.case.and_later, verdict.code == 0) for verdict in of_kind)
        split = [ends[later, well] for later in (False, True) for well in (True, False)]
        rows.append([kind, *map(str, (count, len(of_kind), *split))])
    return fmt.table(header, rows)


def main() -> int:
    """Sweep, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sample", type=int, default=None)
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    wanted = parser.parse_args()
    wanted.folder.mkdir(parents=True, exist_ok=True)
    folder = wanted.folder.resolve()
    with disk.trainer(folder) as trainer:
        quiet, log = folder / "quiet", folder / "trace"
        shutil.rmtree(quiet, ignore_errors=True)
        log.unlink(missing_ok=True)
        quiet.mkdir()
        life = trainer.run(quiet, trace=log)
        assert life.code == 0, life.errors
        calls, reference = disk.read_trace(log, quiet), disk.bits(quiet / "run")
        assert not disk.unlike(quiet / "run", reference)
        cases = cases_of(calls, random.Random(wanted.seed), wanted.sample)
        global _state
        _state = trainer, folder, reference
        print(f"{len(cases):,} cases over {len(calls)} calls, seed {wanted.seed}", flush=True)
        verdicts = []
        with multiprocessing.get_context("fork").Pool(wanted.jobs) as pool:
            for verdict in pool.imap_unordered(_judge_in_worker, cases):
                verdicts.append(verdict)
                for what in verdict.wrong:
                    print(f"{verdict.case}: {what}", flush=True)
    print(table_of(calls, verdicts))
    codes = Counter((verdict.case.how, verdict.code) for verdict in verdicts)
    rows = [[how, str(code), str(times)] for (how, code), times in sorted(codes.items())]
    print(fmt.table(["failure", "exit code", "runs"], rows))
    for verdict in verdicts:
        if verdict.code == 0 and not verdict.said:
            print("silent:", verdict.case)
    silent = sum(verdict.code == 0 and not verdict.said for verdict in verdicts)
    wrong = sum(bool(verdict.wrong) for verdict in verdicts)
    print(f"{len(verdicts):,} runs failed and resumed, {silent} went on without a word, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
