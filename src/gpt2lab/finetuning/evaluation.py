"""Evaluation on held-out conversations: the loss of their answers, and ROUGE-L of generated ones."""

import hashlib
import importlib.util
import math
import re
import types
import unicodedata
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gpt2lab.distributed.strategy import Strategy
from gpt2lab.errors import ConfigError
from gpt2lab.evaluation.generation import draw
from gpt2lab.evaluation.uncertainty import estimate_mean
from gpt2lab.evaluation.validation import ValidationLoss, loss_of_units
from gpt2lab.finetuning.packed import hidden_of_rows
from gpt2lab.finetuning.rows import NO_OWNER, Rows, last_exchanges
from gpt2lab.model.gpt import GPT, evaluating
from gpt2lab.runs.console import counted

MOST_TOKENS = 256  # of an answer
# Thai and Lao, Khmer, Japanese, Chinese: written without spaces between words.
_UNSPACED = re.compile("([\u0e00-\u0eff\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff])")


class AnswerLoss:
    """The validation loss of the held-out rows, or of as many as `val_tokens` allows, evenly spaced."""

    def __init__(self, rows: Rows, *, val_tokens: int, batch_size: int, strategy: Strategy) -> None:
        self._batch_size, self._strategy, self._runtime = batch_size, strategy, strategy.runtime
        self._hidden = strategy.for_evaluation(hidden_of_rows, batch_size=batch_size)
        total, T = len(rows), rows.ids.shape[1] - 1
        chosen = min(total, max(1, val_tokens // T))
        places = np.arange(chosen, dtype=np.int64) * total // chosen
        self._tokenizer = rows.tokenizer
        self._ids, self._owner = rows.ids[places], rows.owner[places]

    def measure(
        self,
        model: GPT,
        *,
        interrupted: Callable[[], bool] = lambda: False,
        keep_token_losses: bool = False,
    ) -> ValidationLoss | None:
        """Return the loss in nats per answer token; None if interrupted. Each rank takes a share of the rows.

        Each conversation is summed in fp64. The standard error takes a conversation as the unit. Losses of single
        tokens are not kept.
        """
        world, rank, count = self._runtime.world_size, self._runtime.rank, len(self._ids)
        mine = np.arange(rank, count, world)
        longest = math.ceil(count / world)  # equal rounds everywhere: interrupted() is a collective
        nats = np.zeros(int(self._owner.max()) + 1)
        with evaluating(model):
            for begin in counted(range(0, longest, self._batch_size), "batches"):
                if interrupted():
                    return None
                rows = mine[begin : begin + self._batch_size]
                if len(rows):
                    self._add(nats, rows, model)
        nats = np.sum(self._runtime.gather(nats), axis=0)  # one rank has a conversation's rows
        return self._summarize(nats)

    def _add(self, nats: np.ndarray, rows: np.ndarray, model: GPT) -> None:
        ids = torch.from_numpy(self._ids[rows].astype(np.int64)).to(self._runtime.device)
        owner = self._owner[rows][:, 1:]  # (B, T)
        with torch.inference_mode(), self._strategy.autocast():
            hidden = self._hidden(model, ids[:, :-1], self._tokenizer.end_of_text)
            losses = model.losses_of(hidden, ids[:, 1:])
        is_answer = owner != NO_OWNER
        np.add.at(nats, owner[is_answer], losses.double().cpu().numpy()[is_answer])  # sync

    def _summarize(self, nats: np.ndarray) -> ValidationLoss:
        owner, ids = self._owner[:, 1:], self._ids[:, 1:]
        is_answer = owner != NO_OWNER
        tokens = np.bincount(owner[is_answer], minlength=len(nats))
        bytes_each = self._tokenizer.byte_lengths()[ids[is_answer]]
        measured = tokens > 0  # --val_tokens may leave some conversations out
        nats, tokens = nats[measured], tokens[measured]
        digest = hashlib.sha256(self._ids.tobytes())
        digest.update(self._owner.tobytes())
        units = {"n": len(nats), "answers": digest.hexdigest()}
        return loss_of_units(nats, tokens, "conversation", units, bytes_each.sum())


def require_rouge() -> None:
    """Raise ConfigError if the package rouge-score is not installed."""
    if importlib.util.find_spec("rouge_score") is None:
        raise ConfigError(
            '--eval_generate compares with rouge-score, which is not installed: pip install "rouge-score>=0.1.2"'
        )


def rouge_scorer() -> Any:
    """Return the library's scorer, without stemming, for words of any script (Lin 2004)."""
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], tokenizer=types.SimpleNamespace(tokenize=_words))


def _words(text: str) -> list[str]:
    """Split as the library does, which keeps only a-z and 0-9; a character is a word in scripts without spaces."""
    kept = [c if c.isalnum() or unicodedata.category(c)[0] == "M" else " " for c in text.lower()]
    return _UNSPACED.sub(r" \1 ", "".join(kept)).split()


def rouge_l(model: GPT, rows: Rows, strategy: Strategy) -> dict[str, Any]:
    """Return the mean ROUGE-L F-measure over the last answers of all conversations, with its standard error.

    Decoding is greedy, up to <|endoftext|> or 256 tokens. Each rank takes a share of the conversations, and all get the
    result.
    """
    scorer, tokenizer, runtime = rouge_scorer(), rows.tokenizer, strategy.runtime
    exchanges = last_exchanges(rows)
    scores = np.zeros(len(exchanges))
    model.eval()
    for number in counted(range(runtime.rank, len(exchanges), runtime.world_size), "answers"):
        prompt, expected = exchanges[number]
        room = model.config.context_length - len(prompt) + 1
        with strategy.autocast():
            drawn = draw(
                model,
                prompt,
                max_new_tokens=min(MOST_TOKENS, room),
                generators=[torch.Generator()],
                temperature=0,
                end_of_text=tokenizer.end_of_text,
            )
            answer = tokenizer.decode([id for (id,) in drawn if id != tokenizer.end_of_text])
        scores[number] = scorer.score(tokenizer.decode(expected), answer)["rougeL"].fmeasure
    found = estimate_mean(np.sum(runtime.gather(scores), axis=0))
    return {"rouge_l": found.mean, "rouge_l_se": found.se, "n": len(exchanges)}
