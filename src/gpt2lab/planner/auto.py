"""Settings that a start chooses automatically: `--preset`, `--mini_batch_size auto` and `--fit_schedule`. No torch.

Each becomes a plain setting, so that the checkpoint stores it and a resume uses it again. A preset such as `8xh100`
only decides how its cards divide a step: tokens per step, and so the loss curve, are unchanged.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from gpt2lab import fmt, paths
from gpt2lab.config.derived import compiles, mini_batch_sizes
from gpt2lab.config.presets import preset
from gpt2lab.config.request import RunRequest
from gpt2lab.config.schema import ActivationCheckpointing, Config, ModelName, SystemConfig
from gpt2lab.distributed.processor import unseen_gpus
from gpt2lab.errors import ConfigError
from gpt2lab.planner import calibration, hardware, measuring
from gpt2lab.planner.estimate import (
    MEMORY_TARGET,
    Estimate,
    MemoryNeed,
    Window,
    device_memory,
    estimate,
    longest_that_fits,
)
from gpt2lab.planner.hardware import Gpu, Hardware, NoSourceError
from gpt2lab.planner.job import Job
from gpt2lab.planner.machine import DetectedHardware, Machine, detect_hardware, named, total_memory
from gpt2lab.planner.memory import Dtype
from gpt2lab.planner.reports import GIB
from gpt2lab.runs.console import say
from gpt2lab.training.plan import Plan
from gpt2lab.training.start import Start

NOT_MEASURED = "mini_batch_size auto: not known before a start measures it; shown with {}"
NOT_COUNTED = "not counted: --fsdp_offload keeps weights and optimizer state in the CPU's memory"
PRESET_MAX_BATCH = 64  # sequences; more only takes memory, once every matmul fills the card
_ENOUGH = 4  # sequences from which recomputing costs more than a larger micro-batch saves
# The cheapest in time first.
_MODES: tuple[ActivationCheckpointing, ...] = ("none", "selective", "block")
_MARGIN = 0.02  # of the window, besides what the interval's upper bound leaves


class TrainingPlanner:
    """Chooses the settings that a request leaves open; `auto` says which these are."""

    def __init__(self, *, preset: str | None = None, fits_schedule: bool = False) -> None:
        """`preset`: cards by name, such as 8xh100; `fits_schedule`: choose the steps that end within --max_hours."""
        self._preset, self._fits_schedule = preset, fits_schedule
        self.memory: Sequence[float | None] | None = None

    def measures(self, request: RunRequest) -> bool:
        """Tell whether a micro-batch is searched by running steps."""
        return request.leaves_mini_batch and self._preset is None

    def free_memory(self, system: SystemConfig) -> float | None:
        """Return the bytes that this rank could use, None where unknown."""
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return detect_hardware(device=system.device).free_memory(ranks)

    def choose(
        self, request: RunRequest, config: Config, plan: Plan, *, run_dir: Path
    ) -> dict[str, Any]:
        """Return the settings that are decided here, by their flags; see `extension.Planner`.

        Raises: ConfigError or NoSourceError if the machine or the preset cannot do it.
        """
        chosen: dict[str, Any] = {}
        if self._preset is not None:
            chosen |= preset_settings(self._preset, config, plan, typed=request.chosen)
        if self.measures(request) or self._fits_schedule:
            detected = detect_hardware(device=config.system.device)
            here = job_on(detected, config, plan)
            if self.measures(request) and self.memory is not None:
                found = measuring.find_batch_size(
                    here,
                    run_dir.parent,
                    memory_bytes=min((m for m in self.memory if m is not None), default=None),
                    on_gpu=not detected.is_cpu,
                )
                chosen["mini_batch_size"] = found["mini_batch_size"]
            if self._fits_schedule:
                chosen["max_steps"] = steps_in_window(here, detected, run_dir.parent)
        if self.memory is not None:
            check_memory(config, plan)
        return chosen

    def peak_flops(self, device_name: str) -> float | None:
        """Return a GPU's dense bf16 or fp16 peak in FLOP/s, None where it is not known."""
        try:
            return hardware.peak_flops(device_name)
        except ConfigError:  # of the user's hardware.json; the forecast says it
            return None


def memory_here(config: Config, plan: Plan) -> MemoryNeed:
    """Return what a rank of a run needs, compared with what is free on this machine.

    Raises: ConfigError if the machine has GPUs that torch cannot use.
    """
    if config.system.device != "cpu" and (why := unseen_gpus()):
        raise ConfigError(why)
    detected = detect_hardware(device=config.system.device)
    job = job_on(detected, config, plan)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", plan.batch.world_size))
    return device_memory(
        job,
        hardware.load(),
        MEMORY_TARGET,
        is_cpu=detected.is_cpu,
        # What a GPU holds of offloaded weights is not counted; it is at most what it holds without offloading.
        available=None if config.system.fsdp_offload else detected.free_memory(ranks),
    )


def fitting_flag(need: MemoryNeed) -> str | None:
    """Return the flag that makes a run fit, None if not even one sequence at a time does."""
    return f"--mini_batch_size {need.largest_micro_batch}" if need.largest_micro_batch else None


def describe_memory(need: MemoryNeed) -> str:
    """Return the need as text, with what would fit if it does not."""
    text = f"{need.needed / GIB:.1f} GiB for each rank"
    if need.available is None:
        return text
    text += f", {need.available / GIB:.1f} GiB free here"
    if need.fits:
        return text
    if flag := fitting_flag(need):
        return f"{text}: does not fit, {flag} does"
    return f"{text}: does not fit, not even one sequence at a time; choose a smaller model"


def check_memory(config: Config, plan: Plan) -> None:
    """Reject a model whose weights, gradients and optimizer state exceed a CPU's memory; a GPU reports that itself.

    Raises: ConfigError.
    """
    total = total_memory()
    if total is None or (config.system.device != "cpu" and shutil.which("nvidia-smi")):
        return
    held = job_on(DetectedHardware(()), config, plan).memory()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed = ranks * (held.params + held.optimizer + held.gradients)
    if needed > total:
        raise ConfigError(
            f"n_layer {config.model.n_layer}, n_embd {config.model.n_embd}: weights, gradients and optimizer take "
            f"{fmt.num_bytes(needed)}, this machine has {fmt.num_bytes(total)} of memory; choose a smaller --model"
        )


def job_on(detected: DetectedHardware, config: Config, plan: Plan) -> Job:
    """Return the job of a start of the trainer on this machine."""
    return _job_of(config, plan, auto_dtype=detected.auto_dtype, on_gpu=not detected.is_cpu)


def _job_of(config: Config, plan: Plan, *, auto_dtype: Dtype, on_gpu: bool) -> Job:
    system, ranks = config.system, plan.batch.world_size
    dtype = auto_dtype if system.dtype == "auto" else system.dtype
    compiled = compiles(system, on_gpu=on_gpu, max_steps=plan.max_steps)
    return Job(config, plan.max_steps, ranks, dtype, compiled)


def estimate_here(start: Start) -> Estimate | None:
    """Predict what is left of a start of the trainer on this machine; None for a GPU of which nothing is known."""
    detected, known = detect_hardware(device=start.config.system.device), hardware.load()
    job = job_on(detected, start.config, start.plan)
    job = job.with_validation(start.data.tokens("val"))
    if start.checkpoint is not None:
        job = job.with_steps(max(1, start.plan.max_steps - start.checkpoint.step))
    records = calibration.read(start.run_dir.parent)
    with contextlib.suppress(NoSourceError):
        return estimate(job, calibration.this_machine(detected, known, records, job), known)
    return None


def steps_in_window(job: Job, detected: DetectedHardware, checkpoint_dir: Path) -> int:
    """Return the most steps of a job that end within its --max_hours, for --fit_schedule.

    Raises: ConfigError if that is missing or too short, or if this machine has not been measured.
    """
    hours = job.config.length.max_hours
    if hours is None:
        raise ConfigError("--fit_schedule needs --max_hours: the window that the run must end in")
    known, records = hardware.load(), calibration.read(checkpoint_dir)
    machines: dict[bool, Machine] = {}

    def predict(other: Job) -> Estimate:
        if other.compiled not in machines:
            on = calibration.this_machine(detected, known, records, other)
            if on.rates.source == "cpu-matmul":
                # What is measured counts for its own precision and mode, and is kept beside the runs.
                words = ["--model", job.config.model.model]
                words += [*([] if other.compiled else ["--compile", "off"]), "--dtype", other.dtype]
                if checkpoint_dir != paths.runs_folder(None):
                    words += ["--checkpoint_dir", paths.display_path(checkpoint_dir)]
                raise ConfigError(
                    "--fit_schedule: this machine has not been measured, and a guess could waste the window or exceed "
                    f"it; first run gpt2lab estimate --measure {fmt.command_line(words)}"
                )
            machines[other.compiled] = on
        return estimate(other, machines[other.compiled], known)

    window = Window(3600 * hours, _MARGIN * 3600 * hours)
    found = longest_that_fits(job, window, predict, at_most=job.max_steps)
    if found is None:
        raise ConfigError(f"--max_hours {hours:g} is too short for a single step of this run")
    return found.max_steps


FIRST_RUN_SECONDS = 1800.0
FIRST_RUN_BYTES = 1_000_000_000  # of all its checkpoints
_FIRST_EPOCHS = 3  # below MANY_EPOCHS
_FIRST_STEPS = 100  # fewer teach little, so that a small text gets small steps
_FEWEST_SEQUENCES = 4  # of such a step


def choose_first_run(
    train_tokens: int, shortest_shard: int, *, affordable: Callable[[ModelName], float]
) -> dict[str, Any]:
    """Return the flags of a first run on new data, by their names; {} if there is too little text for any.

    The largest GPT-2 that gets a token for each parameter of its blocks, from 3 passes over the text and within half
    an hour of this machine. `affordable`: the tokens that a preset trains in that time; `shortest_shard`: its tokens.
    """
    wanted, tokens = _FIRST_EPOCHS * train_tokens, 0.0
    for name in ("gpt2", "gpt2-mini", "gpt2-micro", "gpt2-nano"):
        config = preset(name)
        model, T = config.model, config.model.context_length
        parameters = 12 * model.n_layer * model.n_embd**2
        if wanted >= parameters and shortest_shard > T:
            tokens = min(wanted, affordable(name))
        if tokens >= parameters:
            break
    flags: dict[str, Any] = {"model": name, "num_epochs": _FIRST_EPOCHS}
    if 0 < tokens < wanted:
        flags = {"model": name, "max_tokens": fmt.count(tokens)}
    batch = whole = config.batch.total_batch_size
    while batch > _FEWEST_SEQUENCES * T and wanted < _FIRST_STEPS * batch:
        batch //= 2
    if batch < whole:
        size = min(config.batch.mini_batch_size, batch // T)
        flags |= {"total_batch_size": batch, "mini_batch_size": size}
    # What the ends of the shards leave must hold a step.
    is_enough = shortest_shard > T and wanted >= batch + _FIRST_EPOCHS * T
    return flags if is_enough else {}


def preset_settings(
    name: str, config: Config, plan: Plan, *, typed: Collection[str]
) -> dict[str, Any]:
    """Return the preset's micro-batch and activation checkpointing, as far as nobody typed them.

    Says on stderr what to expect of the preset's cards, and how this machine differs from them.

    Raises: ConfigError if the preset is for another world size, or the model does not fit its card; NoSourceError if
        nothing is known of the card.
    """
    world_size = plan.batch.world_size
    if name == "auto":
        detected = detect_hardware(device=config.system.device).gpus
        if not detected:
            raise ConfigError("--preset auto: nvidia-smi shows no GPU; name one, such as 1x4090")
        name = f"{world_size}x{detected[0].name}"
    count, _, card = name.partition("x")
    if not (count.isdecimal() and int(count) and card):
        raise ConfigError(f"--preset {name}: give auto, or a number and a card, such as 8xh100")
    known = hardware.load()
    gpu = known.gpu(card)
    if world_size != int(count):
        raise ConfigError(
            f"--preset {name} is for world size {count}, one rank per GPU, and this start has {world_size}: use "
            f"--gpus {count}, or --mini_batch_size auto instead of a preset"
        )
    job = _job_of(config, plan, auto_dtype=gpu.dtype, on_gpu=True)
    chosen: dict[str, Any] = {}
    if "mini_batch_size" not in typed:
        typed_mode = "activation_checkpointing" in typed
        modes = (job.recompute,) if typed_mode else _MODES
        jobs = (job.with_settings(activation_checkpointing=mode) for mode in modes)
        job = _largest_fitting([_on_card(one, gpu, known) for one in jobs], name)
        chosen["mini_batch_size"] = job.micro_batch
        if not typed_mode:
            chosen["activation_checkpointing"] = job.recompute
    found = _on_card(job, gpu, known)
    need, speed = found.memory, found.throughput
    said = f", expect {speed.value:,.0f} tokens/s ({speed.low:,.0f} ... {speed.high:,.0f}, 80 %)"
    say(
        f"--preset {name}: mini_batch_size {job.micro_batch}, activation_checkpointing "
        f"{job.recompute}, {need.needed / GIB:.1f} of "
        f"{(need.available or 0) / GIB:.1f} GiB{said if gpu.has_rate(job.dtype) else ''}"
    )
    if need.fits is False:
        say(
            f"warning: mini_batch_size {job.micro_batch} does not fit {gpu.name}; "
            f"the largest that does is {need.largest_micro_batch or 0}"
        )
    _compare_with_this_machine(name, gpu, known)
    return chosen


def _on_card(job: Job, gpu: Gpu, known: Hardware) -> Estimate:
    return estimate(job, named(gpu, known, gpus=job.world_size, compiled=job.compiled), known)


def _largest_fitting(ways: list[Estimate], name: str) -> Job:
    """Return the job with the largest micro-batch that fits, in the cheapest mode that allows enough sequences."""
    largest = [way.memory.largest_micro_batch or 0 for way in ways]
    job = ways[0].job
    enough = min(_ENOUGH, job.sequences, max(largest))
    if not enough:
        raise ConfigError(
            f"--preset {name}: {job.config.model.model} does not fit, not even one sequence at a time; "
            f"gpt2lab doctor with its flags shows what it needs; a larger card, or a smaller --context_length"
        )
    fitting, way = next((n, way) for n, way in zip(largest, ways, strict=True) if n >= enough)
    sizes = mini_batch_sizes(job.sequences, at_most=min(fitting, PRESET_MAX_BATCH))
    return way.job.with_settings(mini_batch_size=sizes[-1])


def _compare_with_this_machine(name: str, gpu: Gpu, known: Hardware) -> None:
    detected = detect_hardware().gpus
    if not detected:
        say(f"warning: --preset {name}, but this machine shows no GPU")
    elif known.recognise(detected[0].name) != gpu:
        say(
            f"warning: --preset {name} is for {gpu.name}, and this machine has {detected[0].name}; "
            f"--mini_batch_size auto finds what fits"
        )
