"""What the planner adds to a run: the forecast at its start, its score at the end, and what a request leaves open."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpt2lab.config.derived import compiles
from gpt2lab.config.request import RunRequest
from gpt2lab.config.schema import Config, SystemConfig
from gpt2lab.errors import GPT2LabError
from gpt2lab.files import replace_durably
from gpt2lab.planner import auto, calibration, forecast, hardware, reports
from gpt2lab.planner.estimate import estimate
from gpt2lab.planner.job import Job
from gpt2lab.planner.machine import Watch, detect_hardware
from gpt2lab.runs import history
from gpt2lab.training.extension import Extension, LiveRun
from gpt2lab.training.plan import Plan


class ForecastExtension(Extension):
    """Writes estimate.json at the start of a run, and compares it with the actual run at the end.

    A resumed run keeps its first forecast. A forecast that fails never stops a run.
    """

    def __init__(self) -> None:
        self._run: LiveRun | None = None

    def started(self, run: LiveRun) -> None:
        """Begin to watch who else uses the machine."""
        self._run, self._watch = run, Watch()

    def recorded(self, event: Mapping[str, Any], result: object) -> None:
        """Write the forecast when the run begins."""
        if event["event"] != "begin" or self._run is None:
            return
        start, facts, say = self._run.start, self._run.components.facts, self._run.logger.say
        path, environment, on_gpu = (
            start.run_dir / forecast.FILE,
            facts["environment"],
            facts["on_gpu"],
        )
        if start.checkpoint is not None and path.exists():
            return
        job = Job.of_run(
            start.config,
            start.plan,
            train_tokens=start.data.tokens("train"),
            dtype=environment["dtype"],
            compiled=environment["compile"] == "on",
            order=start.order,
        )
        try:
            known = hardware.load()
            machine = calibration.this_machine(
                detect_hardware(device="auto" if on_gpu else "cpu"),
                known,
                calibration.read(start.run_dir.parent),
                job,
                device=environment["device"] if on_gpu else None,
                threads=environment["threads"],
            )
            found = estimate(job, machine, known)
            document = reports.estimate_as_json(found, hardware.DEFAULT_PROFILE)
            if start.initial is not None:  # not random weights: the scaling law does not apply
                document["loss"] = None
            replace_durably(path, json.dumps(document, indent=1) + "\n")
        except (OSError, GPT2LabError) as error:
            say(f"forecast       n/a: {error}")
            return
        say(f"forecast       {found.describe_time()}")

    def ended(self, reason: str | None, error: BaseException | None) -> None:
        """Score the forecast of a complete run, and let the next forecast learn from it; never fails a run."""
        if self._run is None or reason is not None or error is not None:
            return
        start, others = self._run.start, self._watch.others()
        with contextlib.suppress(OSError, GPT2LabError):
            log = history.read_log(start.run_dir)
            if (
                start.config.tuning.instructions is None
            ):  # its steps and targets are not pretraining's
                # What others used is unknown of several ranks.
                several = start.plan.batch.world_size > 1
                forecast.learn(start.run_dir, log, others=None if several else others)
            actual = forecast.complete(start.run_dir, log)
            if actual is not None and actual["time_accuracy"] is not None:
                self._run.logger.say(f"forecast {reports.describe_actual(actual)}")


class TrainingPlanner:
    """Chooses the settings that a request leaves open; `auto` says which these are."""

    def __init__(self, *, preset: str | None = None, fits_schedule: bool = False) -> None:
        """`preset`: cards by name, such as 8xh100; `fits_schedule`: choose the steps that end within --max_hours."""
        self._preset, self._fits_schedule = preset, fits_schedule

    def measures(self, request: RunRequest) -> bool:
        """Tell whether a micro-batch is searched by running steps."""
        return request.leaves_mini_batch and self._preset is None

    def free_memory(self, system: SystemConfig) -> float | None:
        """Return the bytes that this rank could use, None where unknown."""
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return detect_hardware(device=system.device).free_memory(ranks)

    def choose(
        self,
        request: RunRequest,
        config: Config,
        plan: Plan,
        *,
        run_dir: Path,
        train_tokens: int,
        memory: Sequence[float | None] | None,
    ) -> dict[str, Any]:
        """Return the settings that are decided here, by their flags; see `extension.Planner`.

        Raises: ConfigError or NoSourceError if the machine or the preset cannot do it.
        """
        chosen: dict[str, Any] = {}
        if self._preset is not None:
            job = Job.of_run(
                config,
                plan,
                train_tokens=train_tokens,
                dtype="fp32" if config.system.dtype == "fp32" else "bf16",
                compiled=compiles(config.system, on_gpu=True, max_steps=plan.max_steps),
            )
            chosen |= auto.preset_settings(self._preset, job, typed=request.chosen)
        if memory is None:
            return chosen
        if self.measures(request) or self._fits_schedule:
            detected = detect_hardware(device=config.system.device)
            here = auto.job_on(detected, config, plan, train_tokens)
            if self.measures(request):
                on_gpu = not detected.is_cpu
                chosen |= auto.find_mini_batch(here, run_dir.parent, memory, on_gpu=on_gpu)
            if self._fits_schedule:
                chosen["max_steps"] = auto.steps_in_window(here, detected, run_dir.parent)
        auto.check_memory(config, plan, train_tokens=train_tokens)
        return chosen

    def peak_flops(self, device_name: str) -> float | None:
        """Return a GPU's dense bf16 peak in FLOP/s, None where it is not known."""
        return hardware.peak_flops(device_name)
