"""Evaluate weights outside of a run: the same numbers that the trainer would log for them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from gpt2lab import paths
from gpt2lab.checkpoint.target import Target, find_target
from gpt2lab.checkpoint.weights import load_weights
from gpt2lab.config.schema import Config, HellaSwagMetrics, ModelConfig, SystemConfig
from gpt2lab.config.settings import override
from gpt2lab.data.order import Order
from gpt2lab.data.shards import open_data
from gpt2lab.data.windows import WindowReader
from gpt2lab.distributed.runtime import Runtime, native_bf16, resolve_dtype
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.errors import ConfigError, DataError, NonFiniteError, SaveError
from gpt2lab.evaluation.hellaswag import METRICS, HellaSwag, summarize
from gpt2lab.evaluation.hellaswag_source import fetch_hellaswag
from gpt2lab.evaluation.hellaswag_tokens import load_questions
from gpt2lab.evaluation.results import Results, write_results
from gpt2lab.evaluation.validation import MeasuresLoss, Validation
from gpt2lab.finetuning.answer_loss import AnswerLoss
from gpt2lab.finetuning.answers import refuse_without_rouge, rouge_l
from gpt2lab.finetuning.rows import Rows, open_instructions
from gpt2lab.tokenizers.gpt2 import NUM_TOKENS


@dataclass(frozen=True)
class Wanted:
    """What to evaluate, and on what. None means: as the run had it."""

    target: str
    checkpoint_dir: Path
    hellaswag: bool
    hellaswag_path: Path | None
    hellaswag_limit: int | None
    hellaswag_metrics: HellaSwagMetrics | None
    val: Path | None
    val_tokens: int | None
    batch_size: int
    device: Literal["auto", "cpu", "cuda"]
    dtype: Literal["auto", "fp32", "bf16"]
    save: Path | None
    generate: bool = False


@dataclass(frozen=True)
class Report:
    """The numbers, as --json prints them, and what to say besides."""

    numbers: dict[str, Any]
    warnings: tuple[str, ...]


def evaluate(wanted: Wanted) -> Report | None:
    """Evaluate one target; the report on the first process, None on the others of a torchrun.

    Raises: ConfigError, DataError, CheckpointError, SaveError: each one line.
    """
    runtime = Runtime()
    target = runtime.decided_by_first(lambda: find_target(wanted.target, wanted.checkpoint_dir))
    saved = override(Config(), target.checkpoint.manifest["config"]) if target.checkpoint else None
    val = wanted.val
    conversations = None
    is_tuned = saved is not None and saved.tuning.instructions is not None
    if is_tuned and val is None and (wanted.generate or not wanted.hellaswag):
        assert saved is not None
        conversations = runtime.decided_by_first(lambda: _conversations(target, saved))
    if wanted.generate and conversations is None:
        raise ConfigError(
            f"{wanted.target}: --eval_generate compares answers, and that needs a run of src/finetune.py and no --val"
        )
    if wanted.generate:
        refuse_without_rouge()
    if val is None and conversations is None and not wanted.hellaswag:
        if saved is None:
            raise ConfigError("nothing to evaluate: give --val DIR, --hellaswag, or both")
        val = saved.data.data_dir
    system = _system(wanted, saved, runtime)
    model = runtime.everywhere(lambda: load_weights(target)).to(runtime.device)
    strategy = Strategy(runtime, compile=False, dtype=system.dtype)
    step = target.checkpoint.step if target.checkpoint else None
    numbers: dict[str, Any] = {
        "target": str(target.folder),
        "step": step,
        "val_loss": None,
        "val_loss_se": None,
        "val_tokens": None,
        "bits_per_byte": None,
        "hellaswag": None,
        "generate": None,
        "dtype": system.dtype,
        "device": runtime.device.type,
    }
    found: list[Results] = []
    validation: MeasuresLoss | None = None
    if conversations is not None and saved is not None:
        validation = AnswerLoss(
            conversations,
            val_tokens=wanted.val_tokens or saved.eval.val_tokens,
            batch_size=wanted.batch_size,
            strategy=strategy,
            runtime=runtime,
        )
    elif val is not None:
        validation = runtime.everywhere(
            lambda: _validation(val, wanted, target, saved, model.config, strategy, runtime)
        )
    if validation is not None:
        loss = validation.measure(model)
        assert loss is not None  # nobody interrupts
        if not math.isfinite(loss.val_loss):
            raise NonFiniteError(
                f"{target.folder}: validation loss {loss.val_loss}: broken weights"
            )
        numbers |= {
            "val_loss": loss.val_loss,
            "val_loss_se": loss.val_loss_se,
            "val_tokens": loss.val_tokens,
            "bits_per_byte": loss.bits_per_byte,
        }
        found.append(loss.results)
    if wanted.generate and conversations is not None:
        numbers["generate"] = rouge_l(model, conversations, strategy=strategy, runtime=runtime)
    if wanted.hellaswag:
        scorer = _hellaswag(wanted, saved, model.config, strategy, runtime)
        results = scorer.measure(model)
        assert results is not None
        numbers["hellaswag"] = summarize(results)
        found.append(results)
    if runtime.rank == 0 and wanted.save is not None:
        _save(wanted.save, [replace(results, step=step) for results in found])
    runtime.close()
    return Report(numbers, target.warnings) if runtime.rank == 0 else None


def _conversations(target: Target, saved: Config) -> Rows:
    """Return the conversations that a run held out.

    Raises: DataError if they are no longer what they were.
    """
    data = open_instructions(saved)
    if target.checkpoint is not None:
        trained_on = target.checkpoint.manifest["data_fingerprint"]
        if data.fingerprint != trained_on:
            raise DataError(
                f"{saved.tuning.instructions}: not the conversations that the run learned (fingerprint "
                f"{data.fingerprint[:12]}, the run's {trained_on[:12]}), so those held out are not known; restore it"
            )
    return data.rows["val"]


def _system(wanted: Wanted, saved: Config | None, runtime: Runtime) -> SystemConfig:
    """Choose device and dtype; `auto` is what the run trained in, where this device can do it."""
    runtime.use(SystemConfig(device=wanted.device))
    dtype = wanted.dtype
    if dtype == "auto" and saved is not None and saved.system.dtype != "auto":
        able = saved.system.dtype == "fp32" or native_bf16(runtime.device)
        dtype = saved.system.dtype if able else "fp32"
    return SystemConfig(device=wanted.device, dtype=resolve_dtype(dtype, runtime.device))


def _validation(
    folder: Path,
    wanted: Wanted,
    target: Target,
    saved: Config | None,
    model: ModelConfig,
    strategy: Strategy,
    runtime: Runtime,
) -> Validation:
    data = open_data(folder, vocab_size=model.vocab_size)
    trained_on = target.checkpoint.manifest["data_fingerprint"] if target.checkpoint else None
    if not data.is_gpt2 and data.fingerprint != trained_on:
        raise DataError(
            f"{folder}: not known to be tokenised with GPT-2's vocabulary, so its ids would mean other text"
        )
    order = Order(
        [shard.tokens for shard in data.splits["val"]],
        context_length=model.context_length,
        shuffle="none",
        seed=0,
    )
    settings = saved or Config()
    return Validation(
        order,
        WindowReader(
            data.splits["val"],
            context_length=model.context_length,
            id_limit=min(model.vocab_size, NUM_TOKENS),
            verify=runtime.local_rank == 0,
        ),
        val_tokens=wanted.val_tokens or settings.eval.val_tokens,
        batch_size=wanted.batch_size,
        is_gpt2=data.is_gpt2 and model.vocab_size >= NUM_TOKENS,
        strategy=strategy,
        runtime=runtime,
    )


def _hellaswag(
    wanted: Wanted, saved: Config | None, model: ModelConfig, strategy: Strategy, runtime: Runtime
) -> HellaSwag:
    if model.vocab_size < NUM_TOKENS:
        raise ConfigError(
            f"{wanted.target}: vocab_size {model.vocab_size} is below GPT-2's {NUM_TOKENS}: no HellaSwag"
        )
    settings = (saved or Config()).eval
    limit = settings.hellaswag_limit if wanted.hellaswag_limit is None else wanted.hellaswag_limit
    used = settings.hellaswag_path
    path = wanted.hellaswag_path or (used if used and used.exists() else None)
    return HellaSwag(
        runtime.decided_by_first(lambda: load_questions(path or fetch_hellaswag()).subset(limit)),
        context_length=model.context_length,
        strategy=strategy,
        runtime=runtime,
        metrics=wanted.hellaswag_metrics or settings.hellaswag_metrics,
    )


def _save(folder: Path, found: list[Results]) -> None:
    for results in found:
        path = folder / f"{results.kind}.npz"
        try:
            write_results(path, results)
        except OSError as error:
            raise SaveError(f"{path}: {error.strerror}; choose another --save") from error


def describe(report: Report) -> str:
    """Write the numbers for people."""
    numbers = report.numbers
    step = "" if numbers["step"] is None else f", step {numbers['step']}"
    lines = [
        f"{paths.for_people(Path(numbers['target']))}{step} ({numbers['dtype']} on {numbers['device']})"
    ]
    if numbers["val_loss"] is not None:
        bits = numbers["bits_per_byte"]
        lines.append(
            f"  validation loss  {numbers['val_loss']:.4f} +- {_error(numbers['val_loss_se'])} nats/token"
            f"{'' if bits is None else f', {bits:.4f} bits/byte'} on {numbers['val_tokens']:,} tokens"
        )
    if numbers["generate"] is not None:
        answers = numbers["generate"]
        lines.append(
            f"  ROUGE-L          {answers['rouge_l']:.4f} +- {_error(answers['rouge_l_se'])} "
            f"on {answers['n']:,} answers held out"
        )
    scores = numbers["hellaswag"]
    for name in (key for key in METRICS if scores and scores[key] is not None):
        lines.append(
            f"  {name:15}  {scores[name]:.4f} +- {_error(scores[f'{name}_se'])} on {scores['n']:,} HellaSwag items"
        )
    return "\n".join(lines)


def _error(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.4f}"
