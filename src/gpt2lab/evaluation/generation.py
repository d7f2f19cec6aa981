"""Text from a model, id by id."""

from collections.abc import Callable, Iterator, Sequence

import torch

from gpt2lab.errors import CheckpointError
from gpt2lab.model.attention_backend import for_changing_shapes
from gpt2lab.model.gpt import GPT, KVCache, evaluating
from gpt2lab.tokenizers.interface import Tokenizer


@torch.inference_mode()
def draw(
    model: GPT,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    generators: Sequence[torch.Generator],
    end_of_text: int,
    temperature: float = 1.0,
    top_k: int = 50,
    top_p: float = 1.0,
) -> Iterator[list[int]]:
    """Continue `prompt` once for each generator; yield the next id of all texts, `end_of_text` for those that ended.

    The first `top_k` ids take part (0: all), of them the fewest that together have probability `top_p`; at
    temperature 0 the first alone. Padding rows of the embedding are never drawn. A text
    draws only from its own generator (on the CPU), so sampling does not change the randomness of training. A text
    longer than the context drops its oldest half: learned positions cannot move, so the rest is read again.
    """
    device, T = next(model.parameters()).device, model.config.context_length
    start = list(prompt) or [end_of_text]
    ids = torch.tensor([start] * len(generators))  # (B, all ids so far)
    fresh, caches = ids[:, -T:], model.new_caches()
    ended = [False] * len(generators)
    for _ in range(max_new_tokens):
        with for_changing_shapes():
            hidden = model.extend(fresh.to(device), caches)[:, -1]  # (B, C)
        logits = _scores(model, hidden).cpu()
        drawn = [
            end_of_text if over else _pick(row, generator, temperature, top_k, top_p)
            for over, row, generator in zip(ended, logits, generators, strict=True)
        ]
        yield drawn
        ended = [over or id == end_of_text for over, id in zip(ended, drawn, strict=True)]
        if all(ended):
            return
        fresh = torch.tensor(drawn)[:, None]  # (B, 1)
        ids = torch.cat([ids, fresh], dim=1)
        if caches[0].length == T:
            fresh, caches = ids[:, -max(1, T // 2) :], model.new_caches()


@torch.inference_mode()
def draw_each(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    generators: Sequence[torch.Generator],
    temperature: float,
    top_k: int,
    top_p: float,
) -> Iterator[list[int]]:
    """Continue each of B different prompts once, side by side; yield the next id of all of them, without an end.

    Prompt and new tokens fit into the context. Shorter prompts are padded on the left, and a mask hides the padding.
    """
    device = next(model.parameters()).device
    lengths = torch.tensor([len(prompt) for prompt in prompts])  # (B,)
    width = int(lengths.max())
    fresh = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    places = torch.arange(width) - (width - lengths)[:, None]  # (B, width), below 0: padding
    seen = torch.arange(width + max_new_tokens) >= (width - lengths)[:, None]  # (B, all keys)
    # A padding position attends to itself: a softmax over nothing would be NaN.
    earlier = torch.ones(width, width, dtype=torch.bool).tril()
    mask = (earlier & seen[:, None, :width]) | torch.eye(width, dtype=torch.bool)  # (B, T, S)
    positions, seen = places.clamp(min=0), seen.to(device)
    caches = [KVCache(width + max_new_tokens) for _ in model.blocks]
    for number in range(max_new_tokens):
        with for_changing_shapes():
            stream = model.stream(fresh.to(device), positions.to(device), mask.to(device), caches)
        logits = _scores(model, model.ln_f(stream)[:, -1])
        if temperature == 0:
            drawn = logits.argmax(dim=1).tolist()
        else:
            drawn = [
                _pick(row, generator, temperature, top_k, top_p)
                for row, generator in zip(logits.cpu(), generators, strict=True)
            ]
        yield drawn
        fresh = torch.tensor(drawn)[:, None]  # (B, 1)
        positions = positions[:, -1:] + 1
        mask = seen[:, None, : width + number + 1]


def _scores(model: GPT, hidden: torch.Tensor) -> torch.Tensor:
    """Return the scores of the real ids, (B, V_real), of hidden states (B, C)."""
    logits = model.head(hidden)[:, : model.config.id_limit].float()
    if not logits.isfinite().all():
        raise CheckpointError(
            "the model's scores are not finite, so nothing can be drawn: its weights hold NaN, or values too large; "
            "use an earlier checkpoint"
        )
    return logits


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


def sample_text(
    model: GPT,
    prompt: Sequence[int],
    tokenizer: Tokenizer,
    *,
    max_new_tokens: int,
    seed: int,
    interrupted: Callable[[], bool] = lambda: False,
) -> str | None:
    """Return `prompt` continued by the model, as text; None if `interrupted`, called before each id, returned True.

    Raises: DataError if the tokenizer cannot be found.
    """
    end = tokenizer.end_of_text
    ids = list(prompt) or [end]
    generators = [torch.Generator().manual_seed(seed)]
    drawn = draw(
        model, ids[:], max_new_tokens=max_new_tokens, generators=generators, end_of_text=end
    )
    with evaluating(model):
        while not interrupted():
            (id,) = next(drawn, [end])
            if id == end:
                break
            ids.append(id)
    return None if interrupted() else tokenizer.decode(ids)
