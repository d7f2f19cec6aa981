"""One evaluation on its own: what to measure of which weights, with the settings of their run as defaults.

Torch is imported when the weights are loaded, so that a wrong name is rejected without it.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gpt2lab.config.flags import TARGET, argument, option
from gpt2lab.config.schema import Config, Dtype, HellaSwagMetrics, SystemConfig
from gpt2lab.errors import ConfigError, DataError, NonFiniteError
from gpt2lab.runs.console import doing

if TYPE_CHECKING:
    from gpt2lab.data.shards import TokenData
    from gpt2lab.distributed.runtime import Runtime
    from gpt2lab.distributed.strategy import Strategy
    from gpt2lab.evaluation.results import Results
    from gpt2lab.evaluation.validation import MeasuresLoss, ValidationLoss
    from gpt2lab.model.gpt import GPT
    from gpt2lab.runs.target import Target
    from gpt2lab.tokenizers.interface import Tokenizer


@dataclass(frozen=True)
class EvaluationRequest:
    """What to measure of one target, and where; None: as the run that trained the weights has it."""

    target: str = argument(TARGET)
    checkpoint_dir: Path | None = option(None, "folder of the runs; default checkpoints/")
    hellaswag: bool = option(False, "score HellaSwag")
    val: Path | None = option(
        None, "folder of token shards; without it, --hellaswag and --tasks: the run's own"
    )
    val_tokens: int | None = option(
        None, "validation tokens; default as the run, else 10,485,760", least=1
    )
    hellaswag_path: Path | None = option(None, "HellaSwag items; default the run's, or downloaded")
    hellaswag_limit: int | None = option(
        None,
        "score a fixed random subset of N items, 0 = all; default as the run, else all",
        least=0,
    )
    hellaswag_metrics: HellaSwagMetrics | None = option(
        None,
        "harness = acc, acc_norm; tutorial = acc_token_norm; half the time each; default as the run, else all",
    )
    batch_size: int = option(
        8, "validation windows per forward pass; only rounding depends on it", least=1
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto = cuda if there is one")
    dtype: Dtype = option(
        "auto", "matmul precision; auto = what the run trained in, else as in training"
    )
    keep_token_losses: bool = option(
        False,
        "keep the loss of every validation token for `gpt2lab compare --explain`, in --save DIR, or else in the run",
    )


@dataclass(frozen=True)
class Subject:
    """Weights on the device that evaluates them, and what else a measurement needs."""

    request: EvaluationRequest
    target: Target
    settings: Config  # of their run; the defaults where there is none
    model: GPT
    dtype: Dtype
    strategy: Strategy
    runtime: Runtime

    @property
    def step(self) -> int | None:
        """The step of the checkpoint, None for a Hugging Face folder."""
        return self.target.checkpoint.step if self.target.checkpoint else None

    @property
    def val_tokens(self) -> int:
        """How many tokens to validate on."""
        return self.request.val_tokens or self.settings.eval.val_tokens

    def text_tokenizer(self, otherwise: str) -> Tokenizer:
        """Return the weights' tokenizer; raise ConfigError, with what that means, if their ids mean no text."""
        from gpt2lab.tokenizers.opening import why_no_text

        tokenizer = self.target.tokenizer()
        problem = why_no_text(tokenizer, self.model.config.vocab_size)
        if tokenizer is None or problem is not None:
            raise ConfigError(f"{self.target.name}: {problem}: {otherwise}")
        return tokenizer


def load_subject(
    request: EvaluationRequest, target: Target, settings: Config, runtime: Runtime
) -> Subject:
    """Load the weights on every rank, on the device and in the dtype that the request or the run says.

    Raises: CheckpointError, ConfigError.
    """
    from gpt2lab.distributed.runtime import fastest_dtype, resolve_dtype
    from gpt2lab.distributed.strategy import Strategy
    from gpt2lab.runs.weights import load_weights

    runtime.use(SystemConfig(device=request.device))
    dtype = request.dtype
    if dtype == "auto":
        dtype = settings.system.dtype
        fastest = fastest_dtype(runtime.device)
        if fastest == "fp32" or (dtype, fastest) == ("bf16", "fp16"):
            dtype = "fp32"
    system = SystemConfig(device=request.device, dtype=resolve_dtype(dtype, runtime.device))
    model = runtime.on_all_ranks(lambda: load_weights(target)).to(runtime.device)
    strategy = Strategy(runtime, system)
    return Subject(request, target, settings, model, system.dtype, strategy, runtime)


def open_shards(subject: Subject) -> tuple[TokenData, MeasuresLoss]:
    """Return the folder of the request, or the run's own data, and the validation loss on it.

    Raises: ConfigError, DataError: also for data of another tokenizer than the weights'.
    """
    from gpt2lab.config.mixture import read_sources
    from gpt2lab.data.mixture import open_sources, require_folders
    from gpt2lab.data.shards import open_data
    from gpt2lab.evaluation.validation import open_validation
    from gpt2lab.tokenizers.opening import require_same

    request, target, shape = subject.request, subject.target, subject.model.config
    if request.val is None:
        require_folders(subject.settings, "--val")
        data = open_sources(read_sources(subject.settings.data), vocab_size=shape.vocab_size)
    else:
        data = open_data(request.val, vocab_size=shape.vocab_size)
    trained_on = target.checkpoint.manifest["data_fingerprint"] if target.checkpoint else None
    if data.fingerprint != trained_on:
        name, folder = target.name, str(data.folder)
        require_same(target.tokenizer(), data.tokenizer, model=name, data=folder)
        if request.val is None and trained_on is not None:
            raise DataError(
                f"{folder}: not the data that {name} trained on (fingerprint {data.fingerprint[:12]}, the run's "
                f"{trained_on[:12]}), so it may have trained on what is validation text here; restore the folder, or "
                f"name it with --val to measure on it all the same"
            )
    return data, open_validation(
        data,
        shape,
        val_tokens=subject.val_tokens,
        batch_size=request.batch_size,
        strategy=subject.strategy,
    )


def measure_loss(subject: Subject, validation: MeasuresLoss) -> ValidationLoss:
    """Return the loss of the weights.

    Raises: DataError; NonFiniteError if the loss is not finite.
    """
    keep = subject.request.keep_token_losses
    with doing("validation loss"):
        loss = validation.measure(subject.model, keep_token_losses=keep)
    assert loss is not None  # nothing interrupts it
    if not math.isfinite(loss.val_loss):
        raise NonFiniteError(
            f"{subject.target.folder}: validation loss {loss.val_loss}: broken weights"
        )
    return loss


def measure_hellaswag(subject: Subject) -> Results:
    """Score HellaSwag, with the items and metrics of the run where the request names none.

    Raises: ConfigError if the weights' tokenizer cannot write the items; DataError.
    """
    from gpt2lab.evaluation.hellaswag import HellaSwag
    from gpt2lab.evaluation.hellaswag_items import fetch_hellaswag, load_questions

    request, of_run = subject.request, subject.settings.eval
    tokenizer = subject.text_tokenizer("no HellaSwag")
    limit, used = request.hellaswag_limit, of_run.hellaswag_path
    limit = of_run.hellaswag_limit if limit is None else limit
    path = request.hellaswag_path or (used if used and used.exists() else None)
    with doing("HellaSwag"):
        results = HellaSwag(
            subject.runtime.on_rank_zero(
                lambda: load_questions(path or fetch_hellaswag(), tokenizer).subset(limit)
            ),
            context_length=subject.model.config.context_length,
            strategy=subject.strategy,
            metrics=request.hellaswag_metrics or of_run.hellaswag_metrics,
        ).measure(subject.model)
    assert results is not None  # nothing interrupts it
    return results


def require_gpu(device: str) -> None:
    """Reject `cuda` where no driver of a GPU is installed, without which torch sees none; torch decides about the rest.

    Raises: ConfigError.
    """
    if device != "cuda" or Path("/dev/kfd").exists():  # that of AMD
        return
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise ConfigError(
            "device cuda: this machine has no driver of a GPU; install it, or use --device cpu"
        ) from None
