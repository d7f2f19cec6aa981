"""Sampling with a cache against running the whole text again for every token, in turns, on the same model."""

from __future__ import annotations

import statistics
import time
from typing import Any, Literal

import torch

from gpt2lab.config.presets import preset
from gpt2lab.config.schema import ModelName, SystemConfig
from gpt2lab.distributed.runtime import Runtime, resolve_dtype
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.evaluation.generation import draw
from gpt2lab.model.gpt import build_model
from gpt2lab.tokenizers.gpt2 import END_OF_TEXT

_EVERY = 32  # of the re-run's lengths, one in so many is timed


def compare_with_rerun(
    *,
    model_name: ModelName,
    tokens: int,
    rounds: int,
    device: Literal["auto", "cpu", "cuda"],
    dtype: Literal["auto", "fp32", "bf16"],
) -> dict[str, Any]:
    """Time both on random weights, from an empty prompt to `tokens`; return tokens/s of each, medians of the rounds.

    The cached text is drawn in full. Running everything again costs minutes, so its sum over all lengths is taken
    from every 32nd, in the middle of its span.
    """
    runtime = Runtime()
    runtime.use(SystemConfig(device=device))
    strategy = Strategy(runtime, SystemConfig(dtype=resolve_dtype(dtype, runtime.device)))
    model = build_model(preset(model_name).model, seed=1, device=runtime.device).eval()
    ids = torch.randint(0, 50257, (1, tokens), device=runtime.device)

    def cached() -> float:
        began, count = time.monotonic(), 0
        generator = torch.Generator().manual_seed(0)
        for _ in draw(
            model, [], max_new_tokens=tokens, generators=[generator], end_of_text=END_OF_TEXT
        ):
            count += 1
        return count / (time.monotonic() - began)

    def again() -> float:
        seconds = 0.0
        for length in range(_EVERY // 2, tokens, _EVERY):
            began = time.monotonic()
            with torch.inference_mode():
                model.head(model.hidden(ids[:, :length])[:, -1]).float().cpu()
            seconds += time.monotonic() - began
        return 1 / (seconds / len(range(_EVERY // 2, tokens, _EVERY)))

    with strategy.autocast():
        for _ in draw(
            model, [], max_new_tokens=4, generators=[torch.Generator()], end_of_text=END_OF_TEXT
        ):
            pass  # warm
        pairs = [(cached(), again()) for _ in range(rounds)]
    return {
        "model": model_name,
        "tokens": tokens,
        "cached_tokens_per_second": statistics.median(pair[0] for pair in pairs),
        "rerun_tokens_per_second": statistics.median(pair[1] for pair in pairs),
        "ratios": [pair[0] / pair[1] for pair in pairs],
    }


def describe(result: dict[str, Any]) -> str:
    """Write the numbers for people."""
    ratios = ", ".join(f"{ratio:.1f}" for ratio in result["ratios"])
    return (
        f"{result['model']}, {result['tokens']} tokens: {result['cached_tokens_per_second']:.1f} tokens/s with the "
        f"cache, {result['rerun_tokens_per_second']:.2f} without; ratio of each round: {ratios}"
    )
