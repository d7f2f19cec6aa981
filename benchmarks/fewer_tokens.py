"""How many tokens and seconds one model needs to the last loss of another, from runs that all went to their end.

PYTHONPATH=src python -m benchmarks.fewer_tokens docs/fewer_tokens/embedded_1m.json ...
PYTHONPATH=src python -m benchmarks.fewer_tokens docs/fewer_tokens/embedded_*.json --points FOLDER

Each file is an `ablation.json`. Its first setting is the baseline, the others are one model trained for several numbers
of tokens, the schedule fixed to each. Between two of them the loss is a straight line over the logarithm of the tokens,
and the seconds one over the tokens.
With `--points` the ends of all runs, of one text and tokenizer, become one more such file, for `plot.py --ablation
FOLDER`.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2lab.commands import entry
from gpt2lab.commands.parser import parse_flags
from gpt2lab.config.flags import argument, option
from gpt2lab.errors import CheckError
from gpt2lab.lab.stats import OverSeeds, over_seeds


@dataclass(frozen=True)
class End:
    """Of a run: its tokens, last validation loss and training seconds."""

    tokens: int
    loss: float
    seconds: float

    @classmethod
    def of(cls, curve: dict[str, list[float]]) -> End:
        """Take the last point of a curve that `ablate` wrote."""
        return cls(int(curve["tokens"][-1]), curve["losses"][-1], curve["seconds"][-1])


@dataclass(frozen=True)
class Flags:
    """Tokens to the last loss of a baseline."""

    tables: tuple[Path, ...] = argument("files that `ablate` wrote")
    points: Path | None = option(None, "existing folder to write an ablation.json of all ends to")


@dataclass(frozen=True)
class Found:
    """What one ablation shows; a value a seed."""

    names: list[str]  # of the baseline and of the model: their settings' up to the first _
    baseline: list[End]
    others: list[list[End]]  # [number of tokens][seed]
    reached: list[tuple[float, float]]  # tokens and seconds to the baseline's loss

    @property
    def tokens(self) -> OverSeeds:
        """Tokens of the model to the baseline's loss."""
        return over_seeds([tokens for tokens, _ in self.reached])

    @property
    def ratio(self) -> OverSeeds:
        """Tokens of the model to those of the baseline."""
        pairs = zip(self.reached, self.baseline, strict=True)
        return over_seeds([tokens / end.tokens for (tokens, _), end in pairs])

    @property
    def seconds_ratio(self) -> OverSeeds:
        """Seconds of the model to those of the baseline."""
        pairs = zip(self.reached, self.baseline, strict=True)
        return over_seeds([seconds / end.seconds for (_, seconds), end in pairs])


def reach(ends: list[End], loss: float) -> tuple[float, float]:
    """Return the tokens and seconds after which runs of one seed would end with this loss.

    Raises: CheckError if it does not lie between two of them.
    """
    ends = sorted(ends, key=lambda end: end.tokens)
    for end, longer in itertools.pairwise(ends):
        if loss == end.loss:  # also where the longer run ended no lower
            return float(end.tokens), end.seconds
        if end.loss > loss >= longer.loss:
            share = (end.loss - loss) / (end.loss - longer.loss)
            tokens = end.tokens * (longer.tokens / end.tokens) ** share
            linear = (tokens - end.tokens) / (longer.tokens - end.tokens)
            return tokens, end.seconds + linear * (longer.seconds - end.seconds)
    ended = ", ".join(f"{end.loss:.4f} after {end.tokens:,}" for end in ends)
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
        baseline, *others = [[End.of(curve) for curve in own] for own in curves]
        seeds = list(zip(baseline, *others, strict=True))
        names = [setting["setting"].partition("_")[0] for setting in settings[:2]]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise CheckError(f"{table}: no table that ablate wrote") from error
    return Found(names, baseline, others, [reach(ends, base.loss) for base, *ends in seeds])


def rows(found: Found) -> list[str]:
    """Write the rows of a table: the last losses, and below them the tokens to the baseline's."""
    runs = [(found.names[0], found.baseline), *((found.names[1], own) for own in found.others)]
    lines = [
        f"| {name} | {ends[0].tokens:,} | {show(over_seeds([end.loss for end in ends]), '.4f')} | | | |"
        for name, ends in runs
    ]
    ratio, tokens = found.ratio, show(found.tokens, ",.0f")
    upper = math.nan if ratio.half_width is None else ratio.mean + ratio.half_width
    seconds = show(found.seconds_ratio, ".3f")
    last = f"| to the same loss | {tokens} | | {show(ratio, '.3f')} | {upper:.3f} | {seconds} |"
    return [*lines, last]


def show(found: OverSeeds, form: str) -> str:
    """Write a mean and half of its 95 % interval over seeds."""
    half = found.half_width
    return f"{found.mean:{form}}" + ("" if half is None else f" ± {half:{form}}")


def points(all_found: list[Found]) -> dict[str, Any]:
    """Return an ablation's table with a curve a seed over the ends of its runs, of the seeds that all have."""
    seeds = range(min(len(found.reached) for found in all_found))
    baseline, model = all_found[0].names
    ends = {
        baseline: [found.baseline for found in all_found],
        model: [own for found in all_found for own in found.others],
    }
    settings = []
    for name, runs in ends.items():
        sorted_ends = [
            sorted((own[seed] for own in runs), key=lambda end: end.tokens) for seed in seeds
        ]
        curves = [
            {
                "tokens": [end.tokens for end in ends_of_seed],
                "seconds": [end.seconds for end in ends_of_seed],
                "losses": [end.loss for end in ends_of_seed],
            }
            for ends_of_seed in sorted_ends
        ]
        settings.append({"setting": name, "curves": curves})
    return {"settings": settings}


def main(argv: list[str]) -> int:
    """Print a table of each file."""
    flags = parse_flags(Flags, argv)
    all_found = [read(path) for path in flags.tables]
    for path, found in zip(flags.tables, all_found, strict=True):
        print(f"\n{path.stem}, {len(found.reached)} seeds; ±: half of a 95 % interval over them\n")
        print("| | tokens | last val loss | tokens ratio | upper limit | seconds ratio |")
        print("|---|---|---|---|---|---|")
        print("\n".join(rows(found)))
    if flags.points is not None:
        written = flags.points / "ablation.json"
        if written.exists():
            raise CheckError(f"{written} exists; name another folder for --points")
        written.write_text(json.dumps(points(all_found)))
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main))
