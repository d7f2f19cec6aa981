"""How many tokens one model needs to the last loss of another, from runs that all went to their end.

PYTHONPATH=src python -m benchmarks.fewer_tokens docs/fewer_tokens/embedded_1m.json ...
PYTHONPATH=src python -m benchmarks.fewer_tokens docs/fewer_tokens/*.json --points FOLDER

Each file is an `ablation.json`. Its first setting is the baseline, the others are one model trained for several numbers
of tokens, the schedule fixed to each. Between two of them the loss is a straight line over the logarithm of the tokens.
With `--points` the ends of all runs become one more such file, for `plot.py --ablation FOLDER`.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from gpt2lab.commands import entry
from gpt2lab.commands.ablation_table import Mean, mean
from gpt2lab.config.command_line import argument, option, run_tyro
from gpt2lab.errors import CheckError

End = tuple[int, float]  # of a run: tokens, last validation loss


@dataclass(frozen=True)
class Flags:
    """Tokens to the last loss of a baseline."""

    tables: Positional[tuple[Path, ...]] = argument("files that `ablate` wrote")
    points: Path | None = option(None, "existing folder to write an ablation.json of all ends to")


@dataclass(frozen=True)
class Found:
    """What one ablation shows; a value a seed."""

    names: list[str]  # of the baseline and of the model: their settings' up to the first _
    baseline: list[End]
    others: list[list[End]]  # [number of tokens][seed]
    tokens: list[float]

    @property
    def ratio(self) -> Mean:
        """Tokens of the model to those of the baseline."""
        pairs = zip(self.tokens, self.baseline, strict=True)
        return mean([tokens / end[0] for tokens, end in pairs])


def tokens_to(ends: list[End], loss: float) -> float:
    """Return the tokens after which runs of one seed would end with this loss.

    Raises: CheckError if it does not lie between two of them.
    """
    for (tokens, above), (more, below) in itertools.pairwise(sorted(ends)):
        if loss == above:  # also where the next run ended no lower
            return float(tokens)
        if above > loss >= below:
            return float(tokens * (more / tokens) ** ((above - loss) / (above - below)))
    ended = ", ".join(f"{end:.4f} after {tokens:,}" for tokens, end in sorted(ends))
    raise CheckError(f"loss {loss:.4f} is not between {ended}; add runs of other --max_tokens")


def read(table: Path) -> Found:
    """Read an ablation.json.

    Raises: CheckError if it is none, or a seed's loss lies outside the runs.
    """
    try:
        settings = json.loads(table.read_text())["settings"]
        curves = [setting["curves"] for setting in settings]
        if any(curve is None for own in curves for curve in own):
            raise CheckError(f"{table}: a run diverged, so its seeds cannot be compared")
        baseline, *others = [[(c["tokens"][-1], c["losses"][-1]) for c in own] for own in curves]
        seeds = list(zip(baseline, *others, strict=True))
        names = [setting["setting"].partition("_")[0] for setting in settings[:2]]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise CheckError(f"{table}: no table that ablate wrote") from error
    return Found(names, baseline, others, [tokens_to(ends, base[1]) for base, *ends in seeds])


def rows(found: Found) -> list[str]:
    """Write the rows of a table: the last losses, and below them the tokens to the baseline's."""
    runs = [(found.names[0], found.baseline), *((found.names[1], own) for own in found.others)]
    lines = [
        f"| {name} | {ends[0][0]:,} | {show(mean([loss for _, loss in ends]), '.4f')} | | |"
        for name, ends in runs
    ]
    ratio, tokens = found.ratio, show(mean(found.tokens), ",.0f")
    upper = math.nan if ratio.half_interval is None else ratio.value + ratio.half_interval
    last = f"| to the same loss | {tokens} | | {show(ratio, '.3f')} | {upper:.3f} |"
    return [*lines, last]


def show(found: Mean, form: str) -> str:
    """Write a mean and half of its 95 % interval over seeds."""
    half = found.half_interval
    return f"{found.value:{form}}" + ("" if half is None else f" ± {half:{form}}")


def points(all_found: list[Found]) -> dict[str, Any]:
    """Return an ablation's table with a curve a seed over the ends of its runs, of the seeds that all have."""
    seeds = range(min(len(found.tokens) for found in all_found))
    baseline, model = all_found[0].names
    ends = {
        baseline: [found.baseline for found in all_found],
        model: [own for found in all_found for own in found.others],
    }
    settings = []
    for name, runs in ends.items():
        pairs = [list(zip(*sorted(own[seed] for own in runs), strict=True)) for seed in seeds]
        curves = [{"tokens": t, "seconds": [0] * len(t), "losses": losses} for t, losses in pairs]
        settings.append({"setting": name, "curves": curves})
    return {"settings": settings}


def main(argv: list[str]) -> int:
    """Print a table of each file."""
    flags = run_tyro(Flags, argv)
    all_found = [read(path) for path in flags.tables]
    for path, found in zip(flags.tables, all_found, strict=True):
        print(f"\n{path.stem}, {len(found.tokens)} seeds; ±: half of a 95 % interval over them\n")
        print("| | tokens | last val loss | ratio | upper limit |\n|---|---|---|---|---|")
        print("\n".join(rows(found)))
    if flags.points is not None:
        written = flags.points / "ablation.json"
        if written.exists():
            raise CheckError(f"{written} exists; name another folder for --points")
        written.write_text(json.dumps(points(all_found)))
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main))
