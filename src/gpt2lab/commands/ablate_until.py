"""`ablate --until_decided`: add seeds until each setting is told from the baseline, or the seeds are spent. No torch.

Seeds are added one by one; with --jobs as many at once as there are places for. That changes no decision: a confidence
sequence holds after every seed, so one may look at any time, and the first decision along the seeds counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from gpt2lab.commands.ablation_table import Run, read_curve
from gpt2lab.errors import ConfigError
from gpt2lab.evaluation.uncertainty import ALPHA
from gpt2lab.lab.seeds import decide, first_bounded
from gpt2lab.runs import history
from gpt2lab.runs.console import say

MAX_SEEDS = 20


def all_seeds(seeds: Sequence[int], max_seeds: int, *, settings: int) -> list[int]:
    """Return every seed that the budget allows: those given, then the numbers after the largest of them.

    Raises: ConfigError if the budget cannot decide anything.
    """
    if max_seeds < len(seeds):
        raise ConfigError(f"--max_seeds {max_seeds} is below the {len(seeds)} seeds of --seeds")
    if max_seeds < (fewest := first_bounded(ALPHA / (settings - 1))):
        raise ConfigError(
            f"--max_seeds {max_seeds}: of {settings} settings, nothing can be decided before {fewest} seeds"
        )
    more = range(max(seeds) + 1, max(seeds) + 1 + max_seeds - len(seeds))
    return [*seeds, *more]


def run_until_decided(
    plan: Callable[[Sequence[int]], list[Run]],
    carry: Callable[[list[Run], list[Run]], None],
    out: Path,
    *,
    settings: Sequence[str],
    seeds: Sequence[int],
    given: int,
    jobs: int,
    smallest: float,
) -> list[Run]:
    """Run what decides, and return it, seed by seed.

    `plan(seeds)` returns the runs of all settings, `carry(new, before)` runs the new ones. The first of `settings` is
    the baseline; `seeds` are all that the budget allows. It begins with `given` of them or, if more, with the fewest
    that can decide. A setting that is decided gets no more seeds, nor does one that diverged. If the baseline diverged,
    there is nothing left to decide.
    """
    baseline, *undecided = settings
    alpha = ALPHA / len(undecided)
    losses: dict[str, list[float]] = {setting: [] for setting in settings}
    done: list[Run] = []
    begin, end = 0, max(given, first_bounded(alpha))
    while True:
        new = [run for run in plan(seeds[begin:end]) if run.setting in (baseline, *undecided)]
        carry(new, done)
        done += new
        diverged = {run.setting for run in new if history.has_diverged(out / run.name)}
        undecided = [setting for setting in undecided if not {setting, baseline} & diverged]
        for run in new:
            if run.setting not in diverged:
                losses[run.setting].append(read_curve(out / run.name).losses[-1])
        differences = {
            setting: [a - b for a, b in zip(losses[setting], losses[baseline], strict=True)]
            for setting in undecided
        }
        undecided = [
            setting
            for setting, values in differences.items()
            if decide(values, smallest=smallest, alpha=alpha).decision is None
        ]
        if not undecided or end == len(seeds):
            return done
        say(f"after {end} seeds, of at most {len(seeds)}, not decided: {', '.join(undecided)}")
        begin, end = end, min(len(seeds), end + max(1, jobs // (1 + len(undecided))))
