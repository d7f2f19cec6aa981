"""When a loss is a spike: far above what the last steps were, measured in their own spread. No torch.

The window is part of the saved state, so a resumed run judges as the one that was never stopped.
"""

from __future__ import annotations

import math
import statistics

FEWEST = 64  # before there are as many, nothing is a spike: a young run falls fast
LIMIT = 6.0  # standard deviations
_LEAST_SPREAD = 1e-3  # of the mean: a flat curve is not a licence to call noise a spike


def z_score(loss: float, recent: tuple[float, ...]) -> float | None:
    """Return how many standard deviations a loss lies above the mean of recent ones; None without enough of them.

    >>> z_score(5.0, (2.0, 4.0) * 64)
    2.0
    """
    if len(recent) < FEWEST:
        return None
    mean = statistics.fmean(recent)
    spread = max(statistics.pstdev(recent, mean), _LEAST_SPREAD * abs(mean))
    return (loss - mean) / spread if spread > 0 else None


def is_spike(loss: float, recent: tuple[float, ...]) -> bool:
    """Tell whether a finite loss is a spike; what is not finite has its own rule."""
    z = z_score(loss, recent) if math.isfinite(loss) else None
    return z is not None and z > LIMIT
