"""What a step spends its time on: operators and kernels sorted by their names. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gpt2lab import fmt

GROUPS = ("matmul", "attention", "cross-entropy", "elementwise", "optimizer", "communication")

# First match wins. ATen's names, Inductor's (cpp_fused_..., triton_...), and cuBLAS's, cuDNN's and NCCL's kernels.
_PATTERNS = (
    ("communication", r"nccl|gloo|c10d|all_reduce|allreduce|reduce_scatter|all_gather"),
    ("optimizer", r"adam|Optimizer\.|multi_tensor|foreach|linalg_vector_norm|clip_grad|lamb|muon"),
    ("cross-entropy", r"log_softmax|nll_loss|cross_entropy|logsumexp|fused_.*_gather"),
    (
        "attention",
        r"scaled_dot_product|flash|fmha|sdpa|attention|\bbmm\b|baddbmm|aten::_softmax|_softmax_backward_data"
        r"|fused_.*_softmax",
    ),
    ("matmul", r"\bmm\b|addmm|linear|matmul|gemm|cutlass|nvjet|xmma|cublas|sgemm"),
)
_COMPILED = tuple((group, re.compile(pattern, re.IGNORECASE)) for group, pattern in _PATTERNS)


def group_of(operator: str) -> str:
    """Return the group of an operator or kernel; whatever streams through memory is elementwise."""
    for group, pattern in _COMPILED:
        if pattern.search(operator):
            return group
    return "elementwise"


def split(
    operators: Mapping[str, float], step_seconds: float, data_seconds: float | None
) -> dict[str, float]:
    """Return seconds a step by group, and `idle`: what no operator accounts for.

    `data_seconds`: how long a step waits for its batch, during which it runs no operator; None: not known, so that
    the wait is in `idle` and a batch's making in `elementwise`.
    """
    seconds = dict.fromkeys(GROUPS, 0.0)
    for name, spent in operators.items():
        seconds[group_of(name)] += spent
    if data_seconds is not None:
        seconds["data"] = data_seconds
    seconds["idle"] = max(0.0, step_seconds - sum(seconds.values()))
    return seconds


def describe(name: str, seconds: Mapping[str, float]) -> str:
    """Write one line: milliseconds and shares."""
    total = sum(seconds.values())
    parts = [
        f"{group} {1000 * spent:,.1f} ms ({spent / total:.0%})" for group, spent in seconds.items()
    ]
    return f"{name}: {1000 * total:,.1f} ms = " + ", ".join(parts)


def longest(operators: Mapping[str, float], count: int = 12) -> str:
    """Write the operators that take longest."""
    ordered = sorted(operators.items(), key=lambda item: -item[1])[:count]
    rows = [[name[:100], group_of(name), f"{1000 * spent:.2f}"] for name, spent in ordered]
    return fmt.table(("operator", "group", "ms"), rows)
