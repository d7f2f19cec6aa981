"""One start of a run, resolved: the run, the checkpoint, the settings, the data. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from gpt2lab import paths
from gpt2lab.checkpoint.catalog import CheckpointInfo, DiskBudget
from gpt2lab.config.schema import Config
from gpt2lab.data.mixture import Mixture, describe_sources
from gpt2lab.data.order import Order
from gpt2lab.data.shards import TokenData
from gpt2lab.tokenizers.interface import Tokenizer
from gpt2lab.tokenizers.opening import why_no_text
from gpt2lab.training.init_from import InitialWeights
from gpt2lab.training.plan import Plan


class Benchmark(Protocol):
    """Tasks on which a run is scored while it trains, on every rank: CORE, which is handed in from outside the core."""

    def measure(
        self, model: Any, strategy: Any, *, step: int, interrupted: Callable[[], bool]
    ) -> tuple[dict[str, Any], str | None] | None:
        """Keep the results of a GPT in the run; return the event's numbers, and a warning if that failed.

        None if `interrupted`, which all ranks call at equal places, returned True.

        Raises: NonFiniteError.
        """


@dataclass(frozen=True)
class Start:
    """One start of a run: all that the ranks must agree on before they touch a tensor."""

    config: Config
    chosen: frozenset[str]  # settings that a person chose, in this start or an earlier one
    run_dir: Path
    checkpoint: CheckpointInfo | None  # to resume from
    changes: dict[str, list[Any]]  # setting -> [saved, now], on a resume
    attempt: int
    data: TokenData
    order: Order | Mixture  # of the training samples
    val_orders: tuple[Order, ...]  # of each source's validation windows
    plan: Plan
    disk: DiskBudget
    hellaswag: Literal["off", "on", "fetch"]  # fetch: wanted, and no file was given
    stop_after_steps: int | None
    deadlines: dict[str, float]  # reason: moment on rank 0's monotonic clock
    last_save_seconds: float | None  # of the run's newest checkpoint, on a resume
    recorded: dict[str, dict[str, Any]]  # on a resume, kind -> event of the checkpoint's step
    has_ended: bool  # everything due after the checkpoint's step is done and recorded
    initial: InitialWeights | None  # of a fresh run with --init_from
    warnings: tuple[str, ...]
    branch: dict[str, Any] | None = None  # of a run that begins as a branch: where from
    attention: str | None = None  # on a GPU: the kernel that was seen to compute it
    loss_kernel: Literal["triton", "inductor"] | None = None  # of compiled steps on a GPU
    core: Benchmark | None = None  # with --core

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that text goes through; None if it is not known, or the model has too few rows for it."""
        return self.data.tokenizer if self.no_text is None else None

    @property
    def no_text(self) -> str | None:
        """Why there is no such tokenizer."""
        return why_no_text(self.data.tokenizer, self.config.model.vocab_size)

    @property
    def tokenizer_files(self) -> dict[str, bytes]:
        """The files that checkpoints carry so that their ids keep their meaning."""
        return self.data.tokenizer.files if self.data.tokenizer else {}

    def describe_place(self) -> str:
        """Write where the run is, and of which checkpoint it begins as a branch."""
        branch = self.branch
        of = f", branch of {branch['run']}@{branch['step']}" if branch else ""
        return f"{paths.display_path(self.run_dir)} (start {self.attempt}{of})"

    def describe_data(self) -> str:
        """Format the data for the console."""
        return self.data.describe(self.order.unused_targets)

    @property
    def tokens(self) -> int:
        """Positions of the full run; those before a resume may have been trained with another batch."""
        origin = self.checkpoint
        done, tokens = (origin.step, origin.tokens) if origin else (0, 0)
        return tokens + (self.plan.max_steps - done) * self.plan.batch.tokens

    @property
    def epochs(self) -> float:
        """Passes over the data up to the run's last sample."""
        return self.end_sample / self.order.windows_per_epoch

    @property
    def end_sample(self) -> int:
        """The number of the sample after the run's last; other data begin at sample 0."""
        per_step = self.plan.batch.samples
        if self.checkpoint is None:
            return self.plan.max_steps * per_step
        done, manifest = self.checkpoint.step, self.checkpoint.manifest
        begin = 0 if "data" in self.changes else manifest.get("samples", done * per_step)
        return begin + (self.plan.max_steps - done) * per_step

    def epochs_completed(self, samples: int) -> int | None:
        """Return the complete epochs if the step up to `samples` ended one whose checkpoint is kept, else None."""
        if not self.plan.keeps_epochs or samples == 0:
            return None
        batch, origin = self.config.batch, self.checkpoint
        if origin is not None and origin.manifest.get("samples") == samples:
            batch = origin.config().batch  # the step resumed from had that of its own start
        trained = batch.total_batch_size // self.config.model.context_length
        before, now = map(self.order.epoch_of, (samples - trained, samples))
        return now if now > before else None

    def epochs_by_source(self) -> dict[str, float]:
        """Return the passes over each source of a mixture in the full run; {} of a single folder."""
        samples = self.end_sample
        return self.order.epochs_before(samples) if isinstance(self.order, Mixture) else {}

    def describe_sources(self) -> list[str]:
        """Write a line for each source of a mixture, with its passes in this run."""
        return describe_sources(self.data, self.order, samples=self.end_sample)

    @property
    def is_complete(self) -> bool:
        """Tell whether nothing is left to do: no step, and nothing of what is due after the last one."""
        if self.checkpoint is None or self.checkpoint.step < self.plan.max_steps:
            return False
        return self.has_ended or self.checkpoint.step > self.plan.max_steps
