"""AdamW is torch's, bit by bit."""

import copy

import torch
from torch import nn

from gpt2lab.config.schema import OptimConfig
from gpt2lab.optim.optimizers import build_optimizers, set_learning_rate
from tiny import parse


def steps_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Take five steps with other gradients and another rate in each."""
    generator = torch.Generator().manual_seed(3)
    for step in range(5):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        set_learning_rate([optimizer], 1e-2 / (step + 1))
        optimizer.step()
        optimizer.zero_grad()


def test_steps_and_state_are_those_of_torch():
    torch.manual_seed(1)
    ours = nn.Sequential(nn.Linear(19, 23), nn.LayerNorm(23), nn.Linear(23, 5))
    theirs = copy.deepcopy(ours)
    (mine,) = build_optimizers(ours, OptimConfig())
    groups = [
        {key: group[key] for key in ("weight_decay", "lr_scale")}
        | {"params": [p for p in theirs.parameters() if (p.dim() >= 2) == (index == 0)]}
        for index, group in enumerate(mine.param_groups)
    ]
    reference = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)
    steps_of(mine, ours)
    steps_of(reference, theirs)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)
    states = [mine.state_dict()["state"], reference.state_dict()["state"]]
    assert list(states[0]) == list(states[1])
    for mine_of, theirs_of in zip(states[0].values(), states[1].values(), strict=True):
        assert list(mine_of) == list(theirs_of)
        assert all(torch.equal(mine_of[key], theirs_of[key]) for key in mine_of)


def test_the_betas_reach_the_optimizer():
    def betas(config: OptimConfig) -> list[tuple[float, float]]:
        model = torch.nn.Linear(2, 2)
        (optimizer,) = build_optimizers(model, config)
        return [group["betas"] for group in optimizer.param_groups]

    assert betas(OptimConfig()) == [(0.9, 0.95)] * 2  # Brown et al. 2020, appendix B
    assert betas(parse(["--beta1=0.8", "--beta2=0.99"]).config.optim) == [(0.8, 0.99)] * 2
