"""Text from a model, id by id."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from gpt2lab.model.gpt import GPT
from gpt2lab.tokenizers.gpt2 import END_OF_TEXT, NUM_TOKENS, gpt2_encoding


@torch.inference_mode()
def draw(
    model: GPT,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    generators: Sequence[torch.Generator],
    temperature: float = 1.0,
    top_k: int = 50,
    top_p: float = 1.0,
) -> Iterator[list[int]]:
    """Continue `prompt` once for each generator; yield the next id of all texts, END_OF_TEXT for those that ended.

    The first `top_k` ids take part (0: all), of them the fewest that together have probability `top_p`; at
    temperature 0 the first alone. Ids from 50257 up are padding rows of the embedding and are never drawn. A text
    draws from its own generator (on the CPU) alone, so sampling cannot shift the randomness of training. A text that
    outgrows the context forgets its oldest half: learned positions cannot be moved, so what is kept is read again.
    """
    device, T = next(model.parameters()).device, model.config.context_length
    real = min(model.config.vocab_size, NUM_TOKENS)
    start = list(prompt) or [END_OF_TEXT]
    ids = torch.tensor([start] * len(generators))  # (B, all ids so far)
    fresh, caches = ids[:, -T:], model.new_caches()
    ended = [False] * len(generators)
    for _ in range(max_new_tokens):
        hidden = model.extend(fresh.to(device), caches)[:, -1]  # (B, C)
        logits = model.head(hidden)[:, :real].float().cpu()  # (B, V_real)
        drawn = [
            END_OF_TEXT if over else _pick(row, generator, temperature, top_k, top_p)
            for over, row, generator in zip(ended, logits, generators, strict=True)
        ]
        yield drawn
        ended = [over or id == END_OF_TEXT for over, id in zip(ended, drawn, strict=True)]
        if all(ended):
            return
        fresh = torch.tensor(drawn)[:, None]  # (B, 1)
        ids = torch.cat([ids, fresh], dim=1)
        if caches[0].length == T:
            fresh, caches = ids[:, -max(1, T // 2) :], model.new_caches()


def _pick(
    logits: torch.Tensor, generator: torch.Generator, temperature: float, top_k: int, top_p: float
) -> int:
    """Draw one id from scores (V,)."""
    if temperature == 0:
        return int(logits.argmax())
    best, indices = logits.topk(min(top_k or len(logits), len(logits)))
    probabilities = torch.softmax(best / temperature, dim=0)
    if top_p < 1:
        before = probabilities.cumsum(dim=0) - probabilities  # of all that are likelier
        probabilities[before >= top_p] = 0.0
    return int(indices[torch.multinomial(probabilities, 1, generator=generator)])


def generate(
    model: GPT,
    prompt: list[int],
    *,
    max_new_tokens: int,
    generator: torch.Generator,
    temperature: float = 1.0,
    top_k: int = 50,
    interrupted: Callable[[], bool] = lambda: False,
) -> list[int]:
    """Return `prompt` continued by up to `max_new_tokens` ids, ending early at end-of-text; see `draw`.

    `interrupted` is asked before each id, and ends the text where it stands.
    """
    ids = list(prompt) or [END_OF_TEXT]
    text = draw(
        model,
        prompt,
        max_new_tokens=max_new_tokens,
        generators=[generator],
        temperature=temperature,
        top_k=top_k,
    )
    while not interrupted():
        (drawn,) = next(text, [END_OF_TEXT])
        if drawn == END_OF_TEXT:
            break
        ids.append(drawn)
    return ids


def sample_text(
    model: GPT,
    prompt: str,
    *,
    max_new_tokens: int,
    seed: int,
    interrupted: Callable[[], bool] = lambda: False,
) -> str | None:
    """Return `prompt` continued by the model, as text; None if it was `interrupted`.

    Raises: DataError if the GPT-2 vocabulary is not to be had.
    """
    encoding = gpt2_encoding()
    generator = torch.Generator().manual_seed(seed)
    was_training = model.training
    model.eval()
    prompt_ids = encoding.encode_ordinary(prompt)
    ids = generate(
        model,
        prompt_ids,
        max_new_tokens=max_new_tokens,
        generator=generator,
        interrupted=interrupted,
    )
    model.train(was_training)
    if interrupted():
        return None
    return encoding.decode(ids)
