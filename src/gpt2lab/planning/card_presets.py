"""`--preset 8xh100`: the mini batch for a number of cards of one kind, and the speed to expect of them. No torch.

Tokens per step, and with them the curve, stay as they are: only how a step is cut follows from the card.
"""

from __future__ import annotations

import sys

from gpt2lab import hardware
from gpt2lab.errors import ConfigError
from gpt2lab.flags import Command
from gpt2lab.hardware import Gpu, Hardware
from gpt2lab.planning import timing
from gpt2lab.planning.alternatives import with_micro_batch
from gpt2lab.planning.estimate import Estimate, estimate
from gpt2lab.planning.here import look
from gpt2lab.planning.job import Job
from gpt2lab.planning.machine import named
from gpt2lab.planning.report_text import GIB
from gpt2lab.planning.scoring import job_of_start
from gpt2lab.start import Start

MAX_BATCH = 64  # sequences; more only takes memory, once every matmul fills the card


def fitted(command: Command, start: Start) -> Command | None:
    """Return the command with the preset's mini batch, None if there is no preset or the mini batch was typed.

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
    if is_open:
        found = _estimate(_cut(found, name), gpu, known)
    need = found.memory
    _say(
        f"--preset {name}: mini_batch_size {found.job.micro_batch}, {need.needed / GIB:.1f} of "
        f"{(need.available or 0) / GIB:.1f} GiB, expect {found.throughput.value:,.0f} tokens/s "
        f"({found.throughput.low:,.0f} ... {found.throughput.high:,.0f}, 80 %)"
    )
    if need.fits is False:
        _say(
            f"warning: mini_batch_size {found.job.micro_batch} does not fit {gpu.name}; "
            f"the largest that does is {need.largest_micro_batch or 0}"
        )
    _compare_with_this_machine(name, gpu, known)
    return command.with_flags(f"--mini_batch_size={found.job.micro_batch}") if is_open else None


def _estimate(job: Job, gpu: Gpu, known: Hardware) -> Estimate:
    rates = timing.roofline(gpu, known, compiled=job.compiled)
    machine = named(gpu, known, gpus=job.world, nodes=1, interconnect=None, rates=rates)
    return estimate(job, machine, known)


def _cut(found: Estimate, name: str) -> Job:
    """Return the job with the largest micro-batch that fits the card.

    Raises: ConfigError if not even one sequence does.
    """
    largest, sequences = found.memory.largest_micro_batch, found.job.sequences
    if largest is None:
        raise ConfigError(
            f"--preset {name}: {found.job.config.model.model} does not fit, not even one sequence at a time; "
            f"python scripts/memory_check.py shows what it needs; a larger card, or a smaller --context_length"
        )
    sizes = [n for n in range(1, min(largest, MAX_BATCH) + 1) if sequences % n == 0]
    return with_micro_batch(found.job, max(sizes))


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
