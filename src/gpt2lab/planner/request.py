"""What a user asks the planner: its flags, the job that they describe, and predictions for it. No torch."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpt2lab import fmt, paths
from gpt2lab.config.derived import check_fsdp_param_dtype, compiles, fit_vocabulary
from gpt2lab.config.flags import check_least, option
from gpt2lab.config.mixture import read_sources
from gpt2lab.config.request import suit_length
from gpt2lab.config.schema import Config
from gpt2lab.config.settings import (
    LEAVES,
    TYPES,
    as_recorded,
    both_set_length,
    find_problems,
    is_list,
    override,
)
from gpt2lab.config.settings_file import make_request
from gpt2lab.data.manifest import tokenizer_of
from gpt2lab.data.mixture import Mixture, open_sources, training_order
from gpt2lab.data.order import Order
from gpt2lab.distributed.processor import unseen_gpus
from gpt2lab.errors import ConfigError, raise_problems
from gpt2lab.model.counts import count_parameters
from gpt2lab.planner import calibration
from gpt2lab.planner.estimate import Estimate, Window, estimate
from gpt2lab.planner.hardware import Hardware, NoSourceError, find_profile
from gpt2lab.planner.job import Job, fit_mini_batch
from gpt2lab.planner.ladder import find_ladder
from gpt2lab.planner.machine import DetectedHardware, Machine, detect_hardware, named

LENGTHS = ("tokens", "steps", "epochs", "num_samples")
MOST_TOKENS = 10**17
MAX_BATCH = 128  # largest micro-batch that a search tries
DEFAULT_TOKENS = 10_000_000_000  # the full run of the README, where no length is given
# Settings of the trainer that describe a job; their flags have the same names.
SETTINGS = (
    *("model", "n_layer", "n_head", "n_embd", "context_length", "vocab_size"),
    *("data_dir", "data_weights_at", "total_batch_size", "mini_batch_size"),
    *("optimizer", "max_lr", "warmup_steps", "average_tail"),
    *("eval_freq", "val_tokens", "sample_freq", "checkpoint_freq"),
    *("dtype", "compile", "parallel", "fsdp_param_dtype", "activation_checkpointing"),
)
_ALONE = ("list_gpus", "accuracy", "run_name")  # cannot be combined with other flags, except:
_ANYWHERE = ("checkpoint_dir", "json", "report")
# Flags that have no effect without another.
_NEEDS = {
    **{"margin": "deadline", "seconds": "measure", "max_batch": "find_batch_size"},
    **{"num_samples": "avg_tokens_per_sample", "avg_tokens_per_sample": "num_samples"},
    **{"epochs": "data_dir", "data_weights_at": "data_dir"},
    **{"nodes": "gpu", "interconnect": "gpu", "scaling": "gpu"},
}
# Flags of which only one would have an effect.
_EXCLUDE = (
    *(("measure", "gpu"), ("find_batch_size", "gpu"), ("find_batch_size", "mini_batch_size")),
    *(("compare", "scaling"), ("compare", "explain"), ("compare", "lr_rule")),
)
Comparison = Literal["gpus", "models", "profiles"]
LrRule = Literal["sqrt", "linear", "none"]


# Where the trainer's help is not true here.
_HELP = {"mini_batch_size": "sequences per forward pass on each rank"}


def _trainer_flags() -> list[tuple[str, Any, Any]]:
    """Return the name, type and default of each flag of SETTINGS, with the trainer's help; None: not given."""
    flags = []
    for name in SETTINGS:
        leaf = LEAVES[name][1]
        default = () if is_list(name) else "auto" if leaf.default == "auto" else None
        kind = TYPES[name] | None if default is None else TYPES[name]
        flags.append((name, kind, option(default, _HELP.get(name, leaf.metadata["help"]))))
    return flags


TrainerFlags: Any = dataclasses.make_dataclass("TrainerFlags", _trainer_flags(), frozen=True)


@dataclass(frozen=True)
class JobFlags(TrainerFlags):  # type: ignore[misc]
    """Flags that describe a planned run, what it runs on, and the form of the answer."""

    gpu: str | None = option(None, "predict for this card, e.g. H100, RTX-4090 (see --list_gpus)")
    gpus: int | None = option(
        None, "world size: total number of cards; default 1, or all of this machine", least=1
    )
    nodes: int = option(1, "number of machines that hold the cards", least=1)
    interconnect: str | None = option(None, "network between nodes, e.g. ib400 (see --list_gpus)")

    tokens: str | None = option(None, "length of the run in tokens, e.g. 10B")
    steps: str | None = option(None, "length of the run in optimizer steps")
    epochs: float | None = option(None, "length of the run in passes over --data_dir")
    num_samples: str | None = option(
        None, "length of the run in samples of --avg_tokens_per_sample tokens"
    )
    avg_tokens_per_sample: float | None = option(None, "mean tokens per sample of --num_samples")

    profile: str | None = option(
        None, "fast | balanced | quality | memory_efficient, or one in your own hardware.json"
    )
    price: float | None = option(None, "US dollars per GPU-hour; default the listed price")
    ladder: str | None = option(
        None,
        "predict the loss from your own ladder of runs: its name in --checkpoint_dir, or its folder",
    )
    checkpoint_dir: Path | None = option(None, "folder of the runs; default checkpoints/")
    json: bool = option(False, "print one JSON object")

    def folder(self) -> Path:
        """Return the folder of the runs."""
        return paths.runs_folder(self.checkpoint_dir)


@dataclass(frozen=True)
class EstimateRequest(JobFlags):
    """Predict a run: time, memory, cost and loss before it starts; without flags, the newest run's remaining time."""

    run_name: str | None = option(
        None, "run whose remaining time to predict; default the one written to last"
    )

    measure: bool = option(False, "first time real training steps on this machine")
    seconds: float = option(60.0, "training time of --measure")
    find_batch_size: bool = option(
        False, "find by trial the fastest micro-batch that fits this machine's memory"
    )
    max_batch: int = option(MAX_BATCH, "largest micro-batch that --find_batch_size tries", least=1)

    deadline: str | None = option(
        None, "when the run must end: 12h, 1d6h, or a time like '2026-12-24 18:00'"
    )
    margin: str = option("30m", "time to leave free before the deadline")
    start: str | None = option(None, "when the run starts, e.g. '2026-12-24 08:00'; default now")
    compare: Comparison | None = option(None, "print a table of alternatives")
    scaling: str = option("1,2,4,8", "world sizes of the scaling table")
    lr_rule: LrRule = option("sqrt", "how the learning rate scales with the batch size")

    report: Path | None = option(None, "also write the JSON object to this file")
    explain: bool = option(False, "print every formula with its numbers")
    list_gpus: bool = option(False, "list the known cards and links")
    accuracy: bool = option(False, "print the accuracy of earlier forecasts")

    @property
    def names_a_job(self) -> bool:
        """Tell whether a flag describes a planned run."""
        return not {*given_flags(self)} <= {*_ALONE, *_ANYWHERE}


def given_flags(request: JobFlags) -> list[str]:
    """Return the names of the flags that have another value than their default."""
    leaves = dataclasses.fields(request)
    return [leaf.name for leaf in leaves if getattr(request, leaf.name) != leaf.default]


def check_request(request: EstimateRequest) -> None:
    """Check all flags: those that exclude or need each other, and their bounds.

    Raises: ConfigError with one line.
    """
    check_job(request)
    given = given_flags(request)
    for alone in (name for name in _ALONE if name in given):
        if others := [name for name in given if name not in (alone, *_ANYWHERE)]:
            raise ConfigError(
                f"--{alone} cannot be combined with --{others[0]}; leave out --{others[0]}"
            )
    window_of(request, time.time())


def check_job(request: JobFlags) -> None:
    """Check the flags that describe a job, and the other flags of the request.

    Raises: ConfigError with one line.
    """
    given = given_flags(request)
    lengths = [f"--{name}" for name in LENGTHS if name in given]
    if len(lengths) > 1:
        raise ConfigError(both_set_length(lengths))
    for one, other in _EXCLUDE:
        if one in given and other in given:
            raise ConfigError(f"--{one} and --{other} cannot be combined; leave out one of them")
    for name in given:
        if name in _NEEDS and _NEEDS[name] not in given:
            raise ConfigError(f"--{name} needs --{_NEEDS[name]}; give both, or neither")
    for name in ("price", "epochs", "avg_tokens_per_sample", "seconds"):
        value = getattr(request, name, None)
        if value is not None and not 0 < value <= 1e9:
            raise ConfigError(f"--{name} {value} must be above 0 and at most 1e9")
    check_least(request)


def read_count(name: str, text: str) -> int:
    """Return a number of tokens, steps or samples that a flag gives as text.

    Raises: ConfigError if it is not a number, not above 0, or above 1e17.
    """
    try:
        number = fmt.parse_count(text.strip().replace(",", ""))
    except ValueError:
        raise ConfigError(f"--{name} {text!r} is not a number like 19073, 500M or 10B") from None
    if not 0 < number <= MOST_TOKENS:
        raise ConfigError(f"--{name} {text} must be above 0 and at most 1e17")
    return number


def window_of(request: EstimateRequest, now: float) -> Window | None:
    """Return the window of --deadline and --margin, None without --deadline.

    Raises: ConfigError if it is not a time, lies in the past, or leaves nothing after the margin.
    """
    begins = start_of(request, now)
    try:
        margin = fmt.parse_duration(request.margin)
    except ValueError:
        raise ConfigError(f"--margin {request.margin!r} is not a time span like 30m") from None
    if request.deadline is None:
        return None
    try:
        seconds = fmt.parse_duration(request.deadline)
    except ValueError:
        seconds = _moment("deadline", request.deadline) - begins
    if seconds <= 0:
        raise ConfigError(f"--deadline {request.deadline} is in the past, before the run starts")
    if not 0 <= margin < seconds:
        raise ConfigError(
            f"--margin {request.margin} leaves nothing of the window {request.deadline}; make it smaller"
        )
    return Window(seconds, margin)


def start_of(request: EstimateRequest, now: float) -> float:
    """Return when the run starts, Unix seconds."""
    return now if request.start is None else _moment("start", request.start)


def _moment(name: str, text: str) -> float:
    for form in ("%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M:%S", "%Y-%m-%d"):
        with contextlib.suppress(ValueError, OverflowError):
            return datetime.datetime.strptime(text, form).timestamp()
    raise ConfigError(f"--{name} {text!r} is neither a span (12h) nor a time (2026-12-24 18:00)")


def settings_of(request: JobFlags) -> Config:
    """Return the trainer's settings that the flags describe.

    Raises: ConfigError with every problem of them.
    """
    given = {n: value for n in SETTINGS if (value := getattr(request, n)) not in (None, ())}
    config = make_request(as_recorded(given)).config
    problems = find_problems(config)
    if (batch := config.batch.total_batch_size) > 10**9:
        problems.append(f"total_batch_size {batch} must be at most 1e9")
    raise_problems(problems)
    return config


class Predictor:
    """Predicts jobs on the machine of a request: this one, or a card by name."""

    def __init__(self, request: JobFlags, known: Hardware) -> None:
        self.request, self.hardware = request, known
        self.profile = find_profile(request.profile, known)
        self.gpu = known.gpu(request.gpu) if request.gpu is not None else None
        self.detected = detect_hardware() if self.gpu is None else DetectedHardware(())
        self.unseen = unseen_gpus() if self.detected.gpus else None  # training would be refused
        if self.unseen:
            self.detected = DetectedHardware(())
        self.records = calibration.read(request.folder())
        self.is_cpu = self.gpu is None and self.detected.is_cpu
        self.world_size = request.gpus or max(1, len(self.detected.gpus))
        self._machines: dict[tuple[Any, ...], Machine] = {}
        self.ladder = (
            None if request.ladder is None else find_ladder(request.ladder, request.folder())
        )

    def job(self) -> Job:
        """Return the job that the flags describe on this machine.

        Raises: ConfigError, DataError.
        """
        request, world_size = self.request, self.world_size
        config = settings_of(request)
        if tokenizer := tokenizer_of(read_sources(config.data).folders[0]):
            is_typed = request.vocab_size is not None
            config = fit_vocabulary(config, tokenizer.size, is_typed=is_typed)
        if world_size == 1 and request.parallel not in (None, "ddp"):
            raise ConfigError(
                f"--parallel {request.parallel} shards state over several ranks, and the world size is 1; add --gpus N"
            )
        if request.fsdp_param_dtype == "bf16" and request.parallel != "fsdp":
            raise ConfigError("--fsdp_param_dtype bf16 goes with --parallel fsdp")
        if request.profile is not None:
            config = self.profile.applied(config, typed=given_flags(request))
        order: Order | Mixture | None = None
        fingerprint: str | None = None
        if request.data_dir:
            data = open_sources(read_sources(config.data), vocab_size=config.model.vocab_size)
            fingerprint = data.fingerprint
            read = min(data.tokens("val"), config.eval.val_tokens)  # as Job.with_validation
            config = override(config, {"val_tokens": read})
            order = training_order(data, config)
        config, steps, unique, dataset = self._length_of(config, order)
        config = fit_mini_batch(config, world_size, typed=request.mini_batch_size is not None)
        auto_dtype = self.gpu.dtype if self.gpu else self.detected.auto_dtype
        dtype = auto_dtype if request.dtype == "auto" else request.dtype
        if dtype == "bf16" and auto_dtype == "fp16":
            raise ConfigError("dtype bf16: this card has no native bf16; use --dtype fp16 or auto")
        check_fsdp_param_dtype(dataclasses.replace(config.system, dtype=dtype))
        return Job(
            config,
            max_steps=steps,
            world_size=world_size,
            dtype=dtype,
            compiled=compiles(config.system, on_gpu=not self.is_cpu, max_steps=steps),
            unique_tokens=unique,
            dataset=dataset,
            order=order,
            data_fingerprint=fingerprint,
        )

    def _length_of(
        self, config: Config, order: Order | Mixture | None
    ) -> tuple[Config, int, int | None, dict[str, float]]:
        """Return settings for the run's length, its steps, the unique tokens if known, and how that size was given."""
        request, batch, unique = self.request, config.batch.total_batch_size, None
        dataset: dict[str, float] = {}
        if order is not None:
            unique = order.windows_per_epoch * config.model.context_length
            dataset["tokens"] = float(unique)
        tokens, steps, samples = (
            None if (text := getattr(request, name)) is None else read_count(name, text)
            for name in ("tokens", "steps", "num_samples")
        )
        if samples is not None and request.avg_tokens_per_sample is not None:
            tokens = round(samples * request.avg_tokens_per_sample)
            dataset["num_samples"] = float(samples)
            dataset["avg_tokens_per_sample"] = request.avg_tokens_per_sample
            unique = unique or tokens
        if request.epochs is not None and unique is not None:
            tokens = int(request.epochs * unique)
        if (tokens, steps, request.epochs, request.profile) == (None, None, None, None):
            steps = config.length.max_steps  # the preset's
        if steps is None:
            default = DEFAULT_TOKENS
            if request.profile is not None:
                default = round(self.profile.tokens_per_parameter * count_parameters(config.model))
            tokens = (unique or default) if tokens is None else tokens
            config = suit_length(config, given_flags(request), tokens, world_size=self.world_size)
            batch = config.batch.total_batch_size
            steps = tokens // batch
            if steps < 1:
                raise ConfigError(
                    f"{tokens:,} tokens are less than one step of {batch:,}; lower --total_batch_size or train longer"
                )
        if steps * batch > MOST_TOKENS:
            raise ConfigError(
                f"{steps * batch:.3g} tokens are too many: a run has at most {MOST_TOKENS:g}"
            )
        return config, steps, unique, {"tokens": float(steps * batch)} | dataset

    def machine_for(self, job: Job) -> Machine:
        """Return the machine with rates for this job's dtype and compilation.

        Raises: ConfigError, NoSourceError.
        """
        kind = (job.world_size, job.dtype, job.compiled, job.parallel)
        if kind not in self._machines:
            if self.gpu is None:
                found = calibration.this_machine(self.detected, self.hardware, self.records, job)
            elif not self.gpu.has_rate(job.dtype):
                raise NoSourceError(
                    f"gpu {self.gpu.name}: no rate of {job.dtype} with a source, only of {self.gpu.dtype}; "
                    f"--dtype {self.gpu.dtype}, or --measure it there"
                )
            else:
                found = named(
                    self.gpu,
                    self.hardware,
                    gpus=job.world_size,
                    compiled=job.compiled,
                    nodes=self.request.nodes,
                    interconnect=self.request.interconnect,
                )
            self._machines[kind] = found
        return self._machines[kind]

    def predict(self, job: Job, *, on: Machine | None = None) -> Estimate:
        """Estimate one job, on another machine than that of the request if given."""
        found = estimate(
            job,
            on or self.machine_for(job),
            self.hardware,
            price=self.request.price,
            memory_target=self.profile.memory_target,
        )
        if self.ladder is None:
            return found
        return dataclasses.replace(found, loss=self.ladder.loss_of(job), ladder=self.ladder)
