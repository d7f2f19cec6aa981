"""Two settings over the same seeds: which error answers which question, and what is said of them in words."""

import json
from dataclasses import asdict

import numpy as np
import pytest

from gpt2lab.evaluation.results import Results
from gpt2lab.evaluation.uncertainty import estimate_mean
from gpt2lab.lab import compare
from gpt2lab.lab.ablation import _spent_line
from gpt2lab.lab.over_seeds import Comparison, compare_all, comparison_table, over_units, sentence
from gpt2lab.lab.stats import over_seeds


def results(losses: np.ndarray, weights: np.ndarray | None = None, text: str = "x") -> Results:
    units = {"n": len(losses), "unit": "document", "windows": text}
    return Results("validation", units, {"val_loss": losses}, {}, weights=weights)


def test_documents_are_paired_where_both_evaluated_the_same() -> None:
    rng = np.random.default_rng(0)
    hard, weights = rng.normal(3, 1, 40), rng.integers(10, 1000, 40).astype(float)
    a = [results(hard + rng.normal(0, 0.1, 40), weights) for _ in range(3)]
    b = [results(hard - 0.2 + rng.normal(0, 0.1, 40), weights) for _ in range(3)]
    found = over_units(a, b, "val_loss")
    means = [np.mean([one.per_unit["val_loss"] for one in runs], axis=0) for runs in (a, b)]
    known = estimate_mean(means[1] - means[0], weights)
    assert (found.paired, found.n, found.unit) == (True, 40, "document")
    assert found.mean == pytest.approx(known.mean)
    assert (found.low + found.high) / 2 == pytest.approx(known.mean)
    assert 1.9 * known.se < found.high - known.mean < 2.3 * known.se  # t, effective n about 25
    assert found.high < 0

    others = [results(one.per_unit["val_loss"], weights, "y") for one in b]
    apart = over_units(a, others, "val_loss")
    assert (apart.paired, apart.mean) == (False, pytest.approx(found.mean))
    errors = [estimate_mean(m, weights).se or 0.0 for m in means]
    ratio = (apart.high - apart.low) / (found.high - found.low)
    assert ratio == pytest.approx(np.hypot(*errors) / known.se, rel=1e-6)  # the same effective n
    assert apart.low < 0 < apart.high  # what is hard for both does not cancel
    # What no document can tell.
    one = over_units([results(np.array([3.0]))], [results(np.array([2.0]))], "val_loss")
    assert (one.mean, one.low, one.high) == (-1.0, None, None)
    mixed = [results(np.ones(4)), results(np.ones(4), text="y")]
    assert over_units(mixed, mixed, "val_loss") is None
    long = [results(np.array([3.0, 2.0]), np.array([100.0, 1.0]))]  # 0.02 degrees of freedom
    assert over_units(long, long, "val_loss").low is None


def test_items_of_unequal_weight_are_not_counted_alike() -> None:
    """B is right in 8 of 10 items that weigh half of all, and 6 of 1,000 others fewer."""
    weights = np.repeat([0.05, 0.0005], [10, 1000])
    a, b = np.zeros(1010), np.zeros(1010)
    b[:8], a[10:30], b[30:44] = 1.0, 1.0, 1.0
    found = compare._difference("val_loss", results(a, weights), results(b, weights))
    assert found.difference == pytest.approx(0.397)
    assert found.p is not None
    assert found.p < 0.01
    plain = compare._difference("val_loss", results(a), results(b))
    assert plain.p == pytest.approx(0.88, abs=0.01), "McNemar: 22 against 20"


def test_each_error_answers_its_own_question() -> None:
    """Losses of 5 seeds over 30 documents: effects of the seed, of the document, and of both together.

    Over seeds, the truth is the mean over all seeds on these documents; over documents, the mean over all documents of
    these seeds. Each interval holds its own truth in 95 % of cases, and the other's far less often.
    """
    rng = np.random.default_rng(4)
    trials, hits = 3000, np.zeros((2, 2))
    for _ in range(trials):
        of_seed, of_document = rng.normal(0, 0.02, 5), rng.normal(0, 0.3, 30)
        losses = of_seed[:, None] + of_document + rng.normal(0, 0.05, (5, 30))
        seeds = over_seeds(losses.mean(axis=1).tolist())
        nothing = [results(np.zeros(30))] * 5
        units = over_units(nothing, [results(row) for row in losses], "val_loss")
        truths = (of_document.mean(), of_seed.mean())
        for row, found in enumerate((seeds, units)):
            hits[row] += [found.low < truth < found.high for truth in truths]
    rates = hits / trials
    assert rates[0, 0] == pytest.approx(0.95, abs=0.015)
    assert rates[1, 1] == pytest.approx(0.95, abs=0.015)
    assert rates[0, 1] < 0.6  # documents vary more than seeds here


def only(differences: list[float], **more: bool | float) -> Comparison:
    (found,) = compare_all("gpt2", {"modern": differences}, {}, **more)
    return found


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([-0.11, -0.12, -0.13, -0.125, -0.115], "better"),
        *(([0.11, 0.12, 0.13], "worse"), ([1e-3, -1e-3, 2e-3, -2e-3], "equal")),
        *(([0.02, -0.03, 0.01, 0.0], "not decided"), ([0.5], "not decided")),
    ],
    ids=str,
)
def test_seeds_that_were_chosen_before_get_a_t_interval(differences, verdict, wording):
    found = only(differences)
    assert found.verdict == verdict
    wording(sentence(found))


def test_a_sequence_says_when_it_stopped() -> None:
    found = only([-0.50, -0.51, -0.49, -0.3], until_decided=True)
    assert (found.verdict, found.sequential.seeds) == ("better", 3)
    said = "modern is better than gpt2 by 0.50 nats (95 % confidence sequence 0."
    assert sentence(found).startswith(said)
    assert " after 3 seeds)" in sentence(found)
    assert comparison_table([found])[1][2:4] == ["3", "-0.5000"], "the seeds of the interval"
    few = only([-0.5, -0.51], until_decided=True)
    assert sentence(few).endswith("nats after 2 seeds, too few for an interval.")
    unclear = only([0.02, -0.03, 0.01, 0.0], until_decided=True)
    assert unclear.verdict == "not decided"
    fixed = only([0.02, -0.03, 0.01, 0.0])
    assert (unclear.seeds_needed.seeds or 0) > (fixed.seeds_needed.seeds or 0)
    # Student's t does not hold for seeds that were added until a decision.
    assert (unclear.p_holm, fixed.p_holm is None) == (None, False)
    heads = [set(comparison_table([one])[0]) for one in (unclear, fixed)]
    assert heads[0] - heads[1] == {"confidence sequence"}
    assert heads[1] - heads[0] == {"95 % over seeds", "p (Holm)"}


def test_several_settings_are_corrected() -> None:
    """Alone the weak setting's p is 0.03; among four it is not enough, and the sentence says why."""
    weak = [-0.010, -0.016, -0.004, -0.018, -0.001]
    assert only(weak).verdict == "better"
    clear = [-0.5, -0.51, -0.52, -0.5, -0.49]
    noise = [0.1, -0.1, 0.05, -0.02, 0.0]
    found = compare_all("gpt2", {"weak": weak, "clear": clear, "x": noise, "y": noise}, {})
    assert [one.verdict for one in found] == ["not decided", "better", "not decided", "not decided"]
    assert "; corrected for all settings, p is 0." in sentence(found[0])
    (alone,) = compare_all("gpt2", {"weak": weak}, {}, tests=4)  # three diverged
    assert alone.p_holm == pytest.approx(4 * (only(weak).p_holm or 0.0))
    sequences = compare_all("gpt2", {"weak": weak, "clear": clear}, {}, until_decided=True)
    assert [one.sequential.confidence for one in sequences if one.sequential] == [0.975, 0.975]
    assert json.loads(json.dumps([asdict(one) for one in sequences]))


def test_the_sentence_says_what_other_documents_would_show() -> None:
    rng = np.random.default_rng(1)
    losses = rng.normal(3, 0.2, 12)
    of_a, of_b = [results(losses)], [results(losses - 0.1 + rng.normal(0, 0.01, 12))]
    differences = {"modern": [-0.1, -0.11, -0.09]}
    (clear,) = compare_all("gpt2", differences, {"modern": over_units(of_a, of_b, "val_loss")})
    assert "; on other documents -0.1" in sentence(clear)
    assert sentence(clear).endswith(" (95 %, 12 documents).")
    of_c = [results(losses - 0.1 + rng.normal(0, 0.5, 12), text="y")]
    units = {"modern": over_units(of_a, of_c, "val_loss")}
    (vague,) = compare_all("gpt2", differences, units)
    assert sentence(vague).endswith("12 documents, not paired), either sign is possible.")
    # All seeds see the same difference of the documents, so they alone decide nothing.
    alike = {"modern": [0.001, 0.0011, 0.0009]}
    (equal,) = compare_all("gpt2", alike, units)
    assert (clear.verdict, vague.verdict, equal.verdict) == ("better", *["not decided"] * 2)
    assert "its own documents, and seeds cannot show what that changes" in sentence(vague)
    # A larger budget of seeds would not change that.
    (decided,) = compare_all("gpt2", {"modern": [-0.5, -0.51, -0.49]}, units, until_decided=True)
    assert (decided.verdict, decided.sequential.decision) == ("not decided", "differs")
    spent = {"seeds": 3, "max_seeds": 3, "runs": 6, "tokens": 6, "step_seconds": 1.0}
    assert _spent_line(spent, [decided]).endswith(" 6 tokens, 1s in training steps.")
