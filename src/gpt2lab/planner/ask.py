"""What a user asks the planner: its flags, the job that they mean, and the machine that is asked about. No torch."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpt2lab import fmt, paths
from gpt2lab.config.derived import check_fsdp_param_dtype, compiles, fit_vocabulary
from gpt2lab.config.flags import check_least, option
from gpt2lab.config.mixture import read_sources
from gpt2lab.config.presets import preset
from gpt2lab.config.schema import ActivationCheckpointing, Config, ModelName, Optimizer, Parallel
from gpt2lab.config.settings import find_problems, override, resolved
from gpt2lab.data.manifest import tokenizer_of
from gpt2lab.data.mixture import open_sources, training_order
from gpt2lab.errors import ConfigError
from gpt2lab.model.counts import count_parameters
from gpt2lab.planner import calibration
from gpt2lab.planner.estimate import Estimate, Window, estimate
from gpt2lab.planner.hardware import Hardware, Profile
from gpt2lab.planner.job import Job, fit_mini_batch
from gpt2lab.planner.ladder import find_ladder
from gpt2lab.planner.machine import DetectedHardware, Machine, look, named
from gpt2lab.planner.memory import Dtype

LENGTHS = ("tokens", "steps", "epochs", "num_samples")
MOST_TOKENS = 10**17
DEFAULT_TOKENS = 10_000_000_000  # the real run of the README, where nothing else is said
# Flags that are settings of the trainer under the same name.
SETTINGS = (
    *("n_layer", "n_head", "n_embd", "context_length", "vocab_size"),
    *("total_batch_size", "mini_batch_size", "max_lr", "warmup_steps"),
    *("eval_freq", "val_tokens", "sample_freq", "checkpoint_freq"),
    *("optimizer", "parallel", "fsdp_param_dtype", "activation_checkpointing"),
)
_SINGLE = ("list_gpus", "accuracy", "self_test", "run_name")  # each a question of its own
_ANYWHERE = ("checkpoint_dir", "json", "report")  # flags that go with every question
# Flags that say nothing without another.
_NEEDS = {
    **{"margin": "deadline", "seconds": "measure", "max_batch": "find_batch_size"},
    **{"num_samples": "avg_tokens_per_sample", "avg_tokens_per_sample": "num_samples"},
    **{"epochs": "data_dir", "data_weights_at": "data_dir"},
    **{"nodes": "gpu", "interconnect": "gpu", "scaling": "gpu"},
}
# Flags of which only one would count.
_EXCLUDE = (
    *(("price", "kwh"), ("measure", "gpu"), ("find_batch_size", "gpu")),
    *(("find_batch_size", "mini_batch_size"), ("compare", "scaling"), ("compare", "explain")),
    *(("compare", "lr_rule"),),
)
Comparison = Literal["gpus", "models", "profiles"]
LrRule = Literal["sqrt", "linear", "none"]


@dataclass(frozen=True)
class JobFlags:
    """Flags that describe a run to come, what it runs on, and the form of the answer."""

    checkpoint_dir: Path | None = option(None, "folder of the runs; default checkpoints/")

    gpu: str | None = option(None, "predict for this card, e.g. H100, RTX-4090 (see --list_gpus)")
    gpus: int | None = option(
        None, "world size: cards in all; default 1, or all of this machine", least=1
    )
    nodes: int = option(1, "number of machines that hold the cards", least=1)
    interconnect: str | None = option(None, "network between nodes, e.g. ib400 (see --list_gpus)")

    model: ModelName | None = option(None, "model preset; default gpt2")
    n_layer: int | None = option(None, "transformer blocks")
    n_head: int | None = option(None, "attention heads per block")
    n_embd: int | None = option(None, "width of the residual stream")
    context_length: int | None = option(None, "tokens per training sequence")
    vocab_size: int | None = option(None, "rows of the token embedding")

    tokens: str | None = option(None, "length of the run in tokens, e.g. 10B")
    steps: str | None = option(None, "length of the run in optimizer steps")
    epochs: float | None = option(None, "length of the run in passes over --data_dir")
    num_samples: str | None = option(
        None, "length of the run in samples of --avg_tokens_per_sample tokens"
    )
    avg_tokens_per_sample: float | None = option(None, "mean tokens per sample of --num_samples")
    data_dir: tuple[str, ...] = option(
        (), "folder of token shards, or a mixture of several, each as PATH:WEIGHT; counts epochs"
    )
    data_weights_at: tuple[str, ...] = option(
        (), "mixture only: other weights from a number of tokens on, as TOKENS:WEIGHT,WEIGHT,..."
    )

    total_batch_size: int | None = option(None, "tokens per optimizer step")
    mini_batch_size: int | None = option(None, "sequences per forward pass of one rank")
    max_lr: float | None = option(None, "peak learning rate")
    warmup_steps: int | None = option(None, "linear warm-up steps")
    eval_freq: int | None = option(None, "steps between validation losses")
    val_tokens: int | None = option(None, "tokens per validation")
    sample_freq: int | None = option(None, "steps between text samples")
    checkpoint_freq: int | None = option(None, "steps between checkpoints")
    optimizer: Optimizer | None = option(None, "adamw | muon | normuon; default the preset's")
    parallel: Parallel | None = option(
        None,
        "ddp: full replica; zero1: optimizer state sharded; fsdp: everything sharded; default ddp",
    )
    fsdp_param_dtype: Literal["fp32", "bf16"] | None = option(
        None, "precision in which fsdp gathers the blocks' matrices; default fp32"
    )
    activation_checkpointing: ActivationCheckpointing | None = option(
        None, "activations that backward recomputes: none | selective | block; default none"
    )
    dtype: Literal["auto", "fp32", "bf16"] = option("auto", "matmul precision")
    compile: Literal["auto", "on", "off"] = option("auto", "torch.compile")

    profile: str | None = option(
        None, "fast | balanced | quality | memory_efficient | one of your own hardware.json"
    )
    price: float | None = option(None, "US dollars per GPU-hour; default the listed price")
    kwh: float | None = option(None, "own hardware: price of a kilowatt-hour")
    ladder: str | None = option(
        None,
        "predict the loss by a ladder of one's own: its name in --checkpoint_dir, or its folder",
    )
    json: bool = option(False, "print one JSON object")

    def folder(self) -> Path:
        """Return the folder of the runs."""
        return paths.runs_folder(self.checkpoint_dir)


@dataclass(frozen=True)
class EstimateRequest(JobFlags):
    """Predict a run: time, memory, cost and loss before it starts; without flags, the newest run's remaining time."""

    run_name: str | None = option(None, "run to project; default the one written to last")

    measure: bool = option(False, "first time real training steps on this machine")
    seconds: float = option(60.0, "training time of --measure")
    find_batch_size: bool = option(
        False, "search and verify the fastest mini batch that fits this machine's memory"
    )
    max_batch: int = option(128, "largest mini batch that --find_batch_size tries", least=1)

    deadline: str | None = option(None, "window: 12h, 1d6h, or a time like '2026-12-24 18:00'")
    margin: str = option("30m", "time kept free at the end of the window")
    start: str | None = option(None, "when the run starts, e.g. '2026-12-24 08:00'; default now")
    compare: Comparison | None = option(None, "print a table of alternatives")
    scaling: str = option("1,2,4,8", "world sizes of the scaling table")
    lr_rule: LrRule = option("sqrt", "how the learning rate scales with the batch size")

    report: Path | None = option(None, "also write the JSON object to this file")
    explain: bool = option(False, "print every formula with its numbers")
    list_gpus: bool = option(False, "list the known cards and links")
    accuracy: bool = option(False, "print the accuracy of earlier forecasts")
    self_test: bool = option(False, "predict, train and compare; about two minutes")

    @property
    def names_a_job(self) -> bool:
        """Tell whether a flag speaks of a run to come, rather than of one that exists or of none."""
        return not {*_given(self)} <= {*_SINGLE, *_ANYWHERE}


def _given(ask: JobFlags) -> list[str]:
    """Return the names of the flags that are not at their defaults."""
    leaves = dataclasses.fields(ask)
    return [leaf.name for leaf in leaves if getattr(ask, leaf.name) != leaf.default]


def check(ask: EstimateRequest) -> None:
    """Check all flags: those that exclude or need each other, and their bounds.

    Raises: ConfigError with one line.
    """
    check_job(ask)
    given = _given(ask)
    for single in (name for name in _SINGLE if name in given):
        if others := [name for name in given if name not in (single, *_ANYWHERE)]:
            raise ConfigError(f"--{single} is a question of its own; leave out --{others[0]}")
    window_of(ask, time.time())


def check_job(ask: JobFlags) -> None:
    """Check the flags of a job, and others that its command has.

    Raises: ConfigError with one line.
    """
    given = _given(ask)
    lengths = [f"--{name}" for name in LENGTHS if name in given]
    if len(lengths) > 1:
        raise ConfigError(
            f"{' and '.join(lengths)} both set the length of the run; give one of them"
        )
    for one, other in _EXCLUDE:
        if one in given and other in given:
            raise ConfigError(f"--{one} and --{other} exclude each other; leave out one of them")
    for name in given:
        if name in _NEEDS and _NEEDS[name] not in given:
            raise ConfigError(f"--{name} says nothing without --{_NEEDS[name]}; give both, or none")
    for name in ("price", "kwh", "max_lr", "epochs", "avg_tokens_per_sample", "seconds"):
        value = getattr(ask, name, None)
        if value is not None and not 0 < value <= 1e9:
            raise ConfigError(f"--{name} {value} must be above 0 and at most 1e9")
    check_least(ask)


def read_count(name: str, text: str) -> int:
    """Return a number of tokens or of other things that a flag gives as text.

    Raises: ConfigError if it is not one, or not above 0, or absurd.
    """
    try:
        number = fmt.parse_count(text.strip().replace(",", ""))
    except ValueError:
        raise ConfigError(f"--{name} {text!r} is not a number like 19073, 500M or 10B") from None
    if not 0 < number <= MOST_TOKENS:
        raise ConfigError(f"--{name} {text} must be above 0 and at most 1e17")
    return number


def window_of(ask: EstimateRequest, now: float) -> Window | None:
    """Return the window of --deadline and --margin, None without --deadline.

    Raises: ConfigError if it is not a time, lies in the past, or leaves nothing after the margin.
    """
    begins = start_of(ask, now)
    try:
        margin = fmt.parse_duration(ask.margin)
    except ValueError:
        raise ConfigError(f"--margin {ask.margin!r} is not a time span like 30m") from None
    if ask.deadline is None:
        return None
    try:
        seconds = fmt.parse_duration(ask.deadline)
    except ValueError:
        seconds = _moment("deadline", ask.deadline) - begins
    if seconds <= 0:
        raise ConfigError(f"--deadline {ask.deadline} is in the past, before the run starts")
    if not 0 <= margin < seconds:
        raise ConfigError(
            f"--margin {ask.margin} leaves nothing of the window {ask.deadline}; make it smaller"
        )
    return Window(seconds, margin)


def start_of(ask: EstimateRequest, now: float) -> float:
    """Return when the run starts, Unix seconds."""
    return now if ask.start is None else _moment("start", ask.start)


def _moment(name: str, text: str) -> float:
    for form in ("%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M:%S", "%Y-%m-%d"):
        try:
            return time.mktime(time.strptime(text, form))
        except (ValueError, OverflowError):
            continue
    raise ConfigError(f"--{name} {text!r} is neither a span (12h) nor a time (2026-12-24 18:00)")


def settings_of(ask: JobFlags, typed: dict[str, Any]) -> Config:
    """Return the trainer's settings that the flags mean; `typed`: those of SETTINGS that have a value.

    Raises: ConfigError with every problem of them.
    """
    known = preset(ask.model or "gpt2", optimizer=typed.get("optimizer"))
    config = override(known, typed | {"compile": ask.compile})
    for name in ("data_dir", "data_weights_at"):
        if words := getattr(ask, name):
            value = resolved(name, list(words), paths.from_working_directory)
            config = override(config, {name: value})
    problems = find_problems(config)
    if (batch := config.batch.total_batch_size) > 10**9:
        problems.append(f"total_batch_size {batch} must be at most 1e9")
    if problems:
        raise ConfigError("; ".join(problems))
    return config


def job_of(
    ask: JobFlags, profile: Profile, *, world_size: int, is_cpu: bool, native_bf16: bool
) -> Job:
    """Return the job that the flags mean at a world size.

    Raises: ConfigError, DataError.
    """
    typed = {name: value for name in SETTINGS if (value := getattr(ask, name)) is not None}
    config = settings_of(ask, typed)
    first = read_sources(config.data).folders[0]
    if tokenizer := tokenizer_of(first):
        config = fit_vocabulary(config, tokenizer.size, is_typed=ask.vocab_size is not None)
    if world_size == 1 and ask.parallel not in (None, "ddp"):
        raise ConfigError(
            f"--parallel {ask.parallel} shards what one rank holds over several, and the world size is 1; add --gpus N"
        )
    if ask.fsdp_param_dtype == "bf16" and ask.parallel != "fsdp":
        raise ConfigError("--fsdp_param_dtype bf16 goes with --parallel fsdp")
    if ask.profile is not None:
        config = profile.applied(config, typed=typed)
    config = fit_mini_batch(config, world_size, typed=ask.mini_batch_size is not None)
    batch, unique, dataset, order = config.batch.total_batch_size, None, {}, None
    fingerprint = None
    if ask.data_dir:
        data = open_sources(read_sources(config.data), vocab_size=config.model.vocab_size)
        T, of_data = config.model.context_length, config.data
        order = training_order(data, context_length=T, shuffle=of_data.shuffle, seed=of_data.seed)
        unique, fingerprint = order.windows_per_epoch * T, data.fingerprint
        dataset = {"tokens": float(unique)}
    tokens, steps, samples = (
        None if (text := getattr(ask, name)) is None else read_count(name, text)
        for name in ("tokens", "steps", "num_samples")
    )
    if samples is not None and ask.avg_tokens_per_sample is not None:
        tokens = round(samples * ask.avg_tokens_per_sample)
        dataset["num_samples"] = float(samples)
        dataset["avg_tokens_per_sample"] = ask.avg_tokens_per_sample
        unique = unique or tokens
    if ask.epochs is not None and unique is not None:
        tokens = int(ask.epochs * unique)
    default = DEFAULT_TOKENS
    if ask.profile is not None:
        default = round(profile.tokens_per_parameter * count_parameters(config.model))
    if steps is None:
        tokens = (unique or default) if tokens is None else tokens
        steps = tokens // batch
        if steps < 1:
            raise ConfigError(
                f"{tokens:,} tokens are less than one step of {batch:,}; lower --total_batch_size or train longer"
            )
    if steps * batch > MOST_TOKENS:
        raise ConfigError(
            f"{steps * batch:.3g} tokens are more than anybody trains on: at most {MOST_TOKENS:g}"
        )
    dataset |= {"tokens": dataset.get("tokens", float(steps * batch))}
    compiled = compiles(config.system, on_gpu=not is_cpu, max_steps=steps)
    bf16 = ask.dtype == "bf16" or (ask.dtype == "auto" and native_bf16)
    dtype: Dtype = "bf16" if bf16 else "fp32"
    check_fsdp_param_dtype(dataclasses.replace(config.system, dtype=dtype))
    return Job(
        config,
        *(steps, world_size, dtype, compiled, unique),
        dataset=tuple(dataset.items()),
        order=order,
        data_fingerprint=fingerprint,
    )


class Predictor:
    """The machine that is asked about, this one or a named card, and its predictions of jobs."""

    def __init__(self, ask: JobFlags, known: Hardware) -> None:
        """Look at this machine, unless a card is named."""
        self.ask, self.hardware = ask, known
        self.gpu = known.gpu(ask.gpu) if ask.gpu is not None else None
        self.seen = look() if self.gpu is None else DetectedHardware(())
        self.records = calibration.read(ask.folder())
        self.is_cpu = self.gpu is None and self.seen.is_cpu
        self.world_size = ask.gpus or max(1, len(self.seen.gpus))
        self._machines: dict[tuple[Any, ...], tuple[Machine, dict[str, float]]] = {}
        self.ladder = None if ask.ladder is None else find_ladder(ask.ladder, ask.folder())

    def job(self, profile: Profile) -> Job:
        """Return the job that the flags mean here.

        Raises: ConfigError, DataError.
        """
        return job_of(
            self.ask,
            profile,
            world_size=self.world_size,
            is_cpu=self.is_cpu,
            native_bf16=self.gpu is not None or self.seen.native_bf16,
        )

    def machine_for(self, job: Job) -> tuple[Machine, dict[str, float]]:
        """Return the machine with rates for this job's dtype and compilation, and the ratios of its event costs.

        Raises: ConfigError, NoSourceError.
        """
        kind = (job.world_size, job.dtype, job.compiled, job.parallel)
        if kind not in self._machines:
            if self.gpu is None:
                found = calibration.this_machine(self.seen, self.hardware, self.records, job)
            else:
                on = named(
                    self.gpu,
                    self.hardware,
                    gpus=job.world_size,
                    compiled=job.compiled,
                    nodes=self.ask.nodes,
                    interconnect=self.ask.interconnect,
                )
                found = on, {}
            self._machines[kind] = found
        return self._machines[kind]

    def predict(self, job: Job, profile: Profile, *, on: Machine | None = None) -> Estimate:
        """Estimate one job, on another machine than the one asked about if given."""
        ratios: dict[str, float] = {}
        if on is None:
            on, ratios = self.machine_for(job)
        found = estimate(
            job,
            on,
            self.hardware,
            ratios=ratios,
            price=self.ask.price,
            kwh=self.ask.kwh,
            memory_target=profile.memory_target,
        )
        if self.ladder is None:
            return found
        return dataclasses.replace(found, loss=self.ladder.loss_of(job), ladder=self.ladder)
