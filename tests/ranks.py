"""Run the ranks of a job as forks of one process that has imported torch and the trainer, seconds of every start.

A rank does what it does under torchrun: the program is `__main__`, environment and store are torchrun's. Tests whose
subject is the launcher, a signal, a thread or the end of a process start real programs (launch.py, tests/faults).
"""

import contextlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory

# Read when modules are imported, so they must be those of the process that imports them for all.
_SOURCES = Path(__file__).resolve().parents[1] / "src"
_BEFORE_IMPORT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_SOURCES)}
_GRACE_SECONDS = 30.0  # torchrun's, between SIGTERM and SIGKILL

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["torch", "torch._dynamo", "gpt2lab.training.pretrain"])


def run_ranks(
    program: Path, flags: list[str], *, world: int, environment: dict[str, str], seconds: float
) -> subprocess.CompletedProcess[str]:
    """Run `world` ranks of a program to their end; when one fails the others are ended, as by torchrun.

    One rank is the program alone, without a process group. The exit code is 0, or that of the rank that failed first.

    Raises: TimeoutError after `seconds`.
    """
    import torch.distributed as dist

    environments = [environment]
    if world > 1:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        shared = {
            **environment,
            **{"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "GROUP_RANK": "0"},
            **{"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)},
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        ranks = map(str, range(world))
        environments = [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in ranks]
    with TemporaryDirectory() as folder:
        out, err = Path(folder, "out.txt"), Path(folder, "err.txt")
        for path in (out, err):
            path.touch()  # a rank that dies at once writes none
        ranks = [
            _forks.Process(target=_become, args=(program, flags, own, out, err))
            for own in environments
        ]
        with _set_before_import():
            for process in ranks:
                process.start()
        try:
            code = _first_failure(ranks, seconds)
        except TimeoutError as error:
            raise TimeoutError(f"{program.name}: {error}; it said: {err.read_text()}") from None
        finally:
            _end(ranks)
        words = [str(program), *flags]
        return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())


def _become(
    program: Path, flags: list[str], environment: dict[str, str], out: Path, err: Path
) -> None:
    """Turn this fork into the program."""
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [str(program), *flags]
    sys.path.insert(0, str(program.parent))
    runpy.run_path(str(program), run_name="__main__")


def _first_failure(ranks: list[multiprocessing.context.ForkServerProcess], seconds: float) -> int:
    """Wait until all have ended well, or one has failed; return its exit code or 0."""
    deadline = time.monotonic() + seconds
    running = {process.sentinel: process for process in ranks}
    while running:
        ended = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
        if not ended:
            raise TimeoutError(f"ranks {[p.name for p in running.values()]} took over {seconds} s")
        for sentinel in ended:
            process = running.pop(sentinel)  # type: ignore[index]
            process.join()
            if process.exitcode:
                return process.exitcode
    return 0


def _end(ranks: list[multiprocessing.context.ForkServerProcess]) -> None:
    for process in ranks:
        process.terminate()
    for process in ranks:
        process.join(_GRACE_SECONDS)
        process.kill()
        process.join()


@contextlib.contextmanager
def _set_before_import() -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(_BEFORE_IMPORT)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
