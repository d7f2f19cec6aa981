"""Runs of several settings and seeds: planned as requests, checked before anything starts, trained in processes.

Each run is a fresh process of the trainer that reads its settings from a file. The trainer may be that of another
commit, which is then asked what it would do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gpt2lab import fmt, paths
from gpt2lab.checkpoint import catalog
from gpt2lab.config.request import RunRequest
from gpt2lab.config.settings import LEAVES, policy_of, to_flat
from gpt2lab.distributed.processor import smi
from gpt2lab.errors import (
    CheckError,
    ConfigError,
    DataError,
    GPT2LabError,
    SavedInterrupt,
    SaveError,
    system_errors_as,
)
from gpt2lab.files import replace_durably
from gpt2lab.runs import history
from gpt2lab.runs.console import doing, say
from gpt2lab.runs.target import find_folder
from gpt2lab.training.stop import PARENT

if TYPE_CHECKING:
    from gpt2lab.training.start import Start

Trainer = Any  # a subprocess.Popen, or what has its methods communicate, wait and terminate
# Settings that all runs must share, and why.
_SHARED = dict.fromkeys(("data_dir", "val_tokens"), "their losses are not comparable") | {
    "average_tail": "the losses compared are those of the last weights, not of their mean"
}
_LONGEST = 240  # bytes of a run's name: a file's name has 255, and writing settings adds 15


@dataclass(frozen=True)
class Setting:
    """What the trainer is asked for, seed and folder apart."""

    request: RunRequest
    # Of the trainer, which a settings file cannot hold, such as --preset 1xa100.
    flags: tuple[str, ...] = ()
    ref: str | None = None  # of other code: a branch, a tag, a commit, or `.`, the working tree
    code: Path | None = None  # where that code is checked out; None: this program's


@dataclass(frozen=True)
class SeedRun:
    """One setting with one seed."""

    setting: str
    seed: int
    request: RunRequest
    out: Path  # folder of the runs
    flags: tuple[str, ...] = ()
    code: Path | None = None

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return f"{self.setting}_seed{self.seed}"

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.out / self.name

    @property
    def settings_file(self) -> Path:
        """The file that the trainer reads its settings from."""
        return self.out / "settings" / f"{self.name}.json"

    def trainer_words(self) -> list[str]:
        """Return the words after the trainer's name."""
        return ["--config", str(self.settings_file), "--resume=auto", *self.flags]

    def write_settings(self) -> None:
        """Write the chosen settings to the file for the trainer, and beside it what the file cannot hold.

        Raises: SaveError.
        """
        values = chosen_values(self.request)
        with system_errors_as(SaveError, self.settings_file, fix="choose another --out"):
            self.settings_file.parent.mkdir(parents=True, exist_ok=True)
            replace_durably(self.settings_file, json.dumps(values, indent=1) + "\n")
            self.settings_file.with_suffix(".flags").unlink(missing_ok=True)
            if self.flags:
                replace_durably(self.settings_file.with_suffix(".flags"), "\n".join(self.flags))


def _trainer(code: Path | None) -> tuple[list[str], dict[str, str]]:
    """Return the words that start the trainer of other code, or of this program's, and its environment."""
    if code is None:
        return [sys.executable, *paths.trainer("train")], dict(os.environ)
    path = os.pathsep.join(filter(None, [str(code / "src"), os.environ.get("PYTHONPATH")]))
    return [sys.executable, str(code / "src" / "train.py")], {**os.environ, "PYTHONPATH": path}


def chosen_values(request: RunRequest) -> dict[str, Any]:
    """Return what a settings file of a request holds."""
    chosen, flat = sorted(request.chosen), to_flat(request.config)
    return {name: flat[name] for name in chosen} | {"chosen": chosen}


def plan_runs(settings: Mapping[str, Setting], *, seeds: Sequence[int], out: Path) -> list[SeedRun]:
    """Return the runs of all settings, seed by seed, so that a sweep that is stopped has complete comparisons.

    Looks into no run folder; `check_runs` does.

    Raises: ConfigError if the losses would not be comparable, if a name is too long, or if `out` is a file.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: a file; give the folder of the runs")
    if len(set(seeds)) != len(seeds):
        raise ConfigError(f"seeds {' '.join(map(str, seeds))}: each may be given once")
    for flag, why in _SHARED.items():
        found = {str(to_flat(one.request.config)[flag]): name for name, one in settings.items()}
        if len(found) > 1:
            (one, first), (other, second) = list(found.items())[:2]
            raise ConfigError(f"{flag} {one} in {first}, {other} in {second}: {why}")
    for name, setting in settings.items():
        if setting.request.config.eval.early_stopping_patience:
            raise ConfigError(
                f"setting {name}: early_stopping_patience ends runs before their last step, and settings are compared "
                f"at equal tokens; leave it out"
            )
    for name, seed in itertools.product(settings, seeds):
        if (size := len(f"{name}_seed{seed}".encode())) > _LONGEST:
            raise ConfigError(
                f"setting {name:.30}...: its runs' names have {size} bytes, {_LONGEST} at most; shorten it"
            )
    return [
        SeedRun(name, seed, _placed(one, f"{name}_seed{seed}", seed, out), out, one.flags, one.code)
        for seed in seeds
        for name, one in settings.items()
    ]


def _placed(setting: Setting, name: str, seed: int, out: Path) -> RunRequest:
    """Return the request of one run, which continues where an earlier process stopped."""
    request = setting.request
    own: dict[str, Any] = {"seed": seed, "checkpoint_dir": str(out), "run_name": name}
    if setting.code is not None:  # it may have other defaults, and a data/ of its own
        own |= {name: to_flat(request.config)[name] for name in _SHARED}
    begin = request.config.init.init_from
    # Its name is that of a run among the others, and `out` is where this one lies.
    if begin is not None and catalog.find_folder(begin, out) is None:
        own["init_from"] = str(
            find_folder(begin, request.config.checkpoint.checkpoint_dir) or begin
        )
    return dataclasses.replace(request.with_settings(**own), resume="auto")


def check_runs(runs: Sequence[SeedRun]) -> None:
    """Check of each run that the trainer would start or continue it.

    Raises: ConfigError, DataError: whatever the trainer would reject.
    """
    for run in runs:
        with prefix_errors(run.setting):
            outlook_of(run)


@contextlib.contextmanager
def prefix_errors(setting: str) -> Iterator[None]:
    """Put the name of a setting before the message of an error."""
    try:
        yield
    except GPT2LabError as error:
        raise type(error)(f"setting {setting}: {error}") from None


def outlook_of(run: SeedRun) -> tuple[int, int, bool]:
    """Return the steps and the tokens of a run, and whether it is complete, as its own trainer sees it.

    Raises: ConfigError if a run of this name has other settings; whatever else that would reject; other code also if
        its flags differ from this program's.
    """
    if run.code is None:
        from gpt2lab.training.resolve import resolve

        require_own_settings(run)
        start = resolve(run.request, world_size=1, set_aside=False)
        return start.plan.max_steps, start.plan.tokens, start.is_complete
    settings = json.dumps(chosen_values(run.request))
    status = history.read_json(run.folder / "status.json") or {}
    return *_ask(run.code, settings, run.flags), status.get("state") == "completed"


@functools.cache
def _ask(code: Path, settings: str, flags: tuple[str, ...]) -> tuple[int, int]:
    """Return the steps and the tokens of a run, as its own code plans them."""
    with tempfile.NamedTemporaryFile("w", dir=code.parent, suffix=".json") as file:
        file.write(settings)
        file.flush()
        words = ["--config", file.name, "--resume=auto", *flags, "--dry_run", "--json"]
        command, environment = _trainer(code)
        done = subprocess.run([*command, *words], env=environment, capture_output=True, text=True)
    whose = f"the code of {code.name}"
    if done.returncode:
        raise ConfigError(f"{whose}: {last_line(done.stderr)}")
    try:
        facts = json.loads(done.stdout)
        names, steps, tokens = set(facts["config"]), int(facts["max_steps"]), int(facts["tokens"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{whose} answers --dry_run --json in another form") from None
    if differing := sorted(names ^ set(LEAVES)):
        raise ConfigError(
            f"{whose} has other flags than this program: --{', --'.join(differing)}; compare code with equal flags, "
            f"the change as its default"
        )
    return steps, tokens


def fresh_start(run: SeedRun) -> Start:
    """Return how the trainer would start a run if it had no folder yet.

    Raises: ConfigError, DataError: whatever the trainer would reject.
    """
    from gpt2lab.training.resolve import resolve

    request = dataclasses.replace(run.request.with_settings(run_name=None), resume=None)
    with prefix_errors(run.setting):
        return resolve(request, world_size=1, set_aside=False)


def require_own_settings(run: SeedRun, *measured: str) -> None:
    """Reject an existing run of the same name that has other settings or data, or was evaluated on others.

    `measured`: more settings that decide what is compared, though not the training.

    Raises: ConfigError, DataError.
    """
    if not (run.folder / "config.json").exists():
        return
    start = fresh_start(run)
    wanted, had = to_flat(start.config), to_flat(history.read_config(run.folder))
    for name, value in wanted.items():
        is_fixed = policy_of(name, start.config) != "free" or name in ("val_tokens", *measured)
        if is_fixed and value not in (None, "auto") and had[name] != value:
            raise ConfigError(
                f"{paths.display_path(run.folder)} was run with {name} {had[name]}, not {value}; "
                f"rename the setting or remove that folder"
            )
    facts = history.read_json(run.folder / "run.json") or {}
    if facts.get("data_fingerprint", start.data.fingerprint) != start.data.fingerprint:
        raise DataError(
            f"{run.name} was trained on other data than its data folder holds now; restore those, or choose another "
            f"--out"
        )


def run_all(
    runs: Sequence[SeedRun],
    *,
    jobs: int = 1,
    machine: Machine | None = None,
    refresh: Callable[[list[SeedRun]], object] = lambda done: None,
    on_divergence: Literal["fail", "continue"] = "fail",
    may_stop: bool = False,
) -> None:
    """Train what is not complete yet, `jobs` processes at a time; each writes its own log.txt.

    `machine`: what starts them, default this one. `refresh` gets the runs of all complete seeds, each time that a run
    completes. `on_divergence`: whether a run whose numbers became non-finite is a failure, or counts as complete and is
    not trained again. `may_stop`: a run need not reach its end.

    Raises: CheckError if a run fails, with its exit code, or stops early; SavedInterrupt after Ctrl+C, when the running
        jobs have saved, SaveError if one could not. Called again, it continues where it stopped.
    """
    devices = {run.request.config.system.device for run in runs}
    trainers = _Trainers(machine or Machine(), jobs, on_cpu=devices == {"cpu"})
    for run in runs:  # all at once, for a job array of those that Ctrl+C leaves
        run.write_settings()
    may_diverge = on_divergence == "continue"

    def train(number: int, run: SeedRun) -> SeedRun:
        if trainers.stopping.is_set():
            raise CheckError(f"{run.name} was not started: another run failed")
        label = f"[{number}/{len(runs)}] {run.name}"
        try:
            _run_one(run, label, trainers, may_diverge=may_diverge, may_stop=may_stop)
        except BaseException as error:
            failures.append(error)
            trainers.stopping.set()  # the running jobs finish, nothing else starts
            raise
        return run

    complete: set[str] = set()
    failures: list[BaseException] = []
    pool = ThreadPoolExecutor(jobs)
    try:
        numbered = enumerate(runs, start=1)
        trained: Iterable[SeedRun] = itertools.starmap(train, numbered)  # in this thread
        if jobs > 1:
            trained = _as_completed([pool.submit(train, *one) for one in numbered], failures)
        for run in trained:
            complete.add(run.name)
            waiting = {other.seed for other in runs if other.name not in complete}
            if done := [other for other in runs if other.seed not in waiting]:
                refresh(done)
            if jobs > 1:
                say(f"{run.name} has ended: {len(complete)} of {len(runs)} runs")
    except KeyboardInterrupt:
        if SaveError.exit_code in trainers.stop():
            raise SaveError("interrupted; a run could not be saved: its log.txt says why") from None
        raise SavedInterrupt("what was trained is saved; start again to continue") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _as_completed(
    tasks: list[Future[SeedRun]], failures: Sequence[BaseException]
) -> Iterator[SeedRun]:
    """Yield each run that is complete, and raise the first failure after all others have ended."""
    for task in as_completed(tasks):
        if not task.exception():
            yield task.result()
    if failures:
        raise failures[0]


class Machine:
    """This machine, which starts runs as its processes."""

    def environments(self, jobs: int, *, on_cpu: bool) -> list[dict[str, str]]:
        """Return the environment variables of each job: a GPU of its own, or its share of the cores.

        They are fewer than the jobs if there are too few GPUs.
        """
        if jobs == 1:
            return [{}]
        gpus: list[str] = []
        if not on_cpu and (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
            gpus = [gpu.strip() for gpu in chosen.split(",") if gpu.strip() not in ("", "-1")]
        elif not on_cpu:
            listed = enumerate(smi("-L").splitlines())
            gpus = [str(number) for number, line in listed if line.startswith("GPU")]
        if gpus:
            return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus[:jobs]]
        return [{"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // jobs))}] * jobs

    def start(self, run: SeedRun, environment: dict[str, str]) -> Trainer:
        """Start the trainer of a run, whose settings are written, as a process that ends with this one."""
        command, own = _trainer(run.code)
        return subprocess.Popen(
            [*command, *run.trainer_words()],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            # Else a run would continue alone and block the next start. A function between fork and exec may deadlock.
            env={**own, **environment, PARENT: str(os.getpid())},
        )


class _Trainers:
    """The running trainers; after one has failed or all were told to stop, none starts."""

    def __init__(self, machine: Machine, jobs: int, *, on_cpu: bool) -> None:
        """Raises: ConfigError if the machine has no room for so many at a time."""
        self.stopping = threading.Event()
        self._machine = machine
        self._running: list[Trainer] = []
        environments = machine.environments(jobs, on_cpu=on_cpu)
        if len(environments) < jobs:
            room = fmt.number_of(len(environments), "run")
            raise ConfigError(
                f"--jobs {jobs}: there is room for {room} at a time, each on a GPU or a core of its own"
            )
        self._free = queue.SimpleQueue[dict[str, str]]()  # as many as threads call `run`
        for environment in environments:
            self._free.put(environment)

    def run(self, run: SeedRun) -> tuple[int, str]:
        environment = self._free.get()
        try:
            trainer = self._machine.start(run, environment)
            self._running.append(trainer)
            if self.stopping.is_set():  # since the caller checked
                trainer.terminate()
            with doing(f"training {run.name}"):
                stderr = trainer.communicate()[1]
            self._running.remove(trainer)
            return trainer.wait(), stderr
        finally:
            self._free.put(environment)

    def stop(self) -> list[int]:
        """Make each running job save and end, wait for that, and return the exit codes."""
        self.stopping.set()
        running = list(self._running)
        for trainer in running:
            trainer.terminate()  # it saves; Ctrl+C in a terminal has reached it too, `kill -INT` has not
        return [trainer.wait() for trainer in running]


def _run_one(
    run: SeedRun, label: str, trainers: _Trainers, *, may_diverge: bool, may_stop: bool
) -> None:
    max_steps, tokens, is_complete = outlook_of(run)
    if may_diverge and history.has_diverged(run.folder):
        say(f"{label}: diverged")
        return
    if is_complete:
        say(f"{label}: complete")
        return
    say(f"{label}: {fmt.number_of(max_steps, 'step')}, {tokens:,} tokens")
    code, stderr = trainers.run(run)
    if code:
        reason = last_line(stderr)
        if code < 0:  # the last line may be any
            reason = f"{signal.strsignal(-code)}; start again to continue"
        if may_diverge and history.has_diverged(run.folder):
            say(f"{label}: diverged: {reason.removeprefix('error: ')}")
            return
        failure = CheckError(f"{run.name} failed with exit code {code}: {reason}")
        failure.exit_code = max(1, code)  # a full disk and a hang are no failed checks
        raise failure
    if run.code is not None and (problem := history.open_log(run.folder).problem):
        raise CheckError(
            f"{run.name}: its code writes a log that this program cannot read: {problem}"
        )
    if not may_stop and not outlook_of(run)[2]:
        raise CheckError(f"{run.name} stopped before its end; start again to continue")


def last_line(stderr: str) -> str:
    """Return the last line of a program's messages."""
    return (stderr.strip() or "no message").splitlines()[-1]
