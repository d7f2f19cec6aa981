"""Forecasts in one line, for tests."""

from pathlib import Path

from gpt2lab.config.presets import preset
from gpt2lab.planner import hardware
from gpt2lab.planner.estimate import Estimate, estimate
from gpt2lab.planner.job import Job
from gpt2lab.planner.machine import Machine, named
from gpt2lab.planner.request import EstimateRequest, Predictor

KNOWN = hardware.load(Path("/nonexistent"))


def job_for(*, world: int = 1, **flags: object) -> Job:
    ask = EstimateRequest(gpu="H100", gpus=world, **flags)  # type: ignore[arg-type]
    return Predictor(ask, KNOWN).job()


def on(gpu: str, *, gpus: int = 1, compiled: bool = True, **more: object) -> Machine:
    return named(KNOWN.gpu(gpu), KNOWN, gpus=gpus, compiled=compiled, **more)  # type: ignore[arg-type]


def predict(gpu: str, *, gpus: int = 1, **flags: object) -> Estimate:
    return estimate(job_for(world=gpus, **flags), on(gpu, gpus=gpus), KNOWN)


def record(**more: object) -> dict[str, object]:
    model = preset("gpt2-nano").model
    return {
        **{"device": "x", "world": 1, "threads": 2, "dtype": "fp32", "compile": False},
        **{"n_layer": model.n_layer, "n_head": model.n_head, "n_embd": model.n_embd},
        **{"context_length": model.context_length, "vocab_size": model.vocab_size},
        **{"micro_batch": 8, "accumulation": 4, "step_seconds": 0.5, "others": 0.0},
        "ratios": {"eval": 0.3},
    } | more
