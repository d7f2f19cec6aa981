"""A ladder of small models: plan and train its rungs, fit a scaling law, predict the top rung before it is trained.

No torch.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2lab import fmt, paths
from gpt2lab.checkpoint.catalog import has_checkpoints
from gpt2lab.checkpoint.manifest import folder_name
from gpt2lab.errors import CheckError, ConfigError, DataError, SaveError, system_errors_as
from gpt2lab.files import replace_durably
from gpt2lab.lab.ablation import read_curve
from gpt2lab.lab.ladder_file import DATA, Family, read_family
from gpt2lab.lab.seed_runs import (
    Machine,
    SeedRun,
    check_runs,
    fresh_start,
    prefix_errors,
    require_own_settings,
    run_all,
)
from gpt2lab.lab.stats import over_seeds
from gpt2lab.planner import auto, ladder
from gpt2lab.planner.ladder import Ladder
from gpt2lab.planner.scaling_law import Rung, fit_law, require_enough
from gpt2lab.runs import history
from gpt2lab.runs.console import say
from gpt2lab.runs.folder import holder_of

if TYPE_CHECKING:
    from gpt2lab.training.start import Start

_TOP_FLOPS = 4.0  # times the most expensive rung: a closer top rung hardly tests the law


def open_ladder(file: str, out: Path | None, *, trunks: bool = False) -> Family:
    """Return a ladder; `out`: the folder of its runs; `trunks`: shorter runs branch from the longest of their size.

    Raises: ConfigError; DataError if it reads the data of the built-in families and these are not prepared.
    """
    family = read_family(file, out, trunks=trunks)
    data = paths.from_working_directory(Path(DATA))
    needed = {str(settings.get("data_dir")) for settings in family.rungs.values()}
    if DATA in needed and not data.is_dir():
        raise DataError(
            f"{paths.display_path(data)}: no such data folder; make it with: gpt2lab data tokenizer train "
            f"python-stdlib --vocab_size 512 --out tok512 && gpt2lab prepare python-stdlib "
            f"--tokenizer tok512 --val_tokens 900000 --out {DATA}"
        )
    return family


def train_ladder(family: Family, machine: Machine, *, jobs: int, top: bool) -> None:
    """Train every rung that is not complete, started by `machine`.

    `top`: then predict the top rung, write that down, and train it.

    Raises: ConfigError, DataError before anything is trained; CheckError, SavedInterrupt as `run_all`.
    """
    tops = top_runs_of(family) if top else []
    rungs, checks = family.rung_runs(), _rate_runs(family)
    plans = [start.plan for start in first_starts(rungs).values()]
    require_enough([(plan.parameters, plan.tokens) for plan in plans])
    check_runs([*rungs, *checks, *tops])
    for run in checks:  # for a job array of what Ctrl+C leaves
        run.write_settings()
    _train_branches(family, rungs, machine, jobs=jobs)
    run_all(rungs, jobs=jobs, machine=machine)
    run_all(checks, jobs=jobs, machine=machine, on_divergence="continue")
    if tops:
        say(describe_prediction(predict_top(family)))
        run_all(tops, jobs=jobs, machine=machine)


def _train_branches(
    family: Family, rungs: Sequence[SeedRun], machine: Machine, *, jobs: int
) -> None:
    """Train each trunk to its next branch, and the branches there, until all of these are complete."""
    of_trunk: dict[str, list[tuple[SeedRun, SeedRun, int]]] = {}
    for branch in sorted(family.branches(rungs), key=lambda one: one[2]):
        of_trunk.setdefault(branch[1].name, []).append(branch)
    for stage in itertools.zip_longest(*of_trunk.values()):
        legs, branches = [], []
        for run, trunk, step in filter(None, stage):
            flags = (f"--branch_from={trunk.name}@{step}",)
            branches.append(dataclasses.replace(run, flags=flags))
            if not (trunk.folder / folder_name(step)).exists() | has_checkpoints(run.folder):
                flags = (f"--stop_after_steps={step}",)
                legs.append(dataclasses.replace(trunk, flags=flags))
        run_all(legs, jobs=jobs, machine=machine, may_stop=True)
        for run, trunk, step in filter(None, stage):
            if not ((trunk.folder / folder_name(step)).exists() or has_checkpoints(run.folder)):
                said = f"{trunk.name} stopped before step {step}; start again to continue"
                raise CheckError(said)
        run_all(branches, jobs=jobs, machine=machine)


def first_starts(rungs: Sequence[SeedRun]) -> dict[str, Start]:
    """Return {rung: how the trainer would start it}, for one seed of each.

    Raises: ConfigError if they differ in more than size, length and learning rate.
    """
    starts = {run.setting: fresh_start(run) for run in rungs if run.seed == rungs[0].seed}
    first, *others = starts
    one = ladder.shared_settings(starts[first].config)
    for name in others:
        other = ladder.shared_settings(starts[name].config)
        if differs := next((key for key in one if one[key] != other[key]), None):
            raise ConfigError(
                f"{differs} {one[differs]} in {first}, {other[differs]} in {name}: the rungs of a ladder must share it"
            )
    return starts


def _rate_runs(family: Family) -> list[SeedRun]:
    rates = family.rate_runs().values()
    return [run for others in rates for runs in others.values() for run in runs]


def plan_ladder(family: Family) -> dict[str, Any]:
    """Return the runs of a ladder with their expected time; start nothing.

    Raises: ConfigError, DataError: whatever the trainer would reject, and too few rungs for a law.
    """
    seeds, family = len(family.seeds), dataclasses.replace(family, seeds=family.seeds[:1])
    rungs, rates, top = family.rung_runs(), _rate_runs(family), family.top_runs()
    starts = first_starts([*rungs, *top]) | {run.setting: fresh_start(run) for run in rates}
    plans = [starts[run.setting].plan for run in rungs]
    require_enough([(plan.parameters, plan.tokens) for plan in plans])
    found: list[dict[str, Any]] = []
    branches = {run.name: step for run, _, step in family.branches(rungs)}
    for kind, runs in (("rung", rungs), ("rate", rates), ("top", top)):
        for run in runs:
            name, start = run.setting, starts[run.setting]
            plan, expected = start.plan, auto.estimate_here(start)
            begin = branches.get(run.name, 0)
            share = 1 - begin / plan.max_steps
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
                    "branches_at": begin,
                    "flops": share * plan.flops_per_token * plan.tokens,
                    "seconds": expected and asdict(expected.seconds.scaled(share)),
                }
            )
    most = max(row["flops"] for row in found if row["kind"] == "rung")
    warnings = [
        f"{row['name']}: {row['epochs']:.1f} epochs; the law assumes one"
        for row in found
        if row["epochs"] > 1
    ]
    for row in found:
        if row["kind"] == "top" and row["flops"] < _TOP_FLOPS * most:
            times = row["flops"] / most
            warnings.append(
                f"the top rung has {times:.1f} x the FLOPs of the most expensive rung; "
                f"a test of the law needs at least {_TOP_FLOPS:g} x"
            )
    seconds = None
    if all(row["seconds"] for row in found):  # the errors are fully correlated: bounds add up, too
        keys = ("value", "low", "high")
        seconds = {key: sum(row["seeds"] * row["seconds"][key] for row in found) for key in keys}
    of_rungs = [row for row in found if row["kind"] == "rung"]
    separate = seeds * sum(row["tokens"] for row in of_rungs)
    shared = seeds * sum(row["tokens"] * row["branches_at"] // row["steps"] for row in of_rungs)
    return {
        "name": family.name,
        "folder": str(family.out),
        "tokens": {"rungs": separate - shared, "separate": separate},
        "runs": sum(row["seeds"] for row in found),
        "flops": sum(row["seeds"] * row["flops"] for row in found),
        "seconds": seconds,
        "rows": found,
        "warnings": warnings,
    }


def describe_plan(document: Mapping[str, Any]) -> str:
    """Format the plan."""

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
    tokens = document["tokens"]
    saving = (
        f"trunks: the rungs train on {tokens['rungs']:,} tokens, {tokens['rungs'] / tokens['separate']:.2f} of the "
        f"{tokens['separate']:,} of separate runs"
    )
    return "\n".join(
        [
            fmt.table([*head, "FLOPs", "time each"], cells),
            f"total: {document['runs']} runs, {document['flops']:.2e} FLOPs, {time(total)}{bounds} one by one",
            *[saving] * (tokens["rungs"] < tokens["separate"]),
            *(f"warning: {warning}" for warning in document["warnings"]),
        ]
    )


def _losses(family: Family, runs: Sequence[SeedRun], *, tokens: int) -> tuple[float, ...]:
    """Return the last validation loss of each run."""
    losses = []
    for run in runs:
        with prefix_errors(run.setting):
            require_own_settings(run)
        try:
            curve = read_curve(run.folder)
        except CheckError:  # nothing is measured yet
            curve = None
        if curve is None or curve.tokens[-1] != tokens:
            words = ["gpt2lab", "ladder", "run", family.file, "--out"]
            words += [paths.display_path(family.out), *["--trunks"] * family.trunks]
            fix = fmt.command_line(words)
            if holder := holder_of(run.folder):
                fix = f"{holder} is training it; wait for it"
            raise CheckError(f"{run.name} is not complete: {fix}")
        losses.append(curve.losses[-1])
    return tuple(losses)


def read_and_fit(family: Family) -> Ladder:
    """Read the losses of the rungs and fit the law.

    Raises: CheckError if one is not complete; ConfigError if they are too few.
    """
    runs = family.rung_runs()
    starts = first_starts(runs)
    rungs = []
    for name, start in starts.items():
        plan, own = start.plan, [run for run in runs if run.setting == name]
        losses = _losses(family, own, tokens=plan.tokens)
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


def top_runs_of(family: Family) -> list[SeedRun]:
    """Return the runs of the top rung.

    Raises: ConfigError if there is none.
    """
    if runs := family.top_runs():
        return runs
    raise ConfigError(f"{family.name} has no [top]: give the settings and tokens of a larger run")


def predict_top(family: Family) -> dict[str, Any]:
    """Write the prediction of the top rung, unless it exists, and return it.

    Raises: ConfigError if there is no top rung; CheckError if it was started without one, or a rung is not complete;
        SaveError.
    """
    runs, found, out = top_runs_of(family), read_and_fit(family), family.out
    begun = next((run.name for run in runs if (run.folder).exists()), None)
    if begun is not None and not (out / ladder.PREDICTION).exists():
        raise CheckError(
            f"{begun} was started before its loss was predicted: remove the runs of the top rung, then predict it"
        )
    plan = fresh_start(runs[0]).plan
    point = found.fit.predict(plan.parameters, plan.tokens, seeds=len(runs))
    with system_errors_as(SaveError, out, fix="choose another --out"):
        return ladder.write_prediction(out, found, point)


def _rates(family: Family, found: Ladder) -> list[dict[str, Any]]:
    """Compare the learning rate of the rule with the others at the checked rungs, seed by seed.

    The rule holds if its mean loss is not above the best one by more than half of the 95 % interval of their
    difference; unknown (None) with a single seed. A factor of which a seed diverged has no losses (None).
    """
    rows = []
    for name, others in family.rate_runs().items():
        rung = found.fit.rungs[list(family.rungs).index(name)]
        losses, diverged = {1.0: rung.losses}, dict[float, None]()
        try:
            for factor, runs in others.items():
                for run in runs:
                    require_own_settings(run)
                if any(history.has_diverged(run.folder) for run in runs):
                    diverged[factor] = None
                else:
                    losses[factor] = _losses(family, runs, tokens=rung.tokens)
        except CheckError:
            continue  # not trained yet
        best = min(losses, key=lambda factor: statistics.fmean(losses[factor]))
        pairs = zip(rung.losses, losses[best], strict=True)
        behind = over_seeds([rule - other for rule, other in pairs])
        half = 0.0 if best == 1.0 else behind.half_width
        rows.append(
            {
                "rung": name,
                "losses": {f"{k:g}": v for k, v in sorted((losses | diverged).items())},
                "best_factor": best,
                "difference": behind.mean,
                "half_interval": half,
                "holds": None if half is None else behind.mean <= half,
            }
        )
    return rows


def ladder_results(family: Family) -> dict[str, Any]:
    """Fit the law, score the prediction if the top rung is complete, and write ladder.json.

    Raises: CheckError if a rung is not complete, or the top rung was started before its prediction; SaveError.
    """
    found, out = read_and_fit(family), family.out
    prediction, scored = ladder.read_prediction(out), None
    if prediction is not None and family.top is not None:
        scored = _score(family, prediction)
    rates = _rates(family, found)
    document = ladder.ladder_as_json(
        found, names=list(family.rungs), rates=rates, prediction=prediction, scored=scored
    )
    with system_errors_as(SaveError, out, fix="choose another --out"):
        text = json.dumps(document, indent=1, allow_nan=False)
        replace_durably(out / ladder.FILE, text + "\n")
    return document


def _score(family: Family, prediction: Mapping[str, Any]) -> dict[str, Any] | None:
    """Compare the top rung with its prediction; None if it is not complete."""
    top = family.top_runs()
    try:
        losses = _losses(family, top, tokens=fresh_start(top[0]).plan.tokens)
    except CheckError:
        return None
    begun = min(float(history.read_log(run.folder).events[0]["time"]) for run in top)
    return ladder.score(prediction, losses, begun)


def describe_prediction(document: Mapping[str, Any]) -> str:
    """Format a prediction."""
    loss, seeds = document["loss"], document["seeds"]
    text = (
        f"predicted: {document['parameters']:,} parameters, {document['tokens']:,} tokens: loss {_interval(loss, 4)} "
        f"nats/token, {'one run' if seeds == 1 else f'mean of {seeds} seeds'}, 80 % interval"
    )
    return f"{text}; written {document['written']}" if "written" in document else text


def _interval(at: Mapping[str, float], digits: int) -> str:
    low, high = f"{at['low']:.{digits}g}", f"{at['high']:.{digits}g}"
    return f"{at['value']:.{digits}g} ({low} ... {high})"


def describe_results(document: Mapping[str, Any]) -> str:
    """Format the results."""
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
    best = ("parameters", "tokens", "loss")
    frontier = [
        [f"{row['flops']:.2e}", *(_interval(row[key], 3) for key in best)]
        for row in document["frontier"]
    ]
    head = ["rung", "parameters", "tokens", "val loss", "sd of seeds", "law", "off by"]
    law, seeds = document["law"], document["seed_spread"]
    lines = [
        fmt.table(head, cells),
        "",
        "L = E + A/N^alpha + B/D^beta, nats/token: "
        + ", ".join(f"{name} {value:.4g}" for name, value in law.items()),
        *(f"  {name:<6} {_interval(at, 3)}" for name, at in document["law_intervals"].items()),
        *["E is near 0: these rungs do not determine the irreducible loss"] * (law["E"] < 0.01),
        f"standard deviations: {'n/a' if seeds is None else f'{seeds:.2%}'} over the seeds of a rung, and another "
        f"{document['misfit']:.2%} of the rungs from the law",
        "",
        "compute-optimal, by 6 N D",
        fmt.table(["FLOPs", *best], frontier),
        "",
        "In brackets: 80 % of bootstrap samples. With few rungs or single seeds, fewer hold the truth, E's fewest.",
    ]
    lines += [_describe_rate(row) for row in document["rates"]]
    if document["prediction"] is not None:
        same = document["prediction"]["inputs_sha256"] == document["inputs_sha256"]
        note = "" if same else "; made from other rungs than this law"
        lines += ["", f"{describe_prediction(document['prediction'])}{note}"]
    if (scored := document["score"]) is not None:
        verdict = "inside" if scored["inside_interval"] else "OUTSIDE"
        lines.append(
            f"actual:    loss {scored['loss']:.4g}, {verdict} the interval of ± {scored['half_width_percent']:.1f} %; "
            f"predicted {scored['error_percent']:+.2f} % from it"
        )
    return "\n".join(lines)


def _describe_rate(row: Mapping[str, Any]) -> str:
    tried = ", ".join(
        f"x{factor} {'diverged' if losses is None else f'{statistics.fmean(losses):.4f}'}"
        for factor, losses in row["losses"].items()
    )
    if row["best_factor"] == 1:
        verdict = "the rate of the rule is the best"
    else:
        noise = "n/a" if row["half_interval"] is None else f"{row['half_interval']:.4f}"
        judged = {True: "within noise", False: "WORSE than noise", None: "noise unknown"}
        verdict = f"the rate of the rule is {row['difference']:.4f} ± {noise} above the best: {judged[row['holds']]}"
    return f"rates at {row['rung']}: {tried}: {verdict}"
