"""What a model answers to questions held out, compared with the answers that were: ROUGE-L. Lin 2004."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import torch

from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.errors import ConfigError
from gpt2lab.evaluation.generation import draw
from gpt2lab.evaluation.results import mean_and_error
from gpt2lab.finetuning.rows import Rows, last_exchanges
from gpt2lab.model.gpt import GPT
from gpt2lab.tokenizers.gpt2 import END_OF_TEXT, gpt2_encoding

MOST_TOKENS = 256  # of an answer


def refuse_without_rouge() -> None:
    """Raise ConfigError if the library that compares is not installed."""
    if importlib.util.find_spec("rouge_score") is None:
        raise ConfigError(
            '--eval_generate compares with rouge-score, which is not installed: pip install "rouge-score>=0.1.2"'
        )


def rouge_l(model: GPT, rows: Rows, *, strategy: Strategy, runtime: Runtime) -> dict[str, Any]:
    """Return the mean F-measure of ROUGE-L over the last answers of all conversations, with its standard error.

    The likeliest token is taken at each place, up to the end that the model sets, or 256 tokens. The library's scorer
    without stemming. Every process takes a share, and all get the result.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer, encoding = RougeScorer(["rougeL"]), gpt2_encoding()
    exchanges = last_exchanges(rows)
    scores = np.zeros(len(exchanges))
    model.eval()
    for number in range(runtime.rank, len(exchanges), runtime.world_size):
        prompt, expected = exchanges[number]
        answer = encoding.decode(_answer(model, prompt, strategy))
        scores[number] = scorer.score(encoding.decode(expected), answer)["rougeL"].fmeasure
    mean, error = mean_and_error(np.sum(runtime.gather(scores), axis=0))
    return {"rouge_l": mean, "rouge_l_se": error, "n": len(exchanges)}


def _answer(model: GPT, prompt: list[int], strategy: Strategy) -> list[int]:
    room = model.config.context_length - len(prompt) + 1
    with strategy.autocast():
        drawn = draw(
            model,
            prompt,
            max_new_tokens=min(MOST_TOKENS, room),
            generators=[torch.Generator()],
            temperature=0,
        )
        return [id for (id,) in drawn if id != END_OF_TEXT]
