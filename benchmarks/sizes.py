"""What trainers are compared at: sizes, and variants of our settings (the sweep of docs/gpu_results.md). No torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from gpt2lab import fmt
from gpt2lab.config.schema import BatchConfig, Config, ModelConfig
from gpt2lab.errors import ConfigError
from gpt2lab.model.counts import flops_per_token
from gpt2lab.planner import hardware
from gpt2lab.planner.estimate import MEMORY_TARGET, device_memory
from gpt2lab.planner.job import Job

SizeName = Literal["tiny256", "tiny", "mid", "124m", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"]
StageName = Literal["doctor", "tests", "speed", "planner", "reliability", "cards", "sweep"]
VariantName = Literal[
    "flash",
    "micro_half",
    "micro_double",
    "descent",
    "autotune",
    "muon",
    "zero1",
    "micro_quarter",
    "expandable",
    "eager",
]


@dataclass(frozen=True)
class Size:
    """A GPT-2 shape and one optimizer step's batch."""

    n_layer: int
    n_head: int
    n_embd: int
    vocab_size: int
    context_length: int
    mini_batch_size: int
    accumulation: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.mini_batch_size * self.accumulation * self.context_length

    @property
    def flops_per_token(self) -> int:
        """6 N_matmul + 12 L C T, the same count for everyone."""
        return flops_per_token(self.model)

    @property
    def model(self) -> ModelConfig:
        """The shape as the planner knows it."""
        return ModelConfig(
            n_layer=self.n_layer,
            n_head=self.n_head,
            n_embd=self.n_embd,
            vocab_size=self.vocab_size,
            context_length=self.context_length,
        )

    @property
    def our_vocab_size(self) -> int:
        """Rows of our embedding: ours are GPT-2's 50257 ids padded to 50304, the trainer's default."""
        return 50304 if self.vocab_size == 50257 else self.vocab_size


SIZES: dict[SizeName, Size] = {
    # For CPUs: one micro-batch a step.
    "tiny256": Size(4, 4, 128, 256, 256, 8),
    "tiny": Size(4, 4, 128, 50257, 256, 8),
    "mid": Size(6, 6, 384, 50304, 256, 8),
    "124m": Size(12, 12, 768, 50304, 256, 2),
    # For GPUs: 524,288 tokens a step, as GPT-2's reproductions train.
    "gpt2": Size(12, 12, 768, 50304, 1024, 64, 8),
    "gpt2-medium": Size(24, 16, 1024, 50304, 1024, 32, 16),
    "gpt2-large": Size(36, 20, 1280, 50304, 1024, 16, 32),
    "gpt2-xl": Size(48, 25, 1600, 50304, 1024, 8, 64),
}
CPU_SIZES: tuple[SizeName, ...] = ("tiny256", "tiny", "mid", "124m")


@dataclass(frozen=True)
class Variant:
    """Settings of our trainer that differ from the default."""

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


_ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"} | {
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29577",
}
# In the order in which they are worth the time.
VARIANTS: dict[VariantName, Variant] = {
    "flash": Variant({"attention": "flash"}),
    "micro_half": Variant(micro_batch=0.5),
    "micro_double": Variant(micro_batch=2.0),
    "descent": Variant(environment={"TORCHINDUCTOR_COORDINATE_DESCENT_TUNING": "1"}),
    "autotune": Variant(
        environment={"TORCHINDUCTOR_MAX_AUTOTUNE_GEMM": "1", "ENABLE_PERSISTENT_TMA_MATMUL": "1"}
    ),
    "muon": Variant({"optimizer": "muon"}),
    "zero1": Variant({"parallel": "zero1"}, environment=_ONE_RANK),
    "micro_quarter": Variant(micro_batch=0.25),
    "expandable": Variant(environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
    "eager": Variant({"compile": "off"}),
}


def largest_micro_batch(size: Size, free: float | None) -> int | None:
    """Return the sequences of one compiled bf16 forward pass that fit a GPU's `free` bytes; None where unknown.

    Raises: ConfigError if not even one does.
    """
    if free is None:
        return None
    batch = BatchConfig(total_batch_size=size.tokens, mini_batch_size=1)
    job = Job(Config(model=size.model, batch=batch), 1, 1, "bf16", compiled=True)
    need = device_memory(job, hardware.load(), MEMORY_TARGET, is_cpu=False, available=free)
    if need.largest_micro_batch is None:
        raise ConfigError(
            f"the card has {fmt.num_bytes(free)} free: not even one sequence of GPT-2 ({size.n_layer} layers) fits; "
            f"end what else uses it"
        )
    return need.largest_micro_batch


def fitted(size: Size, free: float | None) -> Size:
    """Return the size with its micro-batch halved until the planner says that it fits a GPU's `free` bytes.

    Raises: ConfigError if not even one sequence does.
    """
    largest = largest_micro_batch(size, free)
    while largest is not None and size.mini_batch_size > largest:
        size = halved(size)
    return size


def halved(size: Size) -> Size:
    """Return the size with half its micro-batch; tokens a step stay. Raises: ConfigError for one sequence."""
    return Variant(micro_batch=0.5).cut(size)
