"""The lab's statistics: known tables, and in simulation how often intervals, tests and the stopping rule are right.

Bounds on simulated rates are the nominal rate and three binomial standard errors, unless a test says otherwise.
"""

import math

import numpy as np
import pytest
from scipy import stats

from gpt2lab.lab import stats as lab_stats
from gpt2lab.lab.stats import ALPHA, decide, over_seeds, p_of_zero_mean, t_half_width
from tiny import draw_losses


def binomial(rate: float, trials: int) -> float:
    """Return three standard errors of a rate."""
    return 3 * math.sqrt(rate * (1 - rate) / trials)


def test_few_units_are_tested_by_all_signs_and_accuracies_by_discordant_items() -> None:
    assert p_of_zero_mean(np.array([1.0, 2.0, 3.0, 4.0])) == 2 / 16
    assert p_of_zero_mean(np.array([1.0, -1.0])) == 1.0
    assert p_of_zero_mean(np.array([3.0])) is None
    ties = np.array([3.0, 1.0, 2.0, -4.0])  # tenths of them sum to 0.2 with an error
    assert p_of_zero_mean(ties / 10) == p_of_zero_mean(ties) == 14 / 16
    # Discordant items are tosses of a coin.
    a, b = np.zeros(10), np.zeros(10)
    b[:4] = 1  # 4 : 0 looked beyond noise, and is not
    assert lab_stats.p_of_equal_accuracy(a, b) == 0.125
    b[:6] = 1
    assert lab_stats.p_of_equal_accuracy(a, b) == pytest.approx(2 / 64)
    assert lab_stats.p_of_equal_accuracy(b, b) == 1.0


@pytest.mark.parametrize("count", [8, 40, 150])
def test_equal_models_differ_beyond_noise_in_one_of_twenty_cases(count: int) -> None:
    """Four thousand comparisons of models that are equal: 5 % nominal."""
    rng = np.random.default_rng(count)
    found = [p_of_zero_mean(*draw_losses(rng, count)) for _ in range(4000)]
    assert np.mean([p is not None and p < 0.05 for p in found]) == pytest.approx(0.05, abs=0.01)


def test_a_mean_over_seeds_has_the_interval_and_p_value_of_scipy() -> None:
    values = [-0.5, -0.75, -0.4, -0.61]
    found, known = over_seeds(values), stats.ttest_1samp(values, 0)
    interval = known.confidence_interval(0.95)
    assert (found.seeds, found.mean) == (4, pytest.approx(-0.565))
    assert found.p == pytest.approx(known.pvalue, rel=1e-9)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-9)
    alone = over_seeds([0.3])
    assert (alone.mean, alone.sd, alone.low, alone.p) == (0.3, None, None, None)
    assert (over_seeds([0.2, 0.2]).p, over_seeds([0.0, 0.0]).p) == (0.0, 1.0)
    of_items = over_seeds([0.2, 0.2], step=0.1)  # what is rounded to 0.1 differs by 0.1 / sqrt(12)
    assert of_items.p == pytest.approx(2 * stats.t.sf(0.2 / (0.1 / math.sqrt(24)), 1))


def test_holm_adjusts_as_by_hand() -> None:
    """0.01 x 4, then 0.02 x 3, then 0.03 x 2 = 0.06 again, then 0.5; the order of the input stays."""
    assert lab_stats.holm([0.03, 0.01, 0.5, 0.02]) == pytest.approx([0.06, 0.04, 0.5, 0.06])
    assert lab_stats.holm([0.04]) == [0.04]
    assert lab_stats.holm([0.4, 0.9, 0.8]) == pytest.approx([1.0, 1.0, 1.0])
    assert lab_stats.holm([]) == []


@pytest.mark.parametrize("effects", [(0, 0, 0, 0), (0, 0, 0, 3)])
def test_holm_keeps_false_differences_among_settings_that_share_a_baseline(effects):
    """The chance of any false one among four settings of four seeds is 5 % at most; uncorrected, it is far more."""
    rng = np.random.default_rng(1)
    trials, n = 2000, 4
    baseline = rng.normal(size=(trials, 1, n))
    values = rng.normal(np.array(effects)[:, None], 1.0, (trials, len(effects), n)) - baseline
    p = lab_stats.t_p_value(values.mean(axis=-1), values.std(axis=-1, ddof=1) / np.sqrt(n), n - 1)
    null = np.array(effects) == 0
    adjusted = np.array([lab_stats.holm(row) for row in p.tolist()])
    assert (adjusted < ALPHA)[:, null].any(axis=1).mean() < ALPHA + binomial(ALPHA, PATHS)
    assert (p < ALPHA)[:, null].any(axis=1).mean() > 0.10


@pytest.mark.parametrize(("effect", "known"), [(1.0, 10), (0.8, 15), (0.5, 34), (0.2, 199)])
def test_the_number_of_seeds_is_that_of_known_tables(effect: float, known: int) -> None:
    """Cohen's paired designs, two-sided 5 %, power 80 %, as G*Power gives them."""
    assert lab_stats._fewest_seeds(effect * 0.03, 0.03, alpha=ALPHA, sequential=False) == known


@pytest.mark.parametrize("sequential", [False, True])
def test_that_many_seeds_reach_the_power_fewer_do_not_and_spread_needs_more(sequential):
    """A power that is NaN in a far tail once made 6 seeds need 29, and between 61 and 171."""
    trials, effect = 10_000, 1.3
    n = lab_stats._fewest_seeds(effect, 1.0, alpha=ALPHA, sequential=sequential)
    rates = []
    for count in (n - 1, n):
        values = np.random.default_rng(3).normal(effect, 1.0, (trials, count))
        sd = values.std(axis=1, ddof=1)
        half = t_half_width(sd / np.sqrt(count), count - 1)
        if sequential:
            half = lab_stats.sequence_half_width(sd, count)
        rates.append(np.mean(np.abs(values.mean(axis=1)) > half))
    assert rates[1] > lab_stats.POWER - binomial(0.8, trials)
    assert rates[0] < lab_stats.POWER + binomial(0.8, trials)
    how = {"alpha": 0.025, "sequential": sequential}
    deviations = (0.001, 0.004, 0.00684, 0.01096, 0.0269, 0.08)
    found = [lab_stats._fewest_seeds(0.01, sd, **how) for sd in deviations]
    numbers = [count for count in found if count is not None]
    assert (numbers, len(numbers)) == (sorted(numbers), 6)


@pytest.mark.parametrize("n", [2, 5, 30])
def test_the_power_is_that_of_the_noncentral_t(n: int) -> None:
    for effect, critical in ((0.3, 2.0), (1.0, 4.0), (2.0, 3.0)):
        known = stats.nct.sf(critical, n - 1, effect * math.sqrt(n))
        assert lab_stats.power(effect * 0.1, 0.1, n, critical) == pytest.approx(known, abs=3e-4)


def needed(values: list[float], *, sequential: bool = False) -> list[int | None]:
    """Return the seeds that show 0.01, at the low end of the spread, as it is, and at the high end."""
    need = lab_stats.seeds_needed(over_seeds(values), 0.01, sequential=sequential)
    return [need.low, need.seeds, need.high]


def test_one_seed_says_nothing_and_few_say_it_roughly() -> None:
    assert lab_stats.seeds_needed(over_seeds([0.1]), 0.01) is None
    five = np.random.default_rng(2).normal(0, 0.012, 5).tolist()
    counts = [count for count in needed(five) if count is not None]
    assert (len(set(counts)), counts) == (3, sorted(counts))
    assert (needed(five, sequential=True)[1] or 0) > counts[1]
    assert needed([5.0, -5.0])[1:] == [None, None]  # over MOST_SEEDS
    assert needed([0.2, 0.2, 0.2]) == [2, 2, 2]
    assert lab_stats.MOST_SEEDS == 10_000  # as messages say


def test_the_interval_of_a_standard_deviation_holds_it_in_95_of_100_cases() -> None:
    """From four values it is 0.57 to 3.73 times what they show (chi-square tables: 9.348 and 0.216)."""
    assert lab_stats.sd_interval(1.0, 4) == pytest.approx((0.5665, 3.7285), rel=1e-3)
    found = np.random.default_rng(0).normal(0, 2.0, (10_000, 4)).std(axis=1, ddof=1)
    low, high = lab_stats.sd_interval(1.0, 4)
    assert np.mean((low * found < 2.0) & (high * found > 2.0)) == pytest.approx(0.95, abs=0.01)


PATHS, MOST = 10_000, 60


def gaussian(mean: float, seed: int = 0) -> np.ndarray:
    """Return (PATHS, MOST) differences with standard deviation 1."""
    return np.random.default_rng(seed).normal(mean, 1.0, (PATHS, MOST))


def test_the_half_width_is_where_the_martingale_reaches_its_bound() -> None:
    """The closed form against the martingale as it is written in the docstring."""
    values = np.random.default_rng(5).normal(0.4, 0.2, 7)
    n, c2 = len(values), lab_stats._MIXTURE
    half = float(lab_stats.sequence_half_width(values.std(ddof=1), n, 0.02))
    for m in (values.mean() - half, values.mean() + half):
        x = values - m
        squares = (x**2).sum()
        ratio = squares / (squares - x.sum() ** 2 / (n + c2))
        assert math.sqrt(c2 / (n + c2)) * ratio ** (n / 2) == pytest.approx(1 / 0.02)


@pytest.mark.parametrize("alpha", [0.05, 0.0125])
def test_looking_after_each_seed_finds_a_false_difference_in_at_most_5_of_100_cases(alpha):
    """Student's t, looked at as often, finds one in a quarter of the cases."""
    values = gaussian(0.0)
    mean, half = lab_stats.look(values, alpha=alpha)
    assert alpha / 10 < (np.abs(mean) > half).any(axis=-1).mean() < alpha + binomial(alpha, PATHS)
    peeked = np.zeros(PATHS, bool)
    for n in range(2, 21):
        part = values[:, :n]
        half = t_half_width(part.std(axis=1, ddof=1) / np.sqrt(n), n - 1, alpha)
        peeked |= np.abs(part.mean(axis=1)) > half
    assert peeked.mean() > 3 * alpha


@pytest.mark.parametrize("mean", [0.0, 0.1, 0.5, 0.75, 1.5, 4.0])
def test_the_stopping_rule_keeps_its_errors_and_its_coverage(mean: float) -> None:
    """Stop when 0 is excluded or the interval lies within +-0.5; wrong decisions and missed means are 5 % at most."""
    found = [decide(path, smallest=0.5) for path in gaussian(mean, seed=1)]
    assert np.mean([one.low <= mean <= one.high for one in found]) > 0.95 - binomial(0.05, PATHS)
    estimate, decision = np.array([(one.mean, one.decision) for one in found]).T
    wrong_sign = np.sign(estimate.astype(float)) != np.sign(mean)
    wrong = (decision == "differs") & wrong_sign | (decision == "equal") & (mean >= 0.5)
    assert wrong.mean() < ALPHA + binomial(ALPHA, PATHS)
    if mean >= 1.5:
        assert np.mean(decision == "differs") > 0.99
        assert np.median([one.seeds for one in found]) < (12 if mean < 4 else 6)


def test_a_clear_difference_stops_at_once_and_an_unclear_one_does_not() -> None:
    clear = decide([0.51, 0.50, 0.49, 9.0, -9.0], smallest=0.01)
    assert (clear.decision, clear.seeds) == ("differs", 3)  # what comes later changes nothing
    assert clear.low > 0
    assert clear.mean == pytest.approx(0.5)
    same = decide([1e-4, -2e-4, 1e-4, 0.0], smallest=0.01)
    assert (same.decision, same.seeds) == ("equal", 3)
    unclear = decide([0.3, -0.2, 0.1, 0.0], smallest=0.01)
    assert (unclear.decision, unclear.seeds) == (None, 4)
    few = decide([0.3, 0.2], smallest=0.01)
    assert (few.decision, few.low, few.high) == (None, None, None)
    assert [lab_stats.first_bounded(alpha) for alpha in (0.05, 0.025, 0.05 / 4)] == [3, 4, 4]
    identical = decide([0.0, 0.0, 0.0], smallest=0.01)
    assert (identical.decision, identical.low) == ("equal", 0.0)


def test_a_decision_is_the_same_however_many_seeds_come_at_a_time() -> None:
    """`decide` over the first k seeds, for each k: once there is a decision, more seeds repeat it."""
    rng = np.random.default_rng(8)
    for _ in range(50):
        values = rng.normal(1.0, 1.0, 30).tolist()
        whole = decide(values, smallest=0.3)
        for k in range(whole.seeds if whole.decision else 30, 31, 7):
            assert decide(values[:k], smallest=0.3) == whole
