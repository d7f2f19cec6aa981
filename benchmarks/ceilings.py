"""What this machine can do at best: matrix products, copies of memory, attention. Everything else is a share of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.register_peak import register_peak
from benchmarks.shapes import Size
from gpt2lab import fmt

Device = Literal["cpu", "cuda"]
_SECONDS = 1.0  # spent on each measurement
_LEAST_ROUNDS = 5
_KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True)
class Ceilings:
    """The best of several shapes each; the registers' of a CPU that tells."""

    matmul_fp32: float  # FLOP/s, full precision
    matmul_bf16: float  # FLOP/s
    register_fp32: float | None  # FLOP/s out of registers alone
    register_bf16: float | None
    copy: float  # bytes/s, read and written both counted
    fresh_memory: float | None  # bytes/s of first touches, CPU only
    attention_sdpa: float  # FLOP/s forward and backward, dense count, at the size's own shape
    attention_by_kernel: dict[
        str, float | None
    ]  # the same of each of a GPU's kernels, None: cannot
    cudnn: int | None
    device_name: str
    torch_version: str
    threads: int

    def matmul(self, precision: Literal["fp32", "bf16"]) -> float:
        """Return the matmul rate of that precision."""
        return self.matmul_bf16 if precision == "bf16" else self.matmul_fp32

    def as_json(self) -> dict[str, Any]:
        """Return the numbers by name."""
        return asdict(self)


def measure_ceilings(device: Device, size: Size) -> Ceilings:
    """Measure all, a second each."""
    shapes = _matmul_shapes(size, device)
    kernels = _KERNELS if device == "cuda" else {}
    found = Ceilings(
        matmul_fp32=max(_matmul(shape, torch.float32, device) for shape in shapes),
        matmul_bf16=max(_matmul(shape, torch.bfloat16, device) for shape in shapes),
        register_fp32=_register_peak("fp32", device),
        register_bf16=_register_peak("bf16", device),
        copy=_copy(device),
        fresh_memory=_fresh_memory() if device == "cpu" else None,
        attention_sdpa=_attention(size, device),
        attention_by_kernel={name: _attention_by(kernel, size) for name, kernel in kernels.items()},
        cudnn=torch.backends.cudnn.version() if device == "cuda" else None,  # type: ignore[no-untyped-call]
        device_name=torch.cuda.get_device_name() if device == "cuda" else _processor_name(),
        torch_version=torch.__version__,
        threads=torch.get_num_threads(),
    )
    if device == "cuda":
        torch.cuda.empty_cache()  # for the trainers that come
    return found


def describe(ceilings: Ceilings) -> str:
    """Write them for people."""
    peaks = {"bf16": ceilings.register_bf16, "fp32": ceilings.register_fp32}
    by_kernel = ceilings.attention_by_kernel.items()
    rows = [
        [f"registers {name}", f"{peak / 1e9:,.0f} GFLOP/s"] for name, peak in peaks.items() if peak
    ]
    rows += [
        ["matmul bf16", f"{ceilings.matmul_bf16 / 1e9:,.0f} GFLOP/s"],
        ["matmul fp32", f"{ceilings.matmul_fp32 / 1e9:,.0f} GFLOP/s"],
        ["attention forward + backward, bf16", f"{ceilings.attention_sdpa / 1e9:,.0f} GFLOP/s"],
        *[
            [f"  by {name}", "cannot" if rate is None else f"{rate / 1e9:,.0f} GFLOP/s"]
            for name, rate in by_kernel
        ],
        ["memory copy, read + write", f"{ceilings.copy / 1e9:,.1f} GB/s"],
    ]
    if ceilings.fresh_memory is not None:
        rows.append(["memory touched first", f"{ceilings.fresh_memory / 1e9:,.1f} GB/s"])
    head = f"{ceilings.device_name}, {ceilings.threads} threads, torch {ceilings.torch_version}"
    head += f", cuDNN {ceilings.cudnn}" if ceilings.cudnn else ""
    return f"{head}\n{fmt.table(('ceiling', ''), rows)}"


def _register_peak(precision: Literal["fp32", "bf16"], device: Device) -> float | None:
    return register_peak(precision, threads=torch.get_num_threads()) if device == "cpu" else None


def _matmul_shapes(size: Size, device: Device) -> list[tuple[int, int, int]]:
    """Return (M, K, N): a large square, and the size's own head and MLP."""
    square = 8192 if device == "cuda" else 2048
    tokens = size.mini_batch_size * size.context_length
    C = size.n_embd
    return [(square,) * 3, (tokens, C, size.our_vocab_size), (tokens, C, 4 * C), (tokens, 4 * C, C)]


def _matmul(shape: tuple[int, int, int], dtype: torch.dtype, device: Device) -> float:
    M, K, N = shape
    a = torch.randn(M, K, device=device).to(dtype)
    b = torch.randn(K, N, device=device).to(dtype)
    out = torch.empty(M, N, dtype=dtype, device=device)
    before = torch.get_float32_matmul_precision()
    # On CPUs this lets torch choose the faster of its two libraries; see runtime.py for what it may cost.
    torch.set_float32_matmul_precision("medium" if device == "cpu" else "highest")
    seconds = _median_seconds(lambda: torch.mm(a, b, out=out), device)
    torch.set_float32_matmul_precision(before)
    return 2.0 * M * N * K / seconds


def _copy(device: Device) -> float:
    source = torch.ones(2**28 if device == "cuda" else 2**26, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _median_seconds(lambda: target.copy_(source), device)


def _fresh_memory() -> float:
    """Write to pages that the process does not have yet, as a step does whose memory was given back."""
    count = 2**26
    return 4 * count / _median_seconds(lambda: torch.zeros(count), "cpu")


def _attention(size: Size, device: Device) -> float:
    B, H, T = size.mini_batch_size, size.n_head, size.context_length
    shape = (B, H, T, size.n_embd // H)
    q, k, v = (
        torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    gradient = torch.randn(shape, device=device, dtype=torch.bfloat16)

    def step() -> None:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(y, (q, k, v), gradient)

    return 12.0 * B * T * T * size.n_embd / _median_seconds(step, device)


def _attention_by(kernel: SDPBackend, size: Size) -> float | None:
    """Return the rate of one of a GPU's kernels, None if it cannot do the shape."""
    try:
        with sdpa_kernel(kernel):
            return _attention(size, "cuda")
    except RuntimeError:
        return None


def _median_seconds(act: Callable[[], object], device: Device) -> float:
    """Return the median duration of `act`, after unmeasured calls.

    A GPU is waited for after several calls: to start one and to wait takes it as long as a small product.
    """
    calls = 10 if device == "cuda" else 1

    def timed() -> float:
        began = time.perf_counter()
        for _ in range(calls):
            act()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / calls

    timed()
    seconds: list[float] = []
    while calls * sum(seconds) < _SECONDS or len(seconds) < _LEAST_ROUNDS:
        seconds.append(timed())
    return statistics.median(seconds)


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else "CPU"
