"""The pretraining recipe: decide, build the parts in order, run, and say how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Any

import torch

from gpt2lab import paths
from gpt2lab.checkpoint import catalog
from gpt2lab.checkpoint.manifest import folder_name
from gpt2lab.config.command_line import Command
from gpt2lab.config.settings import to_flat
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.errors import ConfigError, GPT2LabError, OutOfMemoryError, TornUpdateError, refusal_of
from gpt2lab.evaluation.hellaswag import HellaSwag
from gpt2lab.evaluation.hellaswag_tokens import load_questions
from gpt2lab.model.gpt import GPT
from gpt2lab.planner import auto, scoring
from gpt2lab.planner.contention import Watch
from gpt2lab.planner.plan import describe
from gpt2lab.planner.run_clock import RunClock
from gpt2lab.runs import history, summary
from gpt2lab.runs.folder import RunFolder
from gpt2lab.runs.logger import Telemetry
from gpt2lab.tokenizers.gpt2 import NUM_TOKENS
from gpt2lab.training.control import Control
from gpt2lab.training.evaluator import Measurements
from gpt2lab.training.heartbeat import EXIT_CODE, Heartbeat
from gpt2lab.training.histograms import Histograms
from gpt2lab.training.parts import (
    PRETRAINING,
    Parts,
    Recipe,
    build_and_load,
    fit_to_hardware,
    look_at_attention,
    refuse_mixed_hardware,
)
from gpt2lab.training.saver import Saver
from gpt2lab.training.start import Start, decide, with_hellaswag
from gpt2lab.training.stop import Signals, end_with_parent, show_stacks_on_request
from gpt2lab.training.trainer import Trainer


def pretrain(command: Command, *, recipe: Recipe = PRETRAINING, began: float | None = None) -> None:
    """Run the trainer as the command line says; return when the run is complete, or has stopped and saved.

    `recipe`: what another kind of training makes in place of pretraining's parts. `began`: reading of the monotonic
    clock from which this start counts its time; default now.

    Raises: GPT2LabError with the exit code of the refusal; the same on every process.
    """
    began = time.monotonic() if began is None else began
    signals = Signals()
    show_stacks_on_request()
    if "RANK" in os.environ:
        end_with_parent()
    runtime = Runtime(timeout_minutes=command.verbs.pg_timeout_minutes)
    folder: RunFolder | None = None
    try:
        start = _decide(command, runtime)
        memory = runtime.gather(auto.free_memory(command, start))
        fitted = runtime.decided_by_first(lambda: auto.fitted(command, start, memory))
        if fitted is not None:
            start = _decide(fitted, runtime)
        if start.is_complete:
            if runtime.rank == 0:
                steps = start.plan.max_steps
                print(f"{start.run_dir.name}: already complete after {steps} steps; nothing to do")
        else:
            start = runtime.everywhere(lambda: fit_to_hardware(start, runtime))
            refuse_mixed_hardware(start, runtime)
            model = recipe.build_model(start, runtime)
            start = look_at_attention(start, model, runtime)
            folder = _open_folder(start, runtime)
            _run(start, recipe, runtime, signals, folder, model, began)
    except (torch.OutOfMemoryError, TornUpdateError) as error:
        # The first update makes the optimizer's state, so that a step may fit until then and not after.
        cause = error.__cause__ if isinstance(error, TornUpdateError) else error
        if not isinstance(cause, torch.OutOfMemoryError):
            raise
        raise OutOfMemoryError(
            f"out of memory: {str(cause).splitlines()[0]} A lower --mini_batch_size needs less and changes no loss; "
            f"--mini_batch_size auto finds one that fits, scripts/memory_check.py shows what takes the room"
        ) from error
    finally:
        signals.close()
        if folder:
            folder.close()
    runtime.close()


def _decide(command: Command, runtime: Runtime) -> Start:
    return runtime.decided_by_first(
        lambda: with_hellaswag(decide(command, world_size=runtime.world_size, set_aside=True))
    )


def _open_folder(start: Start, runtime: Runtime) -> RunFolder | None:
    """Create and lock the run's folder on the first process; from here on things are written."""
    opened: list[RunFolder] = []

    def open_and_check() -> None:
        opened.append(RunFolder(start.run_dir))
        if history.last_attempt(history.read_events(start.run_dir)) + 1 != start.attempt:
            opened.pop().close()
            raise ConfigError(f"{start.run_dir}: another start used this run just now; start again")

    runtime.decided_by_first(open_and_check)
    return opened[0] if opened else None


def _run(
    start: Start,
    recipe: Recipe,
    runtime: Runtime,
    signals: Signals,
    folder: RunFolder | None,
    model: GPT,
    began: float,
) -> None:
    # What is refused here has written nothing.
    parts = build_and_load(start, runtime, model, recipe)
    telemetry = Telemetry(
        start.run_dir if folder else None,
        attempt=start.attempt,
        tensorboard_from=parts.state.step if start.config.log.use_tensorboard else None,
        hparams=to_flat(start.config),
        use_wandb=start.config.log.use_wandb,
    )
    heartbeat = Heartbeat(
        start.run_dir,
        rank=runtime.rank,
        hang_seconds=start.config.system.hang_seconds,
        tell=lambda report: _tell_hang(report, folder, telemetry),
    )
    trainer: Trainer | None = None
    watch = Watch()
    try:
        runtime.decided_by_first(lambda: _write_what_begins(start, parts, folder, telemetry))
        trainer = _assemble(start, parts, runtime, signals, folder, telemetry, heartbeat, began)
        reason = trainer.fit()
        if folder:
            state = "stopped" if reason else "completed"
            folder.write_status(state, step=trainer.state.step, reason=reason, exit_code=0)
    except BaseException as error:
        if folder:
            step = trainer.state.step if trainer else parts.state.step
            refusal = refusal_of(error)
            code = refusal.exit_code if refusal else 1
            reason = f"{type(error).__name__}: {error}"
            with contextlib.suppress(OSError, GPT2LabError):  # the first error is the one to report
                folder.write_status("failed", step=step, reason=str(error), exit_code=code)
                telemetry.event("stop", step, reason=reason, checkpoint=None)
        telemetry.close()
        raise
    finally:
        heartbeat.close()
    if folder and signals.level < 2:  # who asks twice has no time for a report
        scoring.keep_score(start, watch.others(), telemetry.say)
        telemetry.say(summary.describe_run(start.run_dir))
    telemetry.close()


def _tell_hang(report: str, folder: RunFolder | None, telemetry: Telemetry) -> None:
    if folder:
        with contextlib.suppress(OSError, GPT2LabError):
            step = json.loads((folder.path / "status.json").read_text())["step"]
            folder.write_status("failed", step=step, reason=report, exit_code=EXIT_CODE)
            telemetry.event("stop", step, reason=report, checkpoint=None)


def _assemble(
    start: Start,
    parts: Parts,
    runtime: Runtime,
    signals: Signals,
    folder: RunFolder | None,
    telemetry: Telemetry,
    heartbeat: Heartbeat,
    began: float,
) -> Trainer:
    """Put the parts of a run together, in order."""
    config, model, optimizers = start.config, parts.model, parts.optimizers
    strategy = parts.strategy
    strategy.settle(
        parts.wrapped,
        batch_size=config.batch.mini_batch_size,
        context_length=config.model.context_length,
    )
    control = Control(
        signals,
        runtime,
        run_dir=folder.path if folder else None,
        deadlines=start.deadlines,
        save_every_seconds=60 * config.checkpoint.checkpoint_minutes,
        heartbeat=heartbeat,
    )
    clock = _clock(start, parts.facts, began, is_first=folder is not None)
    measurements = Measurements(
        config=config,
        model=model,
        validation=parts.sources.validation(strategy),
        hellaswag=_build_hellaswag(start, strategy, runtime),
        strategy=strategy,
        runtime=runtime,
        telemetry=telemetry,
        progress=clock.progress,
        control=control,
        run_dir=start.run_dir,
    )
    return Trainer(
        start=start,
        model=model,
        wrapped=parts.wrapped,
        optimizers=optimizers,
        loader=parts.sources.loader,
        measurements=measurements,
        histograms=Histograms(
            model, telemetry, config.log.histogram_freq, last_step=start.plan.max_steps
        ),
        strategy=strategy,
        runtime=runtime,
        telemetry=telemetry,
        saver=Saver(
            config.checkpoint,
            start.run_dir,
            folder,
            model,
            optimizers,
            runtime,
            telemetry,
            parts.facts,
            signals,
            resumed_from=start.checkpoint.step if start.checkpoint else None,
        ),
        control=control,
        heartbeat=heartbeat,
        state=parts.state,
        clock=clock,
    )


def _build_hellaswag(start: Start, strategy: Strategy, runtime: Runtime) -> HellaSwag | None:
    path, config = start.config.eval.hellaswag_path, start.config
    if start.hellaswag != "on" or path is None:
        return None
    # The first process reads; the others need neither the file nor its cache.
    return HellaSwag(
        runtime.decided_by_first(lambda: load_questions(path).subset(config.eval.hellaswag_limit)),
        context_length=config.model.context_length,
        strategy=strategy,
        runtime=runtime,
        metrics=config.eval.hellaswag_metrics,
    )


def _clock(start: Start, facts: dict[str, Any], began: float, *, is_first: bool) -> RunClock:
    """Return the clock of this start; only the first process's is shown."""
    clock = RunClock(
        start.config,
        last_step=start.plan.max_steps,
        began=began,
        expected_seconds=scoring.foretold_seconds(start.run_dir) if is_first else None,
    )
    if start.checkpoint is not None and is_first:
        same = facts["environment"] == start.checkpoint.manifest["environment"]
        clock.take_over(start.run_dir, same_hardware=same)
    return clock


def _write_what_begins(
    start: Start, parts: Parts, folder: RunFolder | None, telemetry: Telemetry
) -> None:
    """Record and show this start, on the first process: settings, plan, and on a resume where it goes on."""
    assert folder is not None
    folder.write_config(start.config, parts.facts)
    folder.facts = {
        "attempt": start.attempt,
        "max_steps": start.plan.max_steps,
        "world_size": start.plan.batch.world_size,
        "resume": summary.command_to_resume(start.run_dir, world_size=start.plan.batch.world_size),
    }
    folder.write_status("running", step=parts.state.step)
    _say_what_begins(start, parts, telemetry)
    scoring.foretell(start, parts.facts, telemetry.say)
    if parts.receipt is None:
        return
    step, best = parts.state.step, parts.state.best_step
    telemetry.event("resume", step, **parts.receipt.as_event())
    telemetry.say(parts.receipt.describe())
    if superseded := catalog.supersede(start.run_dir, step):
        telemetry.say(f"set aside {', '.join(superseded)}: newer than the step resumed from")
    if best is not None and (start.run_dir / folder_name(best)).is_dir():
        catalog.set_label(start.run_dir, "best", best)  # it may have been set aside as newer


def _say_what_begins(start: Start, parts: Parts, telemetry: Telemetry) -> None:
    step = start.checkpoint.step if start.checkpoint else 0
    environment, plan = parts.facts["environment"], start.plan
    telemetry.event(
        "begin",
        step,
        max_steps=plan.max_steps,
        tokens_per_step=plan.batch.tokens,
        world_size=plan.batch.world_size,
    )
    telemetry.say(f"run            {paths.for_people(start.run_dir)} (start {start.attempt})")
    telemetry.say(f"data           {start.describe_data()}")
    if start.initial is not None:
        source = paths.for_people(start.initial.target.folder)
        telemetry.say(f"begins with    {source}, sha256 {start.initial.sha256[:12]}")
    telemetry.say(describe(start.plan, start.config))
    trained = sum(p.numel() for p in parts.model.parameters() if p.requires_grad)
    if trained < start.plan.parameters:
        telemetry.say(f"trains         {trained:,} parameters; the others are frozen")
    telemetry.say(
        "runs on        " + ", ".join(f"{name} {value}" for name, value in environment.items())
    )
    for name, (before, now) in start.changes.items():
        telemetry.say(f"changed        {name}: {before} -> {now}")
    for warning in start.warnings:
        telemetry.warn(warning, step)
    if start.config.model.vocab_size < NUM_TOKENS:
        telemetry.warn(
            f"vocab_size {start.config.model.vocab_size} is below GPT-2's {NUM_TOKENS}: no text samples",
            step,
        )
