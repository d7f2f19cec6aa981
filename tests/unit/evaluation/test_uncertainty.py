"""Standard errors over documents: formulas by hand, and how often they are right in simulation."""

import math
from typing import Any

import numpy as np
import pytest
from scipy import special

from gpt2lab.evaluation.results import Results
from gpt2lab.evaluation.uncertainty import estimate_mean
from gpt2lab.evaluation.validation import ValidationLoss, combine
from tiny import draw_losses


def test_a_heavy_unit_counts_as_what_it_is():
    found = estimate_mean(np.array([1.0, 3.0, 3.0]), np.array([2, 1, 1]))
    assert found.mean == 2.0
    # Without each unit the mean is 3, 5/3 and 5/3.
    assert found.se == pytest.approx(math.sqrt(2 / 3 * (1 + 1 / 9 + 1 / 9)))
    assert (found.effective_n, found.degrees) == pytest.approx((16 / 6, 16 / 6 - 1))
    assert estimate_mean(np.array([3.0]), np.array([7])).se is None  # one unit has no error


def test_sources_of_a_mixture_are_strata():
    """By hand, and 95 % intervals by Student's t over 2000 mixtures of a small and a large source that lie apart."""
    values = np.array([1.0, 2.0, 3.0, 11.0, 15.0])
    weights = np.array([0.25, 0.25, 0.25, 0.125, 0.125])
    found = estimate_mean(values, weights, (slice(0, 3), slice(3, 5)))
    parts = [0.75**2 * 1 / 3, 0.25**2 * 8 / 2]
    assert found.mean == pytest.approx(0.75 * 2 + 0.25 * 13)
    assert found.se == pytest.approx(math.sqrt(sum(parts)))
    assert found.degrees == pytest.approx(sum(parts) ** 2 / (parts[0] ** 2 / 2 + parts[1] ** 2))
    assert estimate_mean(values[:4], weights[:4], (slice(0, 3), slice(3, 4))).se is None

    rng, inside = np.random.default_rng(5), 0
    weights = np.repeat([0.7 / 6, 0.3 / 30], [6, 30])
    for _ in range(2000):
        values = np.concatenate([rng.normal(0, 1, 6), rng.normal(3, 1, 30)])
        found = estimate_mean(values, weights, (slice(0, 6), slice(6, 36)))
        inside += abs(found.mean - 0.9) < special.stdtrit(found.degrees, 0.975) * found.se
    assert inside / 2000 == pytest.approx(0.95, abs=0.015)


def test_a_mixture_has_an_error_and_a_unit_if_all_its_sources_have_them():
    def loss(se: float | None, unit: Any) -> ValidationLoss:
        results = Results("validation", {"windows": ""}, {"val_loss": np.ones(2)}, {})
        return ValidationLoss(1.0, se, 2, unit, 2.0, None, results)

    for se, unit, said in ((0.4, "document", 0.25), (None, "window", None)):
        found = combine({"a": loss(0.3, "document"), "b": loss(se, unit)}, (0.5, 0.5))
        assert (found.val_loss_se, found.val_se_unit) == (said, unit)


def test_units_are_divided_by_the_weights_of_their_sources():
    rng = np.random.default_rng(2)
    counts, of_sources = (1, 700, 3), (0.1, 0.6, 0.3)
    tokens = [rng.integers(1, 10**6, count) for count in counts]
    pairs = zip(of_sources, tokens, strict=True)
    weights = np.concatenate([weight * of / of.sum() for weight, of in pairs])
    units = {"n": 704, "weights": list(of_sources)}
    found = Results("validation", units, {"val_loss": weights}, {}, weights=weights)
    assert found.strata == (slice(0, 1), slice(1, 701), slice(701, 704))
    one = Results("validation", {"n": 704}, {"val_loss": weights}, {}, weights=weights)
    assert one.strata == ()


@pytest.mark.parametrize("count", [12, 40, 150])
def test_the_true_loss_lies_within_two_errors_as_often_as_it_should(count):
    rng = np.random.default_rng(count)
    inside = []
    for _ in range(4000):
        values, tokens = draw_losses(rng, count)
        found = estimate_mean(values + 3, tokens)
        margin = special.stdtrit(found.effective_n - 1, 0.975) * found.se
        inside.append(abs(found.mean - 3) < margin)
    assert np.mean(inside) == pytest.approx(0.95, abs=0.015)
