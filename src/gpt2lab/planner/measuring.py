"""Measuring this machine: the trainer takes real steps in a subprocess and a temporary folder.

`probe` times a machine, `find_batch_size` searches the mini batch that fits and is fast, `self_test` compares a
forecast with a short run.
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

from gpt2lab import fmt, paths
from gpt2lab.config.derived import mini_batch_sizes
from gpt2lab.config.mixture import normal_words, read_sources
from gpt2lab.config.schema import Config
from gpt2lab.config.settings import LEAVES, to_flat
from gpt2lab.data.manifest import MANIFEST
from gpt2lab.errors import ConfigError, NoSourceError, system_errors_as
from gpt2lab.files import temporary_folder
from gpt2lab.planner import calibration, hardware, machine, reports
from gpt2lab.planner.ask import EstimateRequest, Predictor
from gpt2lab.planner.hardware import Profile
from gpt2lab.planner.job import Job
from gpt2lab.planner.machine import Watch
from gpt2lab.runs import history
from gpt2lab.runs.console import say
from gpt2lab.runs.history import Log, read_json
from gpt2lab.tokenizers.gpt2 import GPT2

TOO_BUSY = 0.5  # share of the machine in other hands from which no number is given
FEWEST_STEPS = 4
TRIAL_STEPS = 6  # of a size; the first two do not count
STEP_SECONDS = 4.0  # longest step of a size that a search tries beyond the smallest
_LIMIT_SECONDS = 600.0  # for the rest of a trial: start, compilation, the save at the end
_STOP_FILE = "STOP"  # ends a run after its step (training/control.py)
_LOOK_EVERY = 0.5  # seconds between looks at a trial
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
        return _steps_of(self.events)

    @property
    def peak_memory(self) -> int:
        """Return the largest memory in use, bytes."""
        return max((event["peak_memory_bytes"] for event in self.steps), default=0)

    @property
    def tokens_per_second(self) -> float | None:
        """Return the median rate after the first two steps, None if there was no third."""
        rates = [event["tokens_per_second"] for event in self.steps[2:]]
        return statistics.median(rates) if rates else None


def _steps_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == "step"]


def measure(
    ask: EstimateRequest, predictor: Predictor, profile: Profile
) -> tuple[EstimateRequest, dict[str, Any] | None]:
    """Search the mini batch and time this machine, as asked; return the flags to answer now, and the search.

    Raises: NoSourceError if the machine is too busy or too slow; ConfigError if the trainer fails.
    """
    search = None
    if ask.find_batch_size:
        job, seen = predictor.job(profile), predictor.seen
        search = find_batch_size(
            job,
            ask.folder(),
            max_batch=ask.max_batch,
            memory_bytes=seen.free_memory(job.world_size),
            target=profile.memory_target,
            on_gpu=not predictor.is_cpu,
        )
        ask = dataclasses.replace(ask, mini_batch_size=search["mini_batch_size"])
        predictor = Predictor(ask, predictor.hardware)
    if ask.measure:
        probe(predictor, profile, seconds=ask.seconds)
    return dataclasses.replace(ask, measure=False, find_batch_size=False), search


def probe(predictor: Predictor, profile: Profile, *, seconds: float) -> Trial:
    """Train for about `seconds` and add the measured speed to the calibration file.

    Raises: NoSourceError if the machine is too busy or too slow; ConfigError if the trainer fails.
    """
    job, folder, accumulation = predictor.job(profile), predictor.ask.folder(), 1
    with contextlib.suppress(NoSourceError):  # an unknown GPU is a reason to measure
        micro = predictor.predict(job, profile).step.value / job.accumulation
        accumulation = max(1, min(job.accumulation, int(seconds / 15 / micro)))
    say(f"measuring: about {seconds:.0f} s of real training of {job.config.model.model} ...")
    trial = run_trial(with_accumulation(job, accumulation), folder, seconds=seconds)
    if trial.out_of_memory:
        raise NoSourceError(
            f"mini_batch_size {job.micro_batch} does not fit this machine's memory; add --find_batch_size"
        )
    if len(trial.steps) < FEWEST_STEPS:
        raise NoSourceError(
            f"only {len(trial.steps)} steps in {seconds:.0f} s: too few to go by; raise --seconds or lower "
            f"--mini_batch_size"
        )
    on_cores, on_gpus = trial.others or 0.0, predictor.seen.busiest_gpu
    others = max(on_cores, on_gpus)
    busy = f"others used {others:.0%} of its {'cores' if on_cores >= on_gpus else 'GPU'}"
    if others > TOO_BUSY:
        raise NoSourceError(f"this machine is busy: {busy} while measuring; wait until it is idle")
    record = calibration.record_of(
        Log.of(trial.events),
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
    return trial


def with_accumulation(job: Job, accumulation: int) -> Job:
    """Return the job with fewer micro-batches a step, the micro-batch itself unchanged."""
    T = job.config.model.context_length
    return job.with_settings(total_batch_size=accumulation * job.micro_batch * T * job.world_size)


def find_batch_size(
    job: Job,
    folder: Path,
    *,
    max_batch: int,
    memory_bytes: float | None,
    target: float,
    on_gpu: bool,
) -> dict[str, Any]:
    """Return the mini batch to use: the fastest near the largest that fits.

    A line through the memory of two trials predicts the largest; a trial verifies it.

    Raises: NoSourceError if not even one sequence fits, or a trial was too short; ConfigError if the trainer fails.
    """
    sizes = mini_batch_sizes(job.sequences, at_most=max_batch)
    trials: dict[int, Trial] = {}

    def attempt(size: int) -> Trial:
        if size not in trials:
            say(f"trying mini_batch_size {size} ...")
            trial = run_trial(trial_job(job, size), folder, steps=TRIAL_STEPS)
            if trial.tokens_per_second is None and not trial.out_of_memory:
                raise NoSourceError(
                    f"mini_batch_size {size}: the trial took {len(trial.steps)} of {TRIAL_STEPS} steps, which is no "
                    f"measure of its speed; give --mini_batch_size a number"
                )
            trials[size] = trial
        return trials[size]

    def trial_bytes(size: int) -> int:
        return trial_job(job, size).memory(on_gpu=on_gpu).tensors

    if attempt(sizes[0]).out_of_memory:
        raise NoSourceError(
            "not even one sequence at a time fits this machine's memory; use a smaller model or context"
        )
    fitting, line = sizes, None
    if len(sizes) > 1 and memory_bytes is not None and not attempt(sizes[1]).out_of_memory:
        small, large = sizes[:2]
        slope = (trials[large].peak_memory - trials[small].peak_memory) / (large - small)
        # A small step may need less than starting did; the closed form is the floor of the slope.
        slope = max(slope, trial_bytes(2) - trial_bytes(1))
        offset = trials[small].peak_memory - slope * small
        line = {"bytes_at_0": offset, "bytes_per_sequence": slope}

        def run_bytes(size: int) -> float:
            """Return the bytes of the run: unlike a trial it accumulates, and has all its ranks."""
            in_run = job.memory(on_gpu=on_gpu, micro_batch=size).tensors
            return offset + slope * size + in_run - trial_bytes(size)

        fitting = [n for n in sizes if run_bytes(n) <= target * memory_bytes] or sizes[:1]
    top = _within_time(job, fitting, trials)[-1]
    while attempt(top).out_of_memory and top > sizes[0]:
        top = max(n for n in fitting if n < top)
    lower = (max((n for n in fitting if n <= top / part), default=fitting[0]) for part in (2, 4))
    for n in sorted({top, *lower}):
        attempt(n)
    rates = {
        n: t.tokens_per_second or 0.0
        for n, t in trials.items()
        if n in fitting and not t.out_of_memory
    }
    best = max(rates.values())
    chosen = min(n for n, rate in rates.items() if rate >= 0.99 * best)
    say(f"mini_batch_size {chosen}: {rates[chosen]:,.0f} tokens/s")
    return {
        "mini_batch_size": chosen,
        "largest_verified": max(rates),
        "tokens_per_second": {str(n): rate for n, rate in sorted(rates.items())},
        "memory_line": line,
    }


def trial_job(job: Job, size: int) -> Job:
    """Return one micro-batch of the job: on one rank, or on this machine's ranks where they share what one holds."""
    ranks = 1
    if job.parallel != "ddp":
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", job.world_size))
    alone = dataclasses.replace(job.with_settings(mini_batch_size=size), world_size=ranks)
    return with_accumulation(alone, 1)


def _within_time(job: Job, sizes: list[int], trials: dict[int, Trial]) -> list[int]:
    """Leave out sizes with steps longer than STEP_SECONDS: on a slow device larger is not faster."""
    rate = max(trial.tokens_per_second or 0.0 for trial in trials.values())
    most = rate / trial_job(job, 1).world_size * STEP_SECONDS / job.config.model.context_length
    return [n for n in sizes if n <= most] or sizes[:1]


def run_trial(job: Job, folder: Path, *, seconds: float | None = None, steps: int = 10**6) -> Trial:
    """Run the trainer on this job for so many steps, or so long, and return what it logged.

    Raises: ConfigError with the trainer's own line if it fails; NoSourceError if it does not stop.
    """
    with _scratch_folder(folder) as place:
        data = data_for(job.config, place)
        launcher = [sys.executable]
        if job.world_size > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone"]
            launcher += [f"--nproc_per_node={job.world_size}"]
        command = [*launcher, *paths.trainer("train")]
        command += _trial_flags(job, place, data, seconds=seconds, steps=steps)
        watch, run_dir = Watch(), place / "probe"
        code, out, err = _run_for(command, run_dir, seconds)
        others = watch.others()
        exhausted = code in (-9, 137) or any(sign in err + out for sign in _OUT_OF_MEMORY)
        if code != 0 and not exhausted:
            lines = [line for line in err.splitlines() if line.startswith("error: ")]
            why = lines[-1].removeprefix("error: ") if lines else err.strip().splitlines()[-1:]
            raise ConfigError(f"the trainer rejects this run: {why}")
        return Trial(
            events=history.read_events(run_dir),
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
    environment = _without_process_group()
    with subprocess.Popen(command, cwd=run_dir.parent, env=environment, **pipes) as process:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    out, err = process.communicate(timeout=_LOOK_EVERY)
                    return process.returncode, out, err
                now = time.monotonic()
                if now > limit:
                    raise NoSourceError(
                        "the trainer did not stop in time; is this machine swapping?"
                    )
                if seconds is None:
                    continue
                if steps < FEWEST_STEPS:
                    steps = len(_steps_of(history.read_events(run_dir)))
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


def _without_process_group() -> dict[str, str]:
    """Return the environment without the process group of a launcher."""
    group = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK"}
    group |= {"MASTER_ADDR", "MASTER_PORT"}
    others = {name: value for name, value in os.environ.items() if name not in group}
    return {name: value for name, value in others.items() if not name.startswith("TORCHELASTIC")}


def data_for(config: Config, place: Path) -> list[str]:
    """Return the flags of the job's data where they are, else of shards of random ids: content does not change time."""
    folders = [paths.from_repository(folder) for folder in read_sources(config.data).folders]
    if all((f / MANIFEST).exists() or any(f.glob("*_train_*.npy")) for f in folders):
        words = normal_words("data_dir", config.data.data_dir, paths.from_repository)
        later = config.data.data_weights_at
        return ["--data_dir", *words, *(["--data_weights_at", *later] if later else [])]
    made = place / "data"
    made.mkdir()
    limit = min(config.model.vocab_size, GPT2.size)  # as such a folder counts
    draw = np.random.RandomState(0)
    val = 64 * config.model.context_length + 1
    train = min(max(4 * config.batch.total_batch_size + 1, val), 2**24)
    for split, count in (("train", train), ("val", val)):
        ids = draw.randint(0, limit, count).astype(np.uint16)
        np.save(made / f"random_{split}_000000.npy", ids)
    return ["--data_dir", str(made)]


# Settings that decide what a step computes, and how; those of the model besides. The learning rate does not.
_OF_A_STEP = (
    *("total_batch_size", "mini_batch_size", "optimizer", "grad_clip"),
    *(
        "device",
        "residual_dtype",
        "attention",
        "parallel",
        "activation_checkpointing",
        "ddp_bucket_mb",
    ),
    *("fsdp_param_dtype", "fsdp_offload", "reduce", "deterministic"),
)


def _flags_of(job: Job, place: Path, data: list[str], run_name: str, *names: str) -> list[str]:
    """Return the trainer's flags for the job's model and steps, and for the settings in `names`."""
    settings = to_flat(job.config) | {"model": "gpt2"}
    model = [name for name, (section, _) in LEAVES.items() if section == "model"]
    flags = []
    for name in (*model, *_OF_A_STEP, *names):
        value = settings[name]
        if name == "num_tokens" or value is False:  # the data decides; a switch that is off
            continue
        if name == "fsdp_param_dtype" and settings["parallel"] != "fsdp":
            continue
        flags.append(f"--{name}" if value is True else f"--{name}={value}")
    flags += [*data, f"--checkpoint_dir={place}", f"--run_name={run_name}", f"--dtype={job.dtype}"]
    return [*flags, f"--compile={'on' if job.compiled else 'off'}"]


def _trial_flags(
    job: Job, place: Path, data: list[str], *, seconds: float | None, steps: int
) -> list[str]:
    """Return the flags of a short run with few tokens to evaluate; one of `seconds` also times the disk."""
    tokens = job.micro_batch * job.config.model.context_length * job.world_size
    flags = _flags_of(job, place, data, "probe")
    flags += [f"--val_tokens={8 * tokens}", "--eval_freq=20", "--warmup_steps=1"]
    flags += ["--sample_freq=0", "--checkpoint_freq=0", "--keep_checkpoints=1"]
    flags += [f"--checkpoint_minutes={(seconds or 0.0) / 60 / 5}"]
    flags += [f"--max_steps={max(steps, 10)}"]
    return [*flags, f"--stop_after_steps={steps}"] if steps < 10**6 else flags


# -- the self-test -----------------------------------------------------------------------------------------------

SELF_TEST_STEPS = 120
GOOD = (90.0, 110.0)  # percent of the actual time that the forecast may be


def self_test(folder: Path) -> tuple[dict[str, Any], str, int]:
    """Predict a run, train it with evaluations, checkpoints and a resume; return the comparison as JSON and as text.

    The exit code is 0 if the forecast is good or the machine was not idle, else 1.

    Raises: NoSourceError, ConfigError.
    """
    known, steps = hardware.load(), SELF_TEST_STEPS
    folder.mkdir(parents=True, exist_ok=True)
    with temporary_folder(folder / "self-test") as place:
        ask = EstimateRequest(
            checkpoint_dir=place,
            model="gpt2-micro",
            mini_batch_size=8,
            steps=str(steps),
            eval_freq=40,
            val_tokens=16_384,
            checkpoint_freq=40,
            sample_freq=0,
            compile="off",
        )
        profile = hardware.find_profile(None, known)
        probe(Predictor(ask, known), profile, seconds=15.0)
        predictor = Predictor(ask, known)  # learned from the probe
        job = predictor.job(profile)
        found = predictor.predict(job, profile)
        starts = 2  # the resume starts the program again
        predicted = found.seconds.value + (starts - 1) * found.breakdown["start"].value
        say(f"predicted {fmt.duration(predicted)}; training {steps} steps in two starts ...")
        cadence = ("eval_freq", "val_tokens", "sample_freq", "checkpoint_freq")
        flags = _flags_of(job, place, data_for(job.config, place), "self", *cadence)
        watch, began = Watch(), time.monotonic()
        _train([*flags, f"--max_steps={steps}", f"--stop_after_steps={steps // 2}"])
        _train([f"--checkpoint_dir={place}", "--run_name=self", "--resume=latest"])
        actual = time.monotonic() - began
        actual_parts = _parts(history.read_events(place / "self"), actual)
        others = watch.others() or 0.0
    parts = {name: part.value for name, part in found.breakdown.items() if name in actual_parts}
    parts["start"] *= starts
    accuracy = 100 * predicted / actual
    is_idle = others <= machine.BUSY
    good = GOOD[0] <= accuracy <= GOOD[1]
    verdict = "good" if good else "NOT WITHIN 90-110 %"
    if not is_idle:
        verdict += f"; the machine was not idle: others used {others:.0%} of its cores"
    load = machine.load_average()
    found_out = {
        **{"predicted_seconds": predicted, "actual_seconds": actual, "time_accuracy": accuracy},
        **{"others": others, "foretold_parts": parts, "actual_parts": actual_parts},
        **{"load_average": load, "good": good},
    }
    lines = [
        f"predicted  {predicted:.1f} s for {steps} steps, 4 evaluations, 3 checkpoints, {starts} starts",
        *(
            f"  {name:<10} predicted {parts[name]:>6.1f} s, actual {seconds:>6.1f} s"
            for name, seconds in actual_parts.items()
        ),
        f"actual     {actual:.1f} s, load average {load:.2f}",
        f"accuracy   {accuracy:.1f} %: {verdict}",
    ]
    code = 0 if good or not is_idle else 1
    return reports.blank() | {"self_test": found_out}, "\n".join(lines), code


def _parts(events: list[dict[str, Any]], total: float) -> dict[str, float]:
    """Return the seconds of the two starts by kind of work; the rest went into starting."""
    parts = {"train": sum(e["step_seconds"] for e in events if e["event"] == "step")}
    for kind in ("eval", "sample", "checkpoint"):
        parts[kind] = sum(history.stall_of(e) or 0.0 for e in events if e["event"] == kind)
    return parts | {"start": total - sum(parts.values())}


def _train(flags: list[str]) -> None:
    answer = subprocess.run(
        [sys.executable, *paths.trainer("train"), *flags],
        capture_output=True,
        text=True,
        timeout=900,
    )
    if answer.returncode != 0:
        raise ConfigError(f"the trainer failed in the self-test: {answer.stderr.strip()[-300:]}")
