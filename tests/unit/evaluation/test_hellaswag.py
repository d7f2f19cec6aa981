"""HellaSwag: the scorer against brute force, and the same numbers for any batch and any share of the work."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpt2lab.config.schema import ModelConfig
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.errors import NonFiniteError
from gpt2lab.evaluation.hellaswag import (
    BATCH_TOKENS,
    HellaSwag,
    cut_batches,
    judge,
    make_rows,
    summarize,
)
from gpt2lab.evaluation.hellaswag_items import STYLES, load_questions
from gpt2lab.evaluation.results import Results
from gpt2lab.model.gpt import GPT, build_model
from gpt2lab.tokenizers.gpt2 import GPT2, gpt2_encoding
from one_process import Alone
from tiny import write_items


@pytest.fixture(scope="module")
def model() -> GPT:
    """Return a small random model whose scores are far apart."""
    config = ModelConfig(n_layer=1, n_head=2, n_embd=16, context_length=64)
    model = build_model(config, seed=3, device=torch.device("cpu"))
    with torch.no_grad():
        model.wte.weight.mul_(20)
    return model


def measure(model: GPT, path: Path, strategy: Strategy | None = None, **how: Any) -> Results:
    questions, length = load_questions(path, GPT2), model.config.context_length
    strategy = strategy or Alone("fp32")
    return HellaSwag(questions, context_length=length, strategy=strategy, **how).measure(model)


def logprob(model: GPT, context: list[int], ending: list[int]) -> float:
    """Score one ending token by token: the slow and obvious way."""
    total = 0.0
    for i, token in enumerate(ending):
        ids = torch.tensor([context + ending[:i]])
        with torch.no_grad():
            scores = model(ids)[0, -1, :50257].double()
        total += float(scores[token] - scores.logsumexp(0))
    return total


def test_one_text_alone_gives_its_metrics_and_leaves_out_the_other(model, tmp_path):
    path = write_items(tmp_path / "items.jsonl")
    both = summarize(measure(model, path))
    harness = summarize(measure(model, path, metrics="harness"))
    tutorial = summarize(measure(model, path, metrics="tutorial"))
    lineage = {name: value for name, value in both.items() if name.startswith("acc_token_norm")}
    assert None not in both.values()
    assert harness == both | dict.fromkeys(lineage)
    assert tutorial == dict.fromkeys(both) | {"n": 12} | lineage


def test_accuracies_equal_brute_force(model, tmp_path):
    path = write_items(tmp_path / "items.jsonl")
    encode = gpt2_encoding().encode_ordinary
    hits: dict[str, list[bool]] = {"acc": [], "acc_norm": [], "acc_token_norm": []}
    for row in map(json.loads, path.read_text().splitlines()):
        context = encode(f"Moving house: {row['ctx_a']} {row['ctx_b'].capitalize()}")
        endings = [ending.replace("[step]", "").replace("  ", " ") for ending in row["endings"]]
        sums = [logprob(model, context, encode(" " + ending)) for ending in endings]
        per_character = [s / len(ending) for s, ending in zip(sums, endings, strict=True)]
        plain = [encode(" " + ending) for ending in row["endings"]]
        per_token = [logprob(model, encode(row["ctx"]), ids) / len(ids) for ids in plain]
        for name, scores in zip(hits, (sums, per_character, per_token), strict=True):
            hits[name].append(int(np.argmax(scores)) == row["label"])
    result = summarize(measure(model, path))
    assert result["n"] == 12
    for name, expected in hits.items():
        assert result[name] == pytest.approx(np.mean(expected))
        assert result[f"{name}_se"] == pytest.approx(np.std(expected, ddof=1) / np.sqrt(12))
    assert any(0 < np.mean(expected) < 1 for expected in hits.values()), "the items must tell"


def test_an_ending_beyond_the_context_is_judged_by_the_tokens_that_have_a_score(tmp_path):
    questions = load_questions(write_items(tmp_path / "items.jsonl"), GPT2)
    lengths = np.minimum(questions.lengths("tutorial")[:, 1:], 2)
    assert lengths.min() == 2
    sums = {"tutorial": np.random.default_rng(0).normal(size=lengths.shape)}
    found = judge(questions, sums, context_length=2).per_unit["acc_token_norm"]
    assert (found == (sums["tutorial"].argmax(axis=1) == questions.labels)).all()


@pytest.mark.parametrize("world", [2, 4])
def test_any_number_of_processes_gives_the_same_bits(world, model, tmp_path):
    """The processes' shares, taken one after another: batches are dealt, never cut anew."""
    path = write_items(tmp_path / "items.jsonl")
    whole = measure(model, path, batch_tokens=100)
    shares: list[np.ndarray] = []

    def collect(value: np.ndarray) -> list[np.ndarray]:
        shares.append(value)
        return shares

    for rank in range(world):
        strategy = Alone("fp32")
        strategy.runtime.rank, strategy.runtime.world_size = rank, world
        strategy.runtime.gather = collect  # type: ignore[method-assign,assignment]
        together = measure(model, path, strategy, batch_tokens=100)  # complete after the last one
    assert all(np.count_nonzero(share) for share in shares), "every process has work"
    assert sum(map(np.count_nonzero, shares)) == 2 * 4 * 12, "and no two have the same"
    for name in whole.details:
        np.testing.assert_array_equal(together.details[name], whole.details[name])
    for name in whole.per_unit:
        np.testing.assert_array_equal(together.per_unit[name], whole.per_unit[name])


def test_any_batch_size_picks_the_same_and_scores_within_rounding(model, tmp_path):
    path = write_items(tmp_path / "items.jsonl", count=30)
    one_by_one = measure(model, path, batch_tokens=1)
    for batch_tokens in (150, BATCH_TOKENS["cpu"], 10**9):
        other = measure(model, path, batch_tokens=batch_tokens)
        for style in STYLES:
            found = [one.details[f"{style}_nats"] for one in (other, one_by_one)]
            np.testing.assert_allclose(*found, rtol=1e-6)
        for name, right in one_by_one.per_unit.items():
            np.testing.assert_array_equal(other.per_unit[name], right)


def test_batches_hold_each_row_once_and_do_not_waste(tmp_path):
    path = write_items(tmp_path / "items.jsonl", count=40)
    pieces = load_questions(path, GPT2).sequences["harness"]
    batches = cut_batches(make_rows(pieces, context_length=64), batch_tokens=300)
    slots = sorted(slot for batch in batches for row in batch for slot in row.slots)
    assert slots == list(range(160))
    assert all(len(batch) * len(batch[0]) <= 300 for batch in batches)
    assert all(len(batch[-1]) >= 0.85 * len(batch[0]) for batch in batches)


def test_the_subset_is_the_same_every_time(tmp_path):
    questions = load_questions(write_items(tmp_path / "items.jsonl", count=40), GPT2)
    subset = questions.subset(10)
    assert len(subset) == 10
    assert subset.fingerprint == questions.subset(10).fingerprint != questions.fingerprint
    assert questions.subset(0) is questions.subset(40) is questions
    for style in STYLES:
        everything = [b"".join(p.tobytes() for p in item) for item in questions.sequences[style]]
        chosen = [b"".join(p.tobytes() for p in item) for item in subset.sequences[style]]
        places = [everything.index(item) for item in chosen]
        assert places == sorted(places)
        assert places != list(range(10))
        assert [questions.labels[i] for i in places] == list(subset.labels)


def test_a_long_context_is_cut_on_the_left(model, tmp_path):
    """Only the last words count: one word more at the front changes nothing."""
    row = json.loads(write_items(tmp_path / "items.jsonl", 1).read_text())
    sums = []
    for count in (300, 301):
        row["ctx_a"] = row["ctx"] = "word " * count + "end."
        (tmp_path / "long.jsonl").write_text(json.dumps(row))
        pieces = load_questions(tmp_path / "long.jsonl", GPT2).sequences["harness"]
        assert len(make_rows(pieces, context_length=64)) == 4
        sums.append(measure(model, tmp_path / "long.jsonl").details["harness_nats"])
    np.testing.assert_array_equal(sums[0], sums[1])
    assert np.isfinite(sums[0]).all()
    (row,) = make_rows([[np.arange(3), np.arange(70)]], context_length=64)
    assert (row.context.tolist(), row.endings[0].tolist()) == ([5], list(range(6, 70)))


def test_broken_weights_are_rejected_and_an_evaluation_asked_to_stop_has_no_result(model, tmp_path):
    """They would always pick the first."""
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.ln_f.bias[0] = torch.nan
    with pytest.raises(NonFiniteError, match="scores are not finite"):
        measure(broken, write_items(tmp_path / "items.jsonl"))
    questions = load_questions(tmp_path / "items.jsonl", GPT2)
    scorer = HellaSwag(questions, context_length=64, strategy=Alone("fp32"))
    model.train()
    assert scorer.measure(model, interrupted=lambda: True) is None
    assert model.training
