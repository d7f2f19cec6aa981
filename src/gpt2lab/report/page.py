"""The report: runs on one HTML page that needs no network. No torch.

jinja2 fills page.html and escapes every value, so that no text of a model becomes markup. The Content-Security-Policy
of the page allows only its own style sheet and its own script, by their hashes.
"""

import base64
import hashlib
import time
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from gpt2lab import __version__, fmt, paths
from gpt2lab.checkpoint import catalog
from gpt2lab.config.presets import preset
from gpt2lab.config.request import chosen_in
from gpt2lab.config.schema import Config
from gpt2lab.config.settings import LEAVES, data_name, is_path, resolved, to_flat
from gpt2lab.errors import ConfigError, system_errors_as
from gpt2lab.files import replace_durably
from gpt2lab.model.counts import count_parameters
from gpt2lab.report import charts, curves
from gpt2lab.runs import history, overview, summary
from gpt2lab.runs.evaluations import newest_tasks
from gpt2lab.runs.events import Event
from gpt2lab.runs.history import Log, read_json

_TEMPLATE, _STYLE, _SCRIPT = (Path(__file__).with_suffix(end) for end in (".html", ".css", ".js"))
_SAMPLES = 16  # on the page, spread evenly over the run


def write_report(run_dirs: Sequence[Path], out: Path) -> None:
    """Write the page of some runs in one step: readers see the old page or the new one.

    Raises: ConfigError if a folder is not a run's or `out` cannot be written; GPT2LabError if metrics are damaged.
    """
    page = render(*run_dirs)
    with system_errors_as(ConfigError, out, what="cannot be written"):
        # A lone surrogate is valid in JSON and not in UTF-8: it becomes a question mark.
        replace_durably(out, page.encode("utf-8", "replace"))


def render(*run_dirs: Path) -> str:
    """Return the page of one run, or of several with their curves over each other.

    Raises: ConfigError, GPT2LabError.
    """
    import jinja2

    names = [run_dir.name for run_dir in run_dirs]
    if len(set(names)) < len(names):
        names = [paths.display_path(run_dir) for run_dir in run_dirs]
    runs = [_read(run_dir, name) for run_dir, name in zip(run_dirs, names, strict=True)]
    drawn = [run["curves"] for run in runs if run["curves"] is not None]
    for number, run in enumerate(run for run in runs if run["curves"] is not None):
        run["colour"] = charts.colour_of(number)
    style, script, page = (path.read_text("utf-8") for path in (_STYLE, _SCRIPT, _TEMPLATE))
    template = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(page)
    return template.render(
        fmt=fmt,
        setting=_setting,
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        version=__version__,
        written=fmt.moment(time.time()),
        runs=runs,
        charts=charts.charts_of(drawn) if drawn else [],
        differing=_differing(runs),
        width=charts.WIDTH,
        height=charts.HEIGHT,
    )


def _read(run_dir: Path, name: str) -> Event:
    config, log = history.read_config(run_dir), history.read_log(run_dir)
    chosen = chosen_in(read_json(run_dir / "config.json") or {})
    status = overview.read_run(run_dir, lambda _: log)
    facts = read_json(run_dir / "run.json") or {}
    infos, damaged = catalog.list_checkpoints(run_dir)
    samples = log.current("sample")
    return {
        "name": name,
        "colour": "",
        "title": _title(config, log),
        "status": status,
        "tiles": _tiles(log),
        "curves": curves.read_curves(run_dir, log, name) if len(log.numbers) else None,
        "sources": _sources(log),
        "tasks": newest_tasks(run_dir, log),
        "forecast": _forecast(run_dir, log),
        "samples": [
            (step, *_split_sample(samples[step], config, log))
            for step in curves.spread(sorted(samples), _SAMPLES)
        ],
        "all_samples": len(samples),
        "lineage": overview.lineage(run_dir.resolve().parent, of=run_dir.name),
        "starts": _starts(log, is_running=status.state == "running"),
        "settings": _settings(config, chosen),
        "chosen": chosen,
        "checkpoints": infos,
        "warnings": log.of_kind("warning", "rewind"),
        "damaged": [str(error) for error in damaged],
        "environment": _environment(facts),
        "command": summary.command_to_continue(run_dir, log) if log and infos else None,
    }


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _title(config: Config, log: Log) -> str:
    model = config.model
    trained = f"{fmt.count(count_parameters(model))} parameters, context {model.context_length}"
    begun = f", begun {fmt.moment(log.events[0]['time'])}" if log.events else ""
    return f"{model.model}, {trained}, on {data_name(config)}{begun}"


def _tiles(log: Log) -> list[tuple[str, str, str]]:
    scores = log.current("hellaswag")
    first, newest = log.first_step(), log.last_step()
    tiles = []
    if first is not None and newest is not None:
        note = f"{fmt.number(first.get('loss'))} at step {first['step']:,}"
        tiles.append(("training loss", fmt.number(newest.get("loss")), note))
    if evals := log.evals_of_data():
        last, best = evals[-1], min(evals, key=itemgetter("val_loss"))
        bits = f"; {last['bits_per_byte']:.4f} bits/byte" if last.get("bits_per_byte") else ""
        note = f"± {fmt.number(last.get('val_loss_se'))}; best {best['val_loss']:.4f} at step {best['step']:,}{bits}"
        if log.average_loss is not None:
            note += f"; mean of the last weights {log.average_loss:.4f}"
        tiles.append(("validation loss", f"{last['val_loss']:.4f}", note))
    if scores:
        last, (value, name) = scores[max(scores)], curves.REFERENCES["acc_norm"][0]
        note = f"acc_norm ± {fmt.number(last.get('acc_norm_se'))} on {last['n']:,} items; {name} {value}"
        tiles.append(("HellaSwag", fmt.number(last.get("acc_norm")), note))
    if newest is not None:
        tokens = newest.get("tokens")
        goal = f" of {begin['max_steps']:,}" if (begin := log.last_begin) else ""
        shown = "n/a" if tokens is None else fmt.count(tokens)
        tiles.append(("tokens", shown, f"step {newest['step']:,}{goal}"))
        rate, note = log.typical_rate()
        if rate and newest.get("mfu") and newest.get("tokens_per_second"):
            mfu = newest["mfu"] * rate / newest["tokens_per_second"]  # proportional on one machine
            note += f"; MFU {mfu:.1%}"
        tiles.append(("tokens/s", fmt.number(rate, ",.0f"), note))
        starts = log.last_attempt
        note = f"{fmt.duration(log.seconds_in_steps())} in steps; {starts} start{'s' if starts > 1 else ''}"
        tiles.append(("time", fmt.duration(log.spent_seconds()), note))
    return tiles


def _sources(log: Log) -> list[tuple[Any, ...]]:
    """Return (name, weight now, epochs, validation loss, standard error) of each source of a mixture."""
    evals, mixtures = log.current("eval"), log.current("mixture")
    epochs = (log.last_step() or {}).get("epochs_by_source")
    if not mixtures or epochs is None:  # no mixture, or none any more
        return []
    shares = mixtures[max(mixtures)]["weights"]
    last = evals[max(evals)] if evals else {}
    losses, errors = last.get("val_loss_by_source", {}), last.get("val_loss_se_by_source", {})
    return [
        (name, share, epochs.get(name), losses.get(name), errors.get(name))
        for name, share in shares.items()
    ]


def _split_sample(sample: Event, config: Config, log: Log) -> tuple[str, str]:
    prompt = config.eval.sample_prompt  # of the last start; undo the changes of later resumes
    for resume in reversed(log.of_kind("resume")):
        if resume["attempt"] > sample["attempt"]:
            prompt, _ = (resume.get("changes") or {}).get("sample_prompt", (prompt, None))
    text = str(sample["text"])
    return (prompt, text[len(prompt) :]) if text.startswith(prompt) else ("", text)


def _differing(runs: Sequence[Event]) -> list[tuple[str, list[str]]]:
    """Return (name, value of each run) of the settings in which runs differ because somebody chose them."""
    by_name = [{name: value for name, value, *_ in run["settings"]} for run in runs]
    chosen = frozenset[str]().union(*(run["chosen"] for run in runs))
    return [
        (name, values)
        for name in by_name[0]
        if name in chosen
        and len(set(values := [settings.get(name, "-") for settings in by_name])) > 1
    ]


def _forecast(run_dir: Path, log: Log) -> list[tuple[Any, ...]]:
    """Return (what, how to write it, forecast, its interval, actual, note) of what estimate.json and the run have."""
    document = read_json(run_dir / "estimate.json") or {}
    rows: list[tuple[Any, ...]] = []
    span, rate = document.get("estimate"), document.get("throughput") or {}
    if not len(log.numbers) or not span:
        return rows
    actual = document.get("actual")
    spent = 3600 * actual["hours"] if actual else log.spent_seconds()
    value, *bounds = (3600 * span[f"{name}_hours"] for name in ("estimated", "low", "high"))
    note = "" if actual else "so far"
    if actual and actual.get("time_accuracy") is None:
        note = "forecast of another length or batch, or without CORE"
    rows.append(("time", fmt.duration, value, bounds, spent, note))
    median, _ = log.typical_rate()
    if rate.get("value") is not None and median is not None:
        bounds = [rate["low"], rate["high"]]
        rows.append(("tokens/s", "{:,.0f}".format, rate["value"], bounds, median, ""))
    needed = (document.get("memory") or {}).get("total")
    if needed and (peak := log.peak_memory()):
        share = f"{needed / peak:.0%} of the actual peak"
        # In the unit of the forecast before a run.
        gib = "{:.2f} GiB".format
        rows.append(("memory", gib, needed / 2**30, None, peak / 2**30, share))
    loss, evals = document.get("loss") or {}, log.evals_of_data()
    if loss.get("value") is not None and evals:
        measured, at = evals[-1]["val_loss"], evals[-1]["step"]
        note = f"at step {at:,}; forecast of the end, for {loss.get('data', 'this data')}"
        bounds = [loss["low"], loss["high"]]
        rows.append(("validation loss", "{:.2f}".format, loss["value"], bounds, measured, note))
    return rows


def _starts(log: Log, *, is_running: bool) -> list[Event]:
    starts: list[Event] = []
    for begin in log.of_kind("begin"):
        of = [event for event in log.events if event["attempt"] == begin["attempt"]]
        resume = next((event for event in of if event["event"] == "resume"), {})
        ends = [event for event in of if event["event"] in ("stop", "done")]
        taken = log.steps[log.attempts == begin["attempt"]]
        starts.append(
            {
                **begin,
                "resume": resume,
                "to_step": int(taken.max(initial=begin["step"])),
                "end": ends[-1]["reason"] if ends else "no end recorded",
            }
        )
    if starts and is_running:
        starts[-1]["end"] = "running"
    return starts


def _settings(config: Config, chosen: frozenset[str]) -> list[tuple[str, str, str, bool]]:
    """Return (name, value, the preset's value, whether a person chose another one) of every setting."""
    plain = to_flat(preset(config.model.model, optimizer=config.optim.optimizer))
    rows = []
    for name, value in to_flat(config).items():
        usual = plain[name]
        if usual is not None and is_path(name):  # config.json has absolute paths
            usual = resolved(name, usual, paths.from_repository)
        differs = value != usual and name in chosen and LEAVES[name][0] != "checkpoint"
        rows.append((name, _setting(value), _setting(plain[name]), differs))
    return rows


def _setting(value: Any) -> str:
    return "-" if value is None else " ".join(value) if isinstance(value, list) else str(value)


def _environment(facts: Event) -> list[tuple[str, str]]:
    rows = {**(facts.get("environment") or {}), **(facts.get("provenance") or {})}
    rows |= {"data_fingerprint": facts.get("data_fingerprint")}
    rows |= facts.get("initial_weights") or {}
    if isinstance(rows.get("command"), list):
        rows["command"] = " ".join(rows["command"])
    return [(name, str(value)) for name, value in rows.items() if value is not None]
