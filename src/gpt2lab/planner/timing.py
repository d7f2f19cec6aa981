"""How long a step takes: seven kinds of work, each at its own rate, with an 80 % interval. No torch.

A roofline of a known GPU, a matmul on this CPU, and rates fitted to measured runs are the same linear model with
other coefficients and another uncertainty.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gpt2lab.config.schema import ActivationCheckpointing, ModelConfig, Optimizer, uses_muon
from gpt2lab.errors import ConfigError
from gpt2lab.model.counts import count_matmul_parameters, count_parameters
from gpt2lab.planner.hardware import Gpu, Hardware

MUON_ROUNDS = {"fast": 5, "exact": 12}  # of muon.py's NEWTON_SCHULZ; a test compares
# FLOPs in matrices | FLOPs in attention | channels streamed through the blocks | logits | parameters updated |
# blocks run (a constant cost of many small calls) | FLOPs in Muon's rounds, which a CPU takes in fp32
KINDS = ("matmul", "attention", "stream", "logits", "update", "calls", "muon")


def work(
    model: ModelConfig,
    *,
    micro_batch: int,
    accumulation: int,
    recompute: ActivationCheckpointing = "none",
    optimizer: Optimizer = "adamw",
    newton_schulz: str = "fast",
    updaters: int = 1,
) -> tuple[float, ...]:
    """Return one rank's share of a step in each of KINDS; FLOPs forward and backward, dense attention.

    A forward pass is a third of a step's work. `block` repeats the blocks' forward pass, `selective` the part of it
    that only streams. `updaters`: ranks that share the update of the weights, Muon's matrix products included.
    """
    T, C, L = model.context_length, model.n_embd, model.n_layer
    tokens = micro_batch * accumulation * T
    head = model.vocab_size * C
    twice = 4 / 3 if recompute == "block" else 1.0
    streamed = 4 / 3 if recompute != "none" else 1.0
    return (
        6.0 * (twice * (count_matmul_parameters(model) - head) + head) * tokens,
        12.0 * twice * L * C * T * tokens,
        streamed * tokens * C * L,
        1.0 * tokens * model.vocab_size,
        count_parameters(model) / updaters,
        twice * accumulation * L,
        muon_flops(model, newton_schulz) / updaters if uses_muon(optimizer) else 0.0,
    )


def muon_flops(model: ModelConfig, newton_schulz: str = "fast") -> float:
    """Return the FLOPs of a step's Newton-Schulz rounds, of all matrices.

    A round of an (r, c) matrix, r <= c, is two products of 2 r^2 c and one of 2 r^3. A block has four of (C, C) and two
    of (C, 4C): 60 C^3.
    """
    return 60.0 * MUON_ROUNDS[newton_schulz] * model.n_layer * model.n_embd**3


@dataclass(frozen=True)
class MeasuredStep:
    """One observation to learn from."""

    work: tuple[float, ...]
    seconds: float
    sigma: float = 0.05  # deviation of its logarithm


@dataclass(frozen=True)
class Rates:
    """Seconds for one unit of each kind of work, with the covariance of their relative errors."""

    seconds_per_unit: tuple[float, ...]
    covariance: np.ndarray = field(repr=False)  # (7, 7), of seconds_per_unit relative to itself
    source: str
    observations: int = 0

    def seconds(self, amount: Sequence[float]) -> float:
        """Return the time of some work."""
        return sum(a * s for a, s in zip(amount, self.seconds_per_unit, strict=True))

    def sigma(self, amount: Sequence[float]) -> float:
        """Return the deviation of the logarithm of that time."""
        parts = np.array([a * s for a, s in zip(amount, self.seconds_per_unit, strict=True)])
        share = parts / parts.sum()
        return float(math.sqrt(max(0.0, share @ self.covariance @ share)))


def roofline(gpu: Gpu, hardware: Hardware, *, compiled: bool) -> Rates:
    """Return a GPU's rates: FLOPs at a share of its sustained matmul, bytes at a share of its bandwidth.

    Two costs do not shrink on a faster card, so that it is the less efficient the smaller the work: a latency of the
    kernels between the matrix products, and the launches of a block's kernels in each micro-batch.

    Raises: ConfigError if a number that this needs has no source.
    """
    k = hardware.constants
    matmul = gpu.sustained_flops(k["matmul_fraction_unmeasured"])
    if gpu.peak_flops is None or matmul is None or gpu.bandwidth is None:
        why = f" ({gpu.note})" if gpu.note else ""
        raise ConfigError(
            f"gpu {gpu.name}: no rate of bf16 or fp16 with a source{why}; --measure it there"
        )
    per_flop = 1 / (k["matmul_efficiency"] * matmul)
    per_byte = 1 / (k["bandwidth_efficiency"] * gpu.bandwidth)
    # Without the compiler each operation between matrix products reads and writes memory.
    moved = per_byte * (1.0 if compiled else k["eager_bytes_factor"])
    sigma = k["sigma_roofline"] if gpu.matmul_flops else k["sigma_roofline_unmeasured"]
    return Rates(
        seconds_per_unit=(
            per_flop,
            per_flop,
            moved * k["stream_bytes_per_token_layer_channel"]
            + k["stream_seconds_per_token_layer_channel"],
            moved * k["stream_bytes_per_logit"],
            per_byte * k["optimizer_bytes_per_parameter"],
            k["kernels_per_block" if compiled else "kernels_per_block_eager"] * k["launch_seconds"],
            per_flop,
        ),
        # One common error; launches depend on a host that is not known.
        covariance=np.full((7, 7), sigma**2) + np.diag([0.0] * 5 + [k["sigma_launch"] ** 2, 0.0]),
        source="roofline-prior",
    )


def processor(matmul_flops: float, hardware: Hardware, *, bf16: bool, compiled: bool) -> Rates:
    """Return a CPU's rates from how fast it multiplies fp32 matrices: a wide guess until a run was measured.

    `bf16`: the run multiplies in bf16 and the processor has instructions for it; Muon's rounds stay in fp32. A step
    that is not `compiled` writes the logits to memory several times.
    """
    k = hardware.constants
    speedup = k["cpu_bf16_speedup"] if bf16 else 1.0
    per_flop = 1 / (k["cpu_matmul_efficiency"] * speedup * matmul_flops)
    sigma = k["sigma_cpu_matmul"]
    return Rates(
        seconds_per_unit=(
            per_flop,
            per_flop * k["cpu_attention_factor"],
            k["cpu_stream_seconds"],
            k["cpu_logit_seconds" if compiled else "cpu_logit_seconds_eager"],
            k["cpu_update_seconds"],
            k["cpu_call_seconds"],
            1 / (k["cpu_muon_efficiency"] * matmul_flops),
        ),
        covariance=np.full((7, 7), sigma**2) + np.eye(7) * sigma**2,
        source="cpu-matmul",
    )


def fit_rates(prior: Rates, measured: Sequence[MeasuredStep], *, spread: float) -> Rates:
    """Learn rates from measured steps: Bayesian linear regression of predicted / observed = 1.

    The prior is first brought to the level of the runs. Each rate is then the prior's times a factor; the factors are
    normal around 1 with the prior's covariance plus `spread`^2 of their own, so that runs of different shapes correct
    single rates. Factors stay positive.
    """
    if not measured:
        return prior
    level = statistics.median(m.seconds / prior.seconds(m.work) for m in measured)
    base = level * np.array([s or 1e-12 for s in prior.seconds_per_unit])
    design = np.array([np.array(m.work) * base / m.seconds / m.sigma for m in measured])
    target = np.array([1 / m.sigma for m in measured])
    precision = np.linalg.inv(prior.covariance + np.eye(len(KINDS)) * spread**2)
    posterior = precision + design.T @ design
    right = design.T @ target + precision @ np.ones(len(KINDS))
    factors = _positive_solution(posterior, right)
    covariance = np.linalg.inv(posterior) / np.outer(factors, factors)
    predicted = design @ factors / target
    scatter = float(np.mean(np.log(predicted) ** 2)) if len(measured) > 1 else 0.0
    return Rates(
        seconds_per_unit=tuple(float(s) for s in base * factors),
        # The scatter of this machine's own runs, at least the error of one observation.
        covariance=covariance + max(scatter, min(m.sigma for m in measured) ** 2),
        source="calibrated",
        observations=len(measured),
    )


def _positive_solution(matrix: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Minimise x'Mx/2 - r'x over x >= 0.01 by coordinate descent; M is positive definite."""
    x = np.ones(len(right))
    for _ in range(500):
        for i in range(len(x)):
            rest = matrix[i] @ x - matrix[i, i] * x[i]
            x[i] = max(0.01, (right[i] - rest) / matrix[i, i])
    return x
