"""HellaSwag: the scorer against brute force, the same numbers on any share of the work, bad items named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gpt2lab.config import ModelConfig, SystemConfig
from gpt2lab.data.hellaswag_items import load_items, tokenize
from gpt2lab.data.tokenizer import gpt2_encoding
from gpt2lab.errors import DataError
from gpt2lab.hellaswag import HellaSwag
from gpt2lab.model import GPT, build_model
from gpt2lab.parallel import Strategy
from gpt2lab.runtime import Runtime

VERBS = ("opens", "paints", "drops", "lifts", "cleans", "forgets")


def write_items(path: Path, count: int = 12) -> Path:
    """Write self-made items in HellaSwag's format."""
    rng = np.random.RandomState(0)
    rows = []
    for index in range(count):
        nouns = [f"box {number}" for number in rng.randint(0, 99, 5)]
        endings = [
            f"{VERBS[(index + k) % 6]} the {nouns[k]} [step] slowly" * (k + 1) for k in range(4)
        ]
        rows.append(
            {
                "ind": index,
                "activity_label": "Moving house",
                "ctx_a": f"A man carries a {nouns[4]}.",
                "ctx_b": "he then",
                "ctx": f"A man carries a {nouns[4]}. he then",
                "endings": endings,
                "label": int(rng.randint(4)),
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def model() -> GPT:
    """Return a small random model whose scores are far apart."""
    config = ModelConfig(n_layer=1, n_head=2, n_embd=16, context_length=64)
    model = build_model(config, seed=3, device=torch.device("cpu"))
    with torch.no_grad():
        model.wte.weight.mul_(20)
    return model


def measure(model: GPT, path: Path, runtime: Runtime) -> dict[str, float | int | None]:
    strategy = Strategy(runtime, compile=False, dtype="fp32")
    result = HellaSwag.of(load_items(path), strategy=strategy, runtime=runtime).measure(model)
    assert result is not None
    return result


def logprob(model: GPT, context: list[int], ending: list[int]) -> float:
    """Score one ending token by token: the slow and obvious way."""
    total = 0.0
    for i, token in enumerate(ending):
        ids = torch.tensor([context + ending[:i]])
        with torch.no_grad():
            scores = model.logits(ids)[0, -1, :50257].double()
        total += float(scores[token] - scores.logsumexp(0))
    return total


def test_accuracies_equal_brute_force(model: GPT, tmp_path: Path) -> None:
    path = write_items(tmp_path / "items.jsonl")
    encode = gpt2_encoding().encode_ordinary
    hits: dict[str, list[bool]] = {"acc": [], "acc_norm": [], "acc_token_norm": []}
    for row in map(json.loads, path.read_text().splitlines()):
        context = encode(f"Moving house: {row['ctx_a']} {row['ctx_b'].capitalize()}")
        endings = [ending.replace("[step]", "").replace("  ", " ") for ending in row["endings"]]
        sums = [logprob(model, context, encode(" " + ending)) for ending in endings]
        per_byte = [s / len(ending.encode()) for s, ending in zip(sums, endings, strict=True)]
        plain = [encode(" " + ending) for ending in row["endings"]]
        per_token = [logprob(model, encode(row["ctx"]), ids) / len(ids) for ids in plain]
        for name, scores in zip(hits, (sums, per_byte, per_token), strict=True):
            hits[name].append(int(np.argmax(scores)) == row["label"])
    result = measure(model, path, Runtime())
    assert result["n"] == 12
    for name, expected in hits.items():
        assert result[name] == pytest.approx(np.mean(expected))
        assert result[f"{name}_se"] == pytest.approx(np.std(expected, ddof=1) / np.sqrt(12))
    assert any(0 < np.mean(expected) < 1 for expected in hits.values()), "the items must tell"


def test_a_share_of_the_items_each_adds_up_to_the_whole(model: GPT, tmp_path: Path) -> None:
    """Three processes' shares, taken one after another, hold each item once."""
    items = load_items(write_items(tmp_path / "items.jsonl"))
    shares: list[np.ndarray] = []

    class Share(Runtime):
        def gather(self, value: np.ndarray) -> list[np.ndarray]:
            shares.append(value)
            return shares

    for rank in range(3):
        runtime = Share()
        runtime.use(SystemConfig(device="cpu"))
        runtime.rank, runtime.world_size = rank, 3
        strategy = Strategy(runtime, compile=False, dtype="fp32")
        result = HellaSwag.of(items, strategy=strategy, runtime=runtime).measure(model)
    assert result == measure(model, tmp_path / "items.jsonl", Runtime())


def test_the_subset_is_the_same_every_time(tmp_path: Path) -> None:
    path = write_items(tmp_path / "items.jsonl", count=40)
    subset = load_items(path, limit=10)
    assert len(subset) == 10
    assert subset == load_items(path, limit=10)
    assert subset != load_items(path)[:10]
    assert set(subset) <= set(load_items(path))


def test_a_long_context_is_cut_on_the_left(model: GPT, tmp_path: Path) -> None:
    row = json.loads(write_items(tmp_path / "items.jsonl", 1).read_text())
    row["ctx_a"] = row["ctx"] = "word " * 300
    (tmp_path / "long.jsonl").write_text(json.dumps(row))
    question = tokenize(load_items(tmp_path / "long.jsonl")[0], "harness")
    assert len(question.context) > model.config.context_length
    assert measure(model, tmp_path / "long.jsonl", Runtime())["n"] == 1


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"ctx": "a", "endings": ["b"], "label": 0}',
        '{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 4}',
        '{"endings": ["b", "c", "d", "e"], "label": 1}',
    ],
)
def test_a_broken_item_is_named(line: str, tmp_path: Path) -> None:
    path = write_items(tmp_path / "items.jsonl", 2)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError, match="line 3"):
        load_items(path)
