"""Train a ladder of small models, fit a scaling law to it, and predict a larger one before it is trained.

gpt2lab ladder plan ladder.toml
gpt2lab ladder run ladder.toml --jobs 2
gpt2lab ladder run ladder.toml --trunks
gpt2lab ladder predict ladder.toml
gpt2lab ladder run ladder.toml --top
gpt2lab ladder fit ladder.toml
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from gpt2lab.commands.parser import WithJson, parse_flags
from gpt2lab.config.flags import argument, option
from gpt2lab.errors import ConfigError
from gpt2lab.lab import ladder
from gpt2lab.lab.cluster import RAY, machine_of
from gpt2lab.lab.ladder_file import FAMILIES, Family
from gpt2lab.planner.request import read_count

_FILE = f"TOML file of sizes, tokens, seeds and rates, or {' or '.join(FAMILIES)}"
_OUT = "folder of the runs and of the results; default checkpoints/NAME, after the name of FILE"


@dataclass(frozen=True)
class _Ladder:
    file: str = argument(_FILE)
    out: Path | None = option(None, _OUT)
    trunks: bool = option(
        False,
        "train each size once, with the schedule wsd, and branch a cooldown off for each shorter length; "
        "default folder NAME_trunks",
    )

    def family(self) -> Family:
        """Open the ladder."""
        return ladder.open_ladder(self.file, self.out, trunks=self.trunks)


@dataclass(frozen=True)
class PlanLadder(WithJson, _Ladder):
    """Show the rungs, their tokens, FLOPs and predicted time; start nothing."""

    def execute(self) -> None:
        """Print the plan."""
        document = ladder.plan_ladder(self.family())
        print(json.dumps(document) if self.json else ladder.describe_plan(document))


@dataclass(frozen=True)
class TrainLadder(_Ladder):
    """Train every rung that is not complete, then fit; with --top, also predict the top rung and then train it."""

    jobs: int = option(
        1, "runs at the same time: each on a GPU of its own, or on its share of the cores", least=1
    )
    ray: str | None = option(None, RAY)
    top: bool = option(False, "then predict the top rung, write that down, and train it")

    def execute(self) -> None:
        """Train, fit and print the results."""
        family = self.family()
        with machine_of(self.ray) as machine:
            ladder.train_ladder(family, machine, jobs=self.jobs, top=self.top)
        print(ladder.describe_results(ladder.ladder_results(family)))


@dataclass(frozen=True)
class FitLadder(WithJson, _Ladder):
    """Fit the law to the complete rungs, score the prediction of the top rung, and write ladder.json."""

    def execute(self) -> None:
        """Write and print the results."""
        document = ladder.ladder_results(self.family())
        print(json.dumps(document) if self.json else ladder.describe_results(document))


@dataclass(frozen=True)
class PredictLadder(WithJson, _Ladder):
    """Predict the top rung and write that to prediction.json, once; or print the loss of another run."""

    parameters: str | None = option(None, "of another run than the top rung, e.g. 3M")
    tokens: str | None = option(None, "that this run trains on, e.g. 60M")

    def execute(self) -> None:
        """Print the prediction.

        Raises: ConfigError if only one of the two numbers is given.
        """
        if (self.parameters is None) != (self.tokens is None):
            raise ConfigError("--parameters and --tokens go together; the top rung needs neither")
        family = self.family()
        if self.parameters is None or self.tokens is None:
            document = ladder.predict_top(family)
        else:
            numbers = read_count("parameters", self.parameters), read_count("tokens", self.tokens)
            document = asdict(ladder.read_and_fit(family).fit.predict(*numbers))
        print(json.dumps(document) if self.json else ladder.describe_prediction(document))


VERBS = {"plan": PlanLadder, "run": TrainLadder, "fit": FitLadder, "predict": PredictLadder}


def main(argv: list[str]) -> int:
    """Execute the verb that the first word names."""
    verb: PlanLadder | TrainLadder | FitLadder | PredictLadder = parse_flags(VERBS, argv)
    verb.execute()
    return 0
