"""Let each start of a thread or process, and each large allocation, fail in a run of its own; print a table.

    python tests/faults/start_sweep.py FOLDER [--sample N] [--minutes M] [--seed N] [--jobs N]

A training, preparations (of lines, of Parquet as of the Hub's sets, with an own tokenizer), the training of that
tokenizer, and a server that is asked twice. Checked of each: it goes on rightly or ends with an exit code of ours and
one line, no process is left, and what it leaves continues to the bits of a quiet run; where a matrix product got no
memory for its work, to its losses within 1e-5. `--sample`: cases of each program and kind. Ends with 1 if anything
differs.
"""

import contextlib
import ctypes
import functools
import http.client
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import disk
from disk import Trainer
from syscall_sweep import one_line

import corpora
import launch
from gpt2lab import fmt

KINDS = ("thread", "process", "memory")
MOVED = ("losses", "weights", "moments")
# Bytes of a large allocation: a quarter of what Python asks at once for small objects.
LEAST = 1 << 18
Arm = Callable[[], object]
Ended = tuple[disk.Life, list[str]]
# What libraries say themselves; one in Rust that gets no memory ends its process.
OF_LIBRARIES = re.compile(
    r"^(<jemalloc>.*|memory allocation of .*|\n?thread .* panicked at .*\n.*|note: run with `RUST_.*|.*tok/s\].*|)\n",
    re.M,
)
PREPARED = {  # flags, and from which source below the folder
    "lines": "--num_workers=2 --tokenizer=bytes lines.jsonl",
    "parquet": "--num_workers=1 --tokenizer=bytes --group_bytes=60k --skip_bad parquet",
    "learned": "--num_workers=2 --tokenizer=FOLDER/learned lines.jsonl",
}
MAIN, PREPARE = str(launch.MAIN), str(launch.SCRIPTS / "prepare_data.py")


class Case(NamedTuple):
    """One program, and which of its requests fails (0: none)."""

    program: str
    kind: str
    at: int


class Sweep(NamedTuple):
    """What every case needs."""

    trainer: Trainer
    folder: Path
    expected: dict[str, Any]  # by program: of a quiet run

    def run(self, case: Case, folder: Path) -> tuple[disk.Life, list[str], int]:
        """Run a case; return how it ended, what is wrong, and how many requests of its kind there were."""
        count = self.folder / f"count-{os.getpid()}"
        count.write_bytes(bytes(8))
        words = (KINDS.index(case.kind), case.at, LEAST, count)

        def arm() -> None:
            os.environ["GPT2LAB_STARTS"] = " ".join(map(str, words))  # of what it starts
            numbers = map(ctypes.c_long, words[1:3])
            self.trainer.shim.starts_arm(os.fsencode(count), words[0], *numbers)

        program = getattr(self, case.program, None)
        life, wrong = program(folder, arm) if program else self.prepare(folder, arm, case.program)
        life = life._replace(errors=OF_LIBRARIES.sub("", launch.without_progress(life.errors)))
        if case.kind == "memory" and _is_rounded(wrong, folder / "run", self.expected):
            print(f"{case}: the losses of a quiet run within 1e-5", flush=True)
            wrong = []
        is_abort = life.code == -signal.SIGABRT and not life.errors
        wrong += _left_alive(count) + ([] if is_abort else one_line(life))
        return life, wrong, int.from_bytes(count.read_bytes(), "little")

    def train(self, folder: Path, arm: Arm) -> Ended:
        flags = ("--async_checkpoint=on", f"--checkpoint_mirror=file://{folder / 'mirror'}")
        (folder / "mirror").mkdir(exist_ok=True)
        life = self.trainer.run(folder, "--resume=auto", *flags, arm=arm)
        wrong = disk.unsound(folder / "run") if (folder / "run").exists() else []
        if life.code == 0 and self.expected:
            wrong += disk.unlike(folder / "run", self.expected["train"])
        return life, wrong

    def prepare(self, folder: Path, arm: Arm, name: str) -> Ended:
        *flags, source = PREPARED[name].split()
        words = [PREPARE, *flags, "--val_tokens=20000", str(self.folder / source)]
        return self._write(folder, arm, name, words)

    def learn(self, folder: Path, arm: Arm) -> Ended:
        source = str(self.folder / "parquet")
        words = ["data", "tokenizer", "train", source, "--vocab_size=400", "--skip_bad"]
        return self._write(folder, arm, "learn", [MAIN, *words])

    def _write(self, folder: Path, arm: Arm, name: str, words: list[str]) -> Ended:
        """Run a program that writes a folder, which may be there only as a quiet run writes it."""
        is_there = (folder / "data").exists()  # a learned tokenizer is not learned again
        words = [word.replace("FOLDER", str(self.folder)) for word in words]
        cache = {"XDG_CACHE_HOME": str(folder / "cache")}  # of tokenizers that were tried
        words += [f"--out={folder / 'data'}"]
        life = disk.live(words, lambda: (os.environ.update(cache), arm()))
        found = {path.name: path.read_bytes() for path in folder.glob("data/*")}
        is_other = bool(found) and found != self.expected.get(name, found)
        wrong = ["other files than a quiet run's"] * is_other
        if life.code == 0 and (not found or (folder / "data.partial").exists()):
            wrong.append(f"left behind: {sorted(path.name for path in folder.iterdir())}")
        is_again = name == "learn" and is_there and life.code == 2
        return (life._replace(code=0, errors="") if is_again else life), wrong

    def serve(self, folder: Path, arm: Arm) -> Ended:
        wrong: list[str] = []

        def use(child: int, out: Path) -> None:
            while not (found := re.search(r"http://([\w.:]+)/ in", out.read_text())):
                if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    return
                time.sleep(0.01)
            answers = [_ask(found[1]) for _ in range(2)]
            if not {answers[0], answers[1]} <= {200, 503} or 200 not in answers:
                wrong.append(f"answers {answers}")
            os.kill(child, signal.SIGINT)

        flags = ["run", f"--checkpoint_dir={self.folder / 'served'}", "--port=0", "--device=cpu"]
        return disk.live([MAIN, "serve", *flags], arm, use), wrong

    def judge(self, case: Case) -> tuple[tuple[Case, disk.Life], list[str]]:
        """Run a case, and the same again without a failure."""
        folder = self.folder / f"case-{os.getpid()}"
        folder.mkdir()
        life, wrong, _ = self.run(case, folder)
        if case.program != "serve":
            again, found, _ = self.run(case._replace(at=0), folder)
            found += [f"ended with {again.code}: {again.errors[-600:]}"] if again.code else []
            wrong += [f"repeated: {what}" for what in found]
        shutil.rmtree(folder)
        return (case, life), wrong


def _is_rounded(wrong: list[str], run: Path, expected: dict[str, Any]) -> bool:
    """Tell whether all that is wrong is rounding: MKL that gets no memory for a product adds in another order."""
    if not wrong or not set(wrong) <= {f"other {n} than the reference's" for n in MOVED}:
        return False
    losses = [disk.bits(run)["losses"], expected["train"]["losses"]]
    ours, theirs = ([float.fromhex(loss) for loss in one.values()] for one in losses)
    return all(map(functools.partial(math.isclose, rel_tol=1e-5), ours, theirs))


def _left_alive(count: Path) -> list[str]:
    """Wait for processes that the program started; say which of them do not end."""
    until = time.monotonic() + 20
    while True:
        left = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                left += [path.parent.name] * (os.fsencode(count) in path.read_bytes())
        if not left or time.monotonic() > until:
            return [f"processes that do not end: {left}"] if left else []
        time.sleep(0.05)


def _write_sources(folder: Path) -> None:
    """Write half a megabyte of lines, and as much in Parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    dice = random.Random(1)
    texts = [" ".join(str(dice.randrange(5000)) for _ in range(300)) for _ in range(360)]
    corpora.write_jsonl(folder / "lines.jsonl", texts)
    (folder / "parquet").mkdir()
    for number in range(3):
        table = pa.table({"text": texts[120 * number : 120 * number + 120]})
        path = folder / "parquet" / f"shard_{number}.parquet"
        pq.write_table(table, path, row_group_size=40, compression="zstd")


def _ask(address: str) -> int | str:
    """Ask for a text; return the status."""
    connection = http.client.HTTPConnection(address, timeout=60)
    body = json.dumps({"model": "run", "prompt": "a", "max_tokens": 2})
    with contextlib.closing(connection):
        try:
            connection.request("POST", "/v1/completions", body)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            return repr(error)


def main() -> int:
    """Sweep, and print what came of it."""
    wanted = disk.arguments(str(__doc__))
    dice = random.Random(wanted.seed)
    with disk.trainer(wanted.folder) as trainer:
        os.environ["XDG_STATE_HOME"] = str(wanted.folder / "state")
        import gpt2lab.serving.app
        import gpt2lab.serving.connections  # noqa: F401 - here, so that the forks have it

        sweep = Sweep(trainer, wanted.folder, {})
        assert trainer.run(wanted.folder / "served").code == 0
        os.environ.pop("RUST_BACKTRACE", None)
        if os.fork() == 0:  # without pyarrow's threads in the forks to come
            _write_sources(wanted.folder)
            os._exit(0)
        assert os.wait()[1] == 0
        sweep.learn(wanted.folder / "first", lambda: None)
        os.rename(wanted.folder / "first" / "data", wanted.folder / "learned")
        cases: list[Case] = []
        for program in ("train", *PREPARED, "learn", "serve"):
            for kind in KINDS:
                quiet = wanted.folder / f"quiet-{program}-{kind}"
                quiet.mkdir()
                life, wrong, number = sweep.run(Case(program, kind, 0), quiet)
                if life.code or wrong:
                    sys.exit(f"error: {program} failed by itself: {life}, {wrong}")
                print(f"{program}: {number} requests for a {kind}", flush=True)
                every = range(1, number + 1)
                some = dice.sample(every, min(number, wanted.sample or number))
                cases += [Case(program, kind, at) for at in some]
        sweep.expected["train"] = disk.bits(wanted.folder / "quiet-train-thread" / "run")
        for program in (*PREPARED, "learn"):
            written = (wanted.folder / f"quiet-{program}-thread" / "data").iterdir()
            sweep.expected[program] = {path.name: path.read_bytes() for path in written}
        judged = list(disk.judged(sweep.judge, cases, wanted))
    ends = Counter((case.program, case.kind, str(life.code)) for (case, life), _ in judged)
    rows = [[*end, str(n)] for end, n in sorted(ends.items())]
    print(fmt.table(["program", "failed", "exit code", "runs"], rows))
    wrong = sum(bool(found) for _, found in judged)
    print(f"\n{len(judged):,} runs with one failure, seed {wanted.seed}, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
