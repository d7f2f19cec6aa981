"""Muon against torch.optim.Muon, and its state through checkpoints, processes and a change of optimizer."""

import dataclasses
import math
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from gpt2lab.config.schema import Config, ModelConfig, OptimConfig
from gpt2lab.config.settings import override
from gpt2lab.model.counts import checkpoint_bytes
from gpt2lab.model.gpt import build_model
from gpt2lab.optim import muon
from gpt2lab.optim.muon import Muon, orthogonalize
from gpt2lab.optim.optimizers import build_optimizers, set_learning_rate
from tiny import flags_for
from whole_run import Run

CPU = torch.device("cpu")
SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 32, "context_length": 16, "vocab_size": 256}


def matrices(shapes: list[tuple[int, int]], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(("adjust", "how"), [("match_rms_adamw", "fast"), ("original", "exact")])
def test_three_steps_equal_those_of_torch(precision, adjust, how, monkeypatch):
    """Theirs computes in bf16 always. Ours too: equal up to the order of sums; ours in fp32: up to bf16's rounding."""
    shapes = [(8, 8), (8, 8), (32, 8), (8, 32), (8, 8)]
    ours = [nn.Parameter(value) for value in matrices(shapes, 1)]
    theirs = [nn.Parameter(value) for value in matrices(shapes, 1)]
    if precision == "bf16":
        monkeypatch.setattr(
            muon, "orthogonalize", lambda x, how: orthogonalize(x.bfloat16(), how).to(torch.float32)
        )
    settings = {"lr": 0.02, "weight_decay": 0.1}
    own: Any = {"adjust_lr": adjust, "newton_schulz": how}
    mine = Muon([{"params": ours, "weight_decay": 0.1} | own], lr=0.02)
    rounds, coefficients = muon.NEWTON_SCHULZ[how]
    ns: Any = {"ns_steps": rounds, "ns_coefficients": coefficients}
    reference = torch.optim.Muon(theirs, adjust_lr_fn=adjust, **ns, **settings)
    for step in range(3):
        for a, b, gradient in zip(ours, theirs, matrices(shapes, 10 + step), strict=True):
            a.grad, b.grad = gradient.clone(), gradient.clone()
        mine.step()
        reference.step()
    for a, b, start in zip(ours, theirs, matrices(shapes, 1), strict=True):
        moved = (b - start).abs().max().item()
        assert moved > 0.02
        assert (a - b).abs().max().item() <= moved * (0.01 if precision == "bf16" else 0.05)
        mine_buffer, their_buffer = mine.state[a], reference.state[b]
        torch.testing.assert_close(mine_buffer["momentum_buffer"], their_buffer["momentum_buffer"])


@pytest.mark.parametrize("shape", [(16, 16), (48, 16), (16, 48)])
def test_singular_values_come_near_one_and_directions_stay(shape):
    batch = torch.stack(matrices([shape] * 3, seed=2)).double()
    found = orthogonalize(batch)
    left, _, right = torch.linalg.svd(batch, full_matrices=False)
    inner = left.mT @ found @ right.mT  # diagonal if the singular vectors are kept
    values = inner.diagonal(dim1=1, dim2=2)
    assert (inner - torch.diag_embed(values)).abs().max() < 1e-9
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_matrices_in_one_parameter_are_each_made_orthogonal():
    whole = nn.Parameter(torch.zeros(24, 8))
    parts = [nn.Parameter(torch.zeros(8, 8)) for _ in range(3)]
    whole.grad = torch.cat(gradients := matrices([(8, 8)] * 3, 4))
    for part, gradient in zip(parts, gradients, strict=True):
        part.grad = gradient
    Muon([{"params": [whole], "parts": 3}], lr=0.1).step()
    Muon([{"params": parts}], lr=0.1).step()
    assert torch.equal(whole.detach(), torch.cat([part.detach() for part in parts]))


class Weights:
    """Weights, those of 24 rows of three matrices, and their optimizer."""

    def __init__(self, shapes: list[tuple[int, int]], *, even_rows: bool) -> None:
        self.parameters = [nn.Parameter(value) for value in matrices(shapes, 1)]
        groups = [{"params": [p], "parts": 3 if len(p) == 24 else 1} for p in self.parameters]
        self.optimizer = Muon(groups, lr=0.02, even_rows=even_rows)

    def step(self, gradients: list[torch.Tensor], found_inf: torch.Tensor | None = None) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        self.optimizer.found_inf = found_inf
        self.optimizer.step()

    def bits(self) -> list[list[int]]:
        """Return all of weights and state; unlike -0.0 and 0.0, equal ones have the same bits."""
        state = [v for p in self.parameters for v in self.optimizer.state[p].values()]
        return [v.detach().view(torch.int32).tolist() for v in (*self.parameters, *state)]


def test_normuon_divides_rows_by_their_mean_square_and_keeps_the_updates_norm():
    """Against the formula written out for one parameter after the other, its average corrected for its begin."""
    shapes = [(8, 8), (24, 8), (32, 8), (8, 32)]
    own = Weights(shapes, even_rows=True)
    parameters, wanted = own.parameters, matrices(shapes, 1)
    momentum = [torch.zeros(shape) for shape in shapes]
    averages = [torch.zeros(len(p), 1) for p in parameters]
    for step in range(1, 4):
        gradients = matrices(shapes, 20 + step)
        gradients[2] *= torch.linspace(1, 9, 32)[:, None]
        gradients[2][5] = 0.0  # a row that never gets a gradient
        for i, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            momentum[i] = 0.95 * momentum[i] + 0.05 * gradient
            direction = 0.05 * gradient + 0.95 * momentum[i]
            parts = 3 if len(parameter) == 24 else 1
            update = orthogonalize(direction.view(parts, -1, gradient.size(1))).view_as(gradient)
            averages[i].mul_(0.95).add_(0.05 * update.square().mean(1, keepdim=True))
            even = update / (averages[i] / (1 - 0.95**step)).sqrt().clamp(min=1e-10)
            even *= update.norm() / even.norm()
            scale = 0.2 * max(len(gradient) // parts, gradient.size(1)) ** 0.5
            wanted[i] -= 0.02 * scale * even
        own.step(gradients)
    for parameter, value in zip(parameters, wanted, strict=True):
        torch.testing.assert_close(parameter.detach(), value, rtol=1e-4, atol=1e-6)
    assert torch.equal(parameters[2].detach()[5], matrices(shapes, 1)[2][5])
    still = nn.Parameter(torch.ones(4, 8))
    still.grad = torch.zeros(4, 8)
    Muon([{"params": [still]}], lr=0.1, even_rows=True).step()
    assert torch.equal(still.detach(), torch.ones(4, 8))


@pytest.mark.parametrize("even_rows", [False, True])
def test_a_rejected_update_changes_no_bit_and_an_accepted_one_is_as_without_rejections(even_rows):
    shapes = [(8, 8), (24, 8), (8, 32)]
    here, plain = (Weights(shapes, even_rows=even_rows) for _ in range(2))
    for number in (1, 2, 3):
        gradients = matrices(shapes, number)
        here.step(gradients, torch.zeros(()))
        plain.step(gradients)
        assert here.bits() == plain.bits()
        for each in (here, plain):
            first = each.parameters[0]
            for value in (first.detach(), each.optimizer.state[first]["momentum_buffer"]):
                value[0, number] = -0.0
        for bad in (math.nan, math.inf, 1.0):
            here.step([torch.full(shape, bad) for shape in shapes], torch.ones(()))
            assert here.bits() == plain.bits()


def test_muon_takes_the_blocks_matrices_and_adamw_all_else():
    model = build_model(ModelConfig(**SHAPE, qk_norm="rmsnorm"), seed=1, device=CPU)
    config = OptimConfig(optimizer="muon", max_lr=0.01, muon_lr=0.03)
    adamw, own = build_optimizers(model, config)
    names = {id(p): name for name, p in model.named_parameters()}
    taken = {names[id(p)]: g["parts"] for g in own.param_groups for p in g["params"]}
    ends = {"attn.c_attn": 3, "attn.c_proj": 1, "mlp.c_fc": 1, "mlp.c_proj": 1}
    assert taken == {f"blocks.{i}.{end}.weight": n for i in range(2) for end, n in ends.items()}
    embeddings = {names[id(p)] for p in adamw.param_groups[0]["params"]}
    assert embeddings == {"wte.weight", "wpe.weight"}
    set_learning_rate([adamw, own], 0.005)
    assert [g["lr"] for g in own.param_groups] == pytest.approx([0.015] * 3)
    assert isinstance(adamw, torch.optim.AdamW)
    assert len(build_optimizers(model, OptimConfig())) == 1
    _, own = build_optimizers(model, OptimConfig(optimizer="muon"))
    assert {group["lr_scale"] for group in own.param_groups} == {1.0}  # a rate that is None


HOW = {"optimizer": "muon", "muon_lr": 0.01, "lr_schedule": "wsd", "max_steps": 12}
HOW |= {"eval_freq": 0, "checkpoint_freq": 1}


@pytest.fixture(scope="module")
def straight(tiny_run) -> Run:
    """Return a run that was never stopped; treat as read-only."""
    return tiny_run(**HOW)


def test_a_checkpoint_holds_one_moment_of_each_matrix_by_its_name(straight):
    path = straight.path / "step_00000012" / "optim.safetensors"
    tensors = safetensors.torch.load_file(path)
    keys: dict[str, set[str]] = {}
    for full_name in tensors:
        name, _, key = full_name.rpartition("/")
        keys.setdefault(name, set()).add(key)
    assert keys["blocks.0.attn.c_attn.weight"] == {"momentum_buffer"}
    assert keys["wte.weight"] == {"exp_avg", "exp_avg_sq", "step"}
    assert tensors["blocks.1.mlp.c_fc.weight/momentum_buffer"].shape == (128, 32)
    config = override(Config(), {**SHAPE, "optimizer": "muon"})
    weights = safetensors.torch.load_file(path.with_name("model.safetensors"))
    total = sum(4 * t.numel() for t in (*tensors.values(), *weights.values()) if t.dim() > 0)
    assert total == checkpoint_bytes(config)
    plain = dataclasses.replace(config, optim=OptimConfig())
    assert checkpoint_bytes(plain) - total == 4 * 12 * 2 * 32**2


def test_another_optimizer_is_rejected_unless_allowed_and_then_begins_afresh(straight, tiny_run):
    run = tiny_run(*flags_for(**HOW))
    run.train("--stop_after_steps=6")
    other = ("--optimizer=adamw", "--resume=latest", "--stop_after_steps=12")
    assert "optimizer muon -> adamw" in str(run.rejected(*other))
    other += ("--allow_change=optimizer",)
    assert "--max_lr" in str(run.rejected(*other)), "whose rate is not that of Muon"
    run.train(*other, "--max_lr=6e-4")
    losses, before = run.losses(), straight.losses()
    assert losses[7] == before[7], "the same weights go on"
    assert losses[8] != before[8]
    assert math.isfinite(losses[12])
    tensors = safetensors.torch.load_file(run.path / "step_00000012" / "optim.safetensors")
    assert tensors["blocks.0.attn.c_attn.weight/step"].item() == 6
