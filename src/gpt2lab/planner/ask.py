"""What a user asks the planner: its flags, and the job that they mean. No torch."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpt2lab import fmt, paths
from gpt2lab.config.command_line import option
from gpt2lab.config.derived import CPU_COMPILE_FROM_STEPS
from gpt2lab.config.presets import preset
from gpt2lab.config.schema import Config, ModelName, Optimizer, Parallel, Recompute
from gpt2lab.config.settings import find_problems, override
from gpt2lab.data.shards import open_data
from gpt2lab.errors import ConfigError
from gpt2lab.model.counts import count_parameters
from gpt2lab.optim.schedule import default_warmup
from gpt2lab.planner.job import Job, cut_batch
from gpt2lab.planner.memory import Dtype
from gpt2lab.planner.profiles import Profile

LENGTHS = ("tokens", "steps", "epochs", "num_samples")
DEFAULT_TOKENS = 10_000_000_000  # the real run of the README, where nothing else is said
# Flags of this door that are settings of the trainer under the same name.
SETTINGS = (
    *("n_layer", "n_head", "n_embd", "context_length", "vocab_size"),
    *("total_batch_size", "mini_batch_size", "max_lr", "warmup_steps"),
    *("eval_freq", "val_tokens", "sample_freq", "checkpoint_freq"),
    *("optimizer", "parallel", "activation_checkpointing"),
)
Comparison = Literal["gpus", "models", "profiles"]


@dataclass(frozen=True)
class Ask:
    """Predict a run: time, memory, cost and loss before it starts; without flags, the newest run's remaining time."""

    run_name: str | None = option(None, "the run to project; default the one that wrote last")
    checkpoint_dir: Path | None = option(None, "folder of the runs; default checkpoints/")

    gpu: str | None = option(None, "predict for this card, e.g. H100, RTX-4090 (see --list_gpus)")
    gpus: int | None = option(None, "cards in all; default 1, or all of this machine")
    nodes: int = option(1, "machines that the cards are spread over")
    interconnect: str | None = option(None, "what connects them, e.g. ib400 (see --list_gpus)")

    model: ModelName | None = option(None, "preset; default gpt2")
    n_layer: int | None = option(None, "transformer blocks")
    n_head: int | None = option(None, "attention heads per block")
    n_embd: int | None = option(None, "width of the residual stream")
    context_length: int | None = option(None, "tokens per training window")
    vocab_size: int | None = option(None, "rows of the embedding")

    tokens: str | None = option(None, "length of the run in tokens, e.g. 10B")
    steps: str | None = option(None, "... in optimizer steps")
    epochs: float | None = option(None, "... in passes over --data_dir")
    num_samples: str | None = option(None, "... in samples of --avg_tokens_per_sample tokens")
    avg_tokens_per_sample: float | None = option(None, "with --num_samples")
    data_dir: Path | None = option(None, "folder of token shards, to count epochs")

    total_batch_size: int | None = option(None, "tokens per optimizer step")
    mini_batch_size: int | None = option(None, "sequences per forward pass of one process")
    max_lr: float | None = option(None, "peak learning rate")
    warmup_steps: int | None = option(None, "linear warm-up steps")
    eval_freq: int | None = option(None, "steps between validation losses")
    val_tokens: int | None = option(None, "tokens of one validation")
    sample_freq: int | None = option(None, "steps between text samples")
    checkpoint_freq: int | None = option(None, "steps between checkpoints")
    optimizer: Optimizer | None = option(None, "adamw | muon; default the preset's")
    parallel: Parallel | None = option(None, "how several processes share a run; default ddp")
    activation_checkpointing: Recompute | None = option(
        None, "what is computed again instead of kept; default none"
    )
    dtype: Literal["auto", "fp32", "bf16"] = option("auto", "matmul precision")
    compile: Literal["auto", "on", "off"] = option("auto", "torch.compile")

    measure: bool = option(False, "time real steps of the real trainer on this machine first")
    seconds: float = option(60.0, "how long --measure may train")
    find_batch_size: bool = option(
        False, "find the mini batch that fits and is fast, and verify it"
    )
    max_batch: int = option(128, "largest mini batch that --find_batch_size tries")

    deadline: str | None = option(None, "window: 12h, 1d6h, or a time like '2026-12-24 18:00'")
    margin: str = option("30m", "kept free at the end of the window")
    start: str | None = option(None, "when the run starts, e.g. '2026-12-24 08:00'; default now")
    profile: str | None = option(
        None, "fast | balanced | quality | memory_efficient | one of your own hardware.json"
    )
    compare: Comparison | None = option(None, "a table of the alternatives")
    scaling: str = option("1,2,4,8", "numbers of cards for the scaling table")
    price: float | None = option(None, "US dollars per GPU-hour, instead of the list's")
    kwh: float | None = option(None, "own hardware: price of a kilowatt-hour")
    lr_rule: Literal["sqrt", "linear", "none"] = option("sqrt", "how the rate follows the batch")

    json: bool = option(False, "print one JSON object")
    report: Path | None = option(None, "write the JSON object to this file too")
    explain: bool = option(False, "print every formula with its numbers")
    list_gpus: bool = option(False, "list the cards and links that are known, with sources")
    accuracy: bool = option(False, "how well earlier predictions did")
    self_test: bool = option(False, "predict, train for real, compare; about two minutes")

    @property
    def names_a_job(self) -> bool:
        """Tell whether anything was typed that speaks of a run to come."""
        plain = Ask()
        about: tuple[str, ...] = (
            *SETTINGS,
            *LENGTHS,
            "gpu",
            "gpus",
            "model",
            "data_dir",
            "deadline",
            "compare",
        )
        about += ("measure", "find_batch_size", "profile", "nodes")
        return any(getattr(self, name) != getattr(plain, name) for name in about)

    def folder(self) -> Path:
        """Return the folder of the runs."""
        if self.checkpoint_dir is None:
            return paths.from_repository(Path("checkpoints"))
        return paths.from_working_directory(self.checkpoint_dir)


def check(ask: Ask) -> None:
    """Refuse what cannot be meant.

    Raises: ConfigError with one line.
    """
    given = [f"--{name}" for name in LENGTHS if getattr(ask, name) is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} both set the length of the run; give one of them")
    if (ask.num_samples is None) != (ask.avg_tokens_per_sample is None):
        raise ConfigError("--num_samples and --avg_tokens_per_sample go together")
    if ask.epochs is not None and ask.data_dir is None:
        raise ConfigError(
            "--epochs needs --data_dir: without data, how long an epoch is would be a guess"
        )
    if ask.measure and ask.gpu is not None:
        raise ConfigError("--measure times this machine; leave out --gpu, or leave out --measure")
    if ask.run_name is not None and ask.names_a_job:
        raise ConfigError("--run_name projects a run as it is; leave out the flags of another job")
    for name in ("price", "kwh", "max_lr", "epochs", "avg_tokens_per_sample", "seconds"):
        value = getattr(ask, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{name} {value} must be above 0")
    for name in ("gpus", "nodes", "max_batch"):
        value = getattr(ask, name)
        if value is not None and not 1 <= value <= 100_000:
            raise ConfigError(f"--{name} {value} must be from 1 to 100000")


def count_of(ask: Ask, name: str) -> int | None:
    """Return a length flag as a number.

    Raises: ConfigError if it is not one, or not above 0, or absurd.
    """
    text = getattr(ask, name)
    if text is None:
        return None
    plain = text.strip().replace(",", "")
    try:
        if not re.fullmatch(r"[0-9_]*\.?[0-9]+(e[0-9]{1,2})?[kKmMbBtT]?", plain):
            raise ValueError(plain)
        number = fmt.parse_count(plain)
    except ValueError:
        raise ConfigError(f"--{name} {text!r} is not a number like 19073, 500M or 10B") from None
    if not 0 < number <= 10**17:
        raise ConfigError(f"--{name} {text} must be above 0 and at most 1e17")
    return number


def window_of(ask: Ask, now: float) -> tuple[float, float] | None:
    """Return (seconds of the window, seconds of margin), None without --deadline.

    Raises: ConfigError if it is not a time, lies in the past, or is all margin.
    """
    try:
        margin = fmt.parse_duration(ask.margin)
    except ValueError:
        raise ConfigError(f"--margin {ask.margin!r} is not a time span like 30m") from None
    if ask.deadline is None:
        return None
    try:
        seconds = fmt.parse_duration(ask.deadline)
    except ValueError:
        seconds = _moment("deadline", ask.deadline) - start_of(ask, now)
    if seconds <= 0:
        raise ConfigError(f"--deadline {ask.deadline} is in the past of the start of the run")
    if not 0 <= margin < seconds:
        raise ConfigError(
            f"--margin {ask.margin} leaves nothing of the window {ask.deadline}; make it smaller"
        )
    return seconds, margin


def start_of(ask: Ask, now: float) -> float:
    """Return when the run starts, Unix seconds."""
    return now if ask.start is None else _moment("start", ask.start)


def _moment(name: str, text: str) -> float:
    for form in ("%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M:%S", "%Y-%m-%d"):
        try:
            return time.mktime(time.strptime(text, form))
        except (ValueError, OverflowError):
            continue
    raise ConfigError(
        f"--{name} {text!r} is neither a time span (12h) nor a time (2026-12-24 18:00)"
    )


def settings_of(ask: Ask, base: Config | None = None) -> Config:
    """Return the trainer's settings that the flags mean.

    Raises: ConfigError with every problem of them.
    """
    config = base or preset(ask.model or "gpt2")
    typed: dict[str, Any] = {
        name: value for name in SETTINGS if (value := getattr(ask, name)) is not None
    }
    if ask.data_dir is not None:
        typed["data_dir"] = paths.from_working_directory(ask.data_dir)
    config = override(config, typed)
    absurd = [
        name
        for name in ("n_layer", "n_embd", "context_length", "vocab_size", "total_batch_size")
        if (typed.get(name) or 0) > 10**9
    ]
    problems = [f"{name} {typed[name]} is absurd" for name in absurd] + find_problems(config)
    if problems:
        raise ConfigError("; ".join(problems))
    return config


def job_of(ask: Ask, profile: Profile, *, world: int, is_cpu: bool, native_bf16: bool) -> Job:
    """Return the job that the flags mean on so many processes.

    Raises: ConfigError, DataError.
    """
    config = settings_of(ask)
    if world == 1 and ask.parallel not in (None, "ddp"):
        raise ConfigError(
            f"--parallel {ask.parallel} shares what one process holds among several, and there is one; add --gpus N"
        )
    if ask.profile is not None:
        config = profile.applied(config, typed={n for n in SETTINGS if getattr(ask, n) is not None})
    config = cut_batch(config, world, typed=ask.mini_batch_size is not None)
    batch, unique, dataset = config.batch.total_batch_size, None, {}
    if ask.data_dir is not None:
        data = open_data(config.data.data_dir, vocab_size=config.model.vocab_size)
        T = config.model.context_length
        unique = sum((shard.tokens - 1) // T for shard in data.splits["train"]) * T
        dataset = {"tokens": float(unique)}
    tokens = count_of(ask, "tokens")
    steps = count_of(ask, "steps")
    samples = count_of(ask, "num_samples")
    if samples is not None and ask.avg_tokens_per_sample is not None:
        tokens = round(samples * ask.avg_tokens_per_sample * 1.0)
        dataset |= {
            "num_samples": float(samples),
            "avg_tokens_per_sample": ask.avg_tokens_per_sample,
        }
        unique = unique or tokens
    if ask.epochs is not None and unique is not None:
        tokens = int(ask.epochs * unique)
    if tokens is None and steps is None:
        if unique is not None:
            tokens = unique
        elif ask.profile is not None:
            tokens = round(profile.tokens_per_parameter * count_parameters(config.model))
        else:
            tokens = DEFAULT_TOKENS
    if steps is None:
        assert tokens is not None
        steps = tokens // batch
        if steps < 1:
            raise ConfigError(
                f"{tokens:,} tokens are less than one step of {batch:,}; lower --total_batch_size or train longer"
            )
    dataset |= {"tokens": dataset.get("tokens", float(steps * batch))}
    compiled = ask.compile == "on" or (
        ask.compile == "auto" and not (is_cpu and steps < CPU_COMPILE_FROM_STEPS)
    )
    dtype: Dtype = (
        "bf16" if ask.dtype == "bf16" or (ask.dtype == "auto" and native_bf16) else "fp32"
    )
    return Job(config, steps, world, dtype, compiled, unique, tuple(dataset.items()))


def nonsense(job: Job) -> list[str]:
    """Name settings that do not make sense together, though they could be run."""
    config, steps = job.config, job.max_steps
    found = []
    warmup = config.optim.warmup_steps
    if warmup is not None and warmup >= steps:
        found.append(
            f"warm-up of {warmup:,} steps in a run of {steps:,}: the rate never decays; "
            f"try {default_warmup(steps):,}"
        )
    for name, freq in (
        ("eval_freq", config.eval.eval_freq),
        ("checkpoint_freq", config.checkpoint.checkpoint_freq),
    ):
        if freq > steps:
            found.append(
                f"{name} {freq:,} is longer than the run of {steps:,} steps: it happens only at the end"
            )
    if job.epochs is not None and job.epochs > 4:
        found.append(
            f"{job.epochs:.1f} passes over the data: beyond about 4, repeated tokens teach little (arXiv:2305.16264)"
        )
    return found
