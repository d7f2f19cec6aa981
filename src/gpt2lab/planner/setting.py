"""What a question is about: this machine or a named one, and how it predicts jobs. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from gpt2lab.planner import calibration, machine, timing
from gpt2lab.planner.ask import Ask, job_of
from gpt2lab.planner.estimate import Estimate, estimate
from gpt2lab.planner.hardware import Hardware
from gpt2lab.planner.here import Seen, here, look
from gpt2lab.planner.job import Job
from gpt2lab.planner.machine import Machine
from gpt2lab.planner.profiles import Profile


class Setting:
    """The machine that is asked about, and how it predicts jobs."""

    def __init__(self, ask: Ask, known: Hardware) -> None:
        """Look at this machine, unless one is named."""
        self.ask, self.hardware = ask, known
        self.gpu = known.gpu(ask.gpu) if ask.gpu else None
        self.seen: Seen = look() if self.gpu is None else Seen(())
        self.records = calibration.read(ask.folder())
        self.is_cpu = self.gpu is None and self.seen.is_cpu
        self.native_bf16 = self.gpu is not None or self.seen.native_bf16
        default = 1 if self.gpu or self.is_cpu else len(self.seen.gpus)
        self.processes = ask.gpus or default
        self.quality = "ok"

    def job(self, profile: Profile) -> Job:
        """Return the job that the flags mean here."""
        return job_of(
            self.ask,
            profile,
            world=self.processes,
            is_cpu=self.is_cpu,
            native_bf16=self.native_bf16,
        )

    def machine_for(self, job: Job) -> tuple[Machine, dict[str, float]]:
        """Return the machine with rates for this job's dtype and compilation."""
        if self.gpu is None:
            return here(
                self.seen,
                self.hardware,
                self.records,
                processes=job.world,
                dtype=job.dtype,
                compiled=job.compiled,
                parallel=job.parallel,
            )
        named = machine.named(
            self.gpu,
            self.hardware,
            gpus=job.world,
            nodes=self.ask.nodes,
            interconnect=self.ask.interconnect,
            rates=timing.roofline(self.gpu, self.hardware, compiled=job.compiled),
        )
        return named, {}

    def predict(self, job: Job, profile: Profile) -> Estimate:
        """Estimate one job."""
        on, ratios = self.machine_for(job)
        return self.predict_on(on, ratios, job, profile)

    def predict_on(
        self, on: Machine, ratios: Mapping[str, float], job: Job, profile: Profile
    ) -> Estimate:
        """Estimate one job on a machine that was found already."""
        return estimate(
            job,
            on,
            self.hardware,
            ratios=ratios,
            price=self.ask.price,
            kwh=self.ask.kwh,
            memory_target=profile.memory_target,
        )
