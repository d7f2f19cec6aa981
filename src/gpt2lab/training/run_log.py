"""The record of a run in metrics.jsonl and on the console: how a start begins, and every step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict

from gpt2lab import WAITING, fmt, paths
from gpt2lab.checkpoint import catalog
from gpt2lab.checkpoint.store import TrainState
from gpt2lab.config.derived import is_due
from gpt2lab.config.request import describe_change
from gpt2lab.config.settings import record
from gpt2lab.data.loader import GlobalBatch
from gpt2lab.data.mixture import Mixture
from gpt2lab.distributed.compilation import compiled_so_far
from gpt2lab.optim.schedule import describe_rates, muon_scale
from gpt2lab.runs import summary
from gpt2lab.runs.folder import RunFolder
from gpt2lab.runs.logger import MetricsLogger
from gpt2lab.training.components import Components, Session
from gpt2lab.training.plan import describe_plan
from gpt2lab.training.progress import read_forecast
from gpt2lab.training.resume_check import describe_other_environment
from gpt2lab.training.train_step import StepStats


class StepLog:
    """The log of one start's steps."""

    def __init__(self, components: Components, session: Session) -> None:
        self._start, self._runtime = components.start, components.runtime
        self._order = components.start.order
        self._clock, self._logger = session.clock, session.logger
        self._announced_epoch: int | None = None
        self._announced_phase: int | None = None
        self._tells_compiling = self._start.config.system.compile == "on"
        self._peak_flops = session.peak_flops
        optim = self._start.config.optim
        self._muon_scale = muon_scale(optim) if optim.has_muon else None

    def record(
        self,
        state: TrainState,
        batch: GlobalBatch,
        stats: StepStats,
        *,
        lr: float,
        seconds: float,
        cpu_seconds: float,
    ) -> None:
        """Write the step's event, and its console line if one is due."""
        step, tokens = state.step, self._start.plan.batch.tokens
        rate, flops = tokens / seconds, self._start.plan.flops_per_token
        mfu = rate * flops / self._peak_flops if self._peak_flops else None
        left = self._clock.progress.remaining_interval(step, is_measured=False)
        order = self._order
        passes = {}  # over each source of a mixture, up to the end of the batch
        if isinstance(order, Mixture):
            passes["epochs_by_source"] = order.epochs_before(batch.first_sample + batch.samples)
        self._logger.event(
            "step",
            step,
            loss=stats.loss,
            lr=lr,
            grad_norm=stats.grad_norm,
            step_seconds=seconds,
            tokens_per_second=rate,
            tokens=state.tokens,
            targets=batch.num_targets,
            epoch=batch.epoch,
            data_wait_seconds=batch.wait_seconds,
            mfu=mfu,
            peak_memory_bytes=self._runtime.peak_memory(),
            first_sample=batch.first_sample,
            batch_hash=batch.hash,
            updated=stats.updated,
            cpu_seconds=cpu_seconds,
            **({} if state.loss_scale is None else {"loss_scale": state.loss_scale[0]}),
            **({} if self._muon_scale is None else {"muon_lr": lr * self._muon_scale}),
            **passes,
            elapsed_seconds=self._clock.elapsed(),
            remaining_seconds=left.value if left else None,
            on_track=self._clock.is_on_track(left),
        )
        if self._tells_compiling:  # the first step of this start compiled
            compiled, self._tells_compiling = compiled_so_far(), False
            self._logger.event("compile", step, **compiled)
            is_old = 0 < compiled["graphs"] == compiled["from_cache"]  # traced again, for seconds
            self._logger.say(
                f"{'traced' if is_old else 'compiled'} in {compiled['compile_seconds']:.1f} s, "
                f"{compiled['from_cache']} of {compiled['graphs']} graphs from the cache ({compiled['folder']})"
            )
        eta = fmt.duration(left.value if left else None)
        last_step, log_freq = self._clock.progress.last_step, self._start.config.log.log_freq
        short = f"step {step}/{last_step} | loss {stats.loss:.4f} | lr {lr:.1e} | {rate:,.0f} tok/s | eta {eta}"
        self._logger.show(short)
        if not (step == 1 or is_due(step, log_freq, last_step)):
            self._logger.log_if_quiet(short, step_seconds=seconds)
        else:
            targets = "" if batch.num_targets == tokens else f" | targets {batch.num_targets:,}"
            rates = f"{lr:.1e}" + (
                "" if self._muon_scale is None else f", muon {lr * self._muon_scale:.1e}"
            )
            shown = "" if mfu is None else f"mfu {mfu:.1%} | "
            self._logger.say(
                f"step {step}/{last_step} | epoch {batch.epoch} | loss {stats.loss:.4f} | lr {rates} | "
                f"norm {stats.grad_norm:.2f} | dt {seconds * 1000:.0f} ms | {rate:,.0f} tok/s{targets} | "
                f"{shown}eta {eta}",
                short=short,
            )
            if line := self._clock.line(step, left):
                self._logger.say(line)

    def while_compiling(self) -> AbstractContextManager[None]:
        """Say that the first step of a start takes long if it compiles."""
        if not self._tells_compiling:
            return nullcontext()
        about, (_, expected) = "", read_forecast(self._start.run_dir)
        if expected is not None:
            about = f", about {fmt.duration(expected)} unless its code is cached"
        return self._logger.waiting(f"compiling the step{about}")

    def announce(self, batch: GlobalBatch, step: int) -> None:
        """Say, once each, what begins with the batch after `step`: an epoch, other weights of a mixture."""
        self._announce_epoch(batch, step)
        if not isinstance(self._order, Mixture):
            return
        phase = self._order.phase_of(batch.first_sample + batch.samples - 1)
        if phase == self._announced_phase:
            return
        self._announced_phase = phase
        shares = self._order.shares(phase)
        self._logger.event("mixture", step, phase=phase, weights=shares)
        text = ", ".join(f"{share:.2%} {name}" for name, share in shares.items())
        self._logger.say(f"mixture from step {step + 1}: {text}")

    def _announce_epoch(self, batch: GlobalBatch, step: int) -> None:
        """Say which epoch begins, or is entered by a resume, and the order of its shards.

        Where steps are shown less often than epochs begin, the first is enough.
        """
        order, before, self._announced_epoch = self._order, self._announced_epoch, batch.epoch
        between = self._start.config.log.log_freq * batch.samples
        if before == batch.epoch or (before is not None and order.windows_per_epoch < between):
            return
        if isinstance(order, Mixture):
            passes = order.epochs_before(batch.first_sample).items()
            layout = "epochs: " + ", ".join(f"{name} {count:.2f}" for name, count in passes)
        else:
            files = self._start.data.splits["train"]
            shards = [files[i].path.stem for i in order.shard_order(batch.epoch)]
            more = f" and {len(shards) - 6} more" if len(shards) > 6 else ""
            kept = self._start.config.data.shuffle == "shards" and batch.epoch == 0
            layout = f"shards{' as on disk' if kept else ''}: {', '.join(shards[:6])}{more}"
        # Not `start.epochs`: a rewind skips data.
        end = batch.first_sample + (self._start.plan.max_steps - step) * batch.samples
        self._logger.say(
            f"epoch {batch.epoch} of {end / order.windows_per_epoch:.2f} | {order.windows_per_epoch:,} windows | "
            f"shuffle {self._start.config.data.shuffle} | {layout}"
        )


def record_start(components: Components, folder: RunFolder | None, logger: MetricsLogger) -> None:
    """Record and show this start, on rank 0: settings, plan, and on a resume where it continues."""
    start, state, check = components.start, components.state, components.resume_check
    world_size = start.plan.batch.world_size
    assert folder is not None
    settings = record(start.config, start.chosen)
    folder.write_config(settings, components.facts, start.tokenizer_files)
    folder.facts = {
        "attempt": start.attempt,
        "max_steps": start.plan.max_steps,
        "world_size": world_size,
        "resume": summary.command_to_resume(start.run_dir, world_size=world_size, anywhere=True),
    }
    folder.write_status("running", step=state.step)
    # First of all: once the log continues from this step, no start may resume from a newer one.
    superseded = (
        [] if check is None else catalog.supersede(start.run_dir, state.step, best=state.best_step)
    )
    _describe_start(components, logger)
    if start.branch and (problem := folder.record_in_trunk(start.branch)):
        logger.warn(problem, state.step)
    if check is None:
        return
    logger.event("resume", state.step, **asdict(check))
    logger.say(check.describe())
    if (warning := describe_other_environment(start, components.facts)) is not None:
        logger.warn(warning, state.step)
    if superseded:
        logger.say(f"set aside {', '.join(superseded)}: newer than the step resumed from")


def _summary(components: Components) -> str:
    """Return a start in five plain lines; the forecast is the sixth."""
    start, plan, model = components.start, components.start.plan, components.start.config.model
    environment, ranks = components.facts["environment"], plan.batch.world_size
    aside = " besides what rewinds set aside" if start.config.optim.on_spike == "rewind" else ""
    rows = {
        "run": f"{start.describe_place()}, checkpoints of "
        f"{fmt.num_bytes(plan.checkpoint_bytes)}, {fmt.num_bytes(plan.disk_bytes)} of disk at most{aside}",
        "model": f"{model.model}: {plan.parameters:,} parameters, context {model.context_length}",
        "data": start.describe_data().partition(" (")[0],
        "batch": f"{plan.batch.tokens:,} tokens a step, {plan.batch.micro_batch} sequences at a time"
        f"{f' on each of {ranks} processes' if ranks > 1 else ''}, {environment['dtype']} on {environment['device']}"
        + plan.why_batch,
        "schedule": f"{fmt.number_of(plan.max_steps, 'step')}, {start.tokens:,} tokens, {start.epochs:.2f} epochs; "
        f"learning rate {describe_rates(start.config.optim)}",
    }
    return "\n".join(f"{name:<14} {text}" for name, text in rows.items())


def _details(components: Components) -> Iterator[str]:
    """Yield all that is known of a start, for log.txt and --verbose."""
    start, plan = components.start, components.start.plan
    yield f"run            {start.describe_place()}"
    yield f"data           {start.describe_data()}"
    for line in start.describe_sources():
        yield f"source         {line}"
    if start.initial is not None:
        source = paths.display_path(start.initial.target.folder)
        yield f"begins with    {source}, sha256 {start.initial.sha256[:12]}"
    yield describe_plan(plan, start.config, tokens=start.tokens, epochs=start.epochs)
    trained = sum(p.numel() for p in components.model.parameters() if p.requires_grad)
    if trained < plan.parameters:
        yield f"trains         {trained:,} parameters; the others are frozen"
    environment = dict(components.facts["environment"])
    if not start.config.system.deterministic:  # a CPU is so without being asked
        environment.pop("deterministic")
    environment |= {name: os.environ[name] for name in WAITING if name in os.environ}
    facts = ", ".join(f"{name} {value}" for name, value in environment.items())
    yield f"runs on        {facts}"
    if components.runtime.runs_ahead:
        why = components.host_decides
        how = "pipelined" if why is None else f"one by one: the host decides on updates ({why})"
        yield f"steps          {how}"


def _describe_start(components: Components, logger: MetricsLogger) -> None:
    start, plan, step = components.start, components.start.plan, components.state.step
    verbose = start.config.log.verbose
    logger.say(_summary(components), on_console=not verbose, in_log=False)
    logger.say("\n".join(_details(components)), on_console=verbose)
    for name, change in start.changes.items():
        logger.say(f"changed        {name}: {describe_change(name, change)}")
    logger.event(
        "begin",
        step,
        max_steps=plan.max_steps,
        tokens_per_step=plan.batch.tokens,
        world_size=plan.batch.world_size,
        order_version=start.order.version,
        **({"branch_from": start.branch} if start.branch else {}),
    )
    for warning in start.warnings:
        logger.warn(warning, step)
    if start.no_text is not None:
        logger.warn(f"{start.no_text}: no text samples", step)
