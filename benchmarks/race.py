"""Trainers side by side: ours first and last in every round, so that a drifting machine is seen. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.contestants import Contestant
from benchmarks.running import Run
from gpt2lab import fmt


@dataclass
class Entry:
    """A contestant and what its processes showed so far."""

    contestant: Contestant
    runs: list[Run]
    live_bytes: int | None = None
    kernels: dict[str, str | None] = field(default_factory=dict)  # ours on a GPU: those that ran
    forecast: dict[str, Any] | None = None  # ours: contestants.forecast_of its last process
    failed: str | None = None  # why it has no runs

    @property
    def name(self) -> str:
        """The contestant's."""
        return self.contestant.name

    @property
    def seconds(self) -> list[float]:
        """Every timed step of all rounds."""
        return [step.seconds for run in self.runs for step in run.timed]

    @property
    def median(self) -> float:
        """Seconds of the middle step."""
        return statistics.median(self.seconds)

    @property
    def data_seconds(self) -> float | None:
        """Seconds that the middle step waited for its batch, if the trainer tells."""
        waits = [step.data_seconds for run in self.runs for step in run.timed]
        told = [seconds for seconds in waits if seconds is not None]
        return statistics.median(told) if told else None

    @property
    def rate(self) -> float:
        """Tokens/s of the middle step."""
        return self.contestant.size.tokens / self.median

    @property
    def spread(self) -> float:
        """How far the medians of single processes lie apart, as a fraction; 0 of one process."""
        medians = [statistics.median(step.seconds for step in run.timed) for run in self.runs]
        return max(medians) / min(medians) - 1


def order(names: Sequence[str], rounds: int) -> list[str]:
    """Return who runs when: A B C ... A, in every second round backwards in between; the first of `names` is A."""
    first, others = names[0], list(names[1:])
    turns = []
    for turn in range(rounds):
        turns += [first, *(others if turn % 2 == 0 else others[::-1])]
    return [*turns, first]


def ratio(ours: Entry, other: Entry) -> tuple[float | None, str]:
    """Return tokens/s of ours over the other's, and how to print it; None where noise could have made it."""
    value = ours.rate / other.rate
    difference, spread = abs(value - 1), max(ours.spread, other.spread)
    if spread >= difference:
        return None, f"not resolved: rounds differ by {spread:.0%}"
    return value, f"{value:.2f}"


def summarize(
    entries: Sequence[Entry], *, matmul: dict[str, float | None], peak: dict[str, float | None]
) -> list[dict[str, Any]]:
    """Return each contestant's numbers; the first is ours. `matmul` and `peak`: FLOP/s by precision, of the best
    matrix product seen and of the device itself where it is known: MFU is the share of that.

    `ours_is_times` holds how many times as fast each of our rows is.
    """
    ours = [entry for entry in entries if entry.name.startswith("ours")]
    rows = []
    for entry in entries:
        size, seconds = entry.contestant.size, sorted(entry.seconds)
        flops = entry.rate * size.flops_per_token
        precision = entry.contestant.precision
        device_peak, best_matmul = peak[precision], matmul[precision]
        ratios = {mine.name: ratio(mine, entry) for mine in ours if mine is not entry}
        firsts = [run.steps[0] for run in entry.runs]
        rows.append(
            {
                "name": entry.name,
                "tokens_per_second": entry.rate,
                "tokens_per_second_p10": size.tokens / quantile(seconds, 0.9),
                "tokens_per_second_p90": size.tokens / quantile(seconds, 0.1),
                "step_seconds": entry.median,
                "processes": len(entry.runs),
                "steps_timed": len(seconds),
                "spread": entry.spread,
                "ours_is_times": {name: value for name, (value, _) in ratios.items()},
                "ratio_texts": {name: text for name, (_, text) in ratios.items()},
                "flops": flops,
                "share_of_matmul": flops / best_matmul if best_matmul else None,
                "mfu": flops / device_peak if device_peak else None,
                "loss_first": entry.runs[0].steps[0].loss,
                "losses": [step.loss for step in entry.runs[0].steps],
                "loss_last": entry.runs[0].steps[-1].loss,
                "start_seconds": statistics.median(run.start_seconds for run in entry.runs),
                "first_step_seconds": [step.seconds for step in firsts],
                "peak_rss": max(run.peak_rss for run in entry.runs),
                "peak_live_bytes": entry.live_bytes,
                "attention": entry.kernels.get("attention"),
                "loss_kernel": entry.kernels.get("loss_kernel"),
                "forecast": entry.forecast,
                "gpu": [asdict(run.gpu) for run in entry.runs if run.gpu],
                "others": max((run.others or 0.0) for run in entry.runs),
            }
        )
    return rows


def describe(rows: Sequence[dict[str, Any]], device: str) -> str:
    """Write the table; a ratio holds for the device that its corner names, at the share of its best product."""
    ours = [row["name"] for row in rows if row["name"].startswith("ours")]
    on_gpu, cells = any(row["gpu"] for row in rows), []
    for row in rows:
        cells.append(
            [
                row["name"],
                f"{row['tokens_per_second']:,.0f}",
                f"{row['tokens_per_second_p10']:,.0f}-{row['tokens_per_second_p90']:,.0f}",
                *[row["ratio_texts"].get(name, "1") for name in ours],
                "n/a" if row["share_of_matmul"] is None else f"{row['share_of_matmul']:.0%}",
                f"{row['flops'] / 1e9:,.0f}",
                "n/a" if row["mfu"] is None else f"{row['mfu']:.1%}",
                f"{row['loss_first']:.3f} > {row['loss_last']:.3f}",
                f"{row['start_seconds']:.1f}",
                f"{row['first_step_seconds'][0]:.1f}",
                fmt.num_bytes(row["peak_rss"]),
                "-" if row["peak_live_bytes"] is None else fmt.num_bytes(row["peak_live_bytes"]),
                f"{row['others']:.0%}",
                *([_weather(row["gpu"])] if on_gpu else []),
            ]
        )
    header = [device, "tokens/s", "p10-p90", *[f"{name} is x" for name in ours]]
    header += [
        "of matmul",
        "GFLOP/s",
        "MFU",
        "loss",
        "start s",
        "step 1 s",
        "RSS",
        "live",
        "others",
        *(["SM MHz, W, C"] if on_gpu else []),
    ]
    return fmt.table(header, cells)


def _weather(seen: Sequence[dict[str, float]]) -> str:
    """Write clock, power and temperature of a contestant's first process."""
    return "{sm_mhz:.0f}, {watts:.0f}, {celsius:.0f}".format(**seen[0]) if seen else "n/a"


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the sorted values lie, linear between neighbours."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
