"""The comparison of trainers: ceilings, then everyone's step in turns, then memory and profile."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpt2lab.bench import ceilings, operator_groups, race
from gpt2lab.bench.contestants import Contestant, Device, Place, ours, peer
from gpt2lab.bench.running import measure_inside, run
from gpt2lab.bench.shapes import SIZES, SizeName
from gpt2lab.bench.token_stream import (
    markov_tokens,
    text_tokens,
    write_formats,
    write_tiktoken_cache,
)
from gpt2lab.hardware import peak_flops

_CPU_TOKENS, _GPU_TOKENS = 1_000_000, 60_000_000


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


def compare(plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure every model in turn; `say` hears each table as it is done.

    Raises: ConfigError, CheckError.
    """
    return {name: _compare_at(name, plan, say) for name in plan.models}


def _compare_at(name: SizeName, plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    size = SIZES[name]
    with tempfile.TemporaryDirectory(prefix="gpt2lab-benchmark-") as scratch:
        folder = Path(scratch)
        contestants = _contestants(plan, name, folder)  # a peer that has changed is refused at once
        tokens = (
            text_tokens(_CPU_TOKENS, vocab_size=size.vocab_size)
            if plan.device == "cpu"
            else markov_tokens(_GPU_TOKENS, vocab_size=size.vocab_size)
        )
        write_formats(tokens, folder / "data")
        write_tiktoken_cache(folder / "tiktoken")
        best = ceilings.measure_ceilings(plan.device, size)
        say(
            f"\n{name}: {size.tokens:,} tokens a step, {size.flops_per_token / 1e6:,.1f} MFLOP/token"
        )
        say(ceilings.describe(best))
        entries = {c.name: race.Entry(c, []) for c in contestants}
        for turn in race.order(list(entries), plan.rounds):
            entry = entries[turn]
            _empty(entry.contestant)
            found = run(
                entry.contestant,
                warmup=plan.warmup,
                steps=plan.steps,
                limit_seconds=plan.limit_seconds,
            )
            entry.runs.append(found)
            rate = size.tokens / race.Entry(entry.contestant, [found]).median
            say(f"  {turn}: {rate:,.0f} tokens/s")
        if plan.memory:
            for entry in entries.values():
                _empty(entry.contestant)
                inside = measure_inside(
                    entry.contestant, "memory", limit_seconds=plan.limit_seconds
                )
                entry.live_bytes = inside["peak_live_bytes"]
        rows = race.summarize(
            list(entries.values()),
            matmul={"fp32": best.matmul_fp32, "bf16": best.matmul_bf16},
            peak={
                "fp32": best.register_fp32,
                "bf16": best.register_bf16 or peak_flops(best.device_name),
            },
        )
        say(race.describe(rows))
        result: dict[str, Any] = {
            "tokens_per_step": size.tokens,
            "flops_per_token": size.flops_per_token,
        }
        result |= {"ceilings": best.as_json(), "trainers": rows}
        if plan.profile:
            result["profile"] = _profiles(list(entries.values()), plan, say)
    return result


def _contestants(plan: Plan, name: SizeName, folder: Path) -> list[Contestant]:
    size = SIZES[name]

    def place(label: str) -> Place:
        own = folder / label
        own.mkdir()
        return Place(own, folder / "data", folder / "tiktoken", plan.device)

    found = [ours(place(f"ours_{dtype}"), size, dtype=dtype) for dtype in plan.dtypes]
    return found + [peer(known, path, place(known), size) for known, path in plan.peers]


def _empty(contestant: Contestant) -> None:
    """Remove what an earlier process of it reported."""
    contestant.place.output.unlink(missing_ok=True)
    metrics = contestant.place.folder / "run" / "metrics.jsonl"
    if metrics.exists():
        shutil.rmtree(metrics.parent)


def _profiles(
    entries: Sequence[race.Entry], plan: Plan, say: Callable[[str], None]
) -> dict[str, Any]:
    found = {}
    for entry in entries:
        _empty(entry.contestant)
        inside = measure_inside(entry.contestant, "profile", limit_seconds=plan.limit_seconds)
        seconds = operator_groups.split(
            inside["operators"], inside["step_seconds"], entry.data_seconds
        )
        found[entry.name] = {"seconds": seconds, "operators": inside["operators"]}
        say(operator_groups.describe(entry.name, seconds))
        if entry is entries[0]:
            say(operator_groups.longest(inside["operators"]))
    return found
