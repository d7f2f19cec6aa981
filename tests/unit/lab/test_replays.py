"""What replay makes of runs that are compiled by region, and of runs whose optimizer changed."""

import pytest
from torch._dynamo.utils import counters

from gpt2lab.config.derived import REGIONS_FROM_LAYERS
from gpt2lab.lab.replay import open_replay
from gpt2lab.lab.step_tokens import RecordedRun
from gpt2lab.lab.why_spike import contributions
from gpt2lab.training.recipe import PRETRAINING
from one_process import only_trace


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_samples_of_a_step_of_a_deep_run_are_taken_one_by_one_uncompiled(tiny_run, monkeypatch):
    """The step is traced, for its micro-batch; a row alone would be traced as another shape."""
    only_trace(monkeypatch)
    deep = {"n_layer": REGIONS_FROM_LAYERS, "n_embd": 16, "total_batch_size": 64, "max_steps": 4}
    deep |= {"eval_freq": 0, "sample_freq": 0, "checkpoint_freq": 2, "compile": "on"}
    run = tiny_run(stop_after_steps=3, **deep)
    traced = counters["stats"]["unique_graphs"]
    replay = open_replay(RecordedRun(run.path, PRETRAINING), first=3, last=3)
    parts = contributions(replay)
    replay.close()
    logged = run.steps()[3]
    assert sum(part.projection for part in parts) == pytest.approx(logged["grad_norm"], rel=1e-4)
    assert counters["stats"]["unique_graphs"] == traced == 3


def test_a_step_after_a_change_of_optimizer_is_replayed(tiny_run):
    how = {"max_steps": 8, "eval_freq": 0, "checkpoint_freq": 4}
    run = tiny_run(optimizer="muon", stop_after_steps=4, **how)
    change = {"optimizer": "adamw", "max_lr": 6e-4, "allow_change": "optimizer"}
    run.train("--resume=latest", stop_after_steps=None, **change)
    again = open_replay(RecordedRun(run.path, PRETRAINING), first=5, last=5)
    again.take_until(5)
    assert (again.from_step, again.departure) == (4, None)
    again.close()
