"""Compare settings of the trainer at equal tokens and seeds, and write a table with errors.

SETTINGS is a file with one setting a line, `name: flags of the trainer`; the first is the baseline. A flag of the
trainer with several values is a grid: each value with each setting. Each setting and seed is a run of its own: a fresh
process with the trainer's command line.

gpt2lab ablate settings.txt --out runs/norms --seeds 1 2 3 --max_tokens 1M
gpt2lab ablate settings.txt --out runs/norms --target 3.5 --max_tokens 1M
gpt2lab ablate --out runs/rates --max_lr 1e-3 2e-3 4e-3 --max_tokens 1M
gpt2lab ablate settings.txt --out runs/norms --until_decided --max_tokens 1M
"""

import contextlib
import json
import math
import os
import queue
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gpt2lab import fmt, paths
from gpt2lab.commands import ablate_until
from gpt2lab.commands.ablation_table import Run, write_table
from gpt2lab.commands.command_line import Actions, names_of_flags, parse
from gpt2lab.commands.parser import parse_flags
from gpt2lab.config.flags import argument, option, required
from gpt2lab.config.other_programs import answer
from gpt2lab.config.request import RunRequest
from gpt2lab.config.settings import LEAVES, is_list, policy_of, to_flat
from gpt2lab.errors import (
    CheckError,
    ConfigError,
    DataError,
    GPT2LabError,
    SavedInterrupt,
    SaveError,
)
from gpt2lab.lab.over_seeds import SMALLEST
from gpt2lab.runs import history
from gpt2lab.runs.console import say

if TYPE_CHECKING:
    from gpt2lab.training.start import Start

_OURS = {"seed", "run_name", "checkpoint_dir", "resume"}
_NOTHING = (
    "nothing to compare: give a settings file, or several values to a flag, such as "
    "--max_lr 1e-3 2e-3"
)
_SHARED = ("data_dir", "val_tokens")  # validation losses compare only if these are equal


@dataclass(frozen=True)
class Ablate:
    """Compare settings of the trainer; flags of the trainer are passed on to every run."""

    out: Path = required(
        "folder of the runs and the table; a run that is complete is not run again"
    )
    settings: Path | None = argument(
        "file of one `name: flags of the trainer` a line; the first is the baseline. Without it give a flag of the "
        "trainer several values",
        default=None,
    )
    jobs: int = option(
        1, "runs at the same time: each on a GPU of its own, or on its share of the cores", least=1
    )
    seeds: tuple[int, ...] = option((1337,), "each setting is run with each of them")
    target: float | None = option(
        None, "validation loss to reach; default, seed by seed, the last one of the first setting"
    )
    until_decided: bool = option(
        False,
        "add seeds until each setting is better than, worse than or equal to the first, by a confidence sequence",
    )
    max_seeds: int | None = option(
        None, f"with --until_decided: at most so many seeds; default {ablate_until.MAX_SEEDS}"
    )
    smallest_difference: float = option(
        SMALLEST,
        "smaller differences of validation losses, in nats per token, count as equal; the table shows how many seeds "
        "would find one of this size",
    )
    json: bool = option(False, "print one JSON object")


_OWN = {*Ablate.__dataclass_fields__, "help", "help_all"}


def main(argv: list[str]) -> int:
    """Run what is missing, then write and print the table.

    Raises: CheckError after that if a run diverged.
    """
    words, shared, grid = take_grid(argv)
    if shared and not words and not grid:
        raise ConfigError(_NOTHING)
    flags = parse_flags(Ablate, words, passed_on=shared)
    if not 0 < flags.smallest_difference < math.inf:
        raise ConfigError(
            f"--smallest_difference {flags.smallest_difference:g} must be a number above 0"
        )
    if not flags.seeds:
        raise ConfigError("--seeds: no seed; give at least one number")
    if flags.target is not None and not math.isfinite(flags.target):
        raise ConfigError(f"--target {flags.target:g} must be a number")
    if flags.max_seeds is not None and not flags.until_decided:
        raise ConfigError("--max_seeds goes with --until_decided; --seeds 1 2 3 names the seeds")
    out = paths.from_working_directory(flags.out)
    settings: dict[str, list[str]] = {"": []}
    if flags.settings is not None:
        settings = read_settings(paths.from_working_directory(flags.settings))
    settings = cross(settings, grid)
    if len(settings) < 2:
        raise ConfigError(_NOTHING)
    max_seeds = flags.max_seeds
    if flags.until_decided and max_seeds is None:
        max_seeds = max(ablate_until.MAX_SEEDS, len(flags.seeds))

    def plan(seeds: Sequence[int]) -> list[Run]:
        return plan_runs(settings, shared, seeds=seeds, out=out)

    def write(done: list[Run]) -> tuple[str, dict[str, Any]]:
        smallest = flags.smallest_difference
        return write_table(done, out, target=flags.target, smallest=smallest, max_seeds=max_seeds)

    def carry(new: list[Run], before: list[Run]) -> None:
        run_all(
            new,
            jobs=flags.jobs,
            refresh=lambda done: write([*before, *done]),
            on_divergence="go on",
        )

    if max_seeds is None:
        runs = plan(flags.seeds)
        carry(runs, [])
    else:
        seeds = ablate_until.all_seeds(flags.seeds, max_seeds, settings=len(settings))
        _reject_unequal_tokens(plan(seeds[:1]))
        runs = ablate_until.run_until_decided(
            plan,
            carry,
            out,
            settings=list(settings),
            seeds=seeds,
            given=len(flags.seeds),
            jobs=flags.jobs,
            smallest=flags.smallest_difference,
        )
    markdown, as_json = write(runs)
    print(json.dumps(as_json) if flags.json else markdown)
    if diverged := [run.name for run in runs if history.has_diverged(out / run.name)]:
        raise CheckError(
            f"{len(diverged)} of {len(runs)} runs diverged: {', '.join(diverged)}; give their settings a lower "
            f"--max_lr under another name"
        )
    return 0


def _reject_unequal_tokens(runs: Sequence[Run]) -> None:
    """Reject settings that end after other tokens than the baseline, whose last losses do not compare."""
    tokens = [_start_of(run.request).plan.tokens for run in runs]
    for run, count in zip(runs, tokens, strict=True):
        if count != tokens[0]:
            raise ConfigError(
                f"--until_decided compares last losses at equal tokens, but {run.setting} ends after {count:,} and "
                f"{runs[0].setting} after {tokens[0]:,}; give both the same, or leave --until_decided out"
            )


def take_grid(argv: Sequence[str]) -> tuple[list[str], list[str], dict[str, list[str]]]:
    """Divide a command line into words of this command, flags of the trainer, and {flag: its several values}.

    Raises: ConfigError for a flag that neither has.
    """
    words: list[str] = []
    shared: list[str] = []
    grid: dict[str, list[str]] = {}
    place = 0
    while place < len(argv):
        word = argv[place]
        place += 1
        name = word[2:].partition("=")[0].replace("-", "_")
        if word[:2] != "--" or name in _OWN:
            words.append(word)
            continue
        most = _words_of(name)
        begin = place
        while place < len(argv) and argv[place][:2] != "--" and "=" not in word:
            if place - begin == most:
                break
            place += 1
        values = list(argv[begin:place])
        if len(values) > 1 and not is_list(name):
            grid[name] = values
        else:
            shared += [word, *values]
    return words, shared, grid


def _words_of(name: str) -> int | None:
    """Return how many words a flag of the trainer takes at most here; None: any number, which makes a grid.

    Raises: ConfigError if it has no such flag.
    """
    if name in LEAVES:
        return 0 if LEAVES[name][1].type == "bool" else None
    if name in Actions.__dataclass_fields__:
        return 0 if Actions.__dataclass_fields__[name].type == "bool" else 1
    if name.startswith("no_") and name[3:] in LEAVES:
        return 0
    known = [*_OWN, *LEAVES, *Actions.__dataclass_fields__]
    hint = fmt.did_you_mean(name, known, "see gpt2lab ablate --help", flag="--")
    raise ConfigError(f"unknown flag --{name}: {answer(name) or hint}")


def cross(settings: dict[str, list[str]], grid: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return each setting with each combination of the grid's values; the first combination is the baseline.

    Raises: ConfigError if a value stands there twice.
    """
    for flag, values in grid.items():
        if twice := next((value for value in values if values.count(value) > 1), None):
            raise ConfigError(f"--{flag}: {twice} stands there twice")
        settings = {
            "_".join(filter(None, (name, f"{flag}-{re.sub(r'[^A-Za-z0-9_.+-]', '_', value)}"))): [
                *flags,
                f"--{flag}={value}",
            ]
            for name, flags in settings.items()
            for value in values
        }
    return settings


def read_settings(path: Path) -> dict[str, list[str]]:
    """Return {setting: its flags} of a settings file, in its order; `#` begins a comment line.

    Raises: ConfigError naming the line, DataError if there is no such file.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    settings: dict[str, list[str]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, colon, flags = line.partition(":")
        if not colon or re.fullmatch(r"[\w.+-]+", name.strip()) is None:
            raise ConfigError(f"{path} line {number}: not `name: flags of the trainer`")
        if name.strip() in settings:
            raise ConfigError(f"{path} line {number}: a second setting {name.strip()}")
        try:
            settings[name.strip()] = shlex.split(flags)
        except ValueError as error:
            raise ConfigError(f"{path} line {number}: {error}") from error
    if len(settings) < 2:
        count = fmt.number_of(len(settings), "setting")
        raise ConfigError(f"{path}: {count}; a comparison needs at least 2")
    return settings


def plan_runs(
    settings: dict[str, list[str]], shared: Sequence[str], *, seeds: Sequence[int], out: Path
) -> list[Run]:
    """Return all runs, after asking of each whether the trainer would start it or go on with it.

    Raises: ConfigError, DataError: whatever the trainer would reject, and what makes losses incomparable.
    """
    runs = name_runs(settings, shared, seeds=seeds, out=out)
    check_runs(runs)
    return runs


def name_runs(
    settings: dict[str, list[str]], shared: Sequence[str], *, seeds: Sequence[int], out: Path
) -> list[Run]:
    """Return all runs, seed by seed, so that an ablation that is stopped early has complete comparisons.

    Looks at no folder of a run; `check_runs` does.

    Raises: ConfigError for flags that the trainer does not have, what makes losses incomparable, and an `out` that is
        a file.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: a file; give the folder of the runs")
    if len(set(seeds)) != len(seeds):
        raise ConfigError(f"seeds {' '.join(map(str, seeds))}: each may be given once")
    runs = []
    for seed in seeds:
        for name, flags in settings.items():
            place = [f"--seed={seed}", f"--checkpoint_dir={out}", f"--run_name={name}_seed{seed}"]
            with naming(name):
                # A file of settings always has a seed; the ablation's own counts above it.
                if ours := _OURS & names_of_flags([*shared, *flags]):
                    raise ConfigError(f"--{min(ours)} is set by the ablation itself")
                argv = (*shared, *flags, *place, "--resume=auto")
                request = parse(list(argv)).request
            runs.append(Run(name, seed, request, argv))
    for flag in _SHARED:
        found = {str(to_flat(run.request.config)[flag]): run.setting for run in runs}
        if len(found) > 1:
            (one, first), (other, second) = list(found.items())[:2]
            raise ConfigError(
                f"{flag} {one} in {first}, {other} in {second}: their losses would not compare"
            )
    return runs


def check_runs(runs: Sequence[Run]) -> None:
    """Ask of each run whether the trainer would start it or go on with it.

    Raises: ConfigError, DataError: whatever it would reject.
    """
    for run in runs:
        with naming(run.setting):
            _start_of(run.request)


@contextlib.contextmanager
def naming(setting: str) -> Iterator[None]:
    """Name the setting at the beginning of an error's message."""
    try:
        yield
    except GPT2LabError as error:
        raise type(error)(f"setting {setting}: {error}") from None


def _start_of(request: RunRequest) -> "Start":
    """Decide what the trainer would do; reject an old run that had other settings."""
    from gpt2lab.training.resolve import resolve

    require_own_settings(request)
    return resolve(request, world_size=1, set_aside=False)


def require_own_settings(request: RunRequest) -> None:
    """Reject an old run of the same name that had other settings.

    Raises: ConfigError.
    """
    from gpt2lab.training.resolve import fresh_settings

    fresh, _ = fresh_settings(request)
    run_dir = fresh.checkpoint.checkpoint_dir / str(fresh.checkpoint.run_name)
    if not (run_dir / "config.json").exists():
        return
    wanted, had = to_flat(fresh), to_flat(history.read_config(run_dir))
    for name, value in wanted.items():
        differs = value not in (None, "auto") and had[name] != value
        if differs and policy_of(name, fresh) != "free":
            raise ConfigError(
                f"{paths.display_path(run_dir)} was run with {name} {had[name]}, not {value}; "
                f"name the setting otherwise or remove that folder"
            )


def run_all(
    runs: Sequence[Run],
    *,
    jobs: int = 1,
    refresh: Callable[[list[Run]], object] = lambda done: None,
    on_divergence: Literal["end", "go on"] = "end",
) -> None:
    """Run what is not complete yet, `jobs` fresh processes at a time; each writes its own log.txt.

    `refresh` gets the runs of all seeds that are complete, each time that there is one more.

    `on_divergence`: whether a run whose numbers are no longer finite is an end like others, and not taken up again.

    Raises: CheckError if one fails or stops early; SavedInterrupt when what runs has saved and ended. Started again,
        the ablation goes on where it stood.
    """
    devices = {run.request.config.system.device for run in runs}
    trainers = _Trainers(_places(jobs, on_cpu=devices == {"cpu"}))
    may_diverge = on_divergence == "go on"

    def carry(number: int, run: Run) -> None:
        name = f"[{number}/{len(runs)}] {run.name}"
        with trainers.place(run) as environment:
            _carry_out_one(run, name, environment, trainers, may_diverge=may_diverge)

    complete: set[str] = set()
    pool = ThreadPoolExecutor(jobs)
    try:
        for run in _as_completed(runs, carry, pool if jobs > 1 else None):
            complete.add(run.name)
            waiting = {other.seed for other in runs if other.name not in complete}
            if done := [other for other in runs if other.seed not in waiting]:
                refresh(done)
            if jobs > 1:
                say(progress(runs))
    except KeyboardInterrupt:
        if SaveError.exit_code in trainers.end():
            raise KeyboardInterrupt("a run could not be saved: its log.txt says why") from None
        raise SavedInterrupt("what was trained is saved; start again to go on with it") from None
    finally:
        pool.shutdown()


def _as_completed(
    runs: Sequence[Run], carry: Callable[[int, Run], None], pool: ThreadPoolExecutor | None
) -> Iterator[Run]:
    """Carry out runs, one by one in this thread or in those of a pool; yield each that is complete.

    Raises: the first error, in a pool after all others have ended.
    """
    numbered = enumerate(runs, start=1)
    if pool is None:
        for number, run in numbered:
            carry(number, run)
            yield run
        return
    tasks = {pool.submit(carry, number, run): run for number, run in numbered}
    errors = []
    for task in as_completed(tasks):
        if error := task.exception():
            errors.append(error)
        else:
            yield tasks[task]
    if errors:
        raise errors[0]


class _Trainers:
    """The trainers that run, each at a place of its own; none begins once one has failed or all were told to end."""

    def __init__(self, places: Sequence[dict[str, str]]) -> None:
        """`places`: what each has in its environment."""
        self._running: list[subprocess.Popen[str]] = []
        self._stop = threading.Event()
        self._free: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
        for place in places:
            self._free.put(place)

    @contextlib.contextmanager
    def place(self, run: Run) -> Iterator[dict[str, str]]:
        """Wait for a free place and hold it.

        Raises: CheckError if no other shall begin.
        """
        place = self._free.get()
        try:
            if self._stop.is_set():
                raise CheckError(f"{run.name} was not begun: another run failed")
            yield place
        except BaseException:
            self._stop.set()  # what runs comes to its end, nothing else begins
            raise
        finally:
            self._free.put(place)

    def run(self, argv: Sequence[str], environment: dict[str, str]) -> tuple[int, str]:
        """Train in a fresh process; return its exit code and what it wrote to stderr."""
        from gpt2lab.training.stop import end_with_parent

        trainer = subprocess.Popen(
            [sys.executable, *paths.trainer("train"), *argv],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            preexec_fn=end_with_parent,  # else a run would go on alone, and be in the way of the next start
        )
        self._running.append(trainer)
        if self._stop.is_set():  # since the caller looked
            trainer.terminate()
        stderr = trainer.communicate()[1]
        self._running.remove(trainer)
        return trainer.returncode, stderr

    def end(self) -> list[int]:
        """Have each save and end, wait for that, and return their exit codes."""
        self._stop.set()
        told = list(self._running)
        for trainer in told:
            trainer.terminate()  # it saves; Ctrl+C in a terminal has told it too, `kill -INT` has not
        return [trainer.wait() for trainer in told]


def _carry_out_one(
    run: Run,
    place: str,
    environment: dict[str, str],
    trainers: _Trainers,
    *,
    may_diverge: bool,
) -> None:
    start = _start_of(run.request)
    if may_diverge and history.has_diverged(start.run_dir):
        say(f"{place}: diverged")
        return
    if start.is_complete:
        say(f"{place}: complete")
        return
    say(f"{place}: {start.plan.max_steps:,} steps, {start.plan.tokens:,} tokens")
    code, stderr = trainers.run(list(run.argv), environment)
    if code:
        reason = (stderr.strip() or "no message").splitlines()[-1]
        if may_diverge and history.has_diverged(start.run_dir):
            say(f"{place}: diverged: {reason.removeprefix('error: ')}")
            return
        raise CheckError(f"{run.name} failed with exit code {code}: {reason}")
    if not _start_of(run.request).is_complete:
        raise CheckError(f"{run.name} stopped before its end; start again to go on with it")


def _places(jobs: int, *, on_cpu: bool) -> list[dict[str, str]]:
    """Return what each of the jobs has in its environment: a GPU of its own, or its share of the cores.

    Raises: ConfigError if there are fewer GPUs than jobs.
    """
    if jobs == 1:
        return [{}]
    gpus = [] if on_cpu else visible_gpus()
    if gpus and len(gpus) < jobs:
        raise ConfigError(f"--jobs {jobs}: there are {len(gpus)} GPUs, and each run needs its own")
    if gpus:
        return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus[:jobs]]
    return [{"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // jobs))}] * jobs


def visible_gpus() -> list[str]:
    """Return the numbers of the GPUs that a process started here may use, without torch."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [gpu.strip() for gpu in chosen.split(",") if gpu.strip() not in ("", "-1")]
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    except OSError:
        return []
    return [str(number) for number, line in enumerate(found.splitlines()) if line.startswith("GPU")]


def progress(runs: Sequence[Run]) -> str:
    """Write where every run stands: its state, step and last validation loss."""
    rows = []
    for run in runs:
        run_dir = run.request.config.checkpoint.checkpoint_dir / run.name
        status = history.read_json(run_dir / "status.json") or {}
        losses = history.read_log(run_dir).current("eval")
        last = losses[max(losses)]["val_loss"] if losses else None
        state, step = str(status.get("state", "waits")), str(status.get("step", 0))
        rows.append((run.name, state, step, fmt.number(last)))
    return fmt.table(("run", "state", "step", "val loss"), rows)
