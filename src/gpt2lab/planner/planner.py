"""The planner's answer to each kind of question; every mode prints one report, or one JSON object. No torch."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpt2lab.errors import ConfigError
from gpt2lab.files import replace_durably
from gpt2lab.planner import (
    alternatives,
    explain,
    gpu_report,
    hardware,
    lr_rules,
    machine,
    measuring,
    profiles,
    remaining,
    remedies,
    report_json,
    report_text,
    scoring,
    self_test,
)
from gpt2lab.planner.ask import Ask, check, nonsense, start_of, window_of
from gpt2lab.planner.deadline import Window, cadence_for, verdict
from gpt2lab.planner.estimate import Estimate
from gpt2lab.planner.hardware import Hardware
from gpt2lab.planner.job import Job
from gpt2lab.planner.profiles import Profile
from gpt2lab.planner.setting import Setting

DOES_NOT_FIT = 3


def answer(ask: Ask) -> int:
    """Answer the question and return the exit code: 0, or 3 if the run does not fit.

    Raises: GPT2LabError with the exit code of the refusal.
    """
    check(ask)
    known = hardware.load()
    if ask.list_gpus:
        return gpu_report.print_hardware(known, as_json=ask.json)
    if ask.accuracy:
        return scoring.print_history(ask.folder(), as_json=ask.json)
    if ask.self_test:
        return self_test.run(ask.folder(), as_json=ask.json)
    if not ask.names_a_job:
        folder = ask.folder()
        run_dir = folder / ask.run_name if ask.run_name else remaining.last_written_run(folder)
        if run_dir is not None:
            return _print_remaining(run_dir, ask)
    return _print_job(ask, known)


def _print_remaining(run_dir: Path, ask: Ask) -> int:
    now = time.time()
    left = remaining.estimate_remaining(run_dir)
    _deliver(ask, remaining.as_json(left, now), remaining.describe(left, now))
    return 0


def _print_job(ask: Ask, known: Hardware) -> int:
    setting = Setting(ask, known)
    profile = profiles.find(ask.profile, known)
    now = time.time()
    begins, span = start_of(ask, now), window_of(ask, now)
    window = Window(*span) if span else None
    batch_search: dict[str, Any] | None = None
    if ask.measure or ask.find_batch_size:
        ask, batch_search = measuring.measure(setting, profile)
        setting = Setting(ask, known)
    if ask.compare is not None:
        return alternatives.print_comparison(setting, profile, ask.compare, window)
    job = setting.job(profile)
    found = _fitting(setting, job, profile)
    warnings = nonsense(found.job) + _hints(found, window)
    rows = alternatives.scaling(setting, found, profile)
    judged = verdict(found, window) if window else None
    no_memory = found.memory.largest_micro_batch is None and found.memory.fits is False
    options = (
        remedies.options(setting, found, profile, window) if judged != "fits" and window else []
    )
    if no_memory:
        options = remedies.where_it_fits(found, known)
    extra = ["", alternatives.scaling_table(rows)] if len(rows) > 1 else []
    extra += ["", "to make it fit", *(f"  {line}" for line in options)] if options else []
    extra += ["", *explain.lines(found, known)] if ask.explain else []
    unique, advice = found.job.unique_tokens, None
    if unique is not None:
        listed = profiles.profiles(known).values()
        advice = profiles.advise(unique, parameters=found.job.parameters, known=listed)
        extra += [f"{'data':<12} {advice}"]
    extra += [lr_rules.line(found.job, ask.lr_rule, typed=ask.max_lr is not None)]
    milestones = [
        {"step": at, "tokens": at * found.job.config.batch.total_batch_size}
        | {"time": begins + share * found.seconds.value}
        | {"low": begins + share * found.seconds.low, "high": begins + share * found.seconds.high}
        for share in remaining.MILESTONES
        if (at := round(share * found.job.max_steps)) > 0
    ]
    document = report_json.as_json(
        found,
        profile_name=profile.name,
        window=window,
        quality=setting.quality,
        scaling=rows,
        milestones=milestones,
        warnings=warnings,
    )
    document |= {
        "data_advice": advice,
        "batch_search": batch_search,
        "learning_rate": lr_rules.as_json(found.job),
    }
    text = report_text.describe(found, now=begins, window=window, extra=extra, warnings=warnings)
    _deliver(ask, document, text)
    return DOES_NOT_FIT if judged in ("borderline", "does_not_fit") or no_memory else 0


def _fitting(setting: Setting, job: Job, profile: Profile) -> Estimate:
    """Estimate the job; a mini batch that nobody typed and that does not fit gives way to the largest that does."""
    found = setting.predict(job, profile)
    largest = found.memory.largest_micro_batch
    if setting.ask.mini_batch_size is None and found.memory.fits is False and largest:
        found = setting.predict(alternatives.with_micro_batch(job, largest), profile)
    return found


def _hints(found: Estimate, window: Window | None) -> list[str]:
    """Say what the user would want to know before starting."""
    hints = []
    better = cadence_for(found, 0.02)
    if found.event_share > 0.05 and better:
        hints.append(
            f"evaluations take {found.breakdown['eval'].value / found.seconds.value:.0%} of the time; "
            f"--eval_freq {better} makes it 2 %"
        )
    default = found.job.config.batch.mini_batch_size
    if found.memory.fits is False and found.memory.largest_micro_batch:
        hints.append(
            f"mini_batch_size {default} does not fit; --mini_batch_size {found.memory.largest_micro_batch} does"
        )
    if found.cost is not None and found.cost.is_old(datetime.date.today()):
        hints.append(f"the price is of {found.cost.date}: older than half a year; give --price")
    if (
        found.machine.is_cpu
        and found.job.world == 1
        and machine.load_average() > machine.cores() * 0.75
    ):
        hints.append(
            f"machine busy: load {machine.load_average():.1f} on {machine.cores()} cores; "
            f"times hold for an idle one"
        )
    return hints


def _deliver(ask: Ask, document: Mapping[str, Any], text: str) -> None:
    """Print the text, or exactly one JSON object; write the report file whole.

    Raises: ConfigError if the report cannot be written.
    """
    if ask.report is not None:
        try:
            replace_durably(ask.report, json.dumps(document, indent=1) + "\n")
        except OSError as error:
            raise ConfigError(
                f"--report {ask.report}: cannot write there ({error.strerror})"
            ) from error
    if ask.json:
        print(json.dumps(document, allow_nan=False))
    else:
        print(text)
