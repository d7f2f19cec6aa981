"""The optimizers of a run, and the norm of the gradient; add another optimizer here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

from gpt2lab.config.schema import OptimConfig
from gpt2lab.optim.muon import Muon
from gpt2lab.optim.schedule import muon_scale

# Of each optimizer: state that has its parameter's shape.
SHAPED_STATE = ("exp_avg", "momentum_buffer")
# The matrices of a block, by the number stacked in one parameter: c_attn holds queries, keys and values.
_PARTS = {"c_attn.weight": 3, "c_proj.weight": 1, "c_fc.weight": 1}


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW started without torch.compile's tracer: the same arithmetic, groups and state.

    torch._dynamo takes longer to import than the rest of an uncompiled start, and torch.optim imports it at the first
    call of several methods, to mark them as not to be traced. No optimizer here is ever traced.

    Its kernel changes nothing where the attribute `found_inf` is 1.0, a () tensor on the weights' device, as
    torch.amp.GradScaler sets it. The step counts stay too.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            tensors: list[list[torch.Tensor]] = [[], [], [], [], []]
            weights, gradients, means, squares, steps = tensors
            self._init_group(group, weights, gradients, means, squares, [], steps)  # type: ignore[no-untyped-call]
            self.update(group, *tensors)

    def update(self, group: dict[str, Any], *tensors: list[torch.Tensor]) -> None:
        """Update weights and moments in place with the settings of their group.

        `tensors`: weights, gradients, means, mean squares, and counts of steps, each ().
        """
        weights, gradients, means, squares, steps = tensors
        beta1, beta2 = group["betas"]
        adamw(
            weights,
            gradients,
            means,
            squares,
            [],
            steps,
            fused=True,
            found_inf=getattr(self, "found_inf", None),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def skip_tracer() -> None:
    """Keep methods of torch.optim.Optimizer from importing the tracer; call this before an optimizer is made.

    Their wrapper looks for this attribute before it imports the tracer (torch/_compile.py). With a torch that looks
    for another, starts only take longer.
    """
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if method is not None and "torch._dynamo" not in sys.modules:
            setattr(method, "__dynamo_disable", method)


def build_optimizers(model: nn.Module, config: OptimConfig) -> list[torch.optim.Optimizer]:
    """Return optimizers whose groups hold every trainable parameter exactly once.

    Weight decay applies to matrices and embeddings; to vectors (biases, norm gains) only where `adamw_decay` is given.
    Each group's learning rate is the schedule's times its `lr_scale`. Muon trains the matrices of the blocks, AdamW the
    rest.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    block_matrices: dict[str, nn.Parameter] = {}
    if config.has_muon:
        in_blocks = [(name, p) for name, p in named if name.startswith("blocks.")]
        block_matrices = {name: p for name, p in in_blocks if name.endswith(tuple(_PARTS))}
    rest = [(name, p) for name, p in named if name not in block_matrices]
    decay = config.weight_decay
    of_matrices, of_vectors = decay, 0.0
    if config.has_muon and config.adamw_decay is not None:
        of_matrices = of_vectors = config.adamw_decay
    by_rate: dict[tuple[bool, float], list[nn.Parameter]] = {(True, 1.0): [], (False, 1.0): []}
    for name, p in rest:
        key = p.dim() >= 2, rate_of(name, p.dim(), config) / config.max_lr
        by_rate.setdefault(key, []).append(p)
    groups = [
        {"params": each, "weight_decay": of_matrices if wide else of_vectors, "lr_scale": scale}
        for (wide, scale), each in by_rate.items()
    ]
    skip_tracer()
    betas = (config.beta1, config.beta2)
    optimizers: list[torch.optim.Optimizer] = [
        AdamW(groups, lr=config.max_lr, betas=betas, eps=config.adam_eps, fused=True)
    ]
    if block_matrices:
        scale = muon_scale(config)
        by_suffix = {
            end: [p for name, p in block_matrices.items() if name.endswith(end)] for end in _PARTS
        }
        muon_groups = [
            {"params": by_suffix[end], "parts": parts, "weight_decay": decay, "lr_scale": scale}
            | {"adjust_lr": config.muon_adjust_lr, "newton_schulz": config.newton_schulz}
            for end, parts in _PARTS.items()
        ]
        even_rows = config.optimizer == "normuon"
        optimizers.append(Muon(muon_groups, lr=config.max_lr, even_rows=even_rows))
    assert_partition(optimizers, [p for _, p in named])
    return optimizers


def rate_of(name: str, dim: int, config: OptimConfig) -> float:
    """Return AdamW's peak learning rate of a weight."""
    rate = config.vector_lr if dim < 2 else None
    if name in ("wte.weight", "wpe.weight"):
        rate = config.embedding_lr
    elif name == "lm_head.weight":
        rate = config.head_lr
    return config.max_lr if rate is None else rate


def assert_partition(
    optimizers: list[torch.optim.Optimizer], parameters: list[nn.Parameter]
) -> None:
    """Assert that the groups hold each of the parameters once, and no others."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in parameters), (
        "optimizer groups do not partition the parameters"
    )


def can_reject_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether `reject_on_device` works: for AdamW and Muon, with full or sharded weights."""
    return isinstance(optimizer, AdamW | Muon)


def reject_on_device(
    optimizers: list[torch.optim.Optimizer], numbers: tuple[torch.Tensor, ...]
) -> None:
    """Let the next `step` change nothing if one of the numbers, each (), is not finite.

    The device decides, as for torch.amp.GradScaler: nothing waits for it. The optimizer's state stays too.
    """
    are_finite = torch.isfinite(torch.stack(numbers)).all()
    for optimizer in optimizers:
        optimizer.found_inf = 1.0 - are_finite.float()  # type: ignore[attr-defined]


def set_learning_rate(optimizers: list[torch.optim.Optimizer], lr: float) -> None:
    """Set every group's learning rate for the coming step."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]


def sum_of_squares(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the squares of all numbers in gradients of any shapes, () float64.

    On a CPU torch's own norm adds a whole tensor in fp32: 2.7e-3 off for a dense (50304, 768). Here fp32 adds within a
    row alone, which no sharding divides, and rows are added in fp64 without a copy of the gradient. GPUs add in trees,
    whose error is below 1e-6, and in a few kernels for all gradients.
    """
    if gradients and gradients[0].device.type == "cuda":
        return torch.stack(torch._foreach_norm(list(gradients))).double().square().sum()
    norms = [g if g.dim() < 2 else torch.linalg.vector_norm(g, dim=-1) for g in gradients]
    return torch.cat([n.flatten() for n in norms]).double().square().sum()


class LossScale:
    """What an fp16 run multiplies its loss by, so that fp16 does not round small gradients to 0.

    The rule and the numbers are torch.amp.GradScaler's, which looks for infinities in the gradients that a rank holds;
    here the norm shows them, and all ranks have the same norm. The device holds the scale: nothing waits.
    Source: Micikevicius et al. 2018, arXiv:1710.03740.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restore(None)

    def restore(self, state: tuple[float, ...] | None) -> None:
        """Continue with the scale and the steps since it changed that `update` returned; None: as a run begins."""
        scale, steps = state or (2.0**16, 0)
        self.scale = torch.full((), scale, device=self._device)
        self._steps = torch.full((), int(steps), dtype=torch.int32, device=self._device)

    def update(self, norm: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Halve the scale if the gradient's norm, (), is not finite; double it after 2,000 steps that were."""
        overflow = 1.0 - torch.isfinite(norm).to(self.scale)
        torch._amp_update_scale_(self.scale, self._steps, overflow, 2.0, 0.5, 2000)
        return self.scale, self._steps
