"""A .pt file of another program becomes the first checkpoint of a run, which `--resume` continues."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from gpt2lab import paths
from gpt2lab.checkpoint import store
from gpt2lab.checkpoint.manifest import commit, folder_name
from gpt2lab.checkpoint.store import TrainState
from gpt2lab.config.derived import fitting_rows
from gpt2lab.config.mixture import read_sources
from gpt2lab.config.request import RunRequest
from gpt2lab.config.schema import LENGTHS
from gpt2lab.config.settings import ARCHITECTURE, record, to_flat
from gpt2lab.data.manifest import tokenizer_of
from gpt2lab.data.shards import open_data
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.errors import CheckpointError, ConfigError, GPT2LabError
from gpt2lab.evaluation.validation import ValidationLoss
from gpt2lab.files import sha256_of
from gpt2lab.interop.foreign import ForeignCheckpoint, Problems, read_foreign
from gpt2lab.interop.nanogpt import Entry, differences, entries_of
from gpt2lab.model import rng
from gpt2lab.model.gpt import GPT, build_model
from gpt2lab.optim.optimizers import build_optimizers
from gpt2lab.optim.schedule import lr_at
from gpt2lab.runs import summary
from gpt2lab.runs.folder import RunFolder
from gpt2lab.runs.logger import MetricsLogger
from gpt2lab.tokenizers.interface import Tokenizer
from gpt2lab.training.device import choose_hardware
from gpt2lab.training.evaluator import validation_line
from gpt2lab.training.recipe import PRETRAINING
from gpt2lab.training.resolve import resolve
from gpt2lab.training.resume_check import facts_of
from gpt2lab.training.start import Start

_VOCABULARY = {"vocab_size", "num_tokens"}
_NO_BF16 = (
    "no bf16 on this machine; on a GPU resume with --device cuda --dtype bf16 --allow_change dtype"
)


def import_checkpoint(request: RunRequest, path: Path, *, trust: bool = False) -> int:
    """Convert the file, evaluate it, commit it, and print what was taken from it and how to continue.

    Raises: CheckpointError for the file, ConfigError and DataError for the run it begins, with all that is wrong in one
    line; nothing is written then. SaveError.
    """
    runtime = Runtime()
    path = paths.from_working_directory(path)
    start, foreign, entries = _plan(request, path, runtime, trust=trust)
    print(f"evaluating {path.name} on {start.config.eval.val_tokens:,} tokens", flush=True)
    padded = foreign.with_rows(start.config.model.vocab_size - foreign.model.vocab_size)
    model = build_model(start.config.model, seed=start.config.data.seed, device=torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(padded.weights[name])
    loss, seconds = _evaluate(start, model, runtime)
    folder = _commit(start, padded, model, path, runtime, loss, seconds)
    for warning in start.warnings:
        print(f"note: {warning}")
    if foreign.is_nanogpt:
        rows = _settings_table(request, start, foreign, entries)
        theirs, ours = (max(len(row[column]) for row in rows) for column in (0, 1))
        for row in rows:
            print(f"{row[0].ljust(theirs)}  {row[1].ljust(ours)}  {row[2]}".rstrip())
    moments = "as in the file" if foreign.moments else "none in the file: its moments begin at zero"
    before = foreign.best_val_loss
    print(
        f"imported {path.name}: {start.plan.parameters:,} parameters, step {foreign.step} of {start.plan.max_steps}\n"
        f"{validation_line(loss, seconds)}"
        f"{'' if before is None else f' | best in the file {before:.4f}'}\n"
        f"optimizer {moments}\n"
        f"data begins at sample 0: the file does not record the windows that it was trained on\n"
        f"saved as {paths.display_path(folder)}; continue with: "
        f"{summary.command_to_resume(start.run_dir, world_size=1)}"
    )
    return 0


def _plan(
    request: RunRequest, path: Path, runtime: Runtime, *, trust: bool
) -> tuple[Start, ForeignCheckpoint, list[Entry]]:
    """Return the run that the file becomes, what the file holds, and what was taken from nanoGPT's settings."""
    if runtime.world_size > 1:
        raise ConfigError(f"{path.name}: one process imports it; resume with any number of them")
    problems = Problems()
    foreign = problems.of(lambda: read_foreign(path, trust=trust))
    if request.config.optim.has_muon:
        problems.found.append(
            ConfigError(f"{path.name} holds AdamW's moments; import it with --optimizer adamw")
        )

    def folders() -> tuple[Path, ...]:
        return read_sources(request.config.data).folders

    tokenizer = problems.of(lambda: tokenizer_of(folders()[0]))
    if foreign is None:  # then what the run would be is not known, but its data may be looked at
        if "data_dir" in request.chosen:
            problems.of(lambda: [open_data(folder, vocab_size=None) for folder in folders()])
        raise _as_one(problems.found)
    entries = problems.of(lambda: _entries(foreign, tokenizer, path)) or []
    if wrong := _other_shape(request, foreign, path):
        problems.found.append(ConfigError("; ".join(wrong)))
    taken = _with_taken(request, foreign, entries, tokenizer)
    start = None
    if foreign.is_nanogpt and "data_dir" not in taken.chosen:
        dataset = foreign.settings.get("dataset", "NAME")
        problems.found.append(
            ConfigError(
                f"--data_dir is missing: the folder data/{dataset} of nanoGPT, after "
                f"`gpt2lab data import` of it"
            )
        )
    else:
        start = problems.of(lambda: resolve(taken, world_size=1, set_aside=False))
    if start is not None and foreign.step >= start.plan.max_steps:
        problems.found.append(
            ConfigError(
                f"{path.name} is of step {foreign.step}, the run would have {start.plan.max_steps}: "
                f"give its full length with --max_steps"
            )
        )
    if problems.found or start is None:
        raise _as_one(problems.found)
    return choose_hardware(start, runtime), foreign, entries


def _as_one(found: list[GPT2LabError]) -> GPT2LabError:
    """Return one error for all: as it is if it is one thing."""
    first, texts = found[0].with_traceback(None), dict.fromkeys(map(str, found))
    return first if len(texts) == 1 else type(first)("; ".join(texts))


def _other_shape(request: RunRequest, foreign: ForeignCheckpoint, path: Path) -> list[str]:
    typed = request.config.model
    of_run = _VOCABULARY - request.typed if "num_tokens" in request.chosen else set()
    return [
        f"--{name} {getattr(typed, name)}: {path.name} has {getattr(foreign.model, name)}"
        for name in ARCHITECTURE
        if name in request.chosen - of_run and getattr(typed, name) != getattr(foreign.model, name)
    ]


def _entries(foreign: ForeignCheckpoint, tokenizer: Tokenizer | None, path: Path) -> list[Entry]:
    if not foreign.is_nanogpt:
        return []
    try:
        taken = entries_of(
            foreign.settings, block_size=foreign.model.context_length, done=foreign.step
        )
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
    rows = foreign.model.vocab_size
    ids = rows if tokenizer is None else min(rows, tokenizer.size)
    return [*taken, *differences(has_biases=foreign.has_biases, rows=rows, ids=ids)]


def _with_taken(
    request: RunRequest,
    foreign: ForeignCheckpoint,
    entries: list[Entry],
    tokenizer: Tokenizer | None,
) -> RunRequest:
    """Return the request as if the file's shape and settings were chosen, where others were not.

    A run's config.json has the vocabulary of its own data; here the weights have theirs.
    """
    values: dict[str, Any] = {
        name: getattr(foreign.model, name) for name in ARCHITECTURE if name != "num_tokens"
    }
    rows = foreign.model.vocab_size
    if tokenizer is not None and tokenizer.size - 1 == tokenizer.end_of_text == rows:
        # nanoGPT's characters have no end of text: it gets a row that may be read, but takes no part in the softmax.
        values |= {"vocab_size": fitting_rows(tokenizer.size), "num_tokens": rows}
    for entry in entries:
        values |= entry.settings
    if _given_length(request) is not None:
        values.pop("max_steps", None)
    kept = request.chosen - (_VOCABULARY - request.typed)
    taken = {name: value for name, value in values.items() if name not in kept}
    return dataclasses.replace(request.with_settings(**taken), typed=request.typed)


def _given_length(request: RunRequest) -> str | None:
    """Return the unit in which the run's length was chosen; None if it was not."""
    flat = to_flat(request.config)
    return next((n for n in LENGTHS if n in request.chosen and flat[n] is not None), None)


def _settings_table(
    request: RunRequest, start: Start, foreign: ForeignCheckpoint, entries: list[Entry]
) -> list[tuple[str, str, str]]:
    """Return rows of what nanoGPT had, what the run has, and why the two differ."""
    flat, length = to_flat(start.config), _given_length(request)
    if foreign.next_rate is not None:
        rate = lr_at(foreign.step + 1, start.config.optim, max_steps=start.plan.max_steps)
        same = math.isclose(rate, foreign.next_rate, rel_tol=1e-6)
        why = "" if same else "the schedules differ: was a flag typed, or is that nanoGPT older?"
        entries = [
            *entries,
            Entry(f"rate of the next step {foreign.next_rate:.6g}", {}, f"{rate:.6g}", why),
        ]
    lines = [("nanoGPT", "here", "")]
    for entry in entries:
        names = [length if length and name == "max_steps" else name for name in entry.settings]
        here = ", ".join(f"{name} {flat[name]}" for name in names) or entry.here
        why = entry.why
        if request.typed & set(names):
            why = "as typed"
        elif request.chosen & set(names):
            why = "as in the file of --config"
        elif entry.settings == {"dtype": "auto"} and flat["dtype"] == "fp32":
            why = "; ".join(filter(None, (why, _NO_BF16)))
        lines.append((entry.theirs, here, why))
    return lines


def _evaluate(start: Start, model: GPT, runtime: Runtime) -> tuple[ValidationLoss, float]:
    """Measure the validation loss of the imported weights, in nats, and the seconds it took."""
    began, strategy = time.monotonic(), Strategy(runtime, start.config.system)
    validation = PRETRAINING.open_batches(start, runtime).validation(strategy)
    result = validation.measure(model.to(runtime.device))
    model.to("cpu")
    assert result is not None  # nothing interrupts it
    if not math.isfinite(result.val_loss):
        raise CheckpointError(f"the file's weights have a validation loss of {result.val_loss}")
    return result, time.monotonic() - began


def _commit(
    start: Start,
    foreign: ForeignCheckpoint,
    model: GPT,
    path: Path,
    runtime: Runtime,
    loss: ValidationLoss,
    seconds: float,
) -> Path:
    config = start.config
    rng.seed_everything(config.data.seed)
    optimizers = build_optimizers(model, config.optim)
    for optimizer in optimizers:
        for name, parameter in store.parameters_of(optimizer, model):
            fresh = {"step": torch.zeros(())}  # AdamW's before its first update
            fresh |= {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = foreign.moments[name] if foreign.moments else fresh
    origin = {"step": foreign.step, "imported": path.name, "sha256": sha256_of(path), "samples": 0}
    state = TrainState(step=foreign.step, history=(origin,)).with_val_loss(loss.val_loss)
    facts, run_dir = facts_of(start, runtime), start.run_dir
    written = run_dir / folder_name(state.step) if run_dir.exists() else run_dir
    with contextlib.closing(RunFolder(run_dir)) as folder, contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, written, ignore_errors=True)
        folder.write_config(record(config, start.chosen), facts, start.tokenizer_files)
        drafted = store.draft(
            run_dir,
            kind="rolling",
            content=store.collect(model, optimizers, keep=True),
            state=state,
            rng_states=[rng.capture(runtime.device)],
            facts=facts,
            files=start.tokenizer_files,
        )
        saved = commit(run_dir, drafted)
        logger = MetricsLogger(run_dir, attempt=start.attempt)
        logger.event("eval", state.step, **loss.numbers(), seconds=seconds)
        logger.close()
        folder.write_status("stopped", step=state.step, reason="imported", exit_code=0)
        undo.pop_all()
    return saved
