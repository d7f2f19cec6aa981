"""Our trainer in other settings, each against the default: the sweep of docs/gpu_results.md. No torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from benchmarks.shapes import Size
from gpt2lab.errors import ConfigError

VariantName = Literal[
    "flash",
    "micro_half",
    "micro_double",
    "autotune",
    "cuda_graphs",
    "muon",
    "micro_quarter",
    "expandable",
    "eager",
]


@dataclass(frozen=True)
class Variant:
    """What differs from the default."""

    flags: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    micro_batch: float = 1.0  # times the size's own; tokens a step stay

    def cut(self, size: Size) -> Size:
        """Return the size with its step cut as this variant does.

        Raises: ConfigError if it cannot be.
        """
        micro = size.mini_batch_size * self.micro_batch
        accumulation = size.accumulation / self.micro_batch
        if micro != int(micro) or accumulation != int(accumulation):
            raise ConfigError(
                f"a step of {size.accumulation} x {size.mini_batch_size} sequences cannot be cut into micro-batches "
                f"{self.micro_batch:g} times as large"
            )
        return dataclasses.replace(size, mini_batch_size=int(micro), accumulation=int(accumulation))


# In the order in which they are worth the time.
VARIANTS: dict[VariantName, Variant] = {
    "flash": Variant({"attention": "flash"}),
    "micro_half": Variant(micro_batch=0.5),
    "micro_double": Variant(micro_batch=2.0),
    "autotune": Variant(
        environment={"TORCHINDUCTOR_MAX_AUTOTUNE_GEMM": "1", "ENABLE_PERSISTENT_TMA_MATMUL": "1"}
    ),
    "cuda_graphs": Variant(environment={"TORCHINDUCTOR_CUDAGRAPHS": "1"}),
    "muon": Variant({"optimizer": "muon"}),
    "micro_quarter": Variant(micro_batch=0.25),
    "expandable": Variant(environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
    "eager": Variant({"compile": "off"}),
}
