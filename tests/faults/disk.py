"""A run whose disk fails: compile and drive disk_shim.c, and run the trainer as forks of a process that has it loaded.

syscall_sweep.py and power_cut.py use it; both start themselves again with the shim preloaded.
"""

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "src"), str(Path(__file__).parents[1])]

import launch  # noqa: E402
from gpt2lab.checkpoint import catalog  # noqa: E402
from gpt2lab.checkpoint import manifest as manifests  # noqa: E402
from gpt2lab.checkpoint.manifest import folder_name  # noqa: E402
from gpt2lab.errors import CheckpointError  # noqa: E402
from plain_log import read_events  # noqa: E402

SOURCES = [Path(__file__).with_name(f"{name}_shim.c") for name in ("disk", "start")]
_PRELOADED = "GPT2LAB_SHIMS"  # names the libraries in a process that was started with it
_LIVES = 120  # seconds, of a start that takes one

# One T of 16 and bytes as tokens: a start, five steps and all that is due after them take a second.
SHAPE = (
    *("--n_layer=1", "--n_head=2", "--n_embd=16", "--context_length=16", "--vocab_size=257"),
    *("--total_batch_size=64", "--mini_batch_size=2", "--max_lr=0.01", "--val_tokens=160"),
    *("--device=cpu", "--dtype=fp32", "--compile=off", "--run_name=run", "--max_steps=4"),
    *("--checkpoint_freq=1", "--keep_checkpoints=1", "--eval_freq=2", "--sample_freq=2"),
    *("--sample_tokens=2", "--sample_prompt=abc", "--log_freq=1", "--hellaswag_freq=2"),
)
LAST = 4


def compiler() -> str | None:
    """Return the C compiler, None if there is none."""
    return shutil.which("cc")


def preload(folder: Path) -> ctypes.CDLL:
    """Return the functions of the shims; start this program again with them preloaded unless that has happened."""
    if _PRELOADED not in os.environ:
        program = compiler()
        if program is None:
            sys.exit("error: no C compiler `cc`; install one to make calls of the disk fail")
        libraries = [str(folder / source.with_suffix(".so").name) for source in SOURCES]
        for source, library in zip(SOURCES, libraries, strict=True):
            words = ["-shared", "-fPIC", "-O1", "-o", library, str(source), "-ldl", "-lpthread"]
            subprocess.run([program, *words], check=True)
        preloaded = ":".join(libraries)
        own = {_PRELOADED: preloaded, "LD_PRELOAD": preloaded, "OMP_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **own})
    return ctypes.CDLL(None)


def arguments(about: str) -> argparse.Namespace:
    """Return what the command line of a program over many cases says, its folder made."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sample", type=int, default=None)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="then end early")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    wanted = parser.parse_args()
    wanted.folder.mkdir(parents=True, exist_ok=True)
    wanted.folder = wanted.folder.resolve()
    return wanted


_judge: Callable[[Any], tuple[Any, list[str]]]


def _judge_in_worker(case: Any) -> tuple[Any, list[str]]:
    return _judge(case)


def judged(
    judge: Callable[[Any], tuple[Any, list[str]]], cases: list[Any], wanted: argparse.Namespace
) -> Iterator[tuple[Any, list[str]]]:
    """Judge cases in forks for some minutes at most; yield each with what is wrong, which is printed."""
    global _judge
    _judge, until = judge, time.monotonic() + 60 * wanted.minutes
    with multiprocessing.get_context("fork").Pool(wanted.jobs) as pool:
        for count, (case, wrong) in enumerate(
            pool.imap_unordered(_judge_in_worker, cases), start=1
        ):
            if count % 100 == 0:
                print(f"{count} of {len(cases)}", file=sys.stderr, flush=True)
            for what in wrong:
                print(f"{case}: {what}", flush=True)
            yield case, wrong
            if time.monotonic() > until:
                return


class Failure(NamedTuple):
    """Which call below the folder fails, and how."""

    call: int  # from 1; 0 for none
    error: int = 0
    and_later: bool = False
    torn: bool = False  # a write of half of its bytes, and the call after it fails


NONE = Failure(0)


@dataclass(frozen=True)
class Call:
    """One call of a trace."""

    number: int
    kind: str
    error: int
    at: int
    path: str  # relative to the folder
    to: str  # of a rename
    data: bytes


def read_trace(path: Path, folder: Path) -> list[Call]:
    """Return the calls that the shim logged."""
    calls, prefix = [], len(str(folder)) + 1
    with open(path, "rb") as file:
        while head := file.readline():
            number, kind, *numbers = head.decode().split()
            error, at, *sizes = map(int, numbers)
            name, to, data = (file.read(size) for size in sizes)
            relative = [os.fsdecode(text)[prefix:] for text in (name, to)]
            calls.append(Call(int(number), kind, error, at, *relative, data))
    return calls


class Life(NamedTuple):
    """What a start of the trainer that ended leaves; `code` is negative if a signal ended it."""

    code: int
    said: str
    errors: str


@dataclass(frozen=True)
class Trainer:
    """The trainer over one folder of data, to be run as forks."""

    shim: ctypes.CDLL
    data: Path
    items: Path

    def run(
        self,
        folder: Path,
        *more: str,
        failure: Failure = NONE,
        trace: Path | None = None,
        arm: Callable[[], object] | None = None,
    ) -> Life:
        """Run a start to its end, with the shim armed for `folder` if it is to fail or to be traced, or by `arm`."""
        place = [f"--data_dir={self.data}", f"--checkpoint_dir={folder}"]
        flags = [*SHAPE, *place, f"--hellaswag_path={self.items}", *more]

        def arm_disk() -> None:
            if failure.call or trace is not None:
                log = b"" if trace is None else os.fsencode(trace)
                how = (failure.error, failure.and_later, failure.torn)
                self.shim.shim_arm(os.fsencode(folder), log, ctypes.c_long(failure.call), *how)

        return live([str(launch.TRAIN), *flags], arm or arm_disk)


def live(
    words: list[str],
    arm: Callable[[], object],
    meanwhile: Callable[[int, Path], object] | None = None,
) -> Life:
    """Run a program to its end as a fork, armed first; `meanwhile` is called with its id and stdout."""
    with tempfile.TemporaryDirectory() as aside:
        out, err = Path(aside, "out.txt"), Path(aside, "err.txt")
        out.touch()
        child = os.fork()
        if child == 0:
            _become(words, arm, out, err)
        if meanwhile is not None:
            meanwhile(child, out)
        _, status = os.waitpid(child, 0)
        return Life(os.waitstatus_to_exitcode(status), out.read_text(), err.read_text())


def _become(words: list[str], arm: Callable[[], object], *to: Path) -> None:
    code: object = 1
    try:
        for number, path in enumerate(to, start=1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        sys.argv = words
        sys.path.append(str(Path(words[0]).parent))
        os.environ["FAULT"] = ""
        multiprocessing.current_process().daemon = False  # it may have children
        signal.alarm(_LIVES)  # a hang ends, and fails its case
        arm()
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


@contextlib.contextmanager
def trainer(folder: Path) -> Iterator[Trainer]:
    """Prepare a small corpus below a folder and yield a trainer over it."""
    shim = preload(folder)
    import torch

    import corpora
    import train  # noqa: F401 - here, so that the forks have it
    from gpt2lab.commands import train as _  # noqa: F401
    from gpt2lab.tokenizers.named import open_tokenizer
    from gpt2lab.training import pretrain  # noqa: F401
    from tiny import write_items

    torch.set_num_threads(1)
    data = folder / "data"
    if not data.exists():
        source = corpora.write_jsonl(folder / "texts.jsonl", corpora.TEXTS)
        with open(os.devnull, "w") as null, contextlib.redirect_stderr(null):
            tokenizer = open_tokenizer("bytes", None)
            corpora.run_prepare(source, data, val_tokens=300, tokenizer=tokenizer)
    yield Trainer(shim, data, write_items(folder / "items.jsonl", 2))


def bits(run: Path) -> dict[str, object]:
    """Return what must be the same of every run that came to its end: the bits of its losses and last checkpoint."""
    folder = run / f"step_{LAST:08d}"
    files = json.loads((folder / "manifest.json").read_text())["files"]
    steps = launch.current_steps(run)
    return {
        "losses": {step: float.hex(event["loss"]) for step, event in steps.items()},
        "batches": {step: event["batch_hash"] for step, event in steps.items()},
        "weights": files["model.safetensors"]["sha256"],
        "moments": files["optim.safetensors"]["sha256"],
    }


def unsound(run: Path) -> list[str]:
    """Say which checkpoints that have a name are not what was written under it."""
    infos, damaged = catalog.list_checkpoints(run)
    found = [str(error) for error in damaged]
    for info in infos:
        try:
            manifests.verify(info.path)
        except CheckpointError as error:
            found.append(str(error))
    return found


def unlike(run: Path, reference: dict[str, object]) -> list[str]:
    """Say in what a run that should be complete differs from the reference, and what of its end is missing or twice."""
    try:
        ours = bits(run)
    except (OSError, KeyError, ValueError) as error:
        return [f"no final checkpoint that can be read: {error!r}"]
    found = [f"other {n} than the reference's" for n, one in reference.items() if ours[n] != one]
    status = json.loads((run / "status.json").read_text())
    if (status["state"], status["step"]) != ("completed", LAST):
        found.append(f"status is {status['state']} at step {status['step']}")
    if catalog.read_labels(run).get("best") != folder_name(LAST):
        found.append(f"labels are {catalog.read_labels(run)}")
    labels, saved = catalog.read_labels(run), {path.name for path in run.glob("step_*")}
    found += [f"label {label} of no checkpoint" for label in labels if labels[label] not in saved]
    at_end: list[
        dict[str, Any]
    ] = []  # along the line of steps that the newest weights went through
    for event in read_events(run):
        if event["event"] in ("begin", "resume"):
            at_end = [earlier for earlier in at_end if earlier["step"] <= event["step"]]
        at_end.append(event)
    for kind in ("eval", "hellaswag", "sample", "checkpoint", "done"):
        times = sum((event["event"], event["step"]) == (kind, LAST) for event in at_end)
        if times != 1:
            found.append(f"{kind} of the last step is recorded {times} times")
    # What could not be deleted is for the next start that trains; there may be none.
    left = [str(path.relative_to(run)) for path in run.glob("**/.*") if path.name[:5] != ".del-"]
    return found + ([f"left behind: {', '.join(left)}"] if left else [])
