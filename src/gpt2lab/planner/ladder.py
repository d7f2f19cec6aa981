"""A ladder's folder: what its rungs measured, the prediction of its top rung, and the loss of other jobs. No torch.

`ladder.json` holds the rungs and what follows from them; `prediction.json` the loss of the top rung, written before
that is trained and never again.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpt2lab import paths
from gpt2lab.config.schema import Config
from gpt2lab.config.settings import OPTIONS
from gpt2lab.errors import CheckError, ConfigError
from gpt2lab.files import NUMBER, OBJECT, SIZE, TEXT, JsonFile, create_durably, list_of
from gpt2lab.planner.job import Job
from gpt2lab.planner.scaling_law import Fit, Point, Rung, fit_law
from gpt2lab.training.progress import Interval

FILE, PREDICTION = "ladder.json", "prediction.json"
_FORMAT = "gpt2lab-ladder/1"
# Settings that a job must share with the ladder's rungs, besides the data; only sizes may differ.
SHARED = (*OPTIONS, "context_length", "vocab_size", "optimizer")
_RUNG = {"parameters": SIZE, "tokens": SIZE, "losses": list_of(NUMBER, "a list of numbers")}
_PREDICTED = {
    **{"written": TEXT, "time": NUMBER, "inputs_sha256": TEXT, "parameters": SIZE, "tokens": SIZE},
    **{"seeds": SIZE, "loss": OBJECT},
}
# Times the compute of the most expensive rung, from which a loss is said to be far away.
_FAR = 10.0


@dataclass(frozen=True)
class Ladder:
    """A ladder that was run, and its fit."""

    name: str
    settings: Mapping[str, Any]  # SHARED, data (fingerprint), data_name
    fit: Fit

    @property
    def most_flops(self) -> float:
        """6 N D of the most expensive rung."""
        return max(6.0 * rung.parameters * rung.tokens for rung in self.fit.rungs)

    def loss_of(self, job: Job) -> Interval:
        """Return the loss of a job, nats a token, with its 80 % interval.

        Raises: ConfigError if the job is not of the ladder's kind.
        """
        config, flat = job.config, shared_settings(job.config)
        for name in SHARED:
            if flat[name] != self.settings.get(name):
                raise ConfigError(
                    f"--ladder {self.name}: its runs have {name} {self.settings.get(name)}, this job {flat[name]}; "
                    f"run a ladder with the job's settings"
                )
        found = job.data_fingerprint
        if found is not None and found != self.settings["data"]:
            raise ConfigError(
                f"--ladder {self.name}: its runs read {self.settings['data_name']}, this job other data "
                f"({', '.join(config.data.data_dir)}); run a ladder on the job's data"
            )
        return self.fit.predict(job.parameters, job.tokens).loss

    def note(self, job: Job) -> str:
        """Say in one line where a job's loss comes from, and how far that is from what was measured."""
        ratio = 6.0 * job.parameters * job.tokens / self.most_flops
        far = f", {ratio:,.0f} x the compute of its most expensive rung" if ratio > 1 else ""
        far += ": far outside what was fitted" if ratio > _FAR else ""
        epochs = job.epochs or 0.0
        repeats = f"; {epochs:.1f} passes over the data, the law knows one" if epochs > 1 else ""
        return f"ladder {self.name} on {self.settings['data_name']}, one new run{far}{repeats}"


def shared_settings(config: Config) -> dict[str, Any]:
    """Return the settings that a ladder's jobs share."""
    values = {**asdict(config.model), "optimizer": config.optim.optimizer}
    return {name: values[name] for name in SHARED}


def inputs_hash(rungs: Sequence[Rung], settings: Mapping[str, Any]) -> str:
    """Return the SHA-256 of all that a fit depends on."""
    inputs = {"rungs": [asdict(rung) for rung in rungs], "settings": dict(settings)}
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def read_ladder(folder: Path) -> Ladder:
    """Read the ladder of a folder and fit it again.

    Raises: ConfigError if there is none.
    """
    file = JsonFile(folder / FILE, ConfigError, "fit the ladder again")
    found = file.read() if file.path.exists() else {}
    if found.get("format") != _FORMAT:
        raise ConfigError(
            f"{paths.display_path(folder)} contains no fitted ladder: "
            f"gpt2lab ladder fit FILE writes {FILE} there"
        )
    rules = {"name": TEXT, "settings": OBJECT, "rungs": list_of(OBJECT, "a list of objects")}
    file.check(found, rules)
    file.check(found["settings"], {"data": TEXT, "data_name": TEXT}, where="settings: ")
    for row in found["rungs"]:
        file.check(row, _RUNG, where="rungs: ")
    rungs = [Rung(row["parameters"], row["tokens"], tuple(row["losses"])) for row in found["rungs"]]
    return Ladder(found["name"], found["settings"], fit_law(rungs))


def find_ladder(name: str, checkpoint_dir: Path) -> Ladder:
    """Return a ladder by its name among the runs, or by its folder.

    Raises: ConfigError.
    """
    folder = paths.from_working_directory(Path(name))
    named = checkpoint_dir / name
    return read_ladder(folder if (folder / FILE).is_file() else named)


def read_prediction(folder: Path) -> dict[str, Any] | None:
    """Return the prediction for the top rung, None if there is none.

    Raises: ConfigError if the file is damaged.
    """
    fix = "put back what was written, or run the ladder in a new folder (--out)"
    file = JsonFile(folder / PREDICTION, ConfigError, fix)
    if not file.path.exists():
        return None
    found = file.read()
    file.check(found, _PREDICTED)
    file.check(found["loss"], dict.fromkeys(("value", "low", "high"), NUMBER), where="loss: ")
    return found


def write_prediction(folder: Path, ladder: Ladder, point: Point) -> dict[str, Any]:
    """Write the prediction for the top rung, once; return it, or the existing one.

    Raises: CheckError if the existing one was made from other losses; ConfigError if it is damaged; OSError.
    """
    path, inputs = folder / PREDICTION, inputs_hash(ladder.fit.rungs, ladder.settings)
    if (found := read_prediction(folder)) is not None:
        same = (inputs, point.parameters, point.tokens, point.seeds)
        if tuple(found.get(k) for k in ("inputs_sha256", "parameters", "tokens", "seeds")) != same:
            raise CheckError(
                f"{paths.display_path(path)} was written at {found.get('written')} from other losses or for another "
                f"top rung; a prediction is never changed: run the ladder in a new folder (--out)"
            )
        return found
    now = datetime.datetime.now(datetime.timezone.utc)
    document = {
        "written": now.isoformat(timespec="seconds"),
        "time": now.timestamp(),
        "inputs_sha256": inputs,
        "law": asdict(ladder.fit.law),
        **asdict(point),
        "unit": "nats/token, mean of the seeds, 80 % interval",
    }
    create_durably(path, (json.dumps(document, indent=1) + "\n").encode())
    return document


def score(prediction: Mapping[str, Any], losses: Sequence[float], begun: float) -> dict[str, Any]:
    """Compare a prediction with the losses of the top rung's seeds; `begun`: when the first of them started, Unix s.

    Raises: CheckError if the top rung was trained before the prediction was written.
    """
    if begun <= prediction["time"]:
        moment = datetime.datetime.fromtimestamp(begun, datetime.timezone.utc)
        raise CheckError(
            f"the top rung began at {moment.isoformat(timespec='seconds')}, before its prediction was written "
            f"({prediction['written']}): that is no prediction"
        )
    mean, at = sum(losses) / len(losses), prediction["loss"]
    return {
        "losses": list(losses),
        "loss": mean,
        "error_percent": 100 * (at["value"] / mean - 1),
        "half_width_percent": 50 * (at["high"] - at["low"]) / at["value"],
        "inside_interval": at["low"] <= mean <= at["high"],
        "seconds_after_prediction": begun - prediction["time"],
    }


def ladder_as_json(
    ladder: Ladder,
    *,
    names: Sequence[str],
    rates: Sequence[Mapping[str, Any]],
    prediction: Mapping[str, Any] | None,
    scored: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the document of a ladder; `names` of its rungs, in their order."""
    fitted = ladder.fit
    rows = [
        {"name": name, **asdict(rung), "fitted": fitted.law.loss(rung.parameters, rung.tokens)}
        for name, rung in zip(names, fitted.rungs, strict=True)
    ]
    flops = [ladder.most_flops * factor for factor in (0.1, 1.0, 10.0)]
    shown = [(rung.parameters, rung.tokens) for rung in fitted.rungs]
    if prediction is not None:
        shown.append((prediction["parameters"], prediction["tokens"]))
    sizes, tokens = (sorted(set(values)) for values in zip(*shown, strict=True))
    places = [round(at) for at in np.geomspace(tokens[0], tokens[-1], 17).tolist()]
    curves = []
    for size in sizes:  # loss and interval over tokens, for the plot
        points = [fitted.predict(size, at).loss for at in places]
        band = {key: [getattr(one, key) for one in points] for key in ("value", "low", "high")}
        curves.append({"parameters": size, "tokens": places, **band})
    return {
        "format": _FORMAT,
        "name": ladder.name,
        "settings": dict(ladder.settings),
        "inputs_sha256": inputs_hash(fitted.rungs, ladder.settings),
        "rungs": rows,
        "law": asdict(fitted.law),
        "law_intervals": _as_json(fitted.intervals()),
        "seed_spread": fitted.seed_spread,
        "misfit": fitted.misfit,
        "frontier": [{"flops": one} | _as_json(fitted.optimum(one)) for one in flops],
        "curves": curves,
        "rates": list(rates),
        "prediction": prediction,
        "score": scored,
    }


def _as_json(intervals: Mapping[str, Interval]) -> dict[str, Any]:
    return {name: asdict(one) for name, one in intervals.items()}
