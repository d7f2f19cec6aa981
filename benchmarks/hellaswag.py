"""HellaSwag scored our way against the tutorial lineage's loop, in turns, on the same model and items."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.nn import functional as F

from gpt2lab import fmt
from gpt2lab.config.presets import preset
from gpt2lab.config.schema import ModelName, SystemConfig
from gpt2lab.distributed.runtime import Runtime, resolve_dtype
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.errors import ConfigError
from gpt2lab.evaluation.hellaswag import BATCH_TOKENS, cut_batches, make_rows, score
from gpt2lab.evaluation.hellaswag_items import STYLES, Style, load_questions
from gpt2lab.model.gpt import GPT, build_model
from gpt2lab.tokenizers.gpt2 import GPT2

_ROUNDS = 10  # each method does a tenth of its work in turn, so that a machine's moods meet both


@dataclass
class Timing:
    """One way of scoring, and the seconds that it took."""

    name: str
    work: list[Any]
    seconds: float = 0.0


def compare_with_tutorial(
    path: Path,
    *,
    model_name: ModelName,
    items: int,
    device: Literal["auto", "cpu", "cuda"],
    dtype: Literal["auto", "fp32", "bf16"],
) -> dict[str, Any]:
    """Time both on random weights and return seconds, items/s and shares of the tutorial's time.

    Both get token ids, so reading and encoding are not in any number. The tutorial's loop knows one text of an item,
    ours scores two: `ours_tutorial` is the like-for-like number, `ours_both` is what three metrics cost.
    """
    runtime = Runtime()
    runtime.use(SystemConfig(device=device))
    precision = resolve_dtype(dtype, runtime.device)
    strategy = Strategy(runtime, SystemConfig(dtype=precision))
    config = preset(model_name).model
    model = build_model(config, seed=1, device=runtime.device).eval()
    questions = load_questions(path, GPT2).subset(items)
    sequences = questions.sequences
    T = config.context_length
    longest = max(len(c) + max(map(len, ends)) for s in sequences.values() for c, *ends in s)
    if longest > T:
        raise ConfigError(
            f"{path}: an item has {longest} tokens, which the tutorial's loop does not cut to the context of "
            f"{model_name}, {T}; name a model with a longer one"
        )

    def batches(style: Style) -> list[Any]:
        rows = make_rows(sequences[style], context_length=T)
        return cut_batches(rows, batch_tokens=BATCH_TOKENS[runtime.device.type])

    tutorial = Timing("tutorial_loop", sequences["tutorial"])
    ours = [Timing(f"ours_{style}", batches(style)) for style in STYLES]
    with torch.inference_mode(), strategy.autocast():
        score_like_the_tutorial(model, tutorial.work[0])  # warm
        for timing in ours:
            score(model, timing.work[-1])
        for turn in range(_ROUNDS):
            began = time.monotonic()
            for item in tutorial.work[turn::_ROUNDS]:
                score_like_the_tutorial(model, item)
            runtime.synchronize()
            tutorial.seconds += time.monotonic() - began
            for timing in ours:
                began = time.monotonic()
                for batch in timing.work[turn::_ROUNDS]:
                    score(model, batch)
                runtime.synchronize()
                timing.seconds += time.monotonic() - began
    seconds = {timing.name: timing.seconds for timing in (tutorial, *ours)}
    seconds["ours_both"] = sum(timing.seconds for timing in ours)
    return {
        "model": model_name,
        "items": len(questions),
        "device": runtime.device.type,
        "dtype": precision,
        "threads": torch.get_num_threads(),
        "seconds": seconds,
        "items_per_second": {name: len(questions) / spent for name, spent in seconds.items()},
        "share_of_tutorial": {name: spent / tutorial.seconds for name, spent in seconds.items()},
    }


def score_like_the_tutorial(model: GPT, item: list[np.ndarray]) -> int:
    """Return the ending with the lowest mean loss: four padded rows of context and ending, all positions projected."""
    context, *endings = item
    width = len(context) + max(len(ending) for ending in endings)
    tokens = torch.zeros(4, width, dtype=torch.int64)
    mask = torch.zeros(4, width)
    for row, ending in enumerate(endings):
        text = np.concatenate([context, ending]).astype(np.int64)
        tokens[row, : len(text)] = torch.from_numpy(text)
        mask[row, len(context) : len(text)] = 1.0
    device = model.wte.weight.device
    tokens, mask = tokens.to(device), mask.to(device)
    logits = model(tokens)[:, :-1].contiguous()  # (4, width - 1, V)
    losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    scored = losses.view(4, -1) * mask[:, 1:]
    return int((scored.sum(dim=1) / mask[:, 1:].sum(dim=1)).argmin())


def describe(result: dict[str, Any]) -> str:
    """Write the measurement as a table."""
    rows = [
        [name, f"{spent:.2f}", f"{result['items_per_second'][name]:.2f}", f"{share:.0%}"]
        for (name, spent), share in zip(
            result["seconds"].items(), result["share_of_tutorial"].values(), strict=True
        )
    ]
    head = (
        f"{result['model']}, {result['items']} HellaSwag items, {result['dtype']} on {result['device']}, "
        f"{result['threads']} threads; random weights"
    )
    return f"{head}\n{fmt.table(('', 'seconds', 'items/s', 'of the tutorial'), rows)}"
