"""Tell whether two evaluations differ by more than noise, item by item and window by window.

gpt2lab compare run_a run_b
gpt2lab compare run_a/step_00000250 run_a/step_00000500
gpt2lab compare results/gpt2 checkpoints/run_a
gpt2lab compare run_a run_b --explain
gpt2lab compare 'norms/gpt2_seed*' 'norms/modern_seed*'
"""

import json
import math
from dataclasses import asdict, dataclass
from typing import Literal

from gpt2lab import paths
from gpt2lab.commands.parser import AmongRuns, WithJson, parse_flags
from gpt2lab.config.flags import argument, option
from gpt2lab.errors import ConfigError
from gpt2lab.lab.over_seeds import SMALLEST
from gpt2lab.lab.stats import ALPHA


@dataclass(frozen=True)
class Compare(WithJson, AmongRuns):
    """Tell whether two evaluations differ by more than noise."""

    a: str = argument(
        "a run, a checkpoint, a folder of `gpt2lab evaluate --save`, or a results file; or several runs "
        "that differ only in their seed: a pattern such as 'a_seed*', or names separated by commas"
    )
    b: str = argument("the other")
    only: Literal["validation", "hellaswag", "tasks"] | None = option(None, "compare only this")
    explain: bool = option(
        False,
        "split the difference of validation losses by kind and position of the tokens; needs --keep_token_losses",
    )
    smallest_difference: float | None = option(
        None,
        "for groups of runs: these are equal if the interval of their difference lies within +- this, in nats per "
        f"token or in the unit of the metric, and does not exclude 0; default {SMALLEST:g}",
    )


def main(argv: list[str]) -> int:
    """Compare and print."""
    flags = parse_flags(Compare, argv)
    from gpt2lab.lab import compare

    folder = paths.runs_folder(flags.checkpoint_dir)
    if compare.is_group(flags.a) or compare.is_group(flags.b):
        if flags.explain:
            raise ConfigError("--explain compares two runs, not groups: name one run of each")
        smallest = SMALLEST if flags.smallest_difference is None else flags.smallest_difference
        if not 0 < smallest < math.inf:
            raise ConfigError(f"--smallest_difference {smallest:g} must be a number above 0")
        groups = compare.compare_groups(
            flags.a, flags.b, checkpoint_dir=folder, only=flags.only, smallest=smallest
        )
        document, text = compare.groups_as_json(groups), compare.describe_groups(groups)
    elif flags.smallest_difference is not None:
        raise ConfigError(
            "--smallest_difference is for groups of runs, such as 'a_seed*' 'b_seed*'"
        )
    else:
        differences = compare.compare(flags.a, flags.b, checkpoint_dir=folder, only=flags.only)
        metrics = {difference.metric: asdict(difference) for difference in differences}
        document = {"a": flags.a, "b": flags.b, "noise": ALPHA, "metrics": metrics}
        text = compare.describe_differences(flags.a, flags.b, differences)
    if flags.explain:
        from gpt2lab.lab import explain

        explained = explain.explain(flags.a, flags.b, checkpoint_dir=folder)
        document["explain"] = asdict(explained) | {"sentence": explain.sentence(explained)}
        text += f"\n\n{explain.describe_explanation(explained)}"
    print(json.dumps(document) if flags.json else text)
    return 0
