"""AdamW's two decays: GPT-3's by default, others where they are typed, in the run and on a resume."""

from __future__ import annotations

import pytest
import torch

from gpt2lab.config.schema import Config, OptimConfig
from gpt2lab.config.settings import find_problems, override
from gpt2lab.errors import ConfigError
from gpt2lab.optim.optimizers import build_optimizers
from tiny import parse


def test_the_betas_reach_the_optimizer():
    def betas(config: OptimConfig) -> list[tuple[float, float]]:
        model = torch.nn.Linear(2, 2)
        (optimizer,) = build_optimizers(model, config, device=torch.device("cpu"))
        return [group["betas"] for group in optimizer.param_groups]

    assert betas(OptimConfig()) == [(0.9, 0.95)] * 2  # Brown et al. 2020, appendix B
    assert betas(parse(["--beta1=0.8", "--beta2=0.99"]).config.optim) == [(0.8, 0.99)] * 2


@pytest.mark.parametrize("name", ["beta1", "beta2"])
def test_a_beta_of_one_never_forgets(name):
    assert find_problems(override(Config(), {name: 1.0})) == [f"{name} 1.0 must be below 1"]
    assert find_problems(override(Config(), {name: 0.0})) == []


def test_another_beta_on_a_resume_is_asked_for(run):
    run.train("--max_steps=4", "--stop_after_steps=2")
    error = run.rejected("--resume=latest", "--beta2=0.99")
    assert isinstance(error, ConfigError)
    assert "beta2 0.95 -> 0.99" in str(error)
    run.train("--resume=latest", "--beta2=0.95", "--max_steps=4")
    kept = run.losses()[4]
    run.train("--resume=2", "--beta2=0.5", "--allow_change=beta2")
    assert run.losses()[4] != kept, "the fourth loss follows from the third update"
