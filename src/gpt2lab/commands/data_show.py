"""Print the tokens that a step trained on."""

from __future__ import annotations

from pathlib import Path

from gpt2lab import paths
from gpt2lab.commands.train import recipe_of
from gpt2lab.errors import ConfigError
from gpt2lab.lab import step_tokens
from gpt2lab.lab.step_tokens import StepTokens


def tokens_of_step(run_dir: Path, step: int, data_dir: tuple[str, ...] = ()) -> StepTokens:
    """Return what update number `step` of a run trained on; see `lab.step_tokens`."""
    return step_tokens.tokens_of_step(run_dir, step, recipe_of(run_dir), data_dir)


def tokens_as_text(run_dir: Path, tokens: StepTokens, *, as_text: bool) -> str:
    """Print the windows in sample order, as ids or as text, each with its place."""
    tokenizer = tokens.tokenizer
    if as_text and tokenizer is None:
        raise ConfigError(
            f"--text: the tokenizer of {run_dir.name}'s data is not known; leave it out"
        )
    count, width = tokens.windows.shape
    lines = [
        f"step {tokens.step} of {paths.display_path(run_dir)}: epoch {tokens.epoch}, {count} windows "
        f"of {width - 1} + 1 tokens, batch_hash {tokens.hash} as logged"
    ]
    for row, place in enumerate(tokens.places):
        lines.append(f"--- sample {tokens.first_sample + row}: {place}")
        ids = tokens.windows[row].tolist()
        lines.append(tokenizer.decode(ids) if as_text and tokenizer else " ".join(map(str, ids)))
    return "\n".join(lines)
