"""What Inductor writes for a graph: kernels, bytes, library calls; and what machine code needs."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cuda_codegen.allocations import held_bytes

_DEFINITION = re.compile(
    r"^(?P<run>\w+) = async_compile\.triton\('(?P<name>\w+)', '''(?P<source>.*?)''', device_str",
    re.S | re.M,
)
_BYTES = re.compile(r"'kernel_num_gb': (?P<gb>[\d.e+-]+)")
_LOSS = re.compile(r"cross_entropy_kernel_0\.run\(.* (?P<rows>\d+), 1, 1, stream")
_RUN = re.compile(r"^ +(triton_\w+|cross_entropy_kernel_0)\.run\(", re.M)
_LIBRARY = re.compile(r"^ +(?:\w+ = )?(?:extern_kernels|torch\.ops\.aten)\.(\w+)[.(]", re.M)
_INSTRUCTION = re.compile(r"^\s+/\*(?P<at>[0-9a-f]{4,})\*/\s+(?P<text>.*?);", re.M)
_JUMP = re.compile(r"BRA\b.* 0x(?P<to>[0-9a-f]+)")
_USED = re.compile(r"Used (\d+) registers")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_GROUPS = (  # the first that a kernel's name contains
    ("cross-entropy", ("softmax", "nll_loss", "cross_entropy")),
    ("GELU", ("gelu", "tanh")),
    ("LayerNorm", ("layer_norm",)),
    ("embedding", ("embedding",)),
)


@dataclass(frozen=True)
class Kernel:
    """A generated kernel, and how often the graph runs it."""

    name: str
    group: str
    runs: int
    bytes: int  # read and written by one run, each element once
    index: str  # int32 or int64
    source: str


@dataclass
class Graph:
    """One compiled graph."""

    is_backward: bool
    kernels: list[Kernel]
    library: dict[str, int]  # matrix products and attention: calls by operator
    peak_bytes: int  # that it holds, with what the forward pass keeps and without weights
    left_bytes: int  # of these, held when it ends: what a forward pass keeps
    calls: int = 0  # in a step


def read_graph(module: str, *, is_backward: bool) -> Graph:
    """Return what a module of Inductor's runs when called once."""
    body = module[module.index("def call(") :]
    runs = Counter(_RUN.findall(body))
    kernels = []
    for found in _DEFINITION.finditer(module):
        name, source = found["name"], found["source"]
        index = "int64" if "numel': 'i64'" in source else "int32"
        if name == "cross_entropy_kernel":  # logits to gradients, 2 bytes each; targets; losses
            rows, columns = _LOSS.search(body), re.search(r"'V': (\d+)", source)
            assert rows is not None
            assert columns is not None
            moved, index = int(rows["rows"]) * (4 * int(columns[1]) + 12), "int64"
        else:
            size = _BYTES.search(source)
            assert size is not None, f"{name}: Inductor does not say its bytes"
            moved = round(1e9 * float(size["gb"]))
        kernels.append(Kernel(name, _group(name), runs.pop(found["run"]), moved, index, source))
    assert not runs, f"kernels of another form: {sorted(runs)}"
    library = dict(Counter(_LIBRARY.findall(body)))
    return Graph(is_backward, kernels, library, *held_bytes(module, is_backward=is_backward))


def _group(name: str) -> str:
    for group, words in _GROUPS:
        if any(word in name for word in words):
            return group
    return "other"


def resources(kernel_name: str, source: str) -> list[dict[str, Any]]:
    """Return registers, stack, spills and instructions by Triton's ptxas, one row per launch setting.

    A GPU would time these settings and keep the fastest.
    """
    import triton.backends.nvidia
    from torch._inductor.codecache import PyCodeCache

    tuner = getattr(PyCodeCache.load(source), kernel_name)
    tuner.precompile(warm_cache_only=True)
    tools = Path(triton.backends.nvidia.__file__).parent / "bin"
    rows = []
    for compiled in tuner.compile_results:
        with tempfile.TemporaryDirectory() as folder:
            ptx = Path(folder) / "kernel.ptx"
            ptx.write_text(compiled.kernel.asm["ptx"])
            target = re.search(r"^\.target (\w+)", compiled.kernel.asm["ptx"], re.M)
            assert target is not None
            assembler = "ptxas-blackwell" if target[1].startswith("sm_10") else "ptxas"
            code = str(Path(folder) / "kernel.cubin")
            command = [
                str(tools / assembler),
                "-v",
                f"--gpu-name={target[1]}",
                str(ptx),
                "-o",
                code,
            ]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
            command = [str(tools / "cuobjdump"), "-sass", code]
            sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, frame = _USED.search(said), _FRAME.search(said)
        assert registers is not None, said
        assert frame is not None, said
        rows.append(
            {
                "settings": {**compiled.config.kwargs, "num_warps": compiled.config.num_warps},
                "registers": int(registers[1]),
                "stack_bytes": int(frame[1]),
                "spill_bytes": int(frame[2]) + int(frame[3]),
                **_instructions(sass),
            }
        )
    return rows


def _instructions(sass: str) -> dict[str, Any]:
    """Return how many instructions a kernel has, and of them those of each loop: what a jump backwards encloses."""
    code = {int(found["at"], 16): found["text"] for found in _INSTRUCTION.finditer(sass)}
    jumps = {at: int(to["to"], 16) for at, text in code.items() if (to := _JUMP.search(text))}
    spans = [(to, at) for at, to in jumps.items() if to < at]  # the end jumps to itself
    loops = [sum(to <= place <= at for place in code) for to, at in spans]
    return {"instructions": len(code), "loops": loops}
