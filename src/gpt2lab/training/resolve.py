"""Decide what a start of the trainer will do: which run, which checkpoint, which settings. No torch.

Rank 0 decides once and hands the answer to the other ranks: no rank acts on its own clock or directory listing.
Nothing is created here; with `set_aside`, damaged checkpoints are renamed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpt2lab import paths
from gpt2lab.checkpoint.catalog import CheckpointInfo, disk_budget
from gpt2lab.config.derived import check_fsdp_param_dtype, fit_mini_batch
from gpt2lab.config.mixture import read_sources
from gpt2lab.config.request import (
    RunRequest,
    chosen_in,
    describe_change,
    fill_in,
    find_changes,
    follow_peak,
    reject_changes,
    suit_length,
)
from gpt2lab.config.schema import LENGTHS, Config
from gpt2lab.config.settings import find_problems, override, policy_of, to_flat
from gpt2lab.data.mixture import (
    MixedData,
    Mixture,
    check_epochs,
    require_folders,
    training_order,
    validation_orders,
)
from gpt2lab.data.order import VERSION, Order
from gpt2lab.data.shards import TokenData
from gpt2lab.errors import CheckpointError, ConfigError, DataError, SaveError, raise_problems
from gpt2lab.evaluation.hellaswag_items import fetch_hellaswag, read_items
from gpt2lab.optim.schedule import lr_at
from gpt2lab.runs import history
from gpt2lab.runs.events import METRICS
from gpt2lab.runs.target import tokenizer_of
from gpt2lab.tokenizers.interface import Tokenizer
from gpt2lab.tokenizers.opening import require_same, why_no_text
from gpt2lab.training.extension import Extension, Planner
from gpt2lab.training.init_from import InitialWeights, begin_from
from gpt2lab.training.locate import Place, fresh_folder, locate
from gpt2lab.training.plan import Plan, find_repeats, make_plan
from gpt2lab.training.recipe import PRETRAINING, Recipe
from gpt2lab.training.start import Benchmark, Start
from gpt2lab.training.stop import find_deadlines

_HELLASWAG = ("hellaswag_freq", "hellaswag_limit")


def resolve(
    request: RunRequest,
    recipe: Recipe = PRETRAINING,
    *,
    world_size: int,
    set_aside: bool,
    planner: Planner | None = None,
) -> Start:
    """Combine a request with what is on disk; `planner` decides what the request leaves open.

    Raises: ConfigError, DataError or CheckpointError: everything that can be rejected is rejected here, before
    anything is written.
    """
    place = locate(request, set_aside=set_aside)
    settings = merge_settings(request, recipe, place, world_size=world_size)
    steps = plan_steps(request, recipe, place, settings, world_size=world_size, planner=planner)
    return check_start(request, place, settings, steps)


def resolve_to_train(
    request: RunRequest,
    recipe: Recipe,
    *,
    world_size: int,
    planner: Planner | None = None,
    extensions: Sequence[Extension] = (),
    open_core: Callable[[Start], Benchmark | None] = lambda start: None,
) -> Start:
    """Resolve a start that is going to train: set damaged checkpoints aside, and download HellaSwag if it is wanted.

    `open_core` reads the tasks of --core. Raises: ConfigError, DataError, CheckpointError.
    """
    for extension in extensions:
        extension.requested(request)
    start = resolve(request, recipe, world_size=world_size, set_aside=True, planner=planner)
    return with_hellaswag(dataclasses.replace(start, core=open_core(start)))


# -- merge the settings ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """The settings of a start before its steps are planned."""

    config: Config
    run_dir: Path
    saved: Config | None  # of the checkpoint, on a resume
    chosen: frozenset[str]  # by a person, in this start or an earlier one
    initial: InitialWeights | None  # of a fresh run with --init_from
    warnings: tuple[str, ...]


def fresh_settings(
    request: RunRequest, recipe: Recipe = PRETRAINING
) -> tuple[Config, InitialWeights | None]:
    """Return the settings of a start that resumes nothing, with what follows from --init_from and the data.

    Raises: CheckpointError or DataError if those cannot be read; ConfigError if the request contradicts them.
    """
    config, initial = request.config, None
    if config.init.init_from is not None:
        config, initial = begin_from(request)
    return recipe.defaults(request, config), initial


def merge_settings(
    request: RunRequest, recipe: Recipe, place: Place, *, world_size: int
) -> Settings:
    """Put the chosen settings on top of those of the checkpoint, or of the preset.

    Raises: ConfigError with all that cannot work; CheckpointError, DataError of what the settings follow from.
    """
    run_name = request.config.checkpoint.run_name
    raise_problems(find_problems(override(Config(), {"run_name": run_name})))
    saved, initial, chosen, warnings = None, None, request.chosen, place.warnings
    run_dir = place.run_dir
    if place.checkpoint is not None and run_dir is not None:
        saved = place.checkpoint.config()
        chosen |= chosen_in(place.checkpoint.manifest["config"])
        config = _resumed_settings(request, saved, chosen, place, run_dir)
    else:
        config, initial = fresh_settings(request, recipe)
        if initial is not None:
            warnings += tuple(initial.target.warnings)
        if run_dir is None:
            run_dir = fresh_folder(config)
            config = override(config, {"run_name": run_dir.name})
    try:
        os.fsencode(run_dir).decode()  # safetensors takes no other path
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{run_dir}: not UTF-8; choose another --checkpoint_dir, or rename the folder"
        ) from error
    raise_problems(find_problems(config))
    config, more = _fit_parallel(request, config, world_size)
    return Settings(config, run_dir, saved, chosen, initial, warnings + more)


def _resumed_settings(
    request: RunRequest, saved: Config, chosen: frozenset[str], place: Place, run_dir: Path
) -> Config:
    """Return the saved settings, overridden by what was chosen; a branch is mirrored only if that was typed."""
    begun_by = "pretrain" if saved.tuning.instructions is None else "finetune"
    if begun_by != request.recipe:
        program = "train" if begun_by == "pretrain" else "finetune"
        raise ConfigError(
            f"run {run_dir.name} was begun by gpt2lab {program}; continue it with that, "
            f"or name another with --run_name"
        )
    config, before = request.over(saved), to_flat(saved)
    # A typed `auto` means what the run already decided for itself.
    decided = ("dtype", "residual_dtype", "compile")
    kept = {name: before[name] for name in decided if to_flat(config)[name] == "auto"}
    kept |= {"checkpoint_dir": run_dir.parent, "run_name": run_dir.name}
    if place.branch and "checkpoint_mirror" not in request.chosen:
        kept["checkpoint_mirror"] = None
    config = follow_peak(override(config, kept), chosen)
    reject_changes(request, config, find_changes(saved, config), run=run_dir.name)
    return config


def _fit_parallel(
    request: RunRequest, config: Config, world_size: int
) -> tuple[Config, tuple[str, ...]]:
    """Reject a typed --parallel that needs several ranks if there is one; a saved one becomes ddp, with a warning."""
    system, warnings = config.system, []
    if system.parallel != "ddp" and world_size == 1:
        if "parallel" in request.typed:
            raise ConfigError(
                f"parallel {system.parallel}: shards state over several ranks, and there is one; "
                f"start it with --gpus N, or leave it out"
            )
        warnings.append(f"parallel {system.parallel} -> ddp: there is one rank")
        system = dataclasses.replace(system, parallel="ddp")
    if system.fsdp_offload and system.parallel != "fsdp":
        if "fsdp_offload" in request.typed:
            raise ConfigError("--fsdp_offload goes with --parallel fsdp")
        system = dataclasses.replace(system, fsdp_offload=False)
    is_bf16 = "fsdp_param_dtype" in request.typed and system.fsdp_param_dtype == "bf16"
    if is_bf16 and system.parallel != "fsdp":
        raise ConfigError("--fsdp_param_dtype bf16 goes with --parallel fsdp")
    check_fsdp_param_dtype(system)  # other modes keep the setting and ignore it
    return dataclasses.replace(config, system=system), tuple(warnings)


# -- plan the steps --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedSteps:
    """The data of a start, and how its steps share them out."""

    config: Config
    plan: Plan
    data: TokenData
    order: Order | Mixture
    warnings: tuple[str, ...]


def plan_steps(
    request: RunRequest,
    recipe: Recipe,
    place: Place,
    settings: Settings,
    *,
    world_size: int,
    planner: Planner | None,
) -> PlannedSteps:
    """Open the data, divide a step over the ranks and count the steps; fill in what follows from that.

    Raises: DataError, ConfigError, CheckpointError.
    """
    data = _open_data(request, recipe, place, settings)
    config, checkpoint = settings.config, place.checkpoint
    version = checkpoint.manifest.get("order_version", 1) if checkpoint else VERSION
    if not 1 <= version <= VERSION:
        raise CheckpointError(
            f"{settings.run_dir}: its samples are in an order of version {version}, this program knows {VERSION}"
        )
    order = training_order(data, config, version=version)
    if checkpoint is None:
        config = _suit_length(request, config, order, world_size)
    suits_length = config is not settings.config
    config, warnings = _fit_mini_batch(request, config, world_size)

    windows = order.windows_per_epoch
    plan_of = functools.partial(make_plan, world_size=world_size, windows_per_epoch=windows)
    plan, done = plan_of(config), checkpoint.step if checkpoint else None
    if planner is not None and (done is None or done < plan.max_steps):
        left_open = request.open_settings if done is None else frozenset()
        decided = planner.choose(
            dataclasses.replace(request, open_settings=left_open),
            # No evaluation reads more than there is.
            override(config, {"val_tokens": min(data.tokens("val"), config.eval.val_tokens)}),
            plan,
            run_dir=settings.run_dir,
        )
        if decided:
            lengths = dict.fromkeys(LENGTHS) if "max_steps" in decided else {}
            fitted, config = config.batch, override(config, lengths | decided)
            plan, warnings = plan_of(config), warnings if config.batch == fitted else ()
    plan = dataclasses.replace(plan, suits_length=suits_length)
    return PlannedSteps(fill_in(config, plan.max_steps), plan, data, order, warnings)


def _open_data(request: RunRequest, recipe: Recipe, place: Place, settings: Settings) -> TokenData:
    """Open the data, and check that it has the tokenizer that the weights were trained with."""
    config, initial, checkpoint = settings.config, settings.initial, place.checkpoint
    of_weights: Tokenizer | None = None
    if checkpoint is not None:
        of_weights = tokenizer_of(checkpoint)
        if "data_dir" not in request.chosen:
            require_folders(config, "--data_dir")
    elif initial is not None:
        of_weights = initial.target.tokenizer()
    try:
        data = recipe.open_data(config, of_weights)
    except DataError as error:
        named = request.chosen & {"data_dir", "instructions"}
        if named or config.tuning.instructions is not None:
            raise
        raise DataError(f"{error}; other data: --data_dir data/NAME") from error
    origin = checkpoint or (initial.target.checkpoint if initial else None)
    trained_on = origin.manifest["data_fingerprint"] if origin else None
    if data.fingerprint != trained_on:
        name = settings.run_dir.name if initial is None else initial.target.name
        require_same(of_weights, data.tokenizer, model=name, data=paths.display_path(data.folder))
    return data


def _suit_length(
    request: RunRequest, config: Config, order: Order | Mixture, world_size: int
) -> Config:
    """Give a fresh run of a preset the batch and the rates for its length, except those that were chosen."""
    length = config.length
    in_steps = length.max_steps or "max_steps" in request.open_settings
    if in_steps or config.init.init_from or request.recipe != "pretrain":
        return config
    windows = (length.num_epochs or 1.0) * order.windows_per_epoch
    tokens = length.max_tokens or windows * config.model.context_length
    suited = suit_length(config, request.chosen, tokens, world_size=world_size)
    return _fit_mini_batch(request, suited, world_size)[0] if suited is not config else config


def _fit_mini_batch(
    request: RunRequest, config: Config, world_size: int
) -> tuple[Config, tuple[str, ...]]:
    """Lower a micro-batch that was not typed if the ranks cannot share the batch otherwise.

    Tokens per step and the loss curve stay. With dropout the micro-batches decide the masks, so nothing changes.
    """
    if request.fixes_mini_batch or config.model.dropout > 0:
        return config, ()
    T = config.model.context_length
    batch, note = fit_mini_batch(config.batch, context_length=T, world_size=world_size)
    return dataclasses.replace(config, batch=batch), () if note is None else (note,)


# -- check -----------------------------------------------------------------------------------------------------------


def check_start(
    request: RunRequest, place: Place, settings: Settings, steps: PlannedSteps
) -> Start:
    """Compare a start with the checkpoint, the log and the disk of its run, and return it.

    Raises: ConfigError for a change that is not allowed or a length that cannot work; DataError.
    """
    config, data, run_dir, checkpoint = steps.config, steps.data, settings.run_dir, place.checkpoint
    changes = _find_changes(request, checkpoint, settings, steps)
    hellaswag, no_hellaswag = _choose_hellaswag(request, config, data.tokenizer)
    own = log = history.read_log(run_dir)
    if place.branch and checkpoint:
        log = history.read_log(checkpoint.path.parent)
    saves = [event.get("seconds") for event in log.of_kind("checkpoint")]
    disk = disk_budget(run_dir, steps.plan.disk_bytes)
    warnings = (*settings.warnings, *steps.warnings, *data.warnings)
    warnings += (*no_hellaswag, *disk.shortage())
    attempt, has_ended = own.last_attempt, False
    recorded = log.recorded_after(checkpoint.step) if checkpoint else {}
    if place.branch:
        _check_branch(place, settings, steps, recorded.get("step", {}).get("lr"))
    if checkpoint is not None:
        status = history.read_json(run_dir / "status.json") or {}  # what a start writes last
        has_ended = (status.get("state"), status.get("step")) == ("completed", checkpoint.step)
        if not place.branch:
            attempt = max(attempt, checkpoint.manifest.get("attempt", 0))
            warnings += _unsaved_changes(request, settings, data, checkpoint)
        if not recorded and checkpoint.kind != "average":  # which no start trained
            warnings += (
                f"{checkpoint.path.parent / METRICS}: has no line of step {checkpoint.step}, after which this "
                f"checkpoint was saved; was it deleted or replaced? Nothing can be compared with it",
            )
    start = Start(
        config=config,
        chosen=settings.chosen,
        run_dir=run_dir,
        checkpoint=checkpoint,
        changes=changes,
        attempt=attempt + 1,
        data=data,
        order=steps.order,
        val_orders=validation_orders(data, context_length=config.model.context_length),
        plan=steps.plan,
        disk=disk,
        hellaswag=hellaswag,
        stop_after_steps=request.stop_after_steps,
        deadlines=find_deadlines(request.stop_at, os.environ, max_hours=config.length.max_hours),
        last_save_seconds=saves[-1] if saves else None,
        recorded=recorded,
        has_ended=has_ended,
        initial=settings.initial,
        warnings=warnings,
        branch=place.branch,
    )
    if start.is_complete:
        return start
    _check_length(start)
    _check_source_epochs(start)
    if checkpoint is not None:
        return start
    repeats = find_repeats(start.epochs_by_source() or {"the data": start.epochs})
    return dataclasses.replace(start, warnings=(*warnings, *repeats))


def _unsaved_changes(
    request: RunRequest, settings: Settings, data: TokenData, checkpoint: CheckpointInfo
) -> tuple[str, ...]:
    """Warn of what --allow_change gave the last start if the checkpoint of this one was saved before."""
    assert settings.saved is not None
    run_dir, saved, lost = settings.run_dir, settings.saved, []
    trained_on = (history.read_json(run_dir / "run.json") or {}).get("data_fingerprint")
    other_data = trained_on not in (None, data.fingerprint)
    given = request.chosen.union(find_changes(saved, settings.config))
    with contextlib.suppress(ConfigError):  # config.json is replaced
        for name, change in find_changes(saved, history.read_config(run_dir)).items():
            counts = policy_of(name, saved) == "guarded" or (name == "data_dir" and other_data)
            if counts and name not in given:
                lost.append(f"{name} {describe_change(name, change)}")
    if not lost:
        return ()
    return (
        f"step {checkpoint.step} was saved before {', '.join(lost)}: this start has the old values; "
        f"for the new ones, stop it and give them again, with --allow_change",
    )


def _check_branch(place: Place, settings: Settings, steps: PlannedSteps, lr: float | None) -> None:
    """Check that a branch has steps to take, and that a `wsd` rate continues where it was, `lr`, as logged.

    Raises: ConfigError.
    """
    assert place.branch is not None
    assert settings.saved is not None
    step, last, optim = place.branch["step"], steps.plan.max_steps, settings.saved.optim
    if optim.lr_schedule == "wsd" and lr is not None:
        optim = dataclasses.replace(optim, wsd_decay=steps.config.optim.wsd_decay)
        now = lr_at(step, optim, max_steps=last)
        if not math.isclose(now, lr, rel_tol=1e-9):
            raise ConfigError(
                f"--branch_from: step {step} was trained with the rate {lr:.3g}, and {now:.3g} would follow, because "
                f"one of the runs decays there already; branch from an earlier step"
            )
    if last <= step:
        raise ConfigError(
            f"--branch_from: the run would end at step {last}, and {step} are done; give it a length: --cooldown N "
            f"(of a wsd run), or --max_steps N"
        )


def _find_changes(
    request: RunRequest, checkpoint: CheckpointInfo | None, settings: Settings, steps: PlannedSteps
) -> dict[str, list[Any]]:
    """Return {setting: [saved, now]} of a resume."""
    if settings.saved is None or checkpoint is None:
        return {}
    changes = find_changes(settings.saved, steps.config)
    trained_on, data = checkpoint.manifest["data_fingerprint"], steps.data
    if trained_on != data.fingerprint and not _differs_only_later(data, settings.saved, checkpoint):
        changes["data"] = [trained_on, data.fingerprint]
    reject_changes(request, steps.config, changes, run=settings.run_dir.name)
    return changes


def _differs_only_later(data: TokenData, saved: Config, checkpoint: CheckpointInfo) -> bool:
    """Tell whether a mixture differs from the saved one only in weights that begin after what was trained on.

    Such a run continues where it stood: each sample so far is the same one in both.
    """
    before, manifest = read_sources(saved.data).phases, checkpoint.manifest
    if not isinstance(data, MixedData) or len(before[0].weights) != len(data.sources):
        return False
    done = manifest.get("samples", 0) * saved.model.context_length
    past = [[p for p in phases if p.from_tokens < done] for phases in (before, data.phases)]
    return past[0] == past[1] and (
        data.with_phases(before).fingerprint == manifest["data_fingerprint"]
    )


def _choose_hellaswag(
    request: RunRequest, config: Config, tokenizer: Tokenizer | None
) -> tuple[Literal["off", "on", "fetch"], tuple[str, ...]]:
    """Decide whether HellaSwag is evaluated, after checking its file if there is one, and say why not.

    Without a file it is wanted if a HellaSwag setting was typed, now or in an earlier start.
    """
    settings, defaults = to_flat(config), to_flat(Config())
    asked = [
        name for name in _HELLASWAG if name in request.typed or settings[name] != defaults[name]
    ]
    path = config.eval.hellaswag_path
    if path is None and (not asked or "hellaswag_path" in request.typed):  # typed: None
        return "off", ()
    if problem := why_no_text(tokenizer, config.model.vocab_size):
        return "off", (f"{problem}: no HellaSwag",)
    if path is None:
        return "fetch", ()
    read_items(path)
    return "on", ()


def with_hellaswag(start: Start) -> Start:
    """Download HellaSwag if it is wanted and no file was given; if that fails, train without it and warn."""
    if start.hellaswag != "fetch" or start.is_complete:
        return start
    try:
        path = fetch_hellaswag()
    except (DataError, SaveError) as error:  # SaveError: no room for the file
        warning = f"HellaSwag is not evaluated: {error}"
        return dataclasses.replace(start, hellaswag="off", warnings=(*start.warnings, warning))
    config = override(start.config, {"hellaswag_path": path})
    return dataclasses.replace(start, hellaswag="on", config=config)


def _check_length(start: Start) -> None:
    warmup = start.config.optim.warmup_steps
    if warmup is not None and warmup > start.plan.max_steps:
        raise ConfigError(
            f"warmup_steps {warmup} is more than max_steps {start.plan.max_steps}; lower it"
        )
    done = start.checkpoint.step if start.checkpoint else 0
    stop = start.stop_after_steps
    if stop is not None and stop <= done:
        raise ConfigError(
            f"stop_after_steps {stop}: it counts from the run's beginning, and {done} steps are done; "
            f"give {done + max(1, stop)} to take {max(1, stop)} more"
        )


def _check_source_epochs(start: Start) -> None:
    """Compare the full run with --max_source_epochs and --data_weights_at."""
    sources, samples = read_sources(start.config.data), start.end_sample
    check_epochs(sources, start.order, samples=samples)
    end, last = samples * start.config.model.context_length, sources.phases[-1].from_tokens
    if last >= end:
        raise ConfigError(
            f"data_weights_at {last}: never comes, because the run ends after {end:,} tokens of these data; "
            f"give a smaller number, or leave it out"
        )
