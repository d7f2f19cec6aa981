"""Decide what a start of the trainer will do: which run, which checkpoint, which settings. No torch.

Rank 0 decides once and hands the answer to the other ranks: no rank acts on its own clock or directory listing.
Nothing is created here; with `set_aside`, damaged checkpoints are renamed.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from gpt2lab import fmt, paths
from gpt2lab.checkpoint import catalog
from gpt2lab.checkpoint.catalog import CheckpointInfo, look_for_room
from gpt2lab.checkpoint.manifest import folder_name
from gpt2lab.checkpoint.target import tokenizer_of
from gpt2lab.commands.command_line import Command
from gpt2lab.config.derived import check_fsdp_param_dtype, count_steps, mini_batch_sizes
from gpt2lab.config.mixture import read_sources
from gpt2lab.config.resume_policy import find_changes, reject_changes
from gpt2lab.config.schema import LENGTHS, Config
from gpt2lab.config.settings import find_problems, override, to_flat
from gpt2lab.config.settings_file import PROGRAMS
from gpt2lab.data.mixture import (
    MixedData,
    check_epochs,
    require_folders,
    training_order,
    validation_orders,
)
from gpt2lab.data.order import VERSION
from gpt2lab.data.shards import TokenData
from gpt2lab.errors import CheckpointError, ConfigError, DataError, InUseError
from gpt2lab.evaluation.hellaswag_items import fetch_hellaswag, read_items
from gpt2lab.mirror.resume import check_mirror, fetch_newer, url_of
from gpt2lab.mirror.storage import connect
from gpt2lab.optim.schedule import default_min_lr, default_warmup
from gpt2lab.planner.auto import OpenSettings, check_memory, choose_settings
from gpt2lab.planner.job import Plan, make_plan
from gpt2lab.runs import history
from gpt2lab.runs.lock import holder_of
from gpt2lab.tokenizers.interface import Tokenizer
from gpt2lab.tokenizers.opening import require_same, why_no_text
from gpt2lab.training.init_from import InitialWeights, begin_from
from gpt2lab.training.recipe import PRETRAINING, Recipe
from gpt2lab.training.start import Start
from gpt2lab.training.stop import find_deadlines

_NEWEST = ("latest", "auto", "best")  # words of --resume
_HELLASWAG = ("hellaswag_freq", "hellaswag_limit")


def fresh_settings(
    command: Command, recipe: Recipe = PRETRAINING
) -> tuple[Config, InitialWeights | None]:
    """Return the settings of a start that resumes nothing, with what follows from --init_from and the data.

    Raises: CheckpointError or DataError if those cannot be read; ConfigError if the command line contradicts them.
    """
    command = without_followers(command)
    config, initial = command.fresh(), None
    if config.init.init_from is not None:
        config, initial = begin_from(command, config)
    return recipe.defaults(command, config), initial


def without_followers(command: Command) -> Command:
    """Return the command without the floor and warm-up of --config that follow from the file's own peak and length,
    where the start has another peak or length: a run's config.json holds them, and nobody chose them.
    """
    file = command.file
    if not file:
        return command
    own, now = dataclasses.replace(command, values={}).fresh(), command.fresh()
    peak, steps = own.optim.max_lr, _steps_of(own)
    follow = set()
    if "max_lr" in file and now.optim.max_lr != peak and own.optim.min_lr == default_min_lr(peak):
        follow.add("min_lr")
    is_other = steps is not None and _steps_of(now) != steps
    if is_other and own.optim.warmup_steps == default_warmup(steps or 0):
        follow.add("warmup_steps")
    kept = {name: value for name, value in file.items() if name not in follow}
    return dataclasses.replace(command, file=kept)


def _without_warmup_of_epochs(
    command: Command, config: Config, steps: int, windows_per_epoch: int
) -> Config:
    """Do for a --config whose length is in epochs what `without_followers` does for one in steps: the data is known."""
    own, T = dataclasses.replace(command, values={}).fresh(), config.model.context_length
    is_from_file = "warmup_steps" in (command.file or {}) and "warmup_steps" not in command.values
    if not is_from_file or _steps_of(own) is not None:
        return config
    try:
        own_steps = count_steps(
            own.length, own.batch, context_length=T, windows_per_epoch=windows_per_epoch
        )
    except ConfigError:  # of other data, of which this start has too little
        return config
    if own_steps == steps or own.optim.warmup_steps != default_warmup(own_steps):
        return config
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, warmup_steps=None))


def _steps_of(config: Config) -> int | None:
    """Return the length in steps, as far as the settings alone tell it; epochs need the data."""
    if config.length.max_steps is not None or config.length.max_tokens is None:
        return config.length.max_steps
    return config.length.max_tokens // config.batch.total_batch_size


def resolve(
    command: Command,
    recipe: Recipe = PRETRAINING,
    *,
    world_size: int,
    set_aside: bool,
    free_memory: Sequence[float | None] | None = None,
) -> Start:
    """Combine the command line with what is on disk.

    `free_memory`: bytes on each rank, for `--mini_batch_size auto` and `--fit_schedule`, which measure; None leaves
    both to the trainer.

    Raises: ConfigError, DataError or CheckpointError: everything that can be rejected is rejected here, before
    anything is written.
    """
    command = without_followers(command)
    typed = command.fresh()
    _raise_problems(find_problems(override(Config(), {"run_name": typed.checkpoint.run_name})))
    run_dir: Path | None = None
    checkpoint: CheckpointInfo | None = None
    warnings: list[str] = []
    if command.actions.resume is not None:
        run_dir, checkpoint, warnings = _choose(command, typed, set_aside=set_aside)
    saved: Config | None = None
    initial: InitialWeights | None = None
    if checkpoint is not None and run_dir is not None:
        saved = checkpoint.config()
        config = _resumed_settings(command, saved, run_dir)
    else:
        config, initial = fresh_settings(command, recipe)
        if initial is not None:
            warnings = [*warnings, *initial.target.warnings]
        if run_dir is None:
            run_dir = _fresh_folder(config)
            config = override(config, {"run_name": run_dir.name})
    _raise_problems(find_problems(config))
    if config.checkpoint.checkpoint_mirror is not None:
        connect(config.checkpoint.checkpoint_mirror, run_dir.name)
    config, notes = _fit_parallel(command, config, world_size)
    of_weights = _tokenizer_of(checkpoint, initial)
    if saved is not None and "data_dir" not in command.typed:
        require_folders(config, "--data_dir")
    try:
        data = recipe.open_data(config, of_weights)
    except DataError as error:
        if command.typed & {"data_dir", "instructions"} or config.tuning.instructions is not None:
            raise
        raise DataError(f"{error}; other data: --data_dir data/NAME") from error
    origin = checkpoint or (initial.target.checkpoint if initial else None)
    trained_on = origin.manifest["data_fingerprint"] if origin else None
    if data.fingerprint != trained_on:
        name = run_dir.name if initial is None else initial.target.name
        require_same(of_weights, data.tokenizer, model=name, data=paths.display_path(data.folder))
    version = checkpoint.manifest.get("order_version", 1) if checkpoint else VERSION
    if not 1 <= version <= VERSION:
        raise CheckpointError(
            f"{run_dir}: its samples are in an order of version {version}, this program knows {VERSION}"
        )
    T = config.model.context_length
    order = training_order(
        data,
        context_length=T,
        shuffle=config.data.shuffle,
        seed=config.data.seed,
        version=version,
    )
    config, plan, cut = _divide(
        command,
        config,
        order.windows_per_epoch,
        world_size=world_size,
        done=checkpoint.step if checkpoint else None,
        run_dir=run_dir,
        train_tokens=data.tokens("train"),
        free_memory=free_memory,
    )
    if saved is None:
        config = _without_warmup_of_epochs(command, config, plan.max_steps, order.windows_per_epoch)
    config = _fill_in(config, plan.max_steps)
    changes: dict[str, list[Any]] = {}
    if saved is not None and checkpoint is not None:
        changes = find_changes(saved, config)
        trained_on = checkpoint.manifest["data_fingerprint"]
        if trained_on != data.fingerprint and not _differs_only_later(data, saved, checkpoint):
            changes["data"] = [trained_on, data.fingerprint]
        reject_changes(command, config, changes, run=run_dir.name)
    hellaswag, no_hellaswag = _choose_hellaswag(command, config, data.tokenizer)
    log = history.read_log(run_dir)
    saves = [event.get("seconds") for event in log.of_kind("checkpoint")]
    room = look_for_room(run_dir, plan.disk_bytes)
    start = Start(
        config=config,
        run_dir=run_dir,
        checkpoint=checkpoint,
        changes=changes,
        attempt=log.last_attempt + 1,
        data=data,
        order=order,
        val_orders=validation_orders(data, context_length=T),
        plan=plan,
        room=room,
        hellaswag=hellaswag,
        stop_after_steps=command.actions.stop_after_steps,
        deadlines=find_deadlines(
            command.actions.stop_at, os.environ, max_hours=config.length.max_hours
        ),
        last_save_seconds=saves[-1] if saves else None,
        recorded=log.recorded_after(checkpoint.step) if checkpoint else {},
        has_ended=checkpoint is not None and history.has_completed(run_dir, checkpoint.step),
        initial=initial,
        warnings=(*warnings, *notes, *cut, *data.warnings, *no_hellaswag, *room.shortage()),
    )
    if not start.is_complete:
        _check_length(start)
        _check_source_epochs(start)
    return start


def _tokenizer_of(
    checkpoint: CheckpointInfo | None, initial: InitialWeights | None
) -> Tokenizer | None:
    """Return the tokenizer of the weights that a start begins with; None for random or unknown ones."""
    if checkpoint is not None:
        return tokenizer_of(checkpoint)
    return initial.target.tokenizer() if initial is not None else None


def resolve_to_train(
    command: Command,
    recipe: Recipe,
    *,
    world_size: int,
    free_memory: Sequence[float | None] | None,
) -> Start:
    """Resolve a start that is going to train: set damaged checkpoints aside, fetch a newer one from the mirror, and
    download HellaSwag if it is wanted.

    Raises: ConfigError, DataError, CheckpointError.
    """
    start = resolve(command, recipe, world_size=world_size, set_aside=True, free_memory=free_memory)
    start = dataclasses.replace(start, warnings=(*start.warnings, *check_mirror(start)))
    check_memory(start.config, start.plan, train_tokens=start.data.tokens("train"))
    return with_hellaswag(start)


def _resumed_settings(command: Command, saved: Config, run_dir: Path) -> Config:
    """Return the saved settings, overridden by what was typed.

    Raises: ConfigError for a change that is not allowed, or if another program began the run.
    """
    begun_by = "pretrain" if saved.tuning.instructions is None else "finetune"
    if begun_by != command.recipe:
        raise ConfigError(
            f"run {run_dir.name} was begun by {PROGRAMS[begun_by]}; continue it with that, "
            f"or name another with --run_name"
        )
    config, before = command.override(saved), to_flat(saved)
    # A typed `auto` means what the run already decided for itself.
    decided = ("dtype", "residual_dtype", "compile")
    kept = {name: before[name] for name in decided if to_flat(config)[name] == "auto"}
    if "min_lr" not in command.typed and before["min_lr"] == default_min_lr(before["max_lr"]):
        kept["min_lr"] = default_min_lr(
            config.optim.max_lr
        )  # a floor that nobody chose follows its peak
    config = override(config, kept | {"checkpoint_dir": run_dir.parent, "run_name": run_dir.name})
    reject_changes(command, config, find_changes(saved, config), run=run_dir.name)
    return config


def _divide(
    command: Command,
    config: Config,
    windows_per_epoch: int,
    *,
    world_size: int,
    done: int | None,
    run_dir: Path,
    train_tokens: int,
    free_memory: Sequence[float | None] | None,
) -> tuple[Config, Plan, tuple[str, ...]]:
    """Decide how a step is divided and how long the run is: as typed, by a preset, or by measuring.

    Raises: ConfigError.
    """

    def plan_of(config: Config) -> Plan:
        return make_plan(config, world_size=world_size, windows_per_epoch=windows_per_epoch)

    config, notes = _fit_mini_batch(command, config, world_size)
    plan, measures = plan_of(config), free_memory is not None and done is None
    if done is not None and done >= plan.max_steps:
        return config, plan, notes
    wanted = OpenSettings(
        preset=command.actions.preset,
        find_mini_batch=command.finds_mini_batch and measures,
        fit_schedule=command.actions.fit_schedule and measures,
        typed=command.typed | ({"mini_batch_size"} if command.finds_mini_batch else set()),
    )
    chosen = choose_settings(
        wanted,
        config,
        plan,
        run_dir=run_dir,
        train_tokens=train_tokens,
        memory=free_memory or (),
    )
    if not chosen:
        return config, plan, notes
    lengths = dict.fromkeys(LENGTHS) if "max_steps" in chosen else {}
    config = override(config, lengths | chosen)
    return config, plan_of(config), () if "mini_batch_size" in chosen else notes


def _choose_hellaswag(
    command: Command, config: Config, tokenizer: Tokenizer | None
) -> tuple[Literal["off", "on", "fetch"], tuple[str, ...]]:
    """Decide whether HellaSwag is evaluated, after checking its file if there is one, and say why not.

    Without a file it is wanted where a HellaSwag setting was typed, or was and has been saved.
    """
    settings, defaults = to_flat(config), to_flat(Config())
    asked = [
        name for name in _HELLASWAG if name in command.values or settings[name] != defaults[name]
    ]
    path = config.eval.hellaswag_path
    if path is None and (not asked or "hellaswag_path" in command.values):  # typed: None
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
    except DataError as error:
        note = f"HellaSwag is not evaluated: {error}"
        return dataclasses.replace(start, hellaswag="off", warnings=(*start.warnings, note))
    config = override(start.config, {"hellaswag_path": path})
    return dataclasses.replace(start, hellaswag="on", config=config)


def _fit_parallel(
    command: Command, config: Config, world_size: int
) -> tuple[Config, tuple[str, ...]]:
    """Reject a typed --parallel that needs several ranks if there is one; a saved one becomes ddp, with a note.

    Raises: ConfigError.
    """
    system, notes = config.system, []
    if system.parallel != "ddp" and world_size == 1:
        if "parallel" in command.values:
            raise ConfigError(
                f"parallel {system.parallel}: shards state over several ranks, and there is one; "
                f"start it with torchrun --nproc_per_node=N, or leave it out"
            )
        notes.append(f"parallel {system.parallel} -> ddp: there is one rank")
        system = dataclasses.replace(system, parallel="ddp")
    if system.fsdp_offload and system.parallel != "fsdp":
        if "fsdp_offload" in command.values:
            raise ConfigError("--fsdp_offload goes with --parallel fsdp")
        system = dataclasses.replace(system, fsdp_offload=False)
    if command.values.get("fsdp_param_dtype") == "bf16" and system.parallel != "fsdp":
        raise ConfigError("--fsdp_param_dtype bf16 goes with --parallel fsdp")
    check_fsdp_param_dtype(system)  # of another mode the setting is kept, without meaning
    return dataclasses.replace(config, system=system), tuple(notes)


def _fit_mini_batch(
    command: Command, config: Config, world_size: int
) -> tuple[Config, tuple[str, ...]]:
    """Lower a mini batch that nobody typed if this world size cannot share the batch otherwise.

    Tokens per step and the loss curve stay. With dropout the micro-batches decide the masks, so nothing changes.
    """
    batch, T = config.batch, config.model.context_length
    is_open = command.finds_mini_batch or (
        command.actions.preset is not None and "mini_batch_size" not in command.typed
    )
    typed = {"mini_batch_size", "total_batch_size"} & command.values.keys() and not is_open
    share, rest = divmod(batch.total_batch_size, T * world_size)  # sequences of one rank
    if typed or config.model.dropout > 0 or rest or share % batch.mini_batch_size == 0:
        return config, ()
    fitting = max(mini_batch_sizes(share, at_most=batch.mini_batch_size))
    note = (
        f"mini_batch_size {batch.mini_batch_size} -> {fitting}: "
        f"{world_size} ranks share {share * world_size} sequences a step"
    )
    return override(config, {"mini_batch_size": fitting}), (note,)


def _differs_only_later(data: TokenData, saved: Config, checkpoint: CheckpointInfo) -> bool:
    """Tell whether a mixture differs from the saved one only in weights that begin after what was trained on.

    Such a run goes on where it stood: each sample so far is the same one in both.
    """
    before, manifest = read_sources(saved.data).phases, checkpoint.manifest
    if not isinstance(data, MixedData) or len(before[0].weights) != len(data.sources):
        return False
    done = manifest.get("samples", 0) * saved.model.context_length
    past = [[p for p in phases if p.from_tokens < done] for phases in (before, data.phases)]
    return past[0] == past[1] and (
        data.with_phases(before).fingerprint == manifest["data_fingerprint"]
    )


def _choose(
    command: Command, config: Config, *, set_aside: bool
) -> tuple[Path | None, CheckpointInfo | None, list[str]]:
    """Return (run folder, checkpoint, warnings) for --resume; (None or folder, None, ...) for a fresh `auto`."""
    target, name = command.actions.resume, config.checkpoint.run_name
    folder = config.checkpoint.checkpoint_dir
    assert target is not None
    if target == "auto" and name is None:
        raise ConfigError(
            "--resume auto needs --run_name: without it, which run to continue would be a guess"
        )
    is_step = re.fullmatch(r"[0-9]+", target) is not None
    if target not in _NEWEST and not is_step:
        path = paths.from_working_directory(Path(target))
        hint = fmt.did_you_mean(target, _NEWEST, flag="--resume ")
        if hint and not path.is_dir():
            raise CheckpointError(f"{path}: no such checkpoint folder; {hint}")
        checkpoint = catalog.open_checkpoint(path)
        run_dir = checkpoint.path.parent
        in_place = checkpoint.path.name == folder_name(checkpoint.step)
        if not in_place or run_dir.name.startswith(catalog.SUPERSEDED):
            raise CheckpointError(
                f"{checkpoint.path}: not in its run's folder under its own name; "
                f"move it to RUN/{folder_name(checkpoint.step)} first"
            )
        for flag, typed, here in (
            ("run_name", name, run_dir.name),
            ("checkpoint_dir", folder.resolve(), run_dir.parent.resolve()),
        ):
            if flag in command.typed and typed != here:
                raise ConfigError(
                    f"--{flag} names another run than --resume {target}; leave one of them out"
                )
        return run_dir, checkpoint, []
    found = folder / name if name else catalog.newest_run(folder)
    if found is None and config.checkpoint.checkpoint_mirror is not None:
        raise ConfigError(
            f"{folder}: no run to resume; name the one to fetch from --checkpoint_mirror with --run_name"
        )
    if found is None:
        raise CheckpointError(
            f"{folder}: no checkpoint of any run to resume; start one without --resume"
        )
    run_dir = found
    similar = catalog.similar_run(run_dir.name, folder, "--run_name ")
    if similar and target != "auto" and not run_dir.is_dir():
        raise CheckpointError(f"{run_dir}: no such run{similar}")
    if target == "best" or is_step:
        return run_dir, catalog.find(run_dir, target), []
    existed = catalog.has_checkpoints(run_dir)
    info, warnings = catalog.newest_valid(run_dir, set_aside=set_aside)
    url = url_of(command, config.checkpoint.checkpoint_mirror, info)
    if url is not None and set_aside:
        info, more = fetch_newer(url, run_dir, info)
        warnings += more
    if info is None and existed:
        raise CheckpointError(f"{run_dir}: every checkpoint is damaged: {warnings[0]}")
    if info is None and (holder := holder_of(run_dir)) is not None:
        raise InUseError(
            f"{run_dir}: in use by {holder}, which has not saved a checkpoint yet; wait for it, or stop it"
        )
    if info is None and target == "latest":
        raise CheckpointError(
            f"{run_dir}: no checkpoint to resume; start the run without --resume, or use --resume auto"
        )
    return run_dir, info, warnings


def _fresh_folder(config: Config) -> Path:
    name = config.checkpoint.run_name or f"{config.model.model}_{time.strftime('%Y%m%d-%H%M%S')}"
    run_dir = config.checkpoint.checkpoint_dir / name
    if catalog.has_checkpoints(run_dir):
        raise ConfigError(
            f"{run_dir} holds checkpoints already; continue it with --run_name {name} --resume latest, "
            f"or start another with --run_name {name}_2"
        )
    return run_dir


def _fill_in(config: Config, max_steps: int) -> Config:
    """Replace the defaults that depend on other settings by numbers, so that a resume cannot derive others."""
    optim = config.optim
    if optim.min_lr is None:
        optim = dataclasses.replace(optim, min_lr=default_min_lr(optim.max_lr))
    if optim.warmup_steps is None:
        optim = dataclasses.replace(optim, warmup_steps=default_warmup(max_steps))
    length = config.length
    if (length.max_steps, length.max_tokens, length.num_epochs) == (None, None, None):
        length = dataclasses.replace(length, num_epochs=1.0)
    return dataclasses.replace(config, optim=optim, length=length)


def _check_length(start: Start) -> None:
    warmup = start.config.optim.warmup_steps
    if warmup is not None and warmup > start.plan.max_steps:
        raise ConfigError(
            f"warmup_steps {warmup} is longer than the run of {start.plan.max_steps} steps; lower it"
        )
    done = start.checkpoint.step if start.checkpoint else 0
    stop = start.stop_after_steps
    if stop is not None and stop <= done:
        raise ConfigError(
            f"stop_after_steps {stop}: it counts from the run's beginning, and {done} steps are done; "
            f"give {done + max(1, stop)} to take {max(1, stop)} more"
        )


def _check_source_epochs(start: Start) -> None:
    """Compare the whole run with --max_source_epochs and --data_weights_at.

    Raises: ConfigError if it reads a source too often, or ends before the weights change.
    """
    sources, samples = read_sources(start.config.data), start.last_sample()
    check_epochs(sources, start.order, samples=samples)
    end, last = samples * start.config.model.context_length, sources.phases[-1].from_tokens
    if last >= end:
        raise ConfigError(
            f"data_weights_at {last}: never comes, because the run ends after {end:,} tokens of these data; "
            f"give a smaller number, or leave it out"
        )


def _raise_problems(problems: list[str]) -> None:
    if problems:
        raise ConfigError("; ".join(problems))
