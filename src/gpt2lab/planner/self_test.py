"""`--self_test`: foretell a run, really train it with an evaluation, a checkpoint and a resume, and compare."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpt2lab import fmt
from gpt2lab.errors import ConfigError
from gpt2lab.planner import contention, hardware, machine, measuring, profiles, report_json
from gpt2lab.planner.ask import Ask
from gpt2lab.planner.contention import Watch
from gpt2lab.planner.setting import Setting
from gpt2lab.runs import history

STEPS = 120
GOOD = (90.0, 110.0)  # percent that the forecast may be of what came


def run(folder: Path, *, as_json: bool) -> int:
    """Print what was foretold and what came, and return 0 if it agrees, 1 if it does not on an idle machine."""
    known = hardware.load()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".self-test-", dir=folder) as name:
        place = Path(name)
        ask = Ask(
            checkpoint_dir=place,
            model="gpt2-micro",
            mini_batch_size=8,
            steps=str(STEPS),
            eval_freq=40,
            val_tokens=16_384,
            checkpoint_freq=40,
            sample_freq=0,
            compile="off",
        )
        setting = Setting(ask, known)
        profile = profiles.find(None, known)
        measuring.probe(setting, profile, seconds=15.0)
        setting = Setting(ask, known)
        job = setting.job(profile)
        foretold = setting.predict(job, profile)
        starts = 2  # the resume starts the program again
        predicted = foretold.seconds.value + (starts - 1) * foretold.breakdown["start"].value
        measuring.say(
            f"foretold {fmt.duration(predicted)}; training {STEPS} steps in two starts ..."
        )
        data = measuring.data_for(job.config, place)
        flags = measuring.plain_flags(job, place, data)
        watch, began = Watch(), time.monotonic()
        _train([*flags, f"--stop_after_steps={STEPS // 2}"])
        _train([f"--checkpoint_dir={place}", "--run_name=self", "--resume=latest"])
        actual = time.monotonic() - began
        came = _parts(history.read_events(place / "self"), actual)
        others = watch.others() or 0.0
    parts = {name: part.value for name, part in foretold.breakdown.items() if name in came}
    parts["start"] *= starts
    accuracy = 100 * predicted / actual
    idle = others <= contention.BUSY
    good = GOOD[0] <= accuracy <= GOOD[1]
    verdict = "good" if good else "NOT WITHIN 90-110 %"
    if not idle:
        verdict += f"; the machine was not idle: others used {others:.0%} of its cores"
    if as_json:
        document = report_json.blank() | {
            "self_test": {
                "predicted_seconds": predicted,
                "actual_seconds": actual,
                "time_accuracy": accuracy,
                "others": others,
                "foretold_parts": parts,
                "actual_parts": came,
                "load_average": machine.load_average(),
                "good": good,
            }
        }
        print(json.dumps(document))
    else:
        print(
            f"foretold   {predicted:.1f} s for {STEPS} steps, 4 evaluations, 3 checkpoints, {starts} starts"
        )
        for name, seconds in came.items():
            print(f"  {name:<10} foretold {parts[name]:>6.1f} s, came {seconds:>6.1f} s")
        print(f"came       {actual:.1f} s, load average {machine.load_average():.2f}")
        print(f"accuracy   {accuracy:.1f} %: {verdict}")
    return 0 if good or not idle else 1


def _parts(events: list[dict[str, Any]], whole: float) -> dict[str, float]:
    """Return what the two starts spent on each kind of work; what is left went into starting."""
    came = {"train": sum(e["step_seconds"] for e in events if e["event"] == "step")}
    for kind in ("eval", "sample", "checkpoint"):
        came[kind] = sum(e["seconds"] for e in events if e["event"] == kind)
    return came | {"start": whole - sum(came.values())}


def _train(flags: list[str]) -> None:
    from gpt2lab.paths import REPOSITORY

    command = [sys.executable, str(REPOSITORY / "src" / "train.py"), *flags]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if answer.returncode != 0:
        raise ConfigError(f"the trainer failed in the self-test: {answer.stderr.strip()[-300:]}")
