"""Measuring this machine: real steps of the real trainer, in a process of its own, in a folder that is removed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpt2lab import paths
from gpt2lab.config.schema import Config
from gpt2lab.config.settings import to_flat
from gpt2lab.errors import ConfigError, NoSourceError
from gpt2lab.planner import calibration, contention, machine, memory
from gpt2lab.planner.ask import Ask
from gpt2lab.planner.contention import Watch
from gpt2lab.planner.job import Job
from gpt2lab.planner.profiles import Profile
from gpt2lab.planner.setting import Setting
from gpt2lab.runs import history
from gpt2lab.runs.history import read_json
from gpt2lab.tokenizers.gpt2 import NUM_TOKENS

REFUSED = 0.5  # share of the machine in other hands from which no number is given
FEWEST_STEPS = 4
COMPILE_ALLOWANCE = 60.0  # seconds, so that compiling does not eat the time for steps
TRIAL_SECONDS = 12.0
_OUT_OF_MEMORY = ("out of memory", "OutOfMemory", "DefaultCPUAllocator: can't allocate", "Killed")


@dataclass(frozen=True)
class Trial:
    """One run of the trainer for a short while."""

    events: list[dict[str, Any]]
    environment: dict[str, Any]
    config: dict[str, Any]
    others: float | None
    out_of_memory: bool

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Return the step events."""
        return [event for event in self.events if event["event"] == "step"]

    @property
    def peak_memory(self) -> int:
        """Return the largest memory in use, bytes."""
        return max((event["peak_memory_bytes"] for event in self.steps), default=0)

    @property
    def tokens_per_second(self) -> float | None:
        """Return the median rate after the first two steps."""
        rates = [event["tokens_per_second"] for event in self.steps[2:]]
        return statistics.median(rates) if rates else None


def measure(setting: Setting, profile: Profile) -> tuple[Ask, dict[str, Any] | None]:
    """Time this machine (and search the mini batch, if asked) and return the ask to answer now.

    Raises: NoSourceError if the machine is too busy or too slow; ConfigError if the trainer refuses.
    """
    ask, search = setting.ask, None
    if ask.find_batch_size:
        job = setting.job(profile)
        found = find_batch_size(
            job,
            ask.folder(),
            max_batch=ask.max_batch,
            memory_bytes=_free(setting, job),
            target=profile.memory_target,
        )
        ask = dataclasses.replace(ask, mini_batch_size=found["mini_batch_size"])
        search = found
        setting = type(setting)(ask, setting.hardware)
    if ask.measure:
        probe(setting, profile, seconds=ask.seconds)
    return dataclasses.replace(ask, measure=False, find_batch_size=False), search


def probe(setting: Setting, profile: Profile, *, seconds: float) -> Trial:
    """Train for about `seconds` and add what was seen to the calibration file.

    Raises: NoSourceError, ConfigError.
    """
    job = setting.job(profile)
    accumulation = 1
    with contextlib.suppress(NoSourceError):  # a GPU that nobody knows: that is why it is measured
        micro = setting.predict(job, profile).step.value / job.accumulation
        accumulation = max(1, min(job.accumulation, int(seconds / 15 / micro)))
    say(f"measuring: about {seconds:.0f} s of real training of {job.config.model.model} ...")
    trial = run_trial(
        with_accumulation(job, accumulation),
        setting.ask.folder(),
        seconds=seconds + (COMPILE_ALLOWANCE if job.compiled else 0.0),
    )
    if trial.out_of_memory:
        raise NoSourceError(
            f"mini_batch_size {job.micro_batch} does not fit this machine's memory; add --find_batch_size"
        )
    if len(trial.steps) < FEWEST_STEPS:
        raise NoSourceError(
            f"only {len(trial.steps)} steps in {seconds:.0f} s: too few to go by; raise --seconds or lower "
            f"--mini_batch_size"
        )
    on_cores, on_gpus = trial.others or 0.0, setting.seen.busiest_gpu
    others = max(on_cores, on_gpus)
    busy = f"others used {others:.0%} of its {'cores' if on_cores >= on_gpus else 'GPU'}"
    if others > REFUSED:
        raise NoSourceError(
            f"this machine is busy: {busy} while measuring; measure when it is idle"
        )
    record = calibration.record_of(
        trial.events,
        trial.environment,
        trial.config,
        others=None if trial.others is None else others,
        source="probe",
        fewest=FEWEST_STEPS,
    )
    assert record is not None
    setting.ask.folder().mkdir(parents=True, exist_ok=True)
    calibration.append(setting.ask.folder(), record)
    if others > contention.BUSY:
        say(f"! machine busy: {busy}; the interval is wider")
    return trial


def with_accumulation(job: Job, accumulation: int) -> Job:
    """Return the job with fewer micro-batches a step, the micro-batch itself unchanged."""
    config = job.config
    tokens = accumulation * job.micro_batch * config.model.context_length * job.world
    batch = dataclasses.replace(config.batch, total_batch_size=tokens)
    return dataclasses.replace(job, config=dataclasses.replace(config, batch=batch))


def say(text: str) -> None:
    """Tell the user what takes time, beside whatever is printed as the answer."""
    print(text, file=sys.stderr, flush=True)


def find_batch_size(
    job: Job, folder: Path, *, max_batch: int, memory_bytes: float | None, target: float
) -> dict[str, Any]:
    """Return the mini batch to use: memory fitted as a line to two sizes, verified once, then the smallest fast one.

    Raises: NoSourceError if not even one sequence fits; ConfigError if the trainer refuses.
    """
    sizes = [n for n in range(1, min(job.sequences, max_batch) + 1) if job.sequences % n == 0]
    trials: dict[int, Trial] = {}

    def attempt(size: int) -> Trial:
        if size not in trials:
            say(f"trying mini_batch_size {size} ...")
            batch = dataclasses.replace(job.config.batch, mini_batch_size=size)
            cut = dataclasses.replace(
                job, config=dataclasses.replace(job.config, batch=batch), world=1
            )
            trials[size] = run_trial(
                with_accumulation(cut, 1), folder, seconds=TRIAL_SECONDS, steps=6
            )
        return trials[size]

    if attempt(sizes[0]).out_of_memory:
        raise NoSourceError(
            "not even one sequence at a time fits this machine's memory; use a smaller model or context"
        )
    fitting = sizes
    line = None
    if len(sizes) > 1 and memory_bytes is not None and not attempt(sizes[1]).out_of_memory:
        small, large = sizes[:2]
        slope = (trials[large].peak_memory - trials[small].peak_memory) / (large - small)
        # A small step may stay below what starting took; the closed form is the floor of the slope.
        slope = max(slope, _tensor_bytes(job, 2, trial=True) - _tensor_bytes(job, 1, trial=True))
        offset = trials[small].peak_memory - slope * small
        line = {"bytes_at_0": offset, "bytes_per_sequence": slope}
        fitting = [
            n
            for n in sizes
            # A trial neither accumulates nor has peers: gradients come on top.
            if offset + slope * n + _tensor_bytes(job, n) - _tensor_bytes(job, n, trial=True)
            <= target * memory_bytes
        ] or sizes[:1]
    fastest_useful = _within_time(job, fitting, trials)
    top = fastest_useful[-1]
    while attempt(top).out_of_memory and top > sizes[0]:
        top = max(n for n in fitting if n < top)
    near = [
        n for n in fitting if n in (top, *_nearest(fitting, top / 2), *_nearest(fitting, top / 4))
    ]
    rates = {n: attempt(n).tokens_per_second or 0.0 for n in near if not attempt(n).out_of_memory}
    rates |= {
        n: t.tokens_per_second or 0.0 for n, t in trials.items() if not t.out_of_memory and n <= top
    }
    best = max(rates.values())
    chosen = min(n for n, rate in rates.items() if rate >= 0.99 * best)
    say(f"mini_batch_size {chosen}: {rates[chosen]:,.0f} tokens/s")
    return {
        "mini_batch_size": chosen,
        "largest_verified": top,
        "tokens_per_second": {str(n): rate for n, rate in sorted(rates.items())},
        "memory_line": line,
    }


def _tensor_bytes(job: Job, micro_batch: int, *, trial: bool = False) -> int:
    """Return the predicted peak of a job, or of its trial on one process without accumulation."""
    return memory.predict(
        job.config.model,
        micro_batch=micro_batch,
        accumulation=1 if trial else max(1, job.sequences // micro_batch),
        dtype=job.dtype,
        sharing=dataclasses.replace(job.sharing, world=1) if trial else job.sharing,
        optimizer=job.config.optim.optimizer,
        tuning=job.config.tuning,
    ).tensors


def _nearest(sizes: Sequence[int], wanted: float) -> list[int]:
    return [max((n for n in sizes if n <= wanted), default=sizes[0])]


def _within_time(job: Job, sizes: list[int], trials: dict[int, Trial]) -> list[int]:
    """Leave out sizes of which two steps alone would outlast a trial: on a slow device larger is not faster."""
    rate = max((trial.tokens_per_second or 0.0 for trial in trials.values()), default=0.0)
    if not rate:
        return sizes[:1]
    most = rate * TRIAL_SECONDS / 3 / job.config.model.context_length
    return [n for n in sizes if n <= most] or sizes[:1]


def _free(setting: Setting, job: Job) -> float | None:
    if setting.is_cpu:
        available = machine.available_memory()
        return available / job.world if available else None
    return min((gpu.memory_free for gpu in setting.seen.gpus), default=None)


def run_trial(job: Job, folder: Path, *, seconds: float, steps: int = 10**6) -> Trial:
    """Run the trainer on this job for so long, or so many steps, and return what it logged.

    Raises: ConfigError with the trainer's own line if it refuses.
    """
    with _workplace(folder) as place:
        data = data_for(job.config, place)
        command = [*_launcher(job.world), str(paths.REPOSITORY / "src" / "train.py")]
        command += _flags(job, place, data, seconds=seconds, steps=steps)
        watch = Watch()
        try:
            answer = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=10 * seconds + 600,
                cwd=place,
                env=_alone(),
            )
        except subprocess.TimeoutExpired:
            raise NoSourceError(
                f"the trainer did not stop within {10 * seconds + 600:.0f} s; is this machine swapping?"
            ) from None
        others = watch.others()
        run_dir = place / "probe"
        text = answer.stderr + answer.stdout
        killed = answer.returncode in (-9, 137)
        exhausted = killed or any(sign in text for sign in _OUT_OF_MEMORY)
        if answer.returncode != 0 and not exhausted:
            lines = [line for line in answer.stderr.splitlines() if line.startswith("error: ")]
            why = (
                lines[-1].removeprefix("error: ")
                if lines
                else answer.stderr.strip().splitlines()[-1:]
            )
            raise ConfigError(f"the trainer refused to be measured: {why}")
        return Trial(
            events=history.read_events(run_dir),
            environment=(read_json(run_dir / "run.json") or {}).get("environment") or {},
            config=read_json(run_dir / "config.json") or {},
            others=others,
            out_of_memory=answer.returncode != 0,
        )


@contextlib.contextmanager
def _workplace(folder: Path) -> Iterator[Path]:
    """Make a hidden folder beside the runs, so that checkpoints go to the disk that they will go to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix=".measure-", dir=folder))
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot write there ({error.strerror}); give another --checkpoint_dir"
        ) from None
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _alone() -> dict[str, str]:
    """Return the environment without the process group that a launcher may have put this process into."""
    group = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK"}
    group |= {"MASTER_ADDR", "MASTER_PORT"}
    others = {name: value for name, value in os.environ.items() if name not in group}
    return {name: value for name, value in others.items() if not name.startswith("TORCHELASTIC")}


def _launcher(world: int) -> list[str]:
    if world == 1:
        return [sys.executable]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, f"--nproc_per_node={world}"]


def data_for(config: Config, place: Path) -> Path:
    """Return the job's data where it is, else shards of random ids: their content does not change the time."""
    folder = paths.from_repository(config.data.data_dir)
    if folder.is_dir() and any(folder.glob("*_train_*.npy")) and any(folder.glob("*_val_*.npy")):
        return folder
    made = place / "data"
    made.mkdir()
    limit = min(config.model.vocab_size, NUM_TOKENS)
    draw = np.random.RandomState(0)
    tokens = max(4 * config.batch.total_batch_size, 64 * config.model.context_length) + 1
    for split, count in (
        ("train", min(tokens, 2**24)),
        ("val", 64 * config.model.context_length + 1),
    ):
        ids = draw.randint(0, limit, count).astype(np.uint16)
        np.save(made / f"random_{split}_000000.npy", ids)
    return made


_SHAPE = (
    *("n_layer", "n_head", "n_embd", "context_length", "vocab_size", "dropout"),
    *("total_batch_size", "mini_batch_size"),
)


def plain_flags(job: Job, place: Path, data: Path) -> list[str]:
    """Return the trainer's flags for a job as it is, in a run named `self`."""
    settings = to_flat(job.config)
    names = (*_SHAPE, "eval_freq", "val_tokens", "sample_freq", "checkpoint_freq")
    flags = [f"--{name}={settings[name]}" for name in names]
    flags += [f"--data_dir={data}", f"--checkpoint_dir={place}", "--run_name=self", "--model=gpt2"]
    flags += [f"--dtype={job.dtype}", f"--compile={'on' if job.compiled else 'off'}"]
    return [*flags, f"--max_steps={job.max_steps}"]


def _flags(job: Job, place: Path, data: Path, *, seconds: float, steps: int) -> list[str]:
    """Return the flags of a short run: few tokens to evaluate, a few checkpoints, so that a slow disk shows."""
    settings, T = to_flat(job.config), job.config.model.context_length
    flags = [f"--{name}={settings[name]}" for name in _SHAPE]
    flags += [f"--data_dir={data}", f"--checkpoint_dir={place}", "--run_name=probe", "--model=gpt2"]
    flags += [f"--val_tokens={8 * job.micro_batch * T * job.world}", "--eval_freq=20"]
    flags += ["--sample_freq=0", "--checkpoint_freq=0", "--keep_checkpoints=1", "--warmup_steps=1"]
    flags += [f"--dtype={job.dtype}", f"--compile={'on' if job.compiled else 'off'}"]
    flags += [f"--checkpoint_minutes={seconds / 60 / 5}"]
    flags += [f"--max_steps={max(steps, 10)}", f"--max_hours={seconds / 3600}"]
    return [*flags, f"--stop_after_steps={steps}"] if steps < 10**6 else flags
