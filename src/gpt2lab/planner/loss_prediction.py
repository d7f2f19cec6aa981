"""The validation loss that a model of N parameters reaches on D tokens, with an honest offset and band. No torch.

L = E + A / N^a + B / D'^b with the constants that Besiroglu et al. 2024 (arXiv:2404.10102) refitted to Hoffmann et
al.; repeated data count for less, D' = U + 15.39 U (1 - e^(-(D/U - 1) / 15.39)), Muennighoff et al. 2023
(arXiv:2305.16264). For GPT-2 on FineWeb the law is too low: it says 3.01 for 124M on 10.26B tokens where llm.c's
public log ends at 3.272. The difference is added; it moves with data and recipe, hence the band. For ranking sizes,
not a promise. It speaks of GPT-2's blocks and AdamW alone: of other blocks and optimizers no offset is known.
"""

from __future__ import annotations

import math

from gpt2lab.planner.interval import Interval

E, A, B, ALPHA, BETA = 1.8172, 482.01, 2085.43, 0.3478, 0.3658
REPEAT = 15.3878
FINEWEB_OFFSET = 0.27  # 3.272 (llm.c, 124M, 10.26B tokens of FineWeb) - 3.01
BAND = 0.10
SMALLEST = 40e6  # parameters: the law was fitted from 44M up
LAW = "besiroglu2024+offset"


def effective_tokens(tokens: float, unique_tokens: float | None) -> float:
    """Return what `tokens` are worth where only `unique_tokens` of them differ."""
    if unique_tokens is None or tokens <= unique_tokens:
        return tokens
    repeats = tokens / unique_tokens - 1
    return unique_tokens * (1 + REPEAT * (1 - math.exp(-repeats / REPEAT)))


def predicted_loss(
    parameters: int, tokens: float, *, unique_tokens: float | None = None
) -> Interval | None:
    """Return nats/token on FineWeb with the GPT-2 vocabulary, or None where the law says nothing."""
    if parameters < SMALLEST or tokens < 1:
        return None
    D = effective_tokens(tokens, unique_tokens)
    value = E + A / parameters**ALPHA + B / D**BETA + FINEWEB_OFFSET
    return Interval(value, value - BAND, value + BAND)
