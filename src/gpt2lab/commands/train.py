"""Train or fine-tune, or do what a flag asks instead: list checkpoints, dry run, preflight, import."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from gpt2lab import fmt, paths
from gpt2lab.config.schema import RecipeName
from gpt2lab.errors import CheckError, ConfigError, raise_problems

if TYPE_CHECKING:
    from gpt2lab.commands.command_line import Actions, TrainArguments
    from gpt2lab.config.request import RunRequest
    from gpt2lab.planner.auto import TrainingPlanner
    from gpt2lab.training.extension import Extension
    from gpt2lab.training.recipe import Recipe


# Settings that follow from the data or the machine unless typed: left out, so that the file works elsewhere too.
_OF_THE_PLACE = frozenset({"vocab_size", "num_tokens", "data_dir", "checkpoint_dir"})


def main(argv: list[str], recipe_name: RecipeName = "pretrain") -> int:
    """Do what the command line says and return the exit code."""
    from gpt2lab.commands.command_line import parse
    from gpt2lab.commands.launch import count_ranks, launch

    arguments = parse(argv, recipe_name)
    actions, request = arguments.actions, arguments.request
    place = request.config.checkpoint
    if actions.list_checkpoints:
        from gpt2lab.commands.checkpoints import List

        listing = List(place.run_name, actions.verify, json=actions.json)
        return listing.show(paths.runs_folder(place.checkpoint_dir))
    recipe = recipe_named(recipe_name)
    if actions.save_config is not None:
        return _save_config(arguments, recipe, argv)
    if place.checkpoint_mirror is not None:  # rejects a wrong URL
        from gpt2lab.mirror.storage import connect

        connect(place.checkpoint_mirror, place.run_name or "new")
    planner = planner_of(actions)
    ranks = count_ranks(actions.gpus, device=request.config.system.device)
    if actions.dry_run:
        from gpt2lab.commands.dry_run import print_plan

        return print_plan(request, recipe, world_size=ranks, planner=planner, as_json=actions.json)
    imported = actions.import_checkpoint
    if imported is not None and not paths.expand_user(imported).is_file():
        raise ConfigError(f"{imported}: no such file; give a .pt")
    starts_ranks = actions.gpus is not None and ranks > 1 and paths.LAUNCHED not in os.environ
    keeps_batch = request.resume is not None and not request.fixes_mini_batch
    if starts_ranks and not (actions.preflight or keeps_batch):
        from gpt2lab.interop.core import open_core
        from gpt2lab.training.resolve import resolve

        # Reject what cannot work before ranks import torch. A resume that keeps its batch is left to the ranks, so that
        # the checkpoint's bytes are read once.
        open_core(resolve(request, recipe, world_size=ranks, set_aside=False, planner=planner))
    # From here on torch is imported, which takes seconds; the actions above do without.
    if starts_ranks:
        return launch(argv, recipe_name, ranks)
    if actions.preflight:
        from gpt2lab.commands.preflight import preflight

        return preflight(request, recipe=recipe, as_json=actions.json)
    if imported is not None:
        from gpt2lab.interop.import_checkpoint import import_checkpoint

        return import_checkpoint(request, imported, trust=actions.trust)
    from gpt2lab.runs.console import never_wait_for_stderr

    never_wait_for_stderr()
    run(request, recipe, planner=planner, began=_process_began())
    return 0


def run(
    request: RunRequest, recipe: Recipe, *, planner: TrainingPlanner, began: float | None = None
) -> Path | None:
    """Train with all extensions; return the run's folder if this is the only process.

    `began`: see `pretrain`.

    Raises: GPT2LabError.
    """
    from gpt2lab.evaluation.request import require_gpu
    from gpt2lab.interop.core import open_core
    from gpt2lab.training.resolve import resolve, resolve_to_train

    surroundings, start = extensions(), None
    if "RANK" not in os.environ:
        # A single rank rejects what cannot work before it imports torch.
        if planner.measures(request):  # which needs torch
            open_core(resolve(request, recipe, world_size=1, set_aside=False, planner=planner))
        else:
            planner.memory = [None]  # of this rank: not needed, nothing is measured
            start = resolve_to_train(
                request,
                recipe,
                world_size=1,
                planner=planner,
                extensions=surroundings,
                open_core=open_core,
            )
            require_gpu(start.config.system.device)
        if sys.stdout.isatty():
            print("loading PyTorch", flush=True)
    from gpt2lab.training.pretrain import pretrain

    try:
        pretrain(
            request,
            recipe=recipe,
            extensions=surroundings,
            planner=planner,
            open_core=open_core,
            start=start,
            began=began,
        )
    except (ImportError, RuntimeError) as error:  # compiled before, or when it is first called
        _remove_unfinished_code(error)
        raise
    return None if start is None else start.run_dir


def _remove_unfinished_code(error: ImportError | RuntimeError) -> None:
    """Remove a library that a killed compiler left unfinished in the cache: each later start would meet it.

    Raises: CheckError if it was that.
    """
    found = re.search(r"(/\S+\.so): (file too short|.*ELF)", str(error))
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if found is None or folder is None or not Path(found[1]).is_relative_to(folder):
        return
    Path(found[1]).unlink(missing_ok=True)
    said = CheckError(
        f"{found[1]}: left unfinished by a compiler that was killed, now removed; start again"
    )
    said.is_local = True
    raise said from error


def _process_began() -> float:
    """Return the reading of the monotonic clock at which this process started; now where the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        age = 0.0
    return time.monotonic() - age


def planner_of(actions: Actions) -> TrainingPlanner:
    """Return the planner that decides what a command line leaves open."""
    from gpt2lab.planner.auto import TrainingPlanner

    return TrainingPlanner(preset=actions.preset, fits_schedule=actions.fit_schedule)


def extensions() -> list[Extension]:
    """Return the extensions of a run."""
    from gpt2lab.lab.token_losses import TokenLossKeeper
    from gpt2lab.mirror.extension import CheckpointMirror
    from gpt2lab.planner.forecast import ForecastExtension
    from gpt2lab.tracking.followers import Trackers
    from gpt2lab.tracking.tensorboard import TensorBoard

    return [TensorBoard(), Trackers(), CheckpointMirror(), ForecastExtension(), TokenLossKeeper()]


def finetune(argv: list[str]) -> int:
    """Fine-tune."""
    return main(argv, "finetune")


def _save_config(arguments: TrainArguments, recipe: Recipe, argv: list[str]) -> int:
    from gpt2lab.commands.command_line import action_words
    from gpt2lab.config.presets import for_length
    from gpt2lab.config.settings import find_problems
    from gpt2lab.config.settings_file import write_file
    from gpt2lab.training.resolve import fresh_settings

    actions, request = arguments.actions, arguments.request
    assert actions.save_config is not None
    config, _ = fresh_settings(request, recipe)
    raise_problems(find_problems(config))
    path = paths.from_working_directory(actions.save_config)
    if os.environ.get("RANK", "0") == "0":
        suited = for_length(config.model.model, config.optim.optimizer, 1.0)
        left = _OF_THE_PLACE | suited.keys() | request.open_settings
        if actions.preset is not None:
            left |= {"activation_checkpointing"}
        write_file(path, config, leave_out=left - request.chosen)
        verb = "finetune" if request.recipe == "finetune" else "train"
        words = [*paths.command_words(verb), "--config", paths.display_path(path)]
        words += action_words(argv)
        print(
            f"wrote {paths.display_path(path)}; nothing was trained. "
            f"Train with: {fmt.command_line(words)}"
        )
    return 0


def recipe_named(name: RecipeName) -> Recipe:
    """Return the recipe of a program."""
    if name == "finetune":
        from gpt2lab.finetuning.recipe import FINETUNING

        return FINETUNING
    from gpt2lab.training.recipe import PRETRAINING

    return PRETRAINING


def recipe_of(run_dir: Path) -> Recipe:
    """Return the recipe of a run.

    Raises: ConfigError, DataError: config.json is missing or damaged.
    """
    from gpt2lab.runs import history

    is_tuned = history.read_config(run_dir).tuning.instructions is not None
    return recipe_named("finetune" if is_tuned else "pretrain")
