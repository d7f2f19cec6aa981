"""Compare trainers: ceilings, then a step of each in turns, then peak memory, then a step split by operator."""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks import ceilings, race
from benchmarks.contestants import (
    Contestant,
    Device,
    Place,
    describe_forecast,
    forecast_of,
    kernels_of,
    ours,
    peer,
)
from benchmarks.running import measure_inside, run
from benchmarks.sizes import (
    SIZES,
    VARIANTS,
    Size,
    SizeName,
    VariantName,
    fitted,
    halved,
    largest_micro_batch,
)
from benchmarks.token_stream import markov_tokens, text_tokens, write_formats, write_tiktoken_cache
from gpt2lab import fmt
from gpt2lab.errors import CheckError
from gpt2lab.planner.hardware import peak_flops
from gpt2lab.planner.machine import detect_hardware

_CPU_TOKENS = 1_000_000
_OUT_OF_MEMORY = re.compile("out of memory", re.IGNORECASE)
GROUPS = ("matmul", "attention", "cross-entropy", "elementwise", "optimizer", "communication")

# First match wins. ATen's names, Inductor's (cpp_fused_..., triton_...), and cuBLAS's, cuDNN's and NCCL's kernels.
_PATTERNS = (
    ("communication", r"nccl|gloo|c10d|all_reduce|allreduce|reduce_scatter|all_gather"),
    ("optimizer", r"adam|Optimizer\.|multi_tensor|foreach|linalg_vector_norm|clip_grad|lamb|muon"),
    (
        "cross-entropy",
        r"log_softmax|nll_loss|cross_entropy|logsumexp|fused_.*_gather|softmax_online",
    ),
    (
        "attention",
        r"scaled_dot_product|flash|fmha|sdpa|attention|\bbmm\b|baddbmm|aten::_softmax|_softmax_backward_data"
        r"|fused_.*_softmax",
    ),
    ("matmul", r"\bmm\b|addmm|linear|matmul|gemm|cutlass|nvjet|xmma|cublas|sgemm"),
)
_COMPILED = tuple((group, re.compile(pattern, re.IGNORECASE)) for group, pattern in _PATTERNS)


@dataclass(frozen=True)
class Plan:
    """What is asked for."""

    models: tuple[SizeName, ...]
    peers: tuple[tuple[str, Path | None], ...]
    dtypes: tuple[Literal["auto", "fp32", "bf16"], ...]
    device: Device
    rounds: int
    warmup: int
    steps: int
    limit_seconds: float
    memory: bool
    profile: bool
    variants: tuple[VariantName, ...] = ()
    total_seconds: float | None = None


def check_all_ran(found: dict[str, Any]) -> None:
    """Reject a comparison in which a trainer failed; its table has been printed, and the others' numbers stand.

    Raises: CheckError.
    """
    failed = [f"{name}: {text}" for size in found.values() for name, text in size["failed"].items()]
    if failed:
        raise CheckError("; ".join(failed))


class _Clock:
    """What is left of the time that the whole measurement may take."""

    def __init__(self, seconds: float | None) -> None:
        self._end = math.inf if seconds is None else time.monotonic() + seconds
        self._longest = 0.0

    @property
    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()

    def allows(self, processes: int) -> bool:
        """Tell whether so many more would end in time, if none takes longer than the longest so far."""
        return self.left >= processes * self._longest

    @contextlib.contextmanager
    def process(self) -> Iterator[None]:
        """Around one process."""
        began = time.monotonic()
        yield
        self._longest = max(self._longest, time.monotonic() - began)


def compare(plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure every model in turn; `say` hears each table as it is done.

    What fails is said and left out, except ours: without it there is nothing to compare with.

    Raises: ConfigError, CheckError.
    """
    clock = _Clock(plan.total_seconds)
    return {name: _compare_fitted(name, plan, clock, say) for name in plan.models}


def _compare_fitted(
    name: SizeName, plan: Plan, clock: _Clock, say: Callable[[str], None]
) -> dict[str, Any]:
    """Compare at the largest micro-batch that fits by the planner; if it does not, at half of that."""
    size, free = SIZES[name], None
    if plan.device == "cuda":
        found = detect_hardware()
        free = found.free_memory(1) if found.gpus else None  # else that of the CPU
        size = fitted(size, free)
    largest = largest_micro_batch(size, free)
    try:
        result = _compare_at(name, size, plan, clock, say, largest=largest)
        return result | {"micro_batch": size.mini_batch_size, "halved": False}
    except CheckError as error:
        if (
            plan.device == "cpu"
            or size.mini_batch_size < 2
            or not _OUT_OF_MEMORY.search(str(error))
        ):
            raise
        say(f"  micro-batch {size.mini_batch_size} does not fit, so half of it: {error}")
    size = halved(size)
    result = _compare_at(name, size, plan, clock, say, largest=size.mini_batch_size)
    return result | {"micro_batch": size.mini_batch_size, "halved": True}


def _compare_at(
    name: SizeName,
    size: Size,
    plan: Plan,
    clock: _Clock,
    say: Callable[[str], None],
    *,
    largest: int | None,
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="gpt2lab-benchmark-") as scratch:
        folder = Path(scratch)
        contestants = _contestants(plan, size, folder)  # a peer that has changed is refused at once
        fits = fitting(contestants, largest)
        too_large = [c.name for c in contestants if c not in fits]
        tokens = (
            text_tokens(_CPU_TOKENS, vocab_size=size.vocab_size)
            if plan.device == "cpu"
            else markov_tokens(_tokens_for(plan, size), vocab_size=size.vocab_size)
        )
        write_formats(tokens, folder / "data")
        write_tiktoken_cache(folder / "tiktoken")
        best = ceilings.measure_ceilings(plan.device, size)
        say(
            f"\n{name}: {size.tokens:,} tokens a step, {size.flops_per_token / 1e6:,.1f} MFLOP/token"
        )
        say(ceilings.describe(best))
        for left_out in too_large:
            say(f"  {left_out}: left out, the planner says that its micro-batch does not fit")
        entries = [race.Entry(c, []) for c in fits]
        _race(entries, plan, clock, say)
        ran = [entry for entry in entries if entry.runs]
        inside = _look_inside(ran, plan, clock, say)
        for entry in ran:
            entry.live_bytes = inside.get(entry.name, {}).get("peak_live_bytes")
        rows = race.summarize(
            ran,
            matmul={"fp32": best.matmul_fp32, "bf16": best.matmul_bf16},
            peak={
                "fp32": _peak(best.register_fp32, best.matmul_fp32),
                "bf16": _peak(best.register_bf16, best.matmul_bf16) or peak_flops(best.device_name),
            },
        )
        say(race.describe(rows, best.device_name))
        result: dict[str, Any] = {
            "tokens_per_step": size.tokens,
            "flops_per_token": size.flops_per_token,
            "ceilings": best.as_json(),
            "trainers": rows,
            "failed": {entry.name: entry.failed for entry in entries if entry.failed},
            "left_out": [*too_large, *(e.name for e in entries if not (e.runs or e.failed))],
        }
        if plan.profile:
            result["profile"] = _profiles(ran, inside, say)
    return result


def _tokens_for(plan: Plan, size: Size) -> int:
    """Return as many as every process reads, and some to choose from."""
    return max(_CPU_TOKENS, 2 * (plan.warmup + plan.steps) * size.tokens)


def _race(entries: list[race.Entry], plan: Plan, clock: _Clock, say: Callable[[str], None]) -> None:
    """Let everyone take its turns: ours first and last, whatever the time allows in between."""
    by_name = {entry.name: entry for entry in entries}
    turns = race.order(list(by_name), plan.rounds)
    for number, turn in enumerate(turns):
        entry, is_last = by_name[turn], number == len(turns) - 1
        if entry.failed:
            continue
        if not is_last and not clock.allows(2):  # it, and ours at the end
            say(f"  {turn}: left out, {clock.left:.0f} s are left of --total_seconds")
            continue
        _empty(entry.contestant)
        limit = min(plan.limit_seconds, clock.left)
        try:
            with clock.process():
                found = run(
                    entry.contestant, warmup=plan.warmup, steps=plan.steps, limit_seconds=limit
                )
        except CheckError as error:
            if entry is entries[0] and not entry.runs:  # else keep what was measured
                raise
            entry.failed = str(error)
            say(f"  {turn}: failed: {error}")
            continue
        entry.runs.append(found)
        entry.kernels = kernels_of(entry.contestant)
        rate = entry.contestant.size.tokens / race.Entry(entry.contestant, [found]).median
        ran = "".join(f", {what} {kernel}" for what, kernel in entry.kernels.items() if kernel)
        entry.forecast = forecast_of(entry.contestant)
        predicted = f"; {describe_forecast(entry.forecast)}" if entry.forecast else ""
        say(f"  {turn}: {rate:,.0f} tokens/s{ran}{predicted}")


def _look_inside(
    entries: Sequence[race.Entry], plan: Plan, clock: _Clock, say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Look inside one more process of each contestant; left out is what failed or had no time."""
    found = {}
    what = "+".join(name for name in ("memory", "profile") if getattr(plan, name))
    for entry in entries if what else ():
        if not clock.allows(1):
            left = f"{clock.left:.0f} s are left of --total_seconds"
            say(f"  {what} of {entry.name}: left out, {left}")
            continue
        _empty(entry.contestant)
        limit = min(plan.limit_seconds, clock.left)
        try:
            found[entry.name] = measure_inside(entry.contestant, what, limit_seconds=limit)
        except CheckError as error:
            if clock.left == math.inf:
                raise
            say(f"  {what} of {entry.name}: failed: {error}")
    return found


def _peak(registers: float | None, matmul: float | None) -> float | None:
    """Return the higher of two rates: beside a busy program that of the registers may be measured too low."""
    return registers and max(registers, matmul or 0.0)


def _contestants(plan: Plan, size: Size, folder: Path) -> list[Contestant]:
    def place(label: str) -> Place:
        own = folder / label
        own.mkdir()
        return Place(own, folder / "data", folder / "tiktoken", plan.device)

    found = [ours(place(f"ours_{dtype}"), size, dtype=dtype) for dtype in plan.dtypes]
    found += [peer(known, path, place(known), size) for known, path in plan.peers]
    return found + [  # last: they are left out first where time is short
        ours(place(f"variant_{label}"), size, dtype="auto", variant=(label, VARIANTS[label]))
        for label in plan.variants
        if plan.device == "cpu" or size.mini_batch_size * VARIANTS[label].micro_batch >= 1
    ]


def fitting(contestants: Sequence[Contestant], largest: int | None) -> list[Contestant]:
    """Return those whose micro-batch is at most `largest`, the largest that fits; None: unknown, so all."""
    return [c for c in contestants if largest is None or c.size.mini_batch_size <= largest]


def _empty(contestant: Contestant) -> None:
    """Remove what an earlier process of it reported."""
    contestant.place.output.unlink(missing_ok=True)
    metrics = contestant.place.folder / "run" / "metrics.jsonl"
    if metrics.exists():
        shutil.rmtree(metrics.parent)


def _profiles(
    entries: Sequence[race.Entry], inside: Mapping[str, dict[str, Any]], say: Callable[[str], None]
) -> dict[str, Any]:
    found = {}
    for entry in entries:
        if entry.name not in inside:
            continue
        seen = inside[entry.name]
        seconds = split_operators(seen["operators"], seen["step_seconds"], entry.data_seconds)
        found[entry.name] = {"seconds": seconds, "operators": seen["operators"]}
        say(describe_split(entry.name, seconds))
        if entry is entries[0]:
            say(longest_operators(seen["operators"]))
    return found


def group_of(operator: str) -> str:
    """Return the group of an operator or kernel; whatever streams through memory is elementwise."""
    for group, pattern in _COMPILED:
        if pattern.search(operator):
            return group
    return "elementwise"


def split_operators(
    operators: Mapping[str, float], step_seconds: float, data_seconds: float | None
) -> dict[str, float]:
    """Return seconds a step by group, and `idle`: what no operator accounts for.

    `data_seconds`: how long a step waits for its batch, during which it runs no operator; None: not known, so that
    the wait is in `idle` and a batch's making in `elementwise`.
    """
    seconds = dict.fromkeys(GROUPS, 0.0)
    for name, spent in operators.items():
        seconds[group_of(name)] += spent
    if data_seconds is not None:
        seconds["data"] = data_seconds
    seconds["idle"] = max(0.0, step_seconds - sum(seconds.values()))
    return seconds


def describe_split(name: str, seconds: Mapping[str, float]) -> str:
    """Write one line: milliseconds and shares."""
    total = sum(seconds.values())
    parts = [
        f"{group} {1000 * spent:,.1f} ms ({spent / total:.0%})" for group, spent in seconds.items()
    ]
    return f"{name}: {1000 * total:,.1f} ms = " + ", ".join(parts)


def longest_operators(operators: Mapping[str, float], count: int = 12) -> str:
    """Write the operators that take longest."""
    ordered = sorted(operators.items(), key=lambda item: -item[1])[:count]
    rows = [[name[:100], group_of(name), f"{1000 * spent:.2f}"] for name, spent in ordered]
    return fmt.table(("operator", "group", "ms"), rows)
