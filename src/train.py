"""The trainer's door: parse, dispatch, exit code. What it does lives in gpt2lab/.

python src/train.py --model gpt2-micro
torchrun --nproc_per_node=4 src/train.py --resume latest
python src/train.py --list_checkpoints
"""

import sys

from gpt2lab.commands.entry import run


def main(argv: list[str]) -> int:
    """Do what the command line says and return the exit code."""
    from gpt2lab.config.command_line import parse

    command = parse(argv)
    if command.verbs.list_checkpoints:
        from gpt2lab.checkpoint.listing import print_checkpoints

        checkpoint = command.fresh().checkpoint
        return print_checkpoints(
            checkpoint.checkpoint_dir,
            run_name=checkpoint.run_name,
            as_json=command.verbs.json,
            verify=command.verbs.verify,
        )
    if command.verbs.dry_run:
        from gpt2lab.commands.dry_run import print_plan

        return print_plan(command)
    # From here on torch is imported: seconds that the actions above do not owe.
    if command.verbs.preflight:
        from gpt2lab.commands.preflight import preflight

        return preflight(command)
    if command.verbs.import_checkpoint is not None:
        from gpt2lab.commands.import_checkpoint import import_checkpoint

        return import_checkpoint(command, command.verbs.import_checkpoint)
    from gpt2lab.planner.run_clock import process_began
    from gpt2lab.training.pretrain import pretrain

    pretrain(command, began=process_began())
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
