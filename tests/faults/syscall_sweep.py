"""Let every system call by which a run changes its folder fail, one run for each, and resume; print a table.

    python tests/faults/syscall_sweep.py FOLDER [--sample N] [--minutes M] [--seed N] [--jobs N]

Each call fails with EIO, once and with all that come after it; a sample of them with ENOSPC, EROFS, and writes that
are torn: of a run from its start to its end, and of a resume. Checked of every run: it goes on, or ends with an exit
code of ours and one line; every checkpoint that has a name is sound; and without the failure `--resume auto` comes to
the end of the run that nothing disturbed, bit by bit. Ends with 1 if anything differs.
"""

import errno
import os
import random
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import disk
from disk import Call, Failure, Trainer

from gpt2lab import fmt

EXIT_CODES = {0, 1, 2, 75}
# What is done without a failure, and the flags of the start in which one call fails.
SCENES: dict[str, tuple[tuple[str, ...] | None, tuple[str, ...]]] = {
    "a run from its start to its end": (None, ()),
    "a resume from an earlier step": (("--stop_after_steps=3",), ("--resume=2",)),
}


class Case(NamedTuple):
    """One run: the call that fails, and how."""

    scene: str
    call: Call
    how: str  # EIO, ENOSPC, EROFS, torn
    and_later: bool

    def __str__(self) -> str:
        later = " and later" if self.and_later else ""
        return f"{self.scene}: call {self.call.number}{later} ({self.what}): {self.how}"

    @property
    def what(self) -> str:
        """The call, without what differs from run to run."""
        path = re.sub(r"[-.][0-9a-f]{8}(?=/|$)|\d{8}(-\d{6})?", "*", self.call.path)
        return f"{self.call.kind} {path}"


class Verdict(NamedTuple):
    """What came of a case."""

    case: Case
    code: int
    said: str  # its error, or its last warning

    def __str__(self) -> str:
        return str(self.case)


def cases_of(scene: str, calls: list[Call], dice: random.Random) -> list[Case]:
    """Return all cases of a scene."""
    cases = [Case(scene, call, "EIO", later) for call in calls for later in (False, True)]
    some = [
        Case(scene, call, how, dice.random() < 0.5)
        for how in ("ENOSPC", "EROFS")
        for call in dice.sample(calls, len(calls) // 4)
    ]
    writes = [call for call in calls if call.kind == "write"]
    return cases + some + [Case(scene, call, "torn", dice.random() < 0.5) for call in writes]


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


class Sweep(NamedTuple):
    """What every case needs."""

    trainer: Trainer
    folder: Path
    begun: dict[str, Path]  # scene -> what it begins with
    reference: dict[str, object]

    def begin(self, scene: str, to: Path) -> None:
        """Make the folder with which a scene begins."""
        shutil.rmtree(to, ignore_errors=True)
        if scene in self.begun:
            shutil.copytree(self.begun[scene], to)
        else:
            to.mkdir()

    def judge(self, case: Case) -> tuple[Verdict, list[str]]:
        """Run a case and resume it; say what is wrong."""
        folder, log = (self.folder / f"{name}-{os.getpid()}" for name in ("case", "log"))
        run = folder / "run"
        self.begin(case.scene, folder)
        log.unlink(missing_ok=True)
        number = errno.EIO if case.how == "torn" else getattr(errno, case.how)
        failure = Failure(case.call.number, number, case.and_later, case.how == "torn")
        life = self.trainer.run(folder, *SCENES[case.scene][1], failure=failure, trace=log)
        wrong = one_line(life) + disk.unsound(run)
        failed = [call for call in disk.read_trace(log, folder) if call.error == number]
        # A line more in the log, of a slow step, and it is another one than in the trace.
        if failed:
            case = case._replace(call=failed[0])
        else:
            wrong.append("no call failed")
        if life.code == 0:
            wrong += disk.unlike(run, self.reference)
        resumed = self.trainer.run(folder, "--resume=auto")
        if resumed.code != 0:
            wrong.append(f"the resume ended with {resumed.code}: {resumed.errors[-600:]}")
        found = disk.unsound(run) + disk.unlike(run, self.reference)
        wrong += [f"resumed: {what}" for what in found]
        spoken = [line for line in (life.said + life.errors).splitlines() if "warning: " in line]
        shutil.rmtree(folder)
        return Verdict(case, life.code, (life.errors.splitlines() or spoken or [""])[-1]), wrong


def tables_of(calls: Iterable[Call], verdicts: list[Verdict]) -> str:
    """Count calls by kind, and how the runs ended in which one of them failed."""
    header = ["call", "in a run", "failed", "once: went on", "ended", "and later: went on", "ended"]
    rows = []
    for kind, count in Counter(call.kind for call in calls).most_common():
        of_kind = [verdict for verdict in verdicts if verdict.case.call.kind == kind]
        ends = Counter((verdict.case.and_later, verdict.code == 0) for verdict in of_kind)
        split = [ends[later, well] for later in (False, True) for well in (True, False)]
        rows.append([kind, *map(str, (count, len(of_kind), *split))])
    codes = Counter((verdict.case.how, verdict.code) for verdict in verdicts)
    ended = [[how, str(code), str(times)] for (how, code), times in sorted(codes.items())]
    silent = Counter(v.case.what for v in verdicts if v.code == 0 and not v.said)
    quiet = [[what, str(times)] for what, times in silent.most_common()]
    tables = [
        fmt.table(header, rows),
        fmt.table(["failure", "exit code", "runs"], ended),
        fmt.table(["went on without a word after the failure of", "runs"], quiet),
    ]
    return "\n\n".join(tables)


def main() -> int:
    """Sweep, and print what came of it."""
    wanted = disk.arguments(str(__doc__))
    folder, dice = wanted.folder, random.Random(wanted.seed)
    with disk.trainer(folder) as trainer:
        sweep = Sweep(trainer, folder, {}, {})
        calls: list[Call] = []
        cases: list[Case] = []
        for number, (scene, (before, flags)) in enumerate(SCENES.items()):
            quiet, log = folder / f"quiet-{number}", folder / f"trace-{number}"
            if before is not None:
                sweep.begun[scene] = folder / f"begun-{number}"
                shutil.rmtree(sweep.begun[scene], ignore_errors=True)
                sweep.begun[scene].mkdir()
                assert trainer.run(sweep.begun[scene], *before).code == 0
            sweep.begin(scene, quiet)
            log.unlink(missing_ok=True)
            life = trainer.run(quiet, *flags, trace=log)
            assert life.code == 0, life.errors
            traced = disk.read_trace(log, quiet)
            calls, cases = calls + traced, cases + cases_of(scene, traced, dice)
            print(f"{scene}: {len(traced)} calls", flush=True)
        sweep.reference.update(disk.bits(folder / "quiet-0" / "run"))
        cases = dice.sample(cases, wanted.sample or len(cases))
        judged = list(disk.judged(sweep.judge, cases, wanted))
    verdicts = [verdict for verdict, _ in judged]
    print(tables_of(calls, verdicts))
    wrong = sum(bool(found) for _, found in judged)
    print(f"\n{len(verdicts):,} runs failed and resumed, seed {wanted.seed}, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
