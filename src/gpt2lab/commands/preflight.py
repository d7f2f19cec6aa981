"""`--preflight`: try everything that a run will need, in at most a minute, and answer GO or NO-GO.

Nothing of the run is written; trials remove what they write. What the trainer would reject is a NO-GO; what it would
only warn of is a warning.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from gpt2lab import fmt, paths
from gpt2lab.config.request import RunRequest
from gpt2lab.config.settings import override
from gpt2lab.data.loader import GlobalBatch
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.errors import CheckpointError, ConfigError, DataError, GPT2LabError
from gpt2lab.files import sha256_of, staged_file
from gpt2lab.interop.core import open_core
from gpt2lab.model.counts import flops_per_token
from gpt2lab.paths import LAUNCHED
from gpt2lab.planner.auto import NOT_COUNTED, describe_memory, memory_here
from gpt2lab.training.components import Components
from gpt2lab.training.device import check_kernels, choose_hardware
from gpt2lab.training.pretrain import build
from gpt2lab.training.recipe import PRETRAINING, Recipe
from gpt2lab.training.resolve import resolve
from gpt2lab.training.start import Start
from gpt2lab.training.steps import launch_step
from gpt2lab.training.stop import GRACE, launcher_grace_seconds

_UNEVEN = 1.5  # ranks further apart than this are worth a look
_CLOCKS_APART = 2.0  # seconds
DISK_BYTES = 512 * 10**6  # most that is written
STEP_TOKENS = 2048  # most that a process trains on
NETWORK_BYTES = 32 * 2**20  # most that is added up at once
_DISK_SECONDS = 10.0  # a slower disk is judged by what it wrote until then
_CPU_FLOPS = 1e12  # on a CPU, so that the step takes seconds and not minutes
_BLOCK = 16 * 2**20


@dataclass(frozen=True)
class Check:
    """One line of the answer."""

    name: str
    result: Literal["ok", "warning", "failed"]
    detail: str
    numbers: dict[str, Any] = field(default_factory=dict)  # for --json


def preflight(request: RunRequest, *, recipe: Recipe = PRETRAINING, as_json: bool = False) -> int:
    """Try everything, print the checks and the verdict; return 0 for GO and 1 for NO-GO."""
    runtime = Runtime(timeout_minutes=request.timeout_minutes)
    checks = _check_all(request, recipe, runtime)
    failed = [check.name for check in checks if check.result == "failed"]
    if runtime.rank == 0 and as_json:
        found = {"checks": [asdict(check) for check in checks], "command": command_to_start(checks)}
        print(json.dumps({"go": not failed, **found}))
    elif runtime.rank == 0:
        width = max(len(check.name) for check in checks)
        for check in checks:
            print(f"{check.name:<{width}}  {check.result:<7}  {check.detail}")
        print(f"NO-GO: {', '.join(failed)}" if failed else f"GO: {command_to_start(checks)}")
    runtime.close()
    return 1 if failed else 0


def _check_all(request: RunRequest, recipe: Recipe, runtime: Runtime) -> list[Check]:
    """Run the checks in order; one that later ones rest on ends the list where it fails."""
    try:
        start = runtime.on_rank_zero(
            lambda: resolve(request, recipe, world_size=runtime.world_size, set_aside=False)
        )
        runtime.on_rank_zero(lambda: open_core(start) and None)
        start = choose_hardware(start, runtime)
    except GPT2LabError as error:
        return [_rejected(error)]
    if start.is_complete:
        return [Check("settings", "failed", f"{start.run_dir.name} is complete; nothing to train")]
    notes = [text for text in start.warnings if text not in start.disk.shortage()]
    checks = [_settings(start), *(Check("note", "warning", text) for text in notes)]
    checks += runtime.on_rank_zero(lambda: [_disk(start), _memory(start, runtime)])
    if checks[-1].result == "failed":
        return checks
    try:
        model = recipe.build_model(start, runtime)
        start = check_kernels(start, model, runtime)
        components = build(start, runtime, model, recipe)
        began = time.monotonic()
        loader = components.batches.loader
        batch = runtime.on_all_ranks(lambda: loader.fetch(components.state.samples))
        runtime.on_all_ranks(loader.reader.verifier.wait)
        read_seconds = time.monotonic() - began
    except GPT2LabError as error:
        return [*checks, _rejected(error)]
    checks.append(
        Check("data", "ok", f"{start.describe_data()}; first batch read in {read_seconds:.1f} s")
    )
    if components.resume_check is not None:
        checks.append(Check("checkpoint", "ok", components.resume_check.describe().splitlines()[0]))
    step = _step(start, components, batch, runtime)
    checks.append(step)
    if step.result == "failed":
        return checks
    if runtime.world_size > 1:
        checks.append(_network(start, runtime))
    numbers = {check.name: check.numbers for check in checks}
    return [*checks, _clock(start, runtime), _grace(start, numbers)]


def _rejected(error: GPT2LabError) -> Check:
    kinds = {DataError: "data", CheckpointError: "checkpoint"}
    return Check(kinds.get(type(error), "settings"), "failed", str(error))


def _settings(start: Start) -> Check:
    plan, system = start.plan, start.config.system
    at = f", goes on from step {start.checkpoint.step}" if start.checkpoint else ""
    return Check(
        "settings",
        "ok",
        f"{start.config.model.model}, {plan.parameters:,} parameters, {plan.max_steps:,} steps of {plan.batch}, "
        f"{system.dtype}{', compiled' if system.compile == 'on' else ''}{at}",
        {"parameters": plan.parameters, "max_steps": plan.max_steps},
    )


def _disk(start: Start) -> Check:
    """Compare the retention plan with the disk, and time a part of a checkpoint on it."""
    disk, plan = start.disk, start.plan
    # Half of what is free at most: others write too.
    num_bytes = min(DISK_BYTES, plan.checkpoint_bytes, disk.free // 2)
    try:
        written, writing, reading, intact = try_disk(disk.folder, num_bytes)
    except OSError as error:
        return Check("disk", "failed", f"{disk.folder}: cannot write there ({error.strerror})")
    if not intact:
        return Check("disk", "failed", f"{disk.folder}: gives back other bytes than were written")
    if not disk.fits:
        return Check("disk", "failed", " ".join(disk.shortage()))
    write, read = written / writing, written / reading
    save, load = plan.checkpoint_bytes / write, plan.checkpoint_bytes / read
    return Check(
        "disk",
        "ok",
        f"{disk.describe()}; a trial of {fmt.num_bytes(written)} means {_seconds(save)} "
        f"to save and {_seconds(load)} to read a checkpoint of {fmt.num_bytes(plan.checkpoint_bytes)}",
        {
            "free_bytes": disk.free,
            "needed_bytes": disk.needed,
            "write_bytes_per_second": write,
            "read_bytes_per_second": read,
            "save_seconds": save,
        },
    )


def _memory(start: Start, runtime: Runtime) -> Check:
    """Compare the predicted peak of a step with what is free."""
    config = override(start.config, {"device": runtime.device.type})
    try:
        need = memory_here(config, start.plan)
    except ConfigError as error:  # such as of the user's hardware.json
        return Check("memory", "warning", f"not predicted: {error}")
    numbers = {"needed_bytes": need.needed, "available_bytes": need.available}
    if config.system.fsdp_offload:
        return Check("memory", "warning", NOT_COUNTED)
    detail = describe_memory(need)
    if need.available is None:
        return Check("memory", "warning", f"{detail}; what is free is not known here", numbers)
    return Check("memory", "ok" if need.fits else "failed", detail, numbers)


def _step(start: Start, components: Components, batch: GlobalBatch, runtime: Runtime) -> Check:
    """Take two real steps, uncompiled, on a slice of `batch`; the components cannot train afterwards."""
    state, most = components.state, STEP_TOKENS
    if runtime.device.type == "cpu":
        most = min(most, max(1, int(_CPU_FLOPS / flops_per_token(start.config.model))))
    try:
        part = _cut(batch, most=most, runtime=runtime)
        for _ in range(2):  # the first makes memory and kernels ready
            began = time.monotonic()
            with torch.compiler.set_stance("force_eager"):
                _, stats = launch_step(components, state.step + 1, part, state)
            runtime.synchronize()
    except torch.OutOfMemoryError as error:
        if runtime.world_size > 1:  # the others wait in a collective: the launcher must end them
            raise
        return Check("step", "failed", str(error).splitlines()[0])
    seconds = runtime.gather(time.monotonic() - began)
    tokens = part.micro_batches[0].tokens.numel()
    share = start.plan.batch.tokens / runtime.world_size
    full = max(seconds) * share / tokens
    numbers = {"tokens": tokens, "seconds": seconds, "step_seconds": full}
    detail = (
        f"forward, backward and update of {tokens:,} tokens a rank in {max(seconds):.2f} s "
        f"(uncompiled), loss {stats.loss:.3f}: about {_seconds(full)} a step"
    )
    if not (math.isfinite(stats.loss) and math.isfinite(stats.grad_norm)):
        return Check("step", "failed", f"{detail}; loss or gradient is not finite", numbers)
    return Check("step", "ok", detail, numbers)


def _seconds(number: float) -> str:
    return f"{number:.2f} s" if number < 60 else fmt.duration(number)


def _network(start: Start, runtime: Runtime) -> Check:
    gradient_bytes = 4 * start.plan.parameters
    num_bytes = min(gradient_bytes, NETWORK_BYTES)
    medians = []  # as this process sees them
    for elements, rounds in ((1, 50), (num_bytes // 4, 3)):
        values = torch.zeros(elements, device=runtime.device)
        times = []
        for _ in range(rounds + 1):
            runtime.synchronize()
            began = time.monotonic()
            dist.all_reduce(values)
            runtime.synchronize()
            times.append(time.monotonic() - began)
        medians.append(statistics.median(times[1:]))  # the first one connects
    latencies, times = map(list, zip(*runtime.gather(medians), strict=True))
    rates = [num_bytes / seconds for seconds in times]
    gradient = gradient_bytes / min(rates)
    slowest = rates.index(min(rates))
    detail = (
        f"all-reduce of a number {max(latencies) * 1e3:.2f} ms, of {fmt.num_bytes(num_bytes)} "
        f"{fmt.num_bytes(min(rates))}/s (rank {slowest}, the slowest): {gradient:.2f} s for a step's gradient"
    )
    numbers = {"latency_seconds": latencies, "bytes_per_second": rates}
    uneven = max(rates) > _UNEVEN * min(rates)
    if uneven:
        detail += f"; the fastest has {fmt.num_bytes(max(rates))}/s"
    return Check("network", "warning" if uneven else "ok", detail, numbers)


def _clock(start: Start, runtime: Runtime) -> Check:
    """Compare the machines' clocks with each other and with the newest checkpoint's."""
    runtime.gather(None)  # all at once
    clocks = runtime.gather(time.time())
    apart = max(clocks) - min(clocks)
    moment = fmt.moment(clocks[0])
    numbers = {"seconds_apart": apart}
    if apart > _CLOCKS_APART:
        text = f"the ranks' clocks are {apart:.0f} s apart; logs of machines would not match"
    elif start.checkpoint is not None and start.checkpoint.created > clocks[0]:
        text = f"it is {moment} here, but the checkpoint was saved later; set the clock"
    else:
        return Check("clock", "ok", f"{moment}, ranks {apart:.2f} s apart", numbers)
    return Check("clock", "warning", text, numbers)


def _grace(start: Start, done: dict[str, dict[str, Any]]) -> Check:
    """Compare a clean stop, one step and one save, with the launcher's patience."""
    save = start.last_save_seconds or done["disk"].get("save_seconds", 0.0)
    needed = done["step"]["step_seconds"] + save
    grace = launcher_grace_seconds(os.environ)
    numbers = {"stop_seconds": needed, "grace_seconds": grace}
    detail = f"a clean stop takes about {_seconds(needed)}"
    if grace is not None and needed > grace:
        detail += f", torchrun kills after {grace:.0f} s; the command below makes it wait longer"
        return Check("grace", "warning", detail, numbers)
    patience = "no launcher would kill before" if grace is None else f"torchrun waits {grace:.0f} s"
    return Check("grace", "ok", f"{detail}; {patience}", numbers)


def command_to_start(checks: list[Check]) -> str:
    """Return the command line that was typed, without what asked for these checks, and with patience if needed."""
    name, flags = Path(sys.argv[0]).stem, sys.argv[1:]
    if name in ("gpt2lab", "__main__"):
        name, flags = flags[0], flags[1:]
    verb = "finetune" if name == "finetune" else "train"
    launcher, program = [], paths.command_words(verb)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        world = os.environ.get("LOCAL_WORLD_SIZE", "1")
        launcher = [paths.program("torchrun"), f"--nproc_per_node={world}"]
        program = [paths.display_path(Path(word)) for word in paths.trainer(verb)]
        typed = Path(f"/proc/{os.getppid()}/cmdline")
        words = typed.read_text().split("\0") if typed.exists() else []
        starts = [i for i, word in enumerate(words) if word in ("-m", sys.argv[0])]
        starts = [i for i in starts if words[i] != "-m" or words[i + 1].startswith("gpt2lab")]
        if LAUNCHED in os.environ:
            launcher = [paths.program("python")]
        elif starts:
            launcher = words[: starts[0]]
    for grace in (one for one in checks if (one.name, one.result) == ("grace", "warning")):
        patience = str(2 * math.ceil(grace.numbers["stop_seconds"]))
        if LAUNCHED in os.environ:
            launcher = ["env", f"{GRACE}={patience}", *launcher]
        else:
            launcher += ["--shutdown-timeout", patience]
    flags = [flag for flag in flags if flag not in ("--preflight", "--json")]
    return fmt.command_line([*launcher, *program, *flags])


def try_disk(folder: Path, num_bytes: int) -> tuple[int, float, float, bool]:
    """Write random bytes to a file in `folder`, read them back, and remove it.

    Returns: bytes written; seconds to hash, write and flush them, as in a save; seconds to read and hash them, from the
    disk where the system forgets on request; whether they came back.

    Raises: OSError if that cannot be done.
    """
    block = os.urandom(min(_BLOCK, num_bytes))
    digest, written, began = hashlib.sha256(), 0, time.monotonic()
    with staged_file(folder / "gpt2lab-trial") as path:
        with open(path, "wb") as file:
            while written < num_bytes and time.monotonic() - began < _DISK_SECONDS:
                part = block[: num_bytes - written]
                digest.update(part)
                written += file.write(part)
            file.flush()
            os.fsync(file.fileno())
            write_seconds = time.monotonic() - began
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.monotonic()
        is_intact = sha256_of(path) == digest.hexdigest()
    return written, write_seconds, time.monotonic() - began, is_intact


def _cut(batch: GlobalBatch, *, most: int, runtime: Runtime) -> GlobalBatch:
    """Return a batch of one micro-batch a process with at most `most` tokens, shorter windows if one is too long."""
    micro = batch.micro_batches[0]
    rows, length = micro.tokens.shape
    length = min(length, most)
    rows = min(rows, most // length)
    part = dataclasses.replace(
        micro,
        tokens=micro.tokens[:rows, :length].contiguous(),
        targets=micro.targets[:rows, :length].contiguous(),
        is_last=True,
    )
    targets = runtime.sum_over_ranks((part.targets >= 0).sum())
    return dataclasses.replace(batch, micro_batches=(part,), num_targets=max(1, int(targets)))
