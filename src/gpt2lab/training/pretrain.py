"""Run a training from the request to its report: resolve, build, train, and say how it ended.

Pretraining and fine-tuning both come through here; they differ only in `recipe`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from gpt2lab.checkpoint.faults import faultpoint
from gpt2lab.checkpoint.store import TrainState
from gpt2lab.config.derived import SMALLER_MINI_BATCH
from gpt2lab.config.request import RunRequest
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.errors import (
    FolderLostError,
    GPT2LabError,
    InUseError,
    OutOfMemoryError,
    PartialUpdateError,
    SaveError,
    first_line,
    is_out_of_memory,
    to_gpt2lab_error,
)
from gpt2lab.evaluation.hellaswag import HellaSwag
from gpt2lab.evaluation.hellaswag_items import load_questions
from gpt2lab.files import replace_durably
from gpt2lab.model import rng
from gpt2lab.model.gpt import GPT
from gpt2lab.optim.optimizers import build_optimizers
from gpt2lab.runs import history, summary
from gpt2lab.runs.console import beats, doing, say
from gpt2lab.runs.folder import RunFolder
from gpt2lab.runs.logger import MetricsLogger
from gpt2lab.training.average import TailAverage
from gpt2lab.training.components import Components, Session
from gpt2lab.training.control import Control
from gpt2lab.training.device import check_kernels, choose_hardware
from gpt2lab.training.evaluator import Evaluator
from gpt2lab.training.extension import Extension, Extensions, LiveRun, Planner
from gpt2lab.training.health import why_host_decides
from gpt2lab.training.heartbeat import EXIT_CODE, Heartbeat
from gpt2lab.training.progress import RunClock, read_forecast
from gpt2lab.training.recipe import PRETRAINING, Recipe
from gpt2lab.training.resolve import resolve_to_train
from gpt2lab.training.resume_check import check_resume, facts_of, load_state, saved_environment
from gpt2lab.training.run_log import record_start
from gpt2lab.training.saver import Saver
from gpt2lab.training.start import Benchmark, Start
from gpt2lab.training.stop import Signals, end_with_parent, more_to_abort, show_stacks_on_request
from gpt2lab.training.trainer import Trainer

_ALONE_SECONDS = 20.0  # after which a rank other than 0 says that it waits for ranks


def pretrain(
    request: RunRequest,
    *,
    recipe: Recipe = PRETRAINING,
    extensions: Sequence[Extension] = (),
    planner: Planner | None = None,
    open_core: Callable[[Start], Benchmark | None] = lambda start: None,
    start: Start | None = None,
    began: float | None = None,
) -> None:
    """Train as requested; return when the run is complete, or has stopped and saved.

    `extensions` observe the run; `planner` decides what the request leaves open; `open_core` reads the tasks of --core.
    `start`: the request, already resolved on a single rank; default: rank 0 resolves it for all. `began`: reading of
    the monotonic clock from which this start counts its time; default now.

    Raises: GPT2LabError with its exit code; the same on every rank.
    """
    began = time.monotonic() if began is None else began
    signals = Signals()
    if os.environ.get("RANK", "0") == "0":
        signals.answer = lambda number, level: print(
            f"stopping before the next step{more_to_abort(number, level)}", flush=True
        )
    show_stacks_on_request()
    if "RANK" in os.environ:
        end_with_parent()
    observers = Extensions(extensions)
    folder: RunFolder | None = None
    try:
        runtime = _join(request)
        start = start or _resolve(request, recipe, runtime, planner, extensions, open_core)
        if start.is_complete:
            if runtime.rank == 0:
                print(
                    f"{start.run_dir.name}: already complete at step {start.plan.max_steps}; nothing to do "
                    f"(--max_steps N --allow_change max_steps trains longer)"
                )
            observers.resolved(start, runtime, signals)
        else:
            start = choose_hardware(start, runtime)
            model = recipe.build_model(start, runtime)
            start = check_kernels(start, model, runtime)
            observers.resolved(start, runtime, signals)
            folder = _open_folder(start, runtime)
            # If building fails, the folder holds only its lock.
            components = build(start, runtime, model, recipe)
            _train(components, signals, folder, began, observers, planner)
    except Exception as error:
        signals.has_failed = True
        # The first update allocates the optimizer's state, so memory may run out only there.
        cause = error.__cause__ if isinstance(error, PartialUpdateError) else error
        if isinstance(error, GPT2LabError) or not is_out_of_memory(cause):
            raise
        assert isinstance(cause, Exception)
        said = first_line(cause).rstrip(".")
        raise OutOfMemoryError(
            f"out of memory: {said}. {SMALLER_MINI_BATCH}, gpt2lab doctor with these flags shows what takes the memory"
        ) from error
    finally:
        signals.close()
        if folder:
            folder.close()
    runtime.close()


def _join(request: RunRequest) -> Runtime:
    """Join the other ranks. A rank that waits long says so: ranks that people start by hand may never come."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    rank, ranks, address, port = (os.environ.get(name, "") for name in names)
    what = f"rank {rank} waits for all {ranks} ranks at {address}:{port}" if rank else "starting"
    with contextlib.ExitStack() as stack:
        task = stack.enter_context(doing(what))  # what rank 0 says after 4 seconds
        if rank not in ("", "0"):
            stack.enter_context(
                beats(lambda seconds: say(task.line(seconds)), every=_ALONE_SECONDS)
            )
        return Runtime(
            timeout_minutes=request.timeout_minutes,
            is_watched=request.config.system.hang_seconds > 0,
        )


def _resolve(
    request: RunRequest,
    recipe: Recipe,
    runtime: Runtime,
    planner: Planner | None,
    extensions: Sequence[Extension],
    open_core: Callable[[Start], Benchmark | None],
) -> Start:
    """Have rank 0 decide what this start does; it gets each rank's free memory."""
    if planner is not None:
        free = planner.free_memory(request.config.system) if request.open_settings else None
        planner.memory = runtime.gather(free)
    return runtime.on_rank_zero(
        lambda: resolve_to_train(
            request,
            recipe,
            world_size=runtime.world_size,
            planner=planner,
            extensions=extensions,
            open_core=open_core,
        )
    )


# -- build -----------------------------------------------------------------------------------------------------------


def build(
    start: Start,
    runtime: Runtime,
    model: GPT,
    recipe: Recipe,
    *,
    against_log: Literal["compare", "skip"] = "compare",
) -> Components:
    """Build everything around the model; on a resume load the checkpoint and prove that it is the run's.

    `against_log`: a replay skips the proof, because it compares every step itself.

    Raises: CheckpointError, DataError; nothing was written then.
    """
    config, facts = start.config, facts_of(start, runtime)
    rng.seed_everything(config.data.seed)
    full_gradients = config.log.histogram_freq > 0
    strategy = Strategy(runtime, config.system, full_gradients=full_gradients)
    trained = strategy.prepare(model, lambda model: recipe.to_train(model, start.data))
    optimizers = strategy.shard_optimizer_state(model, build_optimizers(model, config.optim))
    batches = recipe.open_batches(start, runtime)
    state, check = TrainState(), None
    if start.checkpoint is not None:
        state = runtime.on_all_ranks(lambda: load_state(start, model, optimizers, runtime))
        if against_log == "compare":
            check = runtime.on_rank_zero(lambda: check_resume(start, state, batches.loader, facts))
    average = TailAverage(start, model, optimizers, done=state.step)
    facts |= {"average_from": average.begin}
    return Components(
        start=start,
        runtime=runtime,
        strategy=strategy,
        facts=facts,
        model=model,
        trained=trained,
        optimizers=optimizers,
        average=average,
        batches=batches,
        state=state,
        resume_check=check,
        host_decides=why_host_decides(config, optimizers, runtime),
    )


def _open_folder(start: Start, runtime: Runtime) -> RunFolder | None:
    """Create and lock the run's folder on rank 0; nothing was written before."""
    opened: list[RunFolder] = []

    def open_and_check() -> None:
        opened.append(RunFolder(start.run_dir))
        if history.open_log(start.run_dir).last_attempt >= start.attempt:
            opened.pop().close()
            raise InUseError(f"{start.run_dir}: another start used this run just now; start again")

    runtime.on_rank_zero(open_and_check)
    return opened[0] if opened else None


# -- train -----------------------------------------------------------------------------------------------------------


def _train(
    components: Components,
    signals: Signals,
    folder: RunFolder | None,
    began: float,
    extensions: Extensions,
    planner: Planner | None,
) -> None:
    """Train, and record how the start ended."""
    start, runtime = components.start, components.runtime
    if not folder:  # extensions observe rank 0
        extensions = Extensions(())
    logger = MetricsLogger(
        start.run_dir if folder else None, attempt=start.attempt, recorded=extensions.recorded
    )
    logger.newest_step = components.state.step
    heartbeat = Heartbeat(
        start.run_dir,
        rank=runtime.rank,
        world_size=runtime.world_size,
        hang_seconds=start.config.system.hang_seconds,
        tell=lambda report: _record_hang(report, folder, logger),
    )
    control = Control(
        signals,
        runtime,
        run_dir=folder.path if folder else None,
        deadlines=start.deadlines,
        save_every_seconds=60 * start.config.checkpoint.checkpoint_minutes,
        heartbeat=heartbeat,
    )
    peak = None  # of all ranks' GPUs together
    if planner is not None and runtime.device.type == "cuda":
        peak = planner.peak_flops(torch.cuda.get_device_name(runtime.device))
        peak = peak * runtime.world_size if peak else None
    # From here on the logger says what goes on.
    with doing(""), contextlib.closing(logger), contextlib.closing(heartbeat):
        try:
            if folder:
                run = LiveRun(components, folder, logger, signals, runtime.timeout_seconds)
                extensions.started(run)
            runtime.on_rank_zero(lambda: record_start(components, folder, logger))
            if runtime.local_rank == 0:
                _name_status(start)
            clock = _open_clock(components, folder, logger, began)
            session = Session(folder, logger, control, heartbeat, clock, extensions.updating, peak)
            reason, step = _run_to_end(components, session)
            heartbeat.close()
            extensions.ended(reason, None)
            runtime.on_rank_zero(lambda: _write_end(folder, reason, step))
        except BaseException as error:
            if folder and not isinstance(error, FolderLostError):  # another start may write there
                _record_failure(folder, logger, error)
            heartbeat.close()
            extensions.ended(None, error)
            raise
        if folder and signals.level < 2:  # a second signal skips the report
            try:
                logger.say(summary.describe_run(start.run_dir))
            except (GPT2LabError, OSError) as error:  # the run itself is complete
                logger.say(f"warning: no summary of the run: {error}")


def _name_status(start: Start) -> None:
    """Write where this start's status.json is into the file of a script on this machine that starts runs again."""
    path = os.environ.get("GPT2LAB_STATUS_FILE", "")
    if os.path.exists(path):  # not on the other nodes of a job, where nobody would remove it
        with contextlib.suppress(OSError):
            replace_durably(Path(path), f"{(start.run_dir / 'status.json').absolute()}\n")


def _run_to_end(components: Components, session: Session) -> tuple[str | None, int]:
    """Train to the last step or to a stop; return the reason of the stop, None at the end, and the step."""
    is_ddp = isinstance(components.trained, DistributedDataParallel)
    compiles = is_ddp and components.start.config.system.compile == "on"
    with session.logger.waiting("compiling for DDP") if compiles else contextlib.nullcontext():
        components.strategy.warm_up_reducer(
            components.trained,
            batch_size=components.start.plan.batch.micro_batch,
            context_length=components.start.config.model.context_length,
        )
    with Saver(components, session) as saver:
        evaluator = Evaluator(components, session, _open_hellaswag(components))
        trainer = Trainer(components, session, saver=saver, evaluator=evaluator)
        reason = trainer.fit()
    step = trainer.state.step
    components.runtime.on_rank_zero(lambda: _flush_end(session.logger, reason, step))
    return reason, step


def _flush_end(logger: MetricsLogger, reason: str | None, step: int) -> None:
    """Wait on rank 0 until all events of a complete run are on disk, because a power cut may spare its status."""
    faultpoint("end.after_done", step)
    if reason is None and (problem := logger.flush()):
        raise SaveError(
            f"{problem}; free space, or repair the disk, and resume: it does what is missing"
        )


def _write_end(folder: RunFolder | None, reason: str | None, step: int) -> None:
    """Write on rank 0 how the start ended, after all else is on disk: a `completed` run is never resumed."""
    assert folder is not None
    faultpoint("end.before_status", step)
    folder.write_status("stopped" if reason else "completed", step=step, reason=reason, exit_code=0)


def _record_failure(folder: RunFolder, logger: MetricsLogger, error: BaseException) -> None:
    """Write the error that ends a start into its status and its log."""
    ours, step = to_gpt2lab_error(error), logger.newest_step
    code = ours.exit_code if ours else 1
    with contextlib.suppress(OSError, GPT2LabError):  # the first error is the one to report
        folder.write_status("failed", step=step, reason=str(error), exit_code=code)
        logger.event("stop", step, reason=f"{type(error).__name__}: {error}", checkpoint=None)


def _record_hang(report: str, folder: RunFolder | None, logger: MetricsLogger) -> None:
    if folder:
        with contextlib.suppress(OSError, GPT2LabError):
            step = (history.read_json(folder.path / "status.json") or {"step": 0})["step"]
            folder.write_status("failed", step=step, reason=report, exit_code=EXIT_CODE)
            logger.event("stop", step, reason=report, checkpoint=None)


def _open_clock(
    components: Components, folder: RunFolder | None, logger: MetricsLogger, began: float
) -> RunClock:
    """Return the clock of this start; only rank 0's is shown."""
    start = components.start
    clock = RunClock(
        start.config,
        last_step=start.plan.max_steps,
        began=began,
        expected_seconds=read_forecast(start.run_dir)[0] if folder else None,
    )
    if start.checkpoint is not None and folder:
        saved = saved_environment(start)
        clock.take_over(start.run_dir, same_hardware=components.facts["environment"] == saved)
        logger.say(clock.describe_left(components.state.step))
    return clock


def _open_hellaswag(components: Components) -> HellaSwag | None:
    start, config = components.start, components.start.config.eval
    path, tokenizer = config.hellaswag_path, start.tokenizer
    if start.hellaswag != "on" or path is None or tokenizer is None:
        return None
    # Rank 0 reads; the other ranks need neither the file nor its cache.
    return HellaSwag(
        components.runtime.on_rank_zero(
            lambda: load_questions(path, tokenizer).subset(config.hellaswag_limit)
        ),
        context_length=start.config.model.context_length,
        strategy=components.strategy,
        metrics=config.hellaswag_metrics,
    )
