"""The predictions of docs/gpu_results.md by their ids, what a card says of them, and its page in Markdown. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.sizes import SIZES, VARIANTS

_FILE = Path(__file__).with_name("predictions.json")
PREDICTED_FOR = "H200"
Stages = dict[str, dict[str, Any]]


def predictions() -> list[dict[str, Any]]:
    """Return them in the order of the page: id, what, unit, low, high, stage (None: no stage measures it)."""
    found: list[dict[str, Any]] = json.loads(_FILE.read_text())
    return found


def table_of_predictions(group: str) -> str:
    """Return the page's table of the ids that begin with `group`; with the stages, if there are several."""
    found = [one for one in predictions() if one["id"].partition(".")[0] == group]
    stages = {one["stage"] for one in found}
    rows = [["id", "what", "predicted", "stage"], ["---"] * 4]
    rows += [[f"`{one['id']}`", one["what"], _range(one), one["stage"] or "none"] for one in found]
    return "\n".join(f"| {' | '.join(row[: 3 + (len(stages) > 1)])} |" for row in rows)


def _range(one: dict[str, Any]) -> str:
    return f"{one['low']:,} to {one['high']:,} {one['unit']}"


def verdicts(stages: Stages, *, card: str) -> dict[str, dict[str, Any]]:
    """Compare every prediction with what the stages found: inside, below, above, or why there is no answer.

    What is predicted for one card says nothing of another, except where it is a ratio.
    """
    found, answers = _measured(stages), {}
    for one in predictions():
        value = found.get(one["id"])
        verdict = "inside"
        if value is None:
            verdict = "not measured"
        elif (named := one.get("card", PREDICTED_FOR)) != "any" and not _is_sxm(named, card):
            verdict = f"predicted for an {named}"
        elif not one["low"] <= value <= one["high"]:
            verdict = "below" if value < one["low"] else "above"
        kept = {name: one[name] for name in ("low", "high", "unit")}
        answers[one["id"]] = kept | {"found": value, "verdict": verdict}
    return answers


def _is_sxm(named: str, card: str) -> bool:
    """Tell whether a card is the named one and not a slower variant of it, or another that contains its name."""
    words = set(card.split())
    return named in words and words.isdisjoint(("NVL", "PCIe"))


def _measured(stages: Stages) -> dict[str, float | None]:
    """Return what was measured by the ids of predictions, in their units."""
    speed, sweep, planner = (stages.get(name, {}) for name in ("speed", "sweep", "planner"))
    best = speed.get("ceilings", {})
    kernels = best.get("attention_by_kernel")
    if not kernels:  # of a CPU nothing was predicted
        return {}
    rows = {row["name"]: row for row in speed.get("trainers", [])}
    ours = rows.get("ours", {})
    has_kernel = ours.get("loss_kernel") == "triton"
    firsts = ours.get("first_step_seconds", [])
    found = {
        "ceilings.matmul": _scaled(best.get("matmul_bf16"), 1e12),
        "ceilings.copy": _scaled(best["copy"], 1e12),
        "ceilings.attention": _scaled(kernels.get("cudnn"), 1e12),
        "ceilings.flash": _scaled(kernels.get("flash"), kernels.get("cudnn")),
        "speed.gpt2": ours.get("tokens_per_second"),
        "speed.gpt2_later": ours.get("tokens_per_second"),
        "speed.gpt2_h100": ours.get("tokens_per_second"),
        "speed.gpt2_kernel": ours.get("tokens_per_second") if has_kernel else None,
        "speed.cross_entropy": _milliseconds(speed, "cross-entropy") if has_kernel else None,
        "speed.nanogpt_h100": rows.get("nanogpt", {}).get("tokens_per_second"),
        "speed.nanogpt": rows.get("nanogpt", {}).get("tokens_per_second"),
        "speed.cold_start": planner.get("first_step_seconds"),
        # Ours ran first and last: the second time from the cache.
        "speed.warm_start": firsts[-1] if len(firsts) > 1 else None,
    }
    return found | {f"sweep.{name}": percent for name, percent in changes(sweep).items()}


def changes(sweep: dict[str, Any]) -> dict[str, float]:
    """Return by how many percent each variant's tokens/s differ from the default's in the same stage."""
    rates = {row["name"]: row["tokens_per_second"] for row in sweep.get("trainers", [])}
    return {n: 100 * (rates[n] / rates["ours"] - 1) for n in VARIANTS if {n, "ours"} <= set(rates)}


def _milliseconds(speed: dict[str, Any], group: str) -> float | None:
    """Return what one kind of work takes of a micro-batch of ours, where a step was split by kinds."""
    split = speed.get("profile", {}).get("ours")
    if split is None:
        return None
    accumulation = speed["tokens_per_step"] / SIZES["gpt2"].context_length / speed["micro_batch"]
    return float(1000 * split["seconds"][group] / accumulation)


def _scaled(value: float | None, unit: float | None) -> float | None:
    return value / unit if value is not None and unit else None


def page(card: dict[str, Any]) -> str:
    """Return a block of Markdown for docs/gpu_results.md."""
    stages: Stages = card["stages"]
    versions = ", ".join(f"{name} {value}" for name, value in card["versions"].items() if value)
    lines = [f"## {card['card']}", "", f"Commit {card['commit']}; {versions}.", ""]
    lines += ["| stage | verdict | seconds | |", "| --- | --- | --- | --- |"]
    for name, one in stages.items():
        why = "; ".join(one["problems"]).replace("|", "/")
        lines.append(f"| {name} | {one['verdict']} | {one['seconds']:.0f} | {why} |")
    for name in ("speed", "sweep"):
        rows = stages.get(name, {}).get("trainers", [])
        if rows:
            lines += ["", f"| {name} | tokens/s | MFU | MHz, W, C |", "| --- | --- | --- | --- |"]
        lines += [
            f"| {r['name']} | {r['tokens_per_second']:,.0f} | {_percent(r['mfu'])} | {_weather(r)} |"
            for r in rows
        ]
    forecasts = stages.get("planner", {}).get("forecasts", [])
    if forecasts:
        lines += [
            "",
            "| planner | predicted | interval | actual | |",
            "| --- | --- | --- | --- | --- |",
        ]
    for one in forecasts:
        cells = [f"{one[key]:,.4g}" for key in ("value", "low", "high", "actual")]
        inside = "inside" if one["inside"] else "outside"
        row = [one["what"], cells[0], f"{cells[1]} to {cells[2]}", cells[3], inside]
        lines.append(f"| {' | '.join(row)} |")
    judged = {k: v for k, v in card["predictions"].items() if v["found"] is not None}
    if judged:
        lines += ["", "| prediction | predicted | found | |", "| --- | --- | --- | --- |"]
    for name, one in judged.items():
        lines.append(f"| `{name}` | {_range(one)} | {one['found']:,.4g} | {one['verdict']} |")
    return "\n".join(lines) + "\n"


def _percent(share: float | None) -> str:
    return "n/a" if share is None else f"{share:.1%}"


def _weather(row: dict[str, Any]) -> str:
    seen = row["gpu"][-1:]
    return "{sm_mhz:.0f}, {watts:.0f}, {celsius:.0f}".format(**seen[0]) if seen else "n/a"
