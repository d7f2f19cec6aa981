"""A run of 12 steps that was stopped after 7 and resumed from step 4 to its end, for tests of what reads runs."""

from pathlib import Path

from tiny import parse, pretrain


def stopped_and_resumed(runs: Path, data: Path) -> Path:
    """Train it in a folder of runs and return its folder."""
    flags = ["--n_layer=1", "--n_head=2", "--n_embd=16", "--context_length=16", "--vocab_size=256"]
    flags += ["--total_batch_size=64", "--mini_batch_size=2", "--val_tokens=320", "--device=cpu"]
    flags += [f"--data_dir={data}", f"--checkpoint_dir={runs}", "--run_name=r", "--dtype=fp32"]
    flags += ["--max_steps=12", "--eval_freq=4", "--checkpoint_freq=4", "--compile=off"]
    pretrain(parse([*flags, "--stop_after_steps=7"]))
    pretrain(parse([*flags, "--resume=4"]))
    return runs / "r"
