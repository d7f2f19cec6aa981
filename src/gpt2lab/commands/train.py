"""Train or fine-tune, or do what a flag asks instead: list checkpoints, dry run, preflight, import."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from gpt2lab.config.schema import RecipeName

if TYPE_CHECKING:
    from gpt2lab.training.recipe import Recipe


def main(argv: list[str], recipe_name: RecipeName = "pretrain") -> int:
    """Do what the command line says and return the exit code."""
    from gpt2lab.config.command_line import parse

    command = parse(argv, recipe_name)
    if command.verbs.list_checkpoints:
        from gpt2lab.checkpoint.listing import print_checkpoints

        checkpoint = command.fresh().checkpoint
        return print_checkpoints(
            checkpoint.checkpoint_dir,
            run_name=checkpoint.run_name,
            as_json=command.verbs.json,
            verify=command.verbs.verify,
        )
    recipe = recipe_named(recipe_name)
    if command.verbs.dry_run:
        from gpt2lab.commands.dry_run import print_plan

        return print_plan(command, recipe)
    # From here on torch is imported: seconds that the actions above do not owe.
    if command.verbs.preflight:
        from gpt2lab.commands.preflight import preflight

        return preflight(command, recipe=recipe)
    if command.verbs.import_checkpoint is not None:
        from gpt2lab.commands.import_checkpoint import import_checkpoint

        return import_checkpoint(command, command.verbs.import_checkpoint)
    from gpt2lab.planner.run_clock import process_began
    from gpt2lab.training.resolve import resolve, resolve_to_train

    start = None
    if "RANK" not in os.environ:
        # One rank asks nobody: what cannot work is rejected before torch is imported, which takes seconds.
        if command.finds_mini_batch:  # which needs torch
            resolve(command, recipe, world_size=1, set_aside=False)
        else:
            start = resolve_to_train(command, recipe, world_size=1, free_memory=[None])
        if sys.stdout.isatty():
            print("loading PyTorch", flush=True)
    from gpt2lab.training.pretrain import pretrain

    pretrain(command, recipe=recipe, start=start, began=process_began())
    return 0


def recipe_named(name: RecipeName) -> Recipe:
    """Return the recipe of a program."""
    if name == "finetune":
        from gpt2lab.finetuning.recipe import FINETUNING

        return FINETUNING
    from gpt2lab.training.recipe import PRETRAINING

    return PRETRAINING
