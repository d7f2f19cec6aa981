"""Runs as tasks of a Ray cluster: each on a node with a free GPU or cores, on another one if that node dies.

The nodes see the runs' folder, or each fetches a run's checkpoints from its `--checkpoint_mirror`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpt2lab.checkpoint import catalog
from gpt2lab.errors import CheckError
from gpt2lab.files import replace_durably
from gpt2lab.lab.seed_runs import Machine, SeedRun
from gpt2lab.runs.console import say
from gpt2lab.runs.events import METRICS
from gpt2lab.runs.folder import LOG, holder_of

RAY = "address of a Ray cluster that trains the runs, --jobs of them at a time; auto = the one of this machine"
_ATTEMPTS = 5  # of a run whose node dies
_LOCK_SECONDS = 150  # in which a file server unlocks what a dead node has locked
_LOOK_SECONDS = 5.0
# Before another attempt: for half a minute Ray may still give tasks to the dead node.
_PAUSE_SECONDS = 15.0
_SMALL = ("*.json", METRICS, LOG, "validation/*")  # files of a run

End = tuple[int, str, dict[str, bytes]]  # exit code, standard error, small files of the run


@contextlib.contextmanager
def machine_of(address: str | None) -> Iterator[Machine]:
    """Yield what starts runs: the Ray cluster at `address`, or this machine without one.

    Raises: ConfigError if Ray is not installed or the cluster cannot be reached.
    """
    if address is None:
        yield Machine()
        return
    from gpt2lab.data.prepare.cluster import connected

    with connected(address) as ray:
        yield Cluster(ray)


class Cluster(Machine):
    """A Ray cluster, which starts each run as a task."""

    def __init__(self, ray: Any) -> None:
        """`ray`: the package, connected."""
        self.ray = ray

    def resources(self, kind: str) -> list[int]:
        """Return how many `CPU` or `GPU` each node that lives offers."""
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        return [int(node.get(kind, 0)) for node in nodes]

    def environments(self, jobs: int, *, on_cpu: bool) -> list[dict[str, str]]:
        """Return the environment variables of each job: none with a GPU of its own, else the number of its cores.

        They are fewer than the jobs if there are too few GPUs or cores.
        """
        if not on_cpu and (gpus := sum(self.resources("GPU"))):
            return [{}] * min(jobs, gpus)
        cores = self.resources("CPU")
        share = max([1, *cores])
        while (room := sum(own // share for own in cores)) < jobs and share > 1:
            share -= 1
        return [{"OMP_NUM_THREADS": str(share)}] * min(jobs, room)

    def start(self, run: SeedRun, environment: dict[str, str]) -> RayTask:
        """Start the trainer of a run on a node with room for it."""
        return RayTask(self, run, environment)


class RayTask:
    """A run on the cluster, with the methods of a process."""

    def __init__(self, cluster: Cluster, run: SeedRun, environment: dict[str, str]) -> None:
        """Submit it."""
        self._cluster, self._run, self._environment = cluster, run, environment
        self._stopped = threading.Event()
        self._submit()

    def _submit(self) -> None:
        cores = int(self._environment.get("OMP_NUM_THREADS", 0))
        self._kind, self._needed = ("CPU", cores) if cores else ("GPU", 1)
        options = {"num_cpus": cores or 1, "num_gpus": int(not cores), "max_retries": 0}
        remote = self._cluster.ray.remote(**options)(_train)
        self._task = remote.remote(self._run, self._environment, Path.cwd())

    def terminate(self) -> None:
        """Have it save and end."""
        self._stopped.set()
        self._cluster.ray.cancel(self._task)

    def wait(self) -> int:
        """Wait for its end; return its exit code."""
        return self._end()[0]

    def communicate(self) -> tuple[None, str]:
        """Wait for its end, bring what it wrote here, and return its standard error.

        Raises: CheckError if it cannot run on the cluster.
        """
        code, stderr, files = self._end()
        url, folder = self._run.request.config.checkpoint.checkpoint_mirror, self._run.folder
        if url is not None:
            from gpt2lab.mirror.extension import fetch_newer

            for name, content in files.items():
                path = folder / name
                if not path.exists() or path.read_bytes() != content:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    replace_durably(path, content)
            newest, _ = catalog.newest_valid(folder, set_aside=False)
            for warning in fetch_newer(url, folder, newest, tell=say):
                say(f"{self._run.name}: {warning}")
        elif not code and folder not in folder.parent.glob("*"):
            raise CheckError(
                f"{self._run.name} was trained where this machine does not see it; give an --out that all nodes share, "
                f"or --checkpoint_mirror"
            )
        return None, stderr

    def _end(self) -> End:
        """Return how it ended; started again elsewhere each time that its node died."""
        ray, name = self._cluster.ray, self._run.name
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                while not ray.wait([self._task], timeout=_LOOK_SECONDS)[0]:
                    if max(self._cluster.resources(self._kind), default=0) < self._needed:
                        raise CheckError(
                            f"{name}: no node of the cluster is left with {self._needed} {self._kind}"
                        )
                end: End = ray.get(self._task)
                return end
            except ray.exceptions.TaskCancelledError:  # before it began
                return 0, "", {}
            except ray.exceptions.RayTaskError as error:
                raise CheckError(f"{name} did not start: {error.cause}") from error
            except ray.exceptions.RayError as error:
                if self._stopped.is_set() or attempt == _ATTEMPTS:
                    reason = " ".join(str(error).split())[:200]
                    raise CheckError(f"{name} was lost {attempt} times: {reason}") from error
                say(f"{name}: lost ({type(error).__name__}); continues from its last checkpoint")
                if self._stopped.wait(_PAUSE_SECONDS):
                    return 0, "", {}
                self._submit()
        raise AssertionError


def _train(run: SeedRun, environment: dict[str, str], working_directory: Path) -> End:
    """Train a run on this node; an interrupt by Ray makes it save."""
    trainer = None
    try:
        os.chdir(working_directory)  # the settings may have relative paths
        until = time.monotonic() + _LOCK_SECONDS
        while holder_of(run.folder) and time.monotonic() < until:
            time.sleep(0.2)
        run.write_settings()
        trainer = Machine().start(run, environment)
        stderr = ""
        while trainer.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # an interrupt ends no system call
                stderr = trainer.communicate(timeout=0.2)[1]
    except KeyboardInterrupt:
        if trainer is None:
            return 0, "", {}
        trainer.terminate()
        stderr = trainer.communicate()[1]
    files: dict[str, bytes] = {}
    if run.request.config.checkpoint.checkpoint_mirror is not None:  # which has the checkpoints
        small = [path for name in _SMALL for path in run.folder.glob(name)]
        files = {str(path.relative_to(run.folder)): path.read_bytes() for path in small}
    return trainer.returncode, f"{stderr.rstrip()} (on {socket.gethostname()})", files
