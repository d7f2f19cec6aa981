"""`--preset 8xh100`: how a number of cards of one kind cut a step, and the speed to expect of them. No torch.

Tokens per step, and with them the curve, stay as they are: only how a step is cut follows from the card.
"""

from __future__ import annotations

import dataclasses
import sys

from gpt2lab.config.command_line import Command
from gpt2lab.config.schema import Recompute
from gpt2lab.errors import ConfigError
from gpt2lab.planner import hardware, timing
from gpt2lab.planner.alternatives import with_micro_batch
from gpt2lab.planner.estimate import Estimate, estimate
from gpt2lab.planner.hardware import Gpu, Hardware
from gpt2lab.planner.here import look
from gpt2lab.planner.job import Job
from gpt2lab.planner.machine import named
from gpt2lab.planner.report_text import GIB
from gpt2lab.planner.scoring import job_of_start
from gpt2lab.training.start import Start

MAX_BATCH = 64  # sequences; more only takes memory, once every matmul fills the card
_ENOUGH = (
    4  # sequences from which computing activations twice costs more than a larger mini batch saves
)
_MODES: tuple[Recompute, ...] = ("none", "selective", "block")  # the cheapest in time first


def fitted(command: Command, start: Start) -> Command | None:
    """Return the command with the preset's mini batch and activation checkpointing, None if it settles nothing.

    What was typed stays: then the preset only says what to expect.

    What the preset means, and where this machine is another, is said on stderr.

    Raises: ConfigError if the preset is for another number of processes, or the model does not fit its card.
    """
    name = command.verbs.preset
    if name is None or start.is_complete:
        return None
    count, _, card = name.partition("x")
    known, world = hardware.load(), start.plan.batch.world_size
    gpu = known.gpu(card)
    if world != int(count):
        raise ConfigError(
            f"--preset {name} is for {count} processes, one a GPU, and this start has {world}: use torchrun "
            f"--nproc_per_node={count}, or --mini_batch_size auto instead of a preset"
        )
    system, is_open = start.config.system, "mini_batch_size" not in command.typed
    is_open &= not command.finds_mini_batch
    job = job_of_start(
        start, dtype="fp32" if system.dtype == "fp32" else "bf16", compiled=system.compile != "off"
    )
    found = _estimate(job, gpu, known)
    typed = "activation_checkpointing" in command.typed
    if is_open:
        modes = (job.recompute,) if typed else _MODES
        ways = [_estimate(_recomputing(job, mode), gpu, known) for mode in modes]
        found = _estimate(_cut(ways, name), gpu, known)
    need = found.memory
    _say(
        f"--preset {name}: mini_batch_size {found.job.micro_batch}, activation_checkpointing "
        f"{found.job.recompute}, {need.needed / GIB:.1f} of "
        f"{(need.available or 0) / GIB:.1f} GiB, expect {found.throughput.value:,.0f} tokens/s "
        f"({found.throughput.low:,.0f} ... {found.throughput.high:,.0f}, 80 %)"
    )
    if need.fits is False:
        _say(
            f"warning: mini_batch_size {found.job.micro_batch} does not fit {gpu.name}; "
            f"the largest that does is {need.largest_micro_batch or 0}"
        )
    _compare_with_this_machine(name, gpu, known)
    if not is_open:
        return None
    command = command.with_flags(f"--mini_batch_size={found.job.micro_batch}")
    return (
        command
        if typed
        else command.with_flags(f"--activation_checkpointing={found.job.recompute}")
    )


def _estimate(job: Job, gpu: Gpu, known: Hardware) -> Estimate:
    rates = timing.roofline(gpu, known, compiled=job.compiled)
    machine = named(gpu, known, gpus=job.world, nodes=1, interconnect=None, rates=rates)
    return estimate(job, machine, known)


def _recomputing(job: Job, mode: Recompute) -> Job:
    system = dataclasses.replace(job.config.system, activation_checkpointing=mode)
    return dataclasses.replace(job, config=dataclasses.replace(job.config, system=system))


def _cut(ways: list[Estimate], name: str) -> Job:
    """Return the job with the largest micro-batch that fits the card, recomputing no more than that is worth.

    Raises: ConfigError if not even one sequence fits.
    """
    largest = [way.memory.largest_micro_batch or 0 for way in ways]
    sequences = ways[0].job.sequences
    enough = min(_ENOUGH, sequences, max(largest))
    if not enough:
        found = ways[0]
        raise ConfigError(
            f"--preset {name}: {found.job.config.model.model} does not fit, not even one sequence at a time; "
            f"python scripts/memory_check.py shows what it needs; a larger card, or a smaller --context_length"
        )
    fitting, way = next((n, way) for n, way in zip(largest, ways, strict=True) if n >= enough)
    sizes = [n for n in range(1, min(fitting, MAX_BATCH) + 1) if sequences % n == 0]
    return with_micro_batch(way.job, max(sizes))


def _compare_with_this_machine(name: str, gpu: Gpu, known: Hardware) -> None:
    seen = look().gpus
    if not seen:
        _say(f"warning: --preset {name}, but this machine shows no GPU")
        return
    here = known.recognise(seen[0].name)
    if here is None or here.name != gpu.name:
        _say(
            f"warning: --preset {name} is for {gpu.name}, and this machine has {seen[0].name}; "
            f"--mini_batch_size auto finds what fits"
        )


def _say(line: str) -> None:
    print(line, file=sys.stderr)
