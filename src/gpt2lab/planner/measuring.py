"""Measuring this machine: the trainer takes real steps in a subprocess and a temporary folder.

`probe` times a machine, `find_batch_size` searches the micro-batch that fits and is fast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpt2lab import paths
from gpt2lab.config.derived import mini_batch_sizes
from gpt2lab.config.mixture import normal_words, read_sources
from gpt2lab.config.schema import Config
from gpt2lab.config.settings import LEAVES, override, to_flat
from gpt2lab.config.settings_file import write_file
from gpt2lab.data.manifest import MANIFEST
from gpt2lab.errors import ConfigError, system_errors_as
from gpt2lab.files import temporary_folder
from gpt2lab.planner import calibration, machine
from gpt2lab.planner.estimate import MEMORY_TARGET
from gpt2lab.planner.hardware import NoSourceError
from gpt2lab.planner.job import Job
from gpt2lab.planner.machine import Watch
from gpt2lab.planner.request import MAX_BATCH, EstimateRequest, Predictor
from gpt2lab.runs import history
from gpt2lab.runs.console import doing, say
from gpt2lab.runs.events import METRICS
from gpt2lab.runs.history import Log, read_json
from gpt2lab.tokenizers.gpt2 import GPT2

TOO_BUSY = 0.5  # share of the machine used by other programs from which no number is given
FEWEST_STEPS = 4
TRIAL_STEPS = 6  # of a size; the first two do not count
STEP_SECONDS = 4.0  # longest step of a size that a search tries beyond the smallest
_LIMIT_SECONDS = 600.0  # of a trial for all but its steps: start, compilation, the save at the end
_STOP_FILE = "STOP"  # ends a run after its step (training/control.py)
_POLL_SECONDS = 0.5  # between looks at a trial
# What a launcher tells its processes: a trial is not one of them.
_LAUNCHED = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK"}
_LAUNCHED |= {"MASTER_ADDR", "MASTER_PORT"}
_OUT_OF_MEMORY = ("out of memory", "OutOfMemory", "DefaultCPUAllocator: can't allocate", "Killed")


@dataclass(frozen=True)
class Trial:
    """One run of the trainer for a short while."""

    log: Log
    environment: dict[str, Any]
    config: dict[str, Any]
    others: float | None
    out_of_memory: bool

    @property
    def tokens_per_second(self) -> float | None:
        """Return the median rate after the first two steps, None if there was no third."""
        rates = self.log.column("tokens_per_second")[2:].tolist()
        return statistics.median(rates) if rates else None


def measure(
    request: EstimateRequest, predictor: Predictor
) -> tuple[EstimateRequest, dict[str, Any] | None]:
    """Search the micro-batch and time this machine, as requested; return the request to answer then, and the search.

    Raises: NoSourceError if the machine is too busy or too slow; ConfigError if the trainer fails.
    """
    search = None
    if request.find_batch_size:
        job = predictor.job()
        search = find_batch_size(
            job,
            request.folder(),
            max_batch=request.max_batch,
            memory_bytes=predictor.detected.free_memory(job.world_size),
            target=predictor.profile.memory_target,
            on_gpu=not predictor.is_cpu,
        )
        found = {"mini_batch_size": search["mini_batch_size"]}
        request = dataclasses.replace(request, **found)
        predictor = Predictor(request, predictor.hardware)
    if request.measure:
        probe(predictor, seconds=request.seconds)
    return dataclasses.replace(request, measure=False, find_batch_size=False), search


def probe(predictor: Predictor, *, seconds: float) -> None:
    """Train for about `seconds` and add the measured speed to the calibration file.

    Raises: NoSourceError if the machine is too busy or too slow; ConfigError if the trainer fails.
    """
    job, folder, accumulation = predictor.job(), predictor.request.folder(), 1
    with contextlib.suppress(NoSourceError):  # an unknown GPU has to be measured
        micro = predictor.predict(job).step.value / job.accumulation
        accumulation = max(1, min(job.accumulation, int(seconds / 15 / micro)))
    say(f"measuring: about {seconds:.0f} s of real training of {job.config.model.model} ...")
    trial = run_trial(with_accumulation(job, accumulation), folder, seconds=seconds)
    if trial.out_of_memory:
        raise NoSourceError(
            f"mini_batch_size {job.micro_batch} does not fit this machine's memory; add --find_batch_size"
        )
    if (taken := len(trial.log.numbers)) < FEWEST_STEPS:
        raise NoSourceError(
            f"only {taken} steps in {seconds:.0f} s: too few to measure; raise --seconds or lower "
            f"--mini_batch_size"
        )
    on_cores, on_gpus = trial.others or 0.0, predictor.detected.busiest_gpu
    others = max(on_cores, on_gpus)
    busy = f"others used {others:.0%} of its {'cores' if on_cores >= on_gpus else 'GPU'}"
    if others > TOO_BUSY:
        raise NoSourceError(f"this machine is busy: {busy} while measuring; wait until it is idle")
    record = calibration.record_of(
        trial.log,
        trial.environment,
        trial.config,
        others=None if trial.others is None else others,
        source="probe",
        fewest=FEWEST_STEPS,
    )
    assert record is not None
    folder.mkdir(parents=True, exist_ok=True)
    calibration.append(folder, record)
    if others > machine.BUSY:
        say(f"! machine busy: {busy}; the interval is wider")


def with_accumulation(job: Job, accumulation: int) -> Job:
    """Return the job with fewer micro-batches a step, the micro-batch itself unchanged."""
    T = job.config.model.context_length
    return job.with_settings(total_batch_size=accumulation * job.micro_batch * T * job.world_size)


def find_batch_size(
    job: Job,
    folder: Path,
    *,
    memory_bytes: float | None,
    on_gpu: bool,
    max_batch: int = MAX_BATCH,
    target: float = MEMORY_TARGET,
) -> dict[str, Any]:
    """Return the micro-batch to use: the fastest near the largest that fits.

    A line through the memory of two trials predicts the largest; a trial verifies it.

    Raises: NoSourceError if not even one sequence fits, or a trial was too short; ConfigError if the trainer fails.
    """
    sizes, trials = mini_batch_sizes(job.sequences, at_most=max_batch), dict[int, Trial]()

    def fits(size: int) -> bool:
        if size not in trials:
            say(f"trying mini_batch_size {size} ...")
            trial = trials[size] = run_trial(trial_job(job, size), folder, steps=TRIAL_STEPS)
            if trial.tokens_per_second is None and not trial.out_of_memory:
                raise NoSourceError(
                    f"mini_batch_size {size}: the trial took {len(trial.log.numbers)} of {TRIAL_STEPS} steps, too few "
                    f"to measure its speed; give --mini_batch_size a number"
                )
        return not trials[size].out_of_memory

    if not fits(sizes[0]):
        raise NoSourceError(
            "not even one sequence at a time fits this machine's memory; use a smaller model or context"
        )
    fitting, line = sizes, None
    if len(sizes) > 1 and memory_bytes is not None and fits(sizes[1]):
        peaks = [trials[size].log.peak_memory() or 0 for size in sizes[:2]]
        fitting, line = _fitting_sizes(job, sizes, peaks, target * memory_bytes, on_gpu=on_gpu)
    # On a slow device larger is not faster: sizes with steps longer than STEP_SECONDS are left out.
    rate = max(trial.tokens_per_second or 0.0 for trial in trials.values())
    most = rate / trial_job(job, 1).world_size * STEP_SECONDS / job.config.model.context_length
    top = max((n for n in fitting if n <= most), default=fitting[0])
    while not fits(top) and top > sizes[0]:
        top = max(n for n in fitting if n < top)
    lower = (max((n for n in fitting if n <= top / part), default=fitting[0]) for part in (2, 4))
    for n in sorted({top, *lower}):
        fits(n)
    rates = {n: trials[n].tokens_per_second or 0.0 for n in trials if n in fitting and fits(n)}
    chosen = min(n for n, rate in rates.items() if rate >= 0.99 * max(rates.values()))
    say(f"mini_batch_size {chosen}: {rates[chosen]:,.0f} tokens/s")
    return {
        "mini_batch_size": chosen,
        "largest_verified": max(rates),
        "tokens_per_second": {str(n): rate for n, rate in sorted(rates.items())},
        "memory_line": line,
    }


def _fitting_sizes(
    job: Job, sizes: list[int], peaks: list[int], budget: float, *, on_gpu: bool
) -> tuple[list[int], dict[str, float]]:
    """Return the sizes whose predicted memory is within `budget` bytes, and the line through the two smallest.

    `peaks`: what trials of these two used, bytes.

    A run needs more than a trial: it accumulates, and has all its ranks. The closed form adds the difference.
    """

    def trial_bytes(size: int) -> int:
        return trial_job(job, size).memory(on_gpu=on_gpu).tensors

    small, large = sizes[:2]
    # A small step may need less than the start of the run; the closed form is the floor of the slope.
    slope = max((peaks[1] - peaks[0]) / (large - small), trial_bytes(2) - trial_bytes(1))
    offset = peaks[0] - slope * small

    def run_bytes(size: int) -> float:
        in_run = job.memory(on_gpu=on_gpu, micro_batch=size).tensors
        return offset + slope * size + in_run - trial_bytes(size)

    fitting = [n for n in sizes if run_bytes(n) <= budget] or sizes[:1]
    return fitting, {"bytes_at_0": offset, "bytes_per_sequence": slope}


def trial_job(job: Job, size: int) -> Job:
    """Return one micro-batch of the job: on one rank, or on this machine's ranks where they share what one holds.

    A trial ends before a run begins the mean of its last weights.
    """
    ranks = 1
    if job.parallel != "ddp":
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", job.world_size))
    alone = dataclasses.replace(job.with_micro_batch(size), world_size=ranks)
    return with_accumulation(alone, 1).with_settings(average_tail=0.0)


def run_trial(job: Job, folder: Path, *, seconds: float | None = None, steps: int = 10**6) -> Trial:
    """Train this job for so many steps, or so long, and return what the trainer logged.

    Raises: ConfigError with the trainer's own line if it fails; NoSourceError if it does not stop.
    """
    with doing("training"), _scratch_folder(folder) as place:
        command = [sys.executable]
        if job.world_size > 1:
            command += ["-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc_per_node={job.world_size}"]
        command += [*paths.trainer("train"), "--config"]
        command += [str(write_trial(job, place, seconds=seconds, steps=steps))]
        if seconds is None:
            command += ["--stop_after_steps", str(steps)]
        watch, run_dir = Watch(), place / _RUN
        code, out, err = _run_for(command, run_dir, seconds)
        others = watch.others()
        exhausted = code in (-9, 137) or any(sign in err + out for sign in _OUT_OF_MEMORY)
        if code != 0 and not exhausted:
            lines = err.strip().splitlines() or [f"exit code {code}"]
            why = next((line for line in lines[::-1] if line.startswith("error: ")), lines[-1])
            raise ConfigError(f"the trainer rejects this run: {why.removeprefix('error: ')}")
        metrics = run_dir / METRICS
        return Trial(
            # Not the file, which is deleted.
            log=Log(metrics.read_bytes() if metrics.exists() else b""),
            environment=(read_json(run_dir / "run.json") or {}).get("environment") or {},
            config=read_json(run_dir / "config.json") or {},
            others=others,
            out_of_memory=code != 0,
        )


def _run_for(command: list[str], run_dir: Path, seconds: float | None) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a run; a STOP file ends it `seconds` after its first step, if given.

    It takes FEWEST_STEPS in any case. Not --max_hours: that keeps time free for a save at a careful guess of the disk's
    speed, which for GPT-2 is more than a trial has.

    Raises: NoSourceError if it does not stop.
    """
    limit = time.monotonic() + 10 * (seconds or 0.0) + _LIMIT_SECONDS
    first_step, steps = math.inf, 0
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHED and not name.startswith("TORCHELASTIC")
    }
    with subprocess.Popen(command, cwd=run_dir.parent, env=environment, **pipes) as process:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    out, err = process.communicate(timeout=_POLL_SECONDS)
                    return process.returncode, out, err
                now = time.monotonic()
                if now > limit:
                    raise NoSourceError(
                        "the trainer did not stop in time; is this machine swapping?"
                    )
                if seconds is None:
                    continue
                if steps < FEWEST_STEPS:
                    steps = len(history.open_log(run_dir).numbers)
                    first_step = min(first_step, now) if steps else math.inf
                elif now - first_step > seconds:
                    (run_dir / _STOP_FILE).touch()
        finally:
            process.kill()


@contextlib.contextmanager
def _scratch_folder(folder: Path) -> Iterator[Path]:
    """Make a hidden folder beside the runs, so that checkpoints go to the disk that they will go to."""
    with contextlib.ExitStack() as stack:
        what, fix = "cannot write there", "give another --checkpoint_dir"
        with system_errors_as(ConfigError, folder, what=what, fix=fix):
            folder.mkdir(parents=True, exist_ok=True)
            place = stack.enter_context(temporary_folder(folder / "measure"))
        yield place


def data_for(config: Config, place: Path) -> dict[str, tuple[str, ...]]:
    """Return the settings of the job's data if it is there, else of shards of random ids, which take as long."""
    folders = [paths.from_repository(folder) for folder in read_sources(config.data).folders]
    if all((f / MANIFEST).exists() or any(f.glob("*_train_*.npy")) for f in folders):
        words = normal_words("data_dir", config.data.data_dir, paths.from_repository)
        return {"data_dir": words, "data_weights_at": config.data.data_weights_at}
    made = place / "data"
    made.mkdir()
    limit = min(config.model.vocab_size, GPT2.size)  # of ids in a folder without a manifest
    draw = np.random.RandomState(0)
    val = 64 * config.model.context_length + 1
    train = min(max(4 * config.batch.total_batch_size + 1, val), 2**24)
    for split, count in (("train", train), ("val", val)):
        ids = draw.randint(0, limit, count).astype(np.uint16)
        np.save(made / f"random_{split}_000000.npy", ids)
    return {"data_dir": (str(made),), "data_weights_at": ()}


# Settings that decide what a step computes, and how, besides those of the model. The learning rate does not.
_OF_A_STEP = (
    *("total_batch_size", "mini_batch_size", "optimizer", "grad_clip", "device", "residual_dtype"),
    *("attention", "parallel", "activation_checkpointing", "ddp_bucket_mb", "fsdp_param_dtype"),
    *("fsdp_offload", "reduce", "deterministic"),
)
_RUN = "probe"  # name of a trial's run


def write_trial(job: Job, place: Path, *, seconds: float | None, steps: int) -> Path:
    """Write the settings file of a short run with few tokens to evaluate; one of `seconds` also times the disk."""
    flat = to_flat(job.config)
    model = [name for name, (section, _) in LEAVES.items() if section == "model"]
    tokens = job.micro_batch * job.config.model.context_length * job.world_size
    config = override(
        Config(),
        {name: flat[name] for name in (*model, *_OF_A_STEP)}
        | {"model": "gpt2", "dtype": job.dtype, "compile": "on" if job.compiled else "off"}
        | data_for(job.config, place)
        | {"checkpoint_dir": place, "run_name": _RUN, "max_steps": max(steps, 10)}
        | {"val_tokens": 8 * tokens, "eval_freq": 20, "warmup_steps": 1, "sample_freq": 0}
        | {"checkpoint_freq": 0, "keep_checkpoints": 1}
        | {"checkpoint_minutes": (seconds or 0.0) / 60 / 5},
    )
    path = place / "trial.json"
    write_file(path, config, leave_out=frozenset({"num_tokens"}))  # the data decides it
    return path
