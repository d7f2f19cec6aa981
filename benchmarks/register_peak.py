"""How fast the processor multiplies and adds out of registers alone: what no matrix product can pass. No torch.

A few lines of C with the vector instructions themselves, compiled at the moment of measuring: from Python nothing can
be timed that touches no memory. Only for x86-64 with AVX-512, elsewhere and without a compiler the peak stays unknown.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

Precision = Literal["fp32", "bf16"]
_CPUINFO = Path("/proc/cpuinfo")
_SECONDS = 0.3
_ROUNDS = 5

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


def register_peak(precision: Precision, *, threads: int) -> float | None:
    """Return FLOP/s of `threads` threads, the best of a few short rounds; None where it cannot be measured."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    known = _CPUINFO.read_text() if _CPUINFO.exists() else ""
    if compiler is None or _NEEDS[precision] not in known.split():
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
        return max(_rate(multiply, _FLOP[precision], threads) for _ in range(_ROUNDS))


def _rate(multiply: ctypes._NamedFuncPointer, flop: int, threads: int) -> float:
    """Return FLOP/s of all threads together; ctypes lets go of the interpreter's lock meanwhile."""
    rounds, seconds = 1_000_000, 0.0
    while seconds < _SECONDS:
        with ThreadPoolExecutor(threads) as pool:
            began = time.perf_counter()
            list(pool.map(multiply, [rounds] * threads))
            seconds = time.perf_counter() - began
        rounds *= 2
    return threads * (rounds // 2) * 16 * flop / seconds
