"""What the planner adds to a run: the forecast at its start, its score at the end, and what a request leaves open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpt2lab.config.request import RunRequest
from gpt2lab.config.schema import Config, SystemConfig
from gpt2lab.planner import auto, hardware
from gpt2lab.planner.forecast import score_forecast, write_forecast
from gpt2lab.planner.job import Job
from gpt2lab.planner.machine import Watch
from gpt2lab.training.extension import Extension, LiveRun
from gpt2lab.training.plan import Plan


class ForecastExtension(Extension):
    """Writes estimate.json at the start of a run, and compares it with the actual run at the end."""

    def __init__(self) -> None:
        self._run: LiveRun | None = None

    def started(self, run: LiveRun) -> None:
        """Begin to watch who else uses the machine."""
        self._run, self._watch = run, Watch()

    def recorded(self, event: Mapping[str, Any], result: object) -> None:
        """Write the forecast when the run begins."""
        if event["event"] != "begin" or self._run is None:
            return
        start, facts = self._run.start, self._run.components.facts
        environment = facts["environment"]
        job = Job.of_run(
            start.config,
            start.plan,
            train_tokens=start.data.tokens("train"),
            dtype=environment["dtype"],
            compiled=environment["compile"] == "on",
            order=start.order,
        )
        write_forecast(
            start.run_dir,
            job,
            environment,
            on_gpu=facts["on_gpu"],
            is_resumed=start.checkpoint is not None,
            from_pretrained=start.initial is not None,
            say=self._run.logger.say,
        )

    def ended(self, reason: str | None, error: BaseException | None) -> None:
        """Score the forecast of a complete run, and let the next forecast learn from it."""
        if self._run is None or reason is not None or error is not None:
            return
        score_forecast(
            self._run.start.run_dir,
            self._run.start.config,
            world_size=self._run.start.plan.batch.world_size,
            others=self._watch.others(),
            say=self._run.logger.say,
        )


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
        return auto.free_memory(system)

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
        wanted = auto.OpenSettings(
            preset=self._preset,
            find_mini_batch=self.measures(request) and memory is not None,
            fit_schedule=self._fits_schedule and memory is not None,
            typed=request.chosen,
        )
        chosen = auto.choose_settings(
            wanted,
            config,
            plan,
            run_dir=run_dir,
            train_tokens=train_tokens,
            memory=memory or (),
        )
        if memory is not None:
            auto.check_memory(config, plan, train_tokens=train_tokens)
        return chosen

    def peak_flops(self, device_name: str) -> float | None:
        """Return a GPU's dense bf16 peak in FLOP/s, None where it is not known."""
        return hardware.peak_flops(device_name)
