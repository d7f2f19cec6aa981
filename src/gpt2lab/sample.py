"""Text from a model: a few tokens at a time, to see what it has learned."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gpt2lab.data.tokenizer import END_OF_TEXT, NUM_TOKENS, gpt2_encoding
from gpt2lab.model import GPT


@torch.inference_mode()
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
    """Return `prompt` continued by up to `max_new_tokens` ids, ending early at end-of-text.

    Ids from 50257 up are padding rows of the embedding and are never drawn. Draws come from `generator` (on the CPU)
    alone, so sampling cannot shift the randomness of training. The context is the last `context_length` ids.
    `interrupted` is asked before each id, and ends the text where it stands.
    """
    device = next(model.parameters()).device
    real = min(model.config.vocab_size, NUM_TOKENS)
    ids = list(prompt) or [END_OF_TEXT]
    for _ in range(max_new_tokens):
        if interrupted():
            break
        tokens = torch.tensor([ids[-model.config.context_length :]], device=device)  # (1, T)
        logits = model.head(model.hidden(tokens)[:, -1])[0, :real].float().cpu()  # (V_real,)
        best, indices = logits.topk(min(top_k, real))
        probabilities = torch.softmax(best / temperature, dim=0)
        drawn = int(indices[torch.multinomial(probabilities, 1, generator=generator)])
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
