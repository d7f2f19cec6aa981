"""What this machine can do at best: matrix products, copies of memory, attention, and a CPU's vector registers."""

from __future__ import annotations

import ctypes
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.sizes import Size
from gpt2lab import fmt
from gpt2lab.distributed.processor import cpu_name, has_bf16

Device = Literal["cpu", "cuda"]
Precision = Literal["fp32", "bf16"]
_CPUINFO = Path("/proc/cpuinfo")
_SECONDS = 1.0  # spent on each measurement
_LEAST_ROUNDS = 5
_PEAK_SECONDS, _PEAK_ROUNDS = 0.3, 5
_KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True)
class Ceilings:
    """The best rate of several shapes each; of registers only where a CPU has AVX-512 and no AMX."""

    matmul_fp32: float  # FLOP/s, full precision
    matmul_bf16: float | None  # FLOP/s; None: a CPU would multiply bf16 in software
    register_fp32: float | None  # FLOP/s out of registers alone
    register_bf16: float | None
    copy: float  # bytes/s, read and written both counted
    fresh_memory: float | None  # bytes/s of first touches, CPU only
    # Forward and backward in bf16, dense count, at the size's own shape; None as above.
    attention_sdpa: float | None  # FLOP/s
    attention_by_kernel: dict[str, float | None]  # each of a GPU's kernels; None: cannot run it
    cudnn: int | None
    device_name: str
    torch_version: str
    threads: int

    def matmul(self, precision: Precision) -> float | None:
        """Return the matmul rate of that precision."""
        return self.matmul_bf16 if precision == "bf16" else self.matmul_fp32

    def as_json(self) -> dict[str, Any]:
        """Return the numbers by name, rates in FLOP/s and bytes/s."""
        return asdict(self)


def measure_ceilings(device: Device, size: Size) -> Ceilings:
    """Measure all, a second each."""

    def peak(precision: Precision) -> float | None:
        threads = torch.get_num_threads()
        on_cpu = device == "cpu"
        return register_peak(precision, threads=threads, flags=cpu_flags()) if on_cpu else None

    shapes = _matmul_shapes(size, device)
    in_bf16 = device == "cuda" or has_bf16()
    kernels = _KERNELS if device == "cuda" else {}
    found = Ceilings(
        matmul_fp32=max(_matmul(shape, torch.float32, device) for shape in shapes),
        matmul_bf16=max(_matmul(shape, torch.bfloat16, device) for shape in shapes)
        if in_bf16
        else None,
        register_fp32=peak("fp32"),
        register_bf16=peak("bf16"),
        copy=_copy(device),
        fresh_memory=_fresh_memory() if device == "cpu" else None,
        attention_sdpa=_attention(size, device) if in_bf16 else None,
        attention_by_kernel={name: _attention_by(kernel, size) for name, kernel in kernels.items()},
        cudnn=torch.backends.cudnn.version() if device == "cuda" else None,  # type: ignore[no-untyped-call]
        device_name=torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        torch_version=torch.__version__,
        threads=torch.get_num_threads(),
    )
    if device == "cuda":
        torch.cuda.empty_cache()  # for the trainers that come
    return found


def describe(ceilings: Ceilings) -> str:
    """Return the ceilings as text."""
    peaks = {"bf16": ceilings.register_bf16, "fp32": ceilings.register_fp32}
    by_kernel = ceilings.attention_by_kernel.items()
    rows = [[f"registers {name}", _rate_text(peak)] for name, peak in peaks.items() if peak]
    rows += [
        ["matmul bf16", _rate_text(ceilings.matmul_bf16, "not in hardware")],
        ["matmul fp32", _rate_text(ceilings.matmul_fp32)],
        [
            "attention forward + backward, bf16",
            _rate_text(ceilings.attention_sdpa, "not in hardware"),
        ],
        *[[f"  by {name}", _rate_text(rate, "cannot")] for name, rate in by_kernel],
        ["memory copy, read + write", f"{ceilings.copy / 1e9:,.1f} GB/s"],
    ]
    if ceilings.fresh_memory is not None:
        rows.append(["memory touched first", f"{ceilings.fresh_memory / 1e9:,.1f} GB/s"])
    head = f"{ceilings.device_name}, {ceilings.threads} threads, torch {ceilings.torch_version}"
    head += f", cuDNN {ceilings.cudnn}" if ceilings.cudnn else ""
    return f"{head}\n{fmt.table(('ceiling', ''), rows)}"


def _rate_text(rate: float | None, absent: str = "n/a") -> str:
    return absent if rate is None else f"{rate / 1e9:,.0f} GFLOP/s"


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


# 16 sums that do not wait for each other cover the instruction's latency of 4 to 6 cycles, two a cycle.
_SOURCE = """
#include <immintrin.h>
#define EACH(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15)
#define MULTIPLY(NAME, OPERAND, START, INSTRUCTION)                         \\
  float NAME(long rounds) {                                                 \\
    __m512 sum[16]; OPERAND a = START, b = START;                           \\
    for (int i = 0; i < 16; i++) sum[i] = _mm512_set1_ps(0.0f);             \\
    for (long round = 0; round < rounds; round++) {                         \\
      __asm__ volatile("" : "+v"(a), "+v"(b));                              \\
      EACH(INSTRUCTION)                                                     \\
    }                                                                       \\
    float total = 0.0f;                                                     \\
    for (int i = 0; i < 16; i++) total += _mm512_reduce_add_ps(sum[i]);     \\
    return total;                                                           \\
  }
#define FP32(i) sum[i] = _mm512_fmadd_ps(a, b, sum[i]);
MULTIPLY(fp32, __m512, _mm512_set1_ps(0.5f), FP32)
#ifdef __AVX512BF16__
#define BF16(i) sum[i] = _mm512_dpbf16_ps(sum[i], a, b);
MULTIPLY(bf16, __m512bh, (__m512bh)_mm512_set1_ps(0.5f), BF16)
#endif
"""
_FLOP = {"fp32": 16 * 2, "bf16": 16 * 4}  # of one instruction: 16 lanes; bf16 takes pairs
_NEEDS = {"fp32": "avx512f", "bf16": "avx512_bf16"}
_FLAGS = {"fp32": ["-mavx512f"], "bf16": ["-mavx512f", "-mavx512bf16"]}


def cpu_flags() -> frozenset[str]:
    """Return the words of /proc/cpuinfo, instruction sets among them; none where there is no such file."""
    return frozenset(_CPUINFO.read_text().split() if _CPUINFO.exists() else ())


def has_amx(flags: Collection[str]) -> bool:
    """Tell whether a processor multiplies matrices in tiles, by its flags in /proc/cpuinfo."""
    return "amx_tile" in flags or "amx_bf16" in flags


def register_peak(precision: Precision, *, threads: int, flags: Collection[str]) -> float | None:
    """Return the FLOP/s of vector registers alone, the best of a few short rounds; None if that is unknown.

    No matrix product of vector instructions is faster. A few lines of C are compiled when this is measured, because
    Python can time nothing that touches no memory. That needs x86-64 with AVX-512 (see `flags` of /proc/cpuinfo) and a
    compiler. A processor with AMX multiplies in tiles, many times as fast as in vectors: there is no peak to return.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or _NEEDS[precision] not in flags or has_amx(flags):
        return None
    with tempfile.TemporaryDirectory(prefix="gpt2lab-peak-") as folder:
        source, library = Path(folder) / "peak.c", Path(folder) / "peak.so"
        source.write_text(_SOURCE)
        command = [compiler, "-O2", "-shared", "-fPIC", *_FLAGS[precision], str(source)]
        built = subprocess.run([*command, "-o", str(library)], capture_output=True)
        if built.returncode:
            return None
        multiply = getattr(ctypes.CDLL(str(library)), precision)
        multiply.argtypes, multiply.restype = [ctypes.c_long], ctypes.c_float
        return max(_rate(multiply, _FLOP[precision], threads) for _ in range(_PEAK_ROUNDS))


def _rate(multiply: ctypes._NamedFuncPointer, flop: int, threads: int) -> float:
    """Return FLOP/s of all threads together; ctypes releases the interpreter's lock during a call."""
    rounds, seconds = 1_000_000, 0.0
    while seconds < _PEAK_SECONDS:
        with ThreadPoolExecutor(threads) as pool:
            began = time.perf_counter()
            list(pool.map(multiply, [rounds] * threads))
            seconds = time.perf_counter() - began
        rounds *= 2
    return threads * (rounds // 2) * 16 * flop / seconds
