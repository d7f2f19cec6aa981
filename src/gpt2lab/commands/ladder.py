"""Train a ladder of small models, fit a scaling law to it, and predict a larger one before it is trained.

gpt2lab ladder plan ladder.toml
gpt2lab ladder run ladder.toml --jobs 2
gpt2lab ladder predict ladder.toml
gpt2lab ladder run ladder.toml --top
gpt2lab ladder fit ladder.toml
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2lab import fmt, paths
from gpt2lab.commands import ablation_table
from gpt2lab.commands.ablate import check_runs, naming, require_own_settings, run_all
from gpt2lab.commands.ladder_file import DATA, FAMILIES, Family, read_family
from gpt2lab.commands.parser import parse_flags
from gpt2lab.config.flags import argument, option
from gpt2lab.errors import (
    CheckError,
    ConfigError,
    DataError,
    NoSourceError,
    SaveError,
    system_errors_as,
)
from gpt2lab.planner import auto, calibration, hardware, ladder
from gpt2lab.planner.ask import read_count
from gpt2lab.planner.estimate import estimate
from gpt2lab.planner.ladder import Ladder
from gpt2lab.planner.machine import DetectedHardware, look
from gpt2lab.planner.scaling_law import Rung, require_enough
from gpt2lab.planner.scaling_law import fit as fit_law
from gpt2lab.runs import history
from gpt2lab.runs.console import say
from gpt2lab.runs.folder import holder_of
from gpt2lab.training.progress import Interval

if TYPE_CHECKING:
    from gpt2lab.training.start import Start

_FILE = f"TOML file of sizes, tokens, seeds and rates, or {' or '.join(FAMILIES)}"
_OUT = "folder of the runs and of the results; default checkpoints/NAME, by the name of FILE"
_TOP_FLOPS = 4.0  # times the most expensive rung: a top rung nearer than that tests little


@dataclass(frozen=True)
class Plan:
    """Show the rungs, their tokens, FLOPs and predicted time; start nothing."""

    file: str = argument(_FILE)
    out: Path | None = option(None, _OUT)
    json: bool = option(False, "print one JSON object")

    def execute(self) -> int:
        """Print the plan."""
        document = _plan(*_open(self.file, self.out))
        print(json.dumps(document) if self.json else _describe_plan(document))
        return 0


@dataclass(frozen=True)
class Run:
    """Train every rung that is not complete, then fit; with --top, predict the top rung first and train it, too."""

    file: str = argument(_FILE)
    out: Path | None = option(None, _OUT)
    jobs: int = option(
        1, "runs at the same time: each on a GPU of its own, or on its share of the cores", least=1
    )
    top: bool = option(False, "then predict the top rung, write that down, and train it")

    def execute(self) -> int:
        """Train, fit and print the results."""
        family, out = _open(self.file, self.out)
        top = _top_of(family, out) if self.top else []
        rungs, checks = family.rung_runs(out), _rate_runs(family, out)
        _require_law(_starts(rungs).values())
        check_runs([*rungs, *checks, *top])
        run_all([*rungs, *checks], jobs=self.jobs)
        if top:
            say(_describe_prediction(_predict_top(top, out, _read(family, out))))
            run_all(top, jobs=self.jobs)
        print(_report(_results(family, out)))
        return 0


@dataclass(frozen=True)
class Fit:
    """Fit the law to the rungs that were run, score the top rung's prediction, and write ladder.json."""

    file: str = argument(_FILE)
    out: Path | None = option(None, _OUT)
    json: bool = option(False, "print one JSON object")

    def execute(self) -> int:
        """Write and print the results."""
        document = _results(*_open(self.file, self.out))
        print(json.dumps(document) if self.json else _report(document))
        return 0


@dataclass(frozen=True)
class Predict:
    """Predict the top rung and write that to prediction.json, once; or print the loss of other runs."""

    file: str = argument(_FILE)
    out: Path | None = option(None, _OUT)
    parameters: str | None = option(None, "of another run than the top rung, e.g. 3M")
    tokens: str | None = option(None, "that it trains on, e.g. 60M")
    json: bool = option(False, "print one JSON object")

    def execute(self) -> int:
        """Print the prediction."""
        if (self.parameters is None) != (self.tokens is None):
            raise ConfigError("--parameters and --tokens go together; the top rung needs neither")
        family, out = _open(self.file, self.out)
        if self.parameters is None or self.tokens is None:
            document = _predict_top(_top_of(family, out), out, _read(family, out))
        else:
            numbers = read_count("parameters", self.parameters), read_count("tokens", self.tokens)
            document = asdict(_read(family, out).fit.predict(*numbers))
        print(json.dumps(document) if self.json else _describe_prediction(document))
        return 0


VERBS = {"plan": Plan, "run": Run, "fit": Fit, "predict": Predict}


def main(argv: list[str]) -> int:
    """Run the verb that the first word names."""
    verb: Plan | Run | Fit | Predict = parse_flags(VERBS, argv)
    return verb.execute()


def _open(file: str, out: Path | None) -> tuple[Family, Path]:
    """Return a ladder and the folder of its runs.

    Raises: ConfigError; DataError if its data are those of the families, and are not prepared.
    """
    family = read_family(file)
    data = paths.from_working_directory(Path(DATA))
    needed = {str(settings.get("data_dir")) for settings in family.rungs.values()}
    if DATA in needed and not data.is_dir():
        raise DataError(
            f"{paths.display_path(data)}: no such data folder; make it with: gpt2lab data tokenizer train "
            f"python-stdlib --vocab_size 512 --out tok512 && gpt2lab prepare python-stdlib "
            f"--tokenizer tok512 --val_tokens 900000 --out {DATA}"
        )
    default = paths.runs_folder(None) / family.name
    return family, paths.from_working_directory(out) if out else default


# -- the plan ----------------------------------------------------------------------------------------------------


def _start(run: ablation_table.Run) -> Start:
    """Return how the trainer would begin a run, wherever it stands now."""
    from gpt2lab.training.resolve import resolve

    request = run.request.with_settings(run_name=None)
    fresh = dataclasses.replace(request, resume=None)
    with naming(run.setting):
        return resolve(fresh, world_size=1, set_aside=False)


def _starts(rungs: Sequence[ablation_table.Run]) -> dict[str, Start]:
    """Return one start of each rung.

    Raises: ConfigError if they differ in more than size, length and rate.
    """
    starts = {run.setting: _start(run) for run in {run.setting: run for run in rungs}.values()}
    first, *others = starts
    one = ladder.shared_settings(starts[first].config)
    for name in others:
        other = ladder.shared_settings(starts[name].config)
        if differs := next((key for key in one if one[key] != other[key]), None):
            raise ConfigError(
                f"{differs} {one[differs]} in {first}, {other[differs]} in {name}: the rungs of one law share it"
            )
    return starts


def _require_law(rungs: Iterable[Start]) -> None:
    """Reject rungs from which no law can be fitted, before they are trained.

    Raises: ConfigError.
    """
    require_enough([(start.plan.parameters, start.plan.tokens) for start in rungs])


def _rate_runs(family: Family, out: Path) -> list[ablation_table.Run]:
    rates = family.rate_runs(out).values()
    return [run for others in rates for runs in others.values() for run in runs]


def _plan(family: Family, out: Path) -> dict[str, Any]:
    """Return the runs of a ladder, with what they will take."""
    seeds, family = len(family.seeds), dataclasses.replace(family, seeds=family.seeds[:1])
    rungs, rates, top = family.rung_runs(out), _rate_runs(family, out), family.top_runs(out)
    starts = _starts([*rungs, *top]) | {run.setting: _start(run) for run in rates}
    _require_law(starts[run.setting] for run in rungs)
    found: list[dict[str, Any]] = []
    for kind, runs in (("rung", rungs), ("rate", rates), ("top", top)):
        for name in (run.setting for run in runs):
            start = starts[name]
            plan, time = start.plan, _time(start, out)
            found.append(
                {
                    "name": name,
                    "kind": kind,
                    "seeds": seeds,
                    "parameters": plan.parameters,
                    "tokens": plan.tokens,
                    "steps": plan.max_steps,
                    "epochs": plan.epochs,
                    "max_lr": start.config.optim.max_lr,
                    "flops": float(plan.flops_per_token * plan.tokens),
                    "seconds": None if time is None else asdict(time),
                }
            )
    most = max(row["flops"] for row in found if row["kind"] == "rung")
    warnings = [
        f"{row['name']}: {row['epochs']:.1f} passes over the data; the law knows one"
        for row in found
        if row["epochs"] > 1
    ]
    for row in found:
        if row["kind"] == "top" and row["flops"] < _TOP_FLOPS * most:
            times = row["flops"] / most
            warnings.append(
                f"the top rung has {times:.1f} x the FLOPs of the most expensive rung; "
                f"a test of a law needs at least {_TOP_FLOPS:g} x"
            )
    return {
        "name": family.name,
        "folder": str(out),
        "runs": sum(row["seeds"] for row in found),
        "flops": sum(row["seeds"] * row["flops"] for row in found),
        "seconds": _sum_of(found),
        "rows": found,
        "warnings": warnings,
    }


def _time(start: Start, out: Path) -> Interval | None:
    """Return how long one run takes here alone, None where nothing is known of the machine."""
    known = hardware.load()
    seen = DetectedHardware(()) if start.config.system.device == "cpu" else look()
    job = auto.job_on(seen, start.config, start.plan, start.data.tokens("train"))
    try:
        on, ratios = calibration.this_machine(seen, known, calibration.read(out), job)
    except NoSourceError:
        return None
    return estimate(job, on, known, ratios=ratios).seconds


def _sum_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Add up seconds that are wrong together: bounds add, too."""
    if any(row["seconds"] is None for row in rows):
        return None
    keys = ("value", "low", "high")
    return {key: sum(row["seeds"] * row["seconds"][key] for row in rows) for key in keys}


def _describe_plan(document: Mapping[str, Any]) -> str:
    def time(seconds: Mapping[str, float] | None) -> str:
        return "n/a" if seconds is None else fmt.duration(seconds["value"])

    cells = [
        [
            *(row["name"], row["kind"], str(row["seeds"]), f"{row['parameters']:,}"),
            *(f"{row['tokens']:,}", f"{row['steps']:,}", f"{row['epochs']:.2f}"),
            *(f"{row['max_lr']:.2e}", f"{row['flops']:.2e}", time(row["seconds"])),
        ]
        for row in document["rows"]
    ]
    head = ["name", "kind", "seeds", "parameters", "tokens", "steps", "epochs", "max_lr"]
    total = document["seconds"]
    bounds = ""
    if total is not None:
        bounds = f" ({fmt.duration(total['low'])} ... {fmt.duration(total['high'])}, 80 %)"
    return "\n".join(
        [
            fmt.table([*head, "FLOPs", "time each"], cells),
            f"total: {document['runs']} runs, {document['flops']:.2e} FLOPs, {time(total)}{bounds} one after another",
            *(f"warning: {warning}" for warning in document["warnings"]),
        ]
    )


# -- the results -------------------------------------------------------------------------------------------------


def _losses(
    family: Family, runs: Sequence[ablation_table.Run], out: Path, *, tokens: int, data: str
) -> tuple[float, ...]:
    """Return the last validation loss of each run. `data`: the fingerprint of what it must be trained on.

    Raises: CheckError if one is not complete; ConfigError, DataError if one had other settings or data.
    """
    losses = []
    for run in runs:
        with naming(run.setting):
            require_own_settings(run.request)
        try:
            curve = ablation_table.read_curve(out / run.name)
        except CheckError:  # nothing is measured yet
            curve = None
        if curve is None or curve.tokens[-1] != tokens:
            holder = holder_of(out / run.name)
            again = fmt.command_line(["run", family.file, "--out", paths.display_path(out)])
            fix = f"{holder} trains it; wait for it" if holder else f"gpt2lab ladder {again}"
            raise CheckError(f"{run.name} is not complete: {fix}")
        trained_on = (history.read_json(out / run.name / "run.json") or {}).get("data_fingerprint")
        if trained_on != data:
            raise DataError(
                f"{run.name} was trained on other data than its data folder holds now; put those back, "
                f"or choose another --out"
            )
        losses.append(curve.losses[-1])
    return tuple(losses)


def _read(family: Family, out: Path) -> Ladder:
    """Read the rungs and fit the law.

    Raises: CheckError if one is not complete; ConfigError if they are too few.
    """
    runs = family.rung_runs(out)
    starts = _starts(runs)
    rungs = []
    for name, start in starts.items():
        plan, own = start.plan, [run for run in runs if run.setting == name]
        losses = _losses(family, own, out, tokens=plan.tokens, data=start.data.fingerprint)
        rungs.append(Rung(plan.parameters, plan.tokens, losses))
    shared = next(iter(starts.values()))
    settings = ladder.shared_settings(shared.config) | {
        "data": shared.data.fingerprint,
        "data_name": paths.display_path(shared.data.folder),
        "tokenizer": shared.data.tokenizer.name if shared.data.tokenizer else None,
        "total_batch_size": shared.config.batch.total_batch_size,
        "val_tokens": shared.config.eval.val_tokens,
        "seeds": list(family.seeds),
    }
    return Ladder(family.name, settings, fit_law(rungs))


def _top_of(family: Family, out: Path) -> list[ablation_table.Run]:
    """Return the runs of the top rung.

    Raises: ConfigError if there is none.
    """
    if runs := family.top_runs(out):
        return runs
    raise ConfigError(f"{family.name} has no [top]: give the settings and tokens of a larger run")


def _predict_top(runs: Sequence[ablation_table.Run], out: Path, found: Ladder) -> dict[str, Any]:
    """Write the top rung's prediction, if there is none yet, and return it.

    Raises: CheckError if the top rung has begun without one.
    """
    begun = next((run.name for run in runs if (out / run.name).exists()), None)
    if begun is not None and not (out / ladder.PREDICTION).exists():
        raise CheckError(
            f"{begun} began before its loss was predicted: remove the top rung's runs, then predict it"
        )
    plan = _start(runs[0]).plan
    point = found.fit.predict(plan.parameters, plan.tokens, seeds=len(runs))
    with system_errors_as(SaveError, out, fix="choose another --out"):
        return ladder.write_prediction(out, found, point)


def _rates(family: Family, out: Path, found: Ladder) -> list[dict[str, Any]]:
    """Compare the rule's rate with the others at the checked rungs, seed by seed.

    The rule holds where its mean loss is not above the best one's by more than half of the 95 % interval of their
    difference; None of a single seed, which tells no noise.
    """
    rows = []
    for name, others in family.rate_runs(out).items():
        rung = found.fit.rungs[list(family.rungs).index(name)]
        losses = {1.0: rung.losses}
        try:
            for factor, runs in others.items():
                data = found.settings["data"]
                losses[factor] = _losses(family, runs, out, tokens=rung.tokens, data=data)
        except CheckError:
            continue  # not trained yet
        best = min(losses, key=lambda factor: statistics.fmean(losses[factor]))
        pairs = zip(rung.losses, losses[best], strict=True)
        behind = ablation_table.mean([rule - other for rule, other in pairs])
        half = 0.0 if best == 1.0 else behind.half_interval
        rows.append(
            {
                "rung": name,
                "losses": {f"{factor:g}": list(losses[factor]) for factor in sorted(losses)},
                "best_factor": best,
                "difference": behind.value,
                "half_interval": half,
                "holds": None if half is None else behind.value <= half,
            }
        )
    return rows


def _results(family: Family, out: Path) -> dict[str, Any]:
    """Fit, score what was predicted and has been run, and write ladder.json."""
    found = _read(family, out)
    prediction, scored = ladder.read_prediction(out), None
    if prediction is not None and family.top is not None:
        scored = _score(family, out, prediction)
    rates = _rates(family, out, found)
    document = ladder.as_json(
        found, names=list(family.rungs), rates=rates, prediction=prediction, scored=scored
    )
    with system_errors_as(SaveError, out, fix="choose another --out"):
        ladder.write_ladder(out, document)
    return document


def _score(family: Family, out: Path, prediction: Mapping[str, Any]) -> dict[str, Any] | None:
    """Compare the top rung with its prediction, None where it is not complete.

    Raises: CheckError if it began before the prediction.
    """
    top = family.top_runs(out)
    start = _start(top[0])
    tokens, data = start.plan.tokens, start.data.fingerprint
    try:
        losses = _losses(family, top, out, tokens=tokens, data=data)
    except CheckError:
        return None
    begun = min(float(next(history.iter_events(out / run.name))["time"]) for run in top)
    return ladder.score(prediction, losses, begun)


def _describe_prediction(document: Mapping[str, Any]) -> str:
    loss, seeds = document["loss"], document["seeds"]
    text = (
        f"predicted: {document['parameters']:,} parameters, {document['tokens']:,} tokens: loss {_interval(loss, 4)} "
        f"nats/token, {'one run' if seeds == 1 else f'mean of {seeds} seeds'}"
    )
    return f"{text}; written {document['written']}" if "written" in document else text


def _interval(at: Mapping[str, float], digits: int) -> str:
    low, high = f"{at['low']:.{digits}g}", f"{at['high']:.{digits}g}"
    return f"{at['value']:.{digits}g} ({low} ... {high}, 80 %)"


def _report(document: Mapping[str, Any]) -> str:
    """Write the results for people."""
    cells = []
    for row in document["rungs"]:
        own = statistics.fmean(row["losses"])
        spread = statistics.stdev(row["losses"]) if len(row["losses"]) > 1 else None
        cells.append(
            [
                *(row["name"], f"{row['parameters']:,}", f"{row['tokens']:,}", f"{own:.4f}"),
                *(fmt.number(spread), f"{row['fitted']:.4f}", f"{row['fitted'] / own - 1:+.2%}"),
            ]
        )
    head = ["rung", "parameters", "tokens", "val loss", "sd of seeds", "law", "off by"]
    law, seeds = document["law"], document["seed_spread"]
    lines = [
        fmt.table(head, cells),
        "",
        "L = E + A/N^alpha + B/D^beta, nats/token: "
        + ", ".join(f"{name} {value:.4g}" for name, value in law.items()),
        *(f"  {name:<6} {_interval(at, 3)}" for name, at in document["law_intervals"].items()),
        *(["E is near 0: these rungs do not tell where the loss ends"] if law["E"] < 0.01 else []),
        f"seeds of a rung differ by {'n/a' if seeds is None else f'{seeds:.2%}'}, rungs from the law by "
        f"{document['misfit']:.2%} besides (standard deviations)",
        "",
        "compute-optimal, by 6 N D",
        fmt.table(
            ["FLOPs", "parameters", "tokens", "loss"],
            [
                [
                    f"{row['flops']:.2e}",
                    *(_interval(row[key], 3) for key in ("parameters", "tokens", "loss")),
                ]
                for row in document["frontier"]
            ],
        ),
    ]
    lines += [_describe_rate(row) for row in document["rates"]]
    if document["prediction"] is not None:
        lines += ["", _describe_prediction(document["prediction"])]
    if (scored := document["score"]) is not None:
        verdict = "inside" if scored["inside_interval"] else "OUTSIDE"
        lines.append(
            f"actual:    loss {scored['loss']:.4g}, {verdict} the interval of ± {scored['half_width_percent']:.1f} %; "
            f"predicted {scored['error_percent']:+.2f} % from it"
        )
    return "\n".join(lines)


def _describe_rate(row: Mapping[str, Any]) -> str:
    tried = ", ".join(
        f"x{factor} {statistics.fmean(losses):.4f}" for factor, losses in row["losses"].items()
    )
    if row["best_factor"] == 1:
        verdict = "the rule's is the best"
    else:
        noise = "n/a" if row["half_interval"] is None else f"{row['half_interval']:.4f}"
        judged = {True: "within the noise", False: "WORSE than the noise", None: "noise not known"}
        verdict = f"the rule's is {row['difference']:.4f} ± {noise} above the best: {judged[row['holds']]}"
    return f"rates at {row['rung']}: {tried}: {verdict}"
