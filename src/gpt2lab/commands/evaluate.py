"""Evaluate a run's newest checkpoint, one checkpoint, or a Hugging Face GPT-2.

gpt2lab evaluate latest
gpt2lab evaluate latest/step_00000200 --val data/fineweb_edu --hellaswag
torchrun --nproc_per_node=4 -m gpt2lab evaluate hf:gpt2 --hellaswag
gpt2lab evaluate latest --tasks arc_easy,piqa --limit 100
gpt2lab evaluate latest --core eval_bundle.zip
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2lab import fmt, paths
from gpt2lab.commands.parser import WithJson, parse_flags
from gpt2lab.config.flags import option
from gpt2lab.config.schema import Config
from gpt2lab.errors import ConfigError, SaveError, system_errors_as
from gpt2lab.evaluation import request as evaluation
from gpt2lab.evaluation.request import EvaluationRequest, Subject
from gpt2lab.evaluation.results import Results, write_results
from gpt2lab.interop.core import CoreTask, measure_core, read_bundle
from gpt2lab.interop.tasks import TaskRequest, keep_tasks, measure_tasks, require_tasks
from gpt2lab.runs import evaluations, history
from gpt2lab.runs.console import doing, say
from gpt2lab.runs.target import Target, find_target, is_run

if TYPE_CHECKING:
    from gpt2lab.evaluation.validation import MeasuresLoss
    from gpt2lab.finetuning.rows import Rows
    from gpt2lab.lab.token_losses import TokenLosses

_BY_SOURCE = ("val_loss_by_source", "val_loss_se_by_source")  # of a run's own mixture


@dataclass(frozen=True)
class Evaluate(WithJson, TaskRequest, EvaluationRequest):
    """Evaluate a run, a checkpoint, or a Hugging Face GPT-2."""

    eval_generate: bool = option(
        False,
        "of a fine-tuned run: also generate answers to the held-out conversations, and compare them (ROUGE-L)",
    )
    save: Path | None = option(
        None, "folder to write results item by item to, for `gpt2lab compare`"
    )


_COMMON = (  # flags of the short help
    *("target", "val", "val_tokens", "hellaswag", "tasks", "limit", "core", "eval_generate"),
    *("save", "device", "json", "checkpoint_dir"),
)


def main(argv: list[str]) -> int:
    """Evaluate and print."""
    flags = parse_flags(Evaluate, argv, common=_COMMON)
    for name in ("limit", "num_fewshot", "tasks_path", "apply_chat_template"):
        if flags.tasks is None and getattr(flags, name) not in (None, False):
            of_items = name == "limit" and flags.hellaswag
            fix = "of HellaSwag it is --hellaswag_limit" if of_items else "give its names too"
            raise ConfigError(f"--{name} is for --tasks; {fix}")
    if flags.core is None and flags.core_limit is not None:
        raise ConfigError("--core_limit is for --core; give the bundle too")
    typed = {
        name: paths.from_working_directory(path)
        for name in ("val", "hellaswag_path", "save", "tasks_path", "core")
        if (path := getattr(flags, name)) is not None
    }
    numbers = evaluate(replace(flags, **typed))
    if numbers is not None:  # rank 0
        print(json.dumps(numbers) if flags.json else as_text(numbers))
    return 0


@dataclass
class _Findings:
    numbers: dict[str, Any]  # as --json prints them
    items: dict[Path, Results] = field(default_factory=dict)  # by the name of the file in --save
    token_losses: TokenLosses | None = None
    warnings: list[str] = field(default_factory=list)


def evaluate(flags: Evaluate) -> dict[str, Any] | None:
    """Evaluate one target as its own run would; return the numbers on rank 0, None on the other ranks of a torchrun.

    Raises: ConfigError, DataError, CheckpointError, SaveError: each one line.
    """

    def find() -> Target:
        return find_target(flags.target, paths.runs_folder(flags.checkpoint_dir))

    # One process needs no other ranks: it rejects an unknown name before torch is imported.
    named = find() if "RANK" not in os.environ else None
    evaluation.require_gpu(flags.device)
    if flags.tasks is not None:
        require_tasks(flags)
    bundle = read_bundle(flags.core, flags.core_limit) if flags.core else []
    from gpt2lab.distributed.runtime import Runtime
    from gpt2lab.evaluation.validation import NUMBERS

    runtime = Runtime()
    target = named or runtime.on_rank_zero(find)
    settings = target.checkpoint.config() if target.checkpoint else Config()
    has_tasks = flags.tasks is not None or flags.core is not None
    has_others = flags.hellaswag or has_tasks
    conversations: Rows | None = None
    is_tuned = settings.tuning.instructions is not None
    if is_tuned and flags.val is None and (flags.eval_generate or not has_others):
        conversations = runtime.on_rank_zero(lambda: _held_out(target, settings))
    has_shards = flags.val is not None or (conversations is None and not has_others)
    _check(flags, target, conversations, has_shards)
    subject = evaluation.load_subject(flags, target, settings, runtime)
    numbers = {
        "target": str(subject.target.folder),
        "step": subject.step,
        **dict.fromkeys((*NUMBERS, *_BY_SOURCE, "hellaswag", "tasks", "generate")),
        "dtype": subject.dtype,
        "device": subject.runtime.device.type,
    }
    found = _Findings(numbers, warnings=[*subject.target.warnings])
    if has_shards or conversations is not None:
        _add_loss(found, subject, conversations)
    if flags.eval_generate and conversations is not None:
        from gpt2lab.finetuning.evaluation import rouge_l

        with doing("answering the held-out conversations"):
            found.numbers["generate"] = rouge_l(subject.model, conversations, subject.strategy)
    if flags.hellaswag:
        from gpt2lab.evaluation.hellaswag import summarize

        items = found.items[Path("hellaswag.npz")] = evaluation.measure_hellaswag(subject)
        found.numbers["hellaswag"] = summarize(items)
    if has_tasks:
        _add_tasks(found, subject, flags, bundle)
    runtime.close()
    if runtime.rank > 0:
        return None
    for warning in found.warnings:
        say(f"warning: {warning}")
    try:
        _save(found, subject, flags.save)
    except SaveError:
        say(as_text(found.numbers))  # it may have taken hours
        raise
    return found.numbers


def _held_out(target: Target, settings: Config) -> Rows:
    from gpt2lab.finetuning.rows import open_held_out

    assert target.checkpoint is not None  # only its settings name instructions
    trained_on = target.checkpoint.manifest["data_fingerprint"]
    return open_held_out(settings, target.tokenizer(), fingerprint=trained_on)


def _check(flags: Evaluate, target: Target, conversations: Rows | None, has_shards: bool) -> None:
    """Reject what cannot be measured of this target, or not kept anywhere."""
    from gpt2lab.finetuning.evaluation import require_rouge

    if flags.eval_generate:
        if conversations is None:
            raise ConfigError(
                f"{flags.target}: --eval_generate compares answers, and that needs a run of "
                f"gpt2lab finetune and no --val"
            )
        require_rouge()
    checkpoint = target.checkpoint
    if has_shards and flags.val is None and checkpoint is None:
        raise ConfigError(
            "nothing to evaluate: give --val DIR, --hellaswag, --tasks NAMES or --core BUNDLE"
        )
    if not flags.keep_token_losses:
        return
    if not has_shards:
        raise ConfigError(
            "--keep_token_losses is for validation on token shards; give --val DIR too"
        )
    if flags.save is None and (checkpoint is None or not is_run(checkpoint.path.parent)):
        raise ConfigError(
            f"{flags.target} belongs to no run; say where to keep the losses with --save DIR"
        )


def _add_loss(found: _Findings, subject: Subject, conversations: Rows | None) -> None:
    from gpt2lab.finetuning.evaluation import AnswerLoss
    from gpt2lab.lab.token_losses import describe_losses

    data = None
    validation: MeasuresLoss
    if conversations is not None:
        validation = AnswerLoss(
            conversations,
            val_tokens=subject.val_tokens,
            batch_size=subject.request.batch_size,
            strategy=subject.strategy,
        )
    else:
        data, validation = subject.runtime.on_all_ranks(lambda: evaluation.open_shards(subject))
    loss = evaluation.measure_loss(subject, validation)
    found.numbers |= loss.numbers()
    found.items[Path("validation.npz")] = loss.results
    if data is not None and subject.request.keep_token_losses:
        found.token_losses = describe_losses(loss, data, step=subject.step, attempt=None)


def _add_tasks(found: _Findings, subject: Subject, flags: Evaluate, bundle: list[CoreTask]) -> None:
    checkpoint, both = subject.target.checkpoint, []
    if bundle:
        tokenizer = subject.text_tokenizer("CORE cannot be measured")
        core = measure_core(bundle, subject.model, subject.strategy, tokenizer)
        assert core is not None  # nothing interrupts it
        both.append(core)
    if flags.tasks is not None:
        both.append(measure_tasks(flags, subject))
    if subject.runtime.rank > 0:
        return
    found.numbers["tasks"] = {}
    for measured in both:
        found.warnings += measured.warnings
        found.numbers["tasks"] |= measured.numbers
        found.items |= {
            evaluations.file_of(Path("tasks"), name): one for name, one in measured.items.items()
        }
        problem = checkpoint and keep_tasks(measured, checkpoint.path.parent, checkpoint.step)
        found.warnings += [problem] if problem else []


def _save(found: _Findings, subject: Subject, save: Path | None) -> None:
    """Write the items to `save`; the losses of single tokens there too, else into the run."""
    from gpt2lab.lab.token_losses import LOSSES, write_token_losses

    if save is not None:
        for name, results in found.items.items():
            with system_errors_as(SaveError, save / name, fix="choose another --save"):
                of = str(subject.target.folder.resolve())
                write_results(save / name, replace(results, step=subject.step, target=of))
    kept, folder = found.token_losses, save
    if kept is None:
        return
    if folder is None:
        assert subject.target.checkpoint is not None  # checked before
        run_dir, step = subject.target.checkpoint.path.parent, subject.target.checkpoint.step
        folder = evaluations.items_folder(run_dir, step)
        kept = replace(kept, attempt=evaluations.attempt_of(history.read_log(run_dir), step))
    with system_errors_as(SaveError, folder, fix="choose another folder with --save"):
        write_token_losses(folder, kept)
    found.numbers["token_losses"] = str(folder / LOSSES)


def as_text(numbers: dict[str, Any]) -> str:
    """Return the numbers as text."""

    def row(label: str, value: float | None, error: float | None, rest: str = "") -> None:
        lines.append(f"  {label} {fmt.number(value)} +- {fmt.number(error)}{rest}")

    step = "" if numbers["step"] is None else f", step {numbers['step']}"
    place = paths.display_path(Path(numbers["target"]))
    lines = [f"{place}{step} ({numbers['dtype']} on {numbers['device']})"]
    if numbers["val_loss"] is not None:
        bits = numbers["bits_per_byte"]
        rest = f" nats/token{'' if bits is None else f', {bits:.4f} bits/byte'} on {numbers['val_tokens']:,} tokens"
        rest += f" ({numbers['val_effective_n']:,.0f} effective {numbers['val_se_unit']}s)"
        row("validation loss ", numbers["val_loss"], numbers["val_loss_se"], rest)
    for name, loss in (numbers["val_loss_by_source"] or {}).items():
        row(f"  {name:<14}", loss, numbers["val_loss_se_by_source"][name])
    if "token_losses" in numbers:
        lines.append(f"    each token's loss: {paths.display_path(Path(numbers['token_losses']))}")
    if (answers := numbers["generate"]) is not None:
        rest = f" on {answers['n']:,} held-out answers"
        row(f"{'ROUGE-L':16}", answers["rouge_l"], answers["rouge_l_se"], rest)
    scores = numbers["hellaswag"] or {}
    for name in ("acc", "acc_norm", "acc_token_norm"):
        if scores.get(name) is not None:
            row(
                f"{name:16}",
                scores[name],
                scores[f"{name}_se"],
                f" on {scores['n']:,} HellaSwag items",
            )
    for name, task in (numbers["tasks"] or {}).items():
        items = "" if task["n"] is None else f" on {task['n']:,} items"
        for metric, found in task["metrics"].items():
            row(f"{f'{name} {metric}':<30} ", found["value"], found["se"], items)
    return "\n".join(lines)
