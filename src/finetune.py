"""The fine-tuning door: the trainer's engine on conversations. What it does lives in gpt2lab/.

python src/finetune.py --init_from RUN --instructions my_pairs.jsonl
python src/finetune.py --init_from hf:gpt2 --instructions hf:tatsu-lab/alpaca --lora_r 8
torchrun --nproc_per_node=4 src/finetune.py --resume latest --run_name NAME
"""

import sys

from gpt2lab.commands.entry import run


def main(argv: list[str]) -> int:
    """Do what the command line says and return the exit code."""
    from gpt2lab.config.command_line import parse

    command = parse(argv, "finetune")
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
    from gpt2lab.finetuning.recipe import FINETUNING

    if command.verbs.preflight:
        from gpt2lab.commands.preflight import preflight

        return preflight(command, recipe=FINETUNING)
    from gpt2lab.planner.run_clock import process_began
    from gpt2lab.training.pretrain import pretrain

    pretrain(command, recipe=FINETUNING, began=process_began())
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
