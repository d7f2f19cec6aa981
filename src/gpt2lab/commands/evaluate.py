"""Evaluate a run's newest checkpoint, one checkpoint, or a Hugging Face GPT-2.

gpt2lab evaluate my_run
gpt2lab evaluate my_run/step_00000250 --val data/fineweb_edu --hellaswag
torchrun --nproc_per_node=4 -m gpt2lab evaluate hf:gpt2 --hellaswag
gpt2lab evaluate my_run --tasks arc_easy,piqa --limit 100
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from gpt2lab import fmt, paths
from gpt2lab.commands.command_line import TARGET, argument, option, run_tyro
from gpt2lab.errors import ConfigError, DataError, NonFiniteError, SaveError, system_errors_as
from gpt2lab.runs.console import say

if TYPE_CHECKING:
    from gpt2lab.config.schema import Config, ModelConfig, SystemConfig
    from gpt2lab.data.shards import TokenData
    from gpt2lab.distributed.runtime import Runtime
    from gpt2lab.distributed.strategy import Strategy
    from gpt2lab.evaluation.hellaswag import HellaSwag
    from gpt2lab.evaluation.results import Results
    from gpt2lab.evaluation.validation import MeasuresLoss
    from gpt2lab.finetuning.rows import Rows
    from gpt2lab.lab.token_losses import TokenLosses
    from gpt2lab.runs.target import Target

_BY_SOURCE = ("val_loss_by_source", "val_loss_se_by_source")  # of a run's own mixture


@dataclass(frozen=True)
class Evaluate:
    """Evaluate a run, a checkpoint, or a Hugging Face GPT-2."""

    target: Positional[str] = argument(TARGET)
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
    hellaswag_metrics: Literal["all", "harness", "tutorial"] | None = option(
        None,
        "harness = acc, acc_norm; tutorial = acc_token_norm; half the time each; default as the run, else all",
    )
    batch_size: int = option(
        8, "validation windows per forward pass; only rounding depends on it", least=1
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto = cuda if there is one")
    dtype: Literal["auto", "fp32", "bf16"] = option(
        "auto", "matmul precision; auto = what the run trained in, else as in training"
    )
    eval_generate: bool = option(
        False, "of a fine-tuned run: also let it answer what was held out, and compare (ROUGE-L)"
    )
    tasks: str | None = option(
        None, "tasks of EleutherAI's lm-eval, separated by commas, such as arc_easy,piqa"
    )
    limit: int | None = option(None, "of each task only the first N items", least=1)
    num_fewshot: int | None = option(
        None, "examples before each item of a task; default as the task says", least=0
    )
    tasks_path: Path | None = option(None, "folder with more tasks, as YAML files of lm-eval")
    apply_chat_template: bool = option(
        False, "put what the tasks ask into the chat template of a fine-tuned run"
    )
    save: Path | None = option(
        None, "folder to write results item by item to, for `gpt2lab compare`"
    )
    keep_token_losses: bool = option(
        False,
        "keep the loss of every validation token for `gpt2lab compare --explain`, in --save DIR or else in the run",
    )
    checkpoint_dir: Path | None = option(None, "folder of the runs; default checkpoints/")
    json: bool = option(False, "print one JSON object")


_COMMON = (  # flags of the short help
    *("target", "val", "val_tokens", "hellaswag", "tasks", "limit", "eval_generate", "save"),
    *("device", "json", "checkpoint_dir"),
)


def main(argv: list[str]) -> int:
    """Evaluate and print."""
    flags = run_tyro(Evaluate, argv, common=_COMMON)
    for name in ("limit", "num_fewshot", "tasks_path", "apply_chat_template"):
        if flags.tasks is None and getattr(flags, name) not in (None, False):
            raise ConfigError(f"--{name} is for --tasks; give its names too")
    typed = {
        name: paths.from_working_directory(path)
        for name in ("val", "hellaswag_path", "save", "tasks_path")
        if (path := getattr(flags, name)) is not None
    }
    numbers = evaluate(replace(flags, **typed))
    if numbers is not None:  # rank 0
        print(json.dumps(numbers) if flags.json else describe(numbers))
    return 0


def evaluate(wanted: Evaluate) -> dict[str, Any] | None:
    """Evaluate one target as its own run would; return the numbers on rank 0, None on the other ranks of a torchrun.

    Raises: ConfigError, DataError, CheckpointError, SaveError: each one line.
    """
    from gpt2lab.config.schema import Config
    from gpt2lab.interop.tasks import keep_tasks, measure_tasks, require_lm_eval
    from gpt2lab.runs.target import find_target

    runs = paths.runs_folder(wanted.checkpoint_dir)
    # One rank asks nobody: a name that means nothing is rejected before torch is imported.
    named = find_target(wanted.target, runs) if "RANK" not in os.environ else None
    if wanted.tasks is not None:
        require_lm_eval(wanted.tasks_path)
    from gpt2lab.distributed.runtime import Runtime
    from gpt2lab.distributed.strategy import Strategy
    from gpt2lab.evaluation.hellaswag import summarize
    from gpt2lab.evaluation.results import write_results
    from gpt2lab.evaluation.validation import NUMBERS
    from gpt2lab.finetuning.evaluation import require_rouge, rouge_l
    from gpt2lab.lab.token_losses import describe_losses
    from gpt2lab.runs.evaluations import file_of
    from gpt2lab.runs.weights import load_weights

    runtime = Runtime()
    target = named or runtime.on_rank_zero(lambda: find_target(wanted.target, runs))
    settings = target.checkpoint.config() if target.checkpoint else Config()
    others = wanted.hellaswag or wanted.tasks is not None
    is_tuned = settings.tuning.instructions is not None
    conversations: Rows | None = None
    if is_tuned and wanted.val is None and (wanted.eval_generate or not others):
        conversations = runtime.on_rank_zero(lambda: _conversations(target, settings))
    if wanted.eval_generate:
        if conversations is None:
            raise ConfigError(
                f"{wanted.target}: --eval_generate compares answers, and that needs a run of "
                f"{paths.script('finetune')} and no --val"
            )
        require_rouge()
    has_windows = wanted.val is not None or (conversations is None and not others)
    if has_windows and wanted.val is None and target.checkpoint is None:
        raise ConfigError("nothing to evaluate: give --val DIR, --hellaswag or --tasks NAMES")
    if wanted.keep_token_losses:
        _require_windows(wanted, target, is_measured=has_windows)
    system = _system(wanted, settings, runtime)
    model = runtime.on_all_ranks(lambda: load_weights(target)).to(runtime.device)
    strategy = Strategy(runtime, system)
    subject = _Subject(wanted, target, settings, model.config, strategy, runtime)
    step = target.checkpoint.step if target.checkpoint else None
    numbers: dict[str, Any] = {
        "target": str(target.folder),
        "step": step,
        **dict.fromkeys((*NUMBERS, *_BY_SOURCE, "hellaswag", "tasks", "generate")),
        "dtype": system.dtype,
        "device": runtime.device.type,
    }
    found: dict[Path, Results] = {}  # by the name of the file in --save
    kept: TokenLosses | None = None
    if has_windows or conversations is not None:
        data: TokenData | None = None
        if conversations is not None:
            validation = subject.answers(conversations)
        else:
            data, validation = runtime.on_all_ranks(subject.validation)
        loss = validation.measure(model, keep_token_losses=wanted.keep_token_losses)
        assert loss is not None  # nothing interrupts it
        if not math.isfinite(loss.val_loss):
            raise NonFiniteError(
                f"{target.folder}: validation loss {loss.val_loss}: broken weights"
            )
        numbers |= loss.numbers()
        found[Path("validation.npz")] = loss.results
        if data is not None and wanted.keep_token_losses:
            kept = describe_losses(loss, data, step=step, attempt=None)
    if wanted.eval_generate and conversations is not None:
        numbers["generate"] = rouge_l(model, conversations, strategy=strategy, runtime=runtime)
    if wanted.hellaswag:
        results = subject.hellaswag().measure(model)
        assert results is not None
        numbers["hellaswag"] = summarize(results)
        found[Path("hellaswag.npz")] = results
    warnings = [*target.warnings]
    if wanted.tasks is not None:
        measured = measure_tasks(
            wanted.tasks,
            target,
            model,
            strategy=strategy,
            runtime=runtime,
            limit=wanted.limit,
            num_fewshot=wanted.num_fewshot,
            tasks_path=wanted.tasks_path,
            apply_chat_template=wanted.apply_chat_template,
        )
        if measured is not None:  # rank 0
            numbers["tasks"] = measured.numbers
            found |= {file_of(Path("tasks"), name): one for name, one in measured.items.items()}
            problem = keep_tasks(measured, target.checkpoint) if target.checkpoint else None
            warnings += [problem] if problem else []
    runtime.close()
    if runtime.rank > 0:
        return None
    if wanted.save is not None:
        for name, results in found.items():
            with system_errors_as(SaveError, wanted.save / name, fix="choose another --save"):
                write_results(wanted.save / name, replace(results, step=step))
    if kept is not None:
        numbers["token_losses"] = str(_keep(kept, wanted, target))
    for warning in warnings:
        say(f"warning: {warning}")
    return numbers


@dataclass(frozen=True)
class _Subject:
    """The model that is evaluated, with the settings of its run, and where it computes."""

    wanted: Evaluate
    target: Target
    settings: Config
    model: ModelConfig
    strategy: Strategy
    runtime: Runtime

    def answers(self, conversations: Rows) -> MeasuresLoss:
        """Return the loss on held-out conversations."""
        from gpt2lab.finetuning.evaluation import AnswerLoss

        return AnswerLoss(
            conversations,
            val_tokens=self.wanted.val_tokens or self.settings.eval.val_tokens,
            batch_size=self.wanted.batch_size,
            strategy=self.strategy,
            runtime=self.runtime,
        )

    def validation(self) -> tuple[TokenData, MeasuresLoss]:
        """Return the folder of --val, or the run's own data where none is given, and the loss on it."""
        from gpt2lab.config.mixture import read_sources
        from gpt2lab.data.mixture import open_sources, require_folders, validation_orders
        from gpt2lab.data.shards import open_data
        from gpt2lab.evaluation.by_source import open_validation
        from gpt2lab.tokenizers.opening import require_same

        target, model = self.target, self.model
        if self.wanted.val is None:
            require_folders(self.settings, "--val")
            data = open_sources(read_sources(self.settings.data), vocab_size=model.vocab_size)
        else:
            data = open_data(self.wanted.val, vocab_size=model.vocab_size)
        trained_on = target.checkpoint.manifest["data_fingerprint"] if target.checkpoint else None
        if data.fingerprint != trained_on:
            name, folder = target.name, str(data.folder)
            require_same(target.tokenizer(), data.tokenizer, model=name, data=folder)
        return data, open_validation(
            data,
            validation_orders(data, context_length=model.context_length),
            model,
            val_tokens=self.wanted.val_tokens or self.settings.eval.val_tokens,
            batch_size=self.wanted.batch_size,
            strategy=self.strategy,
            runtime=self.runtime,
        )

    def hellaswag(self) -> HellaSwag:
        """Return the items, as the run has them where nothing else was typed."""
        from gpt2lab.evaluation.hellaswag import HellaSwag
        from gpt2lab.evaluation.hellaswag_items import fetch_hellaswag
        from gpt2lab.evaluation.hellaswag_tokens import load_questions
        from gpt2lab.tokenizers.opening import why_no_text

        wanted, of_run = self.wanted, self.settings.eval
        tokenizer = self.target.tokenizer()
        problem = why_no_text(tokenizer, self.model.vocab_size)
        if tokenizer is None or problem is not None:
            raise ConfigError(f"{wanted.target}: {problem}: no HellaSwag")
        limit, used = wanted.hellaswag_limit, of_run.hellaswag_path
        limit = of_run.hellaswag_limit if limit is None else limit
        path = wanted.hellaswag_path or (used if used and used.exists() else None)
        return HellaSwag(
            self.runtime.on_rank_zero(
                lambda: load_questions(path or fetch_hellaswag(), tokenizer).subset(limit)
            ),
            context_length=self.model.context_length,
            strategy=self.strategy,
            runtime=self.runtime,
            metrics=wanted.hellaswag_metrics or of_run.hellaswag_metrics,
        )


def _require_windows(wanted: Evaluate, target: Target, *, is_measured: bool) -> None:
    """Reject --keep_token_losses where no windows of shards are measured, or nothing says where to keep them.

    Raises: ConfigError.
    """
    from gpt2lab.runs.target import is_run

    if not is_measured:
        raise ConfigError(
            "--keep_token_losses is for validation on token shards; give --val DIR too"
        )
    checkpoint = target.checkpoint
    if wanted.save is None and (checkpoint is None or not is_run(checkpoint.path.parent)):
        raise ConfigError(
            f"{wanted.target}: of no run; say where to keep the losses with --save DIR"
        )


def _keep(kept: TokenLosses, wanted: Evaluate, target: Target) -> Path:
    """Write the losses of single tokens to --save DIR, or into the run beside its other evaluations; return the file.

    Raises: SaveError.
    """
    from gpt2lab.lab.token_losses import LOSSES, write_token_losses
    from gpt2lab.runs import evaluations, history

    folder = wanted.save
    if folder is None:
        assert target.checkpoint is not None  # checked before
        run_dir, step = target.checkpoint.path.parent, target.checkpoint.step
        folder = evaluations.items_folder(run_dir, step)
        kept = replace(kept, attempt=evaluations.attempt_of(history.read_log(run_dir), step))
    with system_errors_as(SaveError, folder, fix="choose another folder with --save"):
        write_token_losses(folder, kept)
    return folder / LOSSES


def _conversations(target: Target, settings: Config) -> Rows:
    """Return the conversations that a run held out.

    Raises: DataError if the data has changed since.
    """
    from gpt2lab.finetuning.rows import open_instructions

    assert target.checkpoint is not None  # only its settings name instructions
    data = open_instructions(settings, target.tokenizer())
    trained_on = target.checkpoint.manifest["data_fingerprint"]
    if data.fingerprint != trained_on:
        raise DataError(
            f"{settings.tuning.instructions}: not the conversations that the run learned (fingerprint "
            f"{data.fingerprint[:12]}, the run's {trained_on[:12]}), so those held out are not known; restore it"
        )
    return data.rows["val"]


def _system(wanted: Evaluate, settings: Config, runtime: Runtime) -> SystemConfig:
    """Choose device and dtype; `auto` is the run's own dtype if this device supports it."""
    from gpt2lab.config.schema import SystemConfig
    from gpt2lab.distributed.runtime import native_bf16, resolve_dtype

    runtime.use(SystemConfig(device=wanted.device))
    dtype = settings.system.dtype if wanted.dtype == "auto" else wanted.dtype
    if wanted.dtype == "auto" and dtype == "bf16" and not native_bf16(runtime.device):
        dtype = "fp32"
    return SystemConfig(device=wanted.device, dtype=resolve_dtype(dtype, runtime.device))


def describe(numbers: dict[str, Any]) -> str:
    """Return the numbers as text."""
    step = "" if numbers["step"] is None else f", step {numbers['step']}"
    lines = [
        f"{paths.display_path(Path(numbers['target']))}{step} ({numbers['dtype']} on {numbers['device']})"
    ]
    if numbers["val_loss"] is not None:
        bits = numbers["bits_per_byte"]
        lines.append(
            f"  validation loss  {numbers['val_loss']:.4f} +- {fmt.number(numbers['val_loss_se'])} nats/token"
            f"{'' if bits is None else f', {bits:.4f} bits/byte'} on {numbers['val_tokens']:,} tokens "
            f"({numbers['val_effective_n']:,.0f} effective {numbers['val_se_unit']}s)"
        )
    for name, loss in (numbers["val_loss_by_source"] or {}).items():
        error = fmt.number(numbers["val_loss_se_by_source"][name])
        lines.append(f"    {name:<15}{loss:.4f} +- {error}")
    if "token_losses" in numbers:
        lines.append(f"    each token's loss: {paths.display_path(Path(numbers['token_losses']))}")
    if numbers["generate"] is not None:
        answers = numbers["generate"]
        lines.append(
            f"  ROUGE-L          {answers['rouge_l']:.4f} +- {fmt.number(answers['rouge_l_se'])} "
            f"on {answers['n']:,} held-out answers"
        )
    scores = numbers["hellaswag"] or {}
    for name in ("acc", "acc_norm", "acc_token_norm"):
        if scores.get(name) is not None:
            error = fmt.number(scores[f"{name}_se"])
            lines.append(
                f"  {name:15}  {scores[name]:.4f} +- {error} on {scores['n']:,} HellaSwag items"
            )
    for name, task in (numbers["tasks"] or {}).items():
        items = "" if task["n"] is None else f" on {task['n']:,} items"
        for metric, found in task["metrics"].items():
            lines.append(
                f"  {f'{name} {metric}':<30}  {found['value']:.4f} +- {fmt.number(found['se'])}{items}"
            )
    return "\n".join(lines)
