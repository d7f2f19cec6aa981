"""HellaSwag equals the reference harness: log-likelihoods and every decision of lm-eval on self-written items.

`python THIS_FILE ITEMS.jsonl OUT.json` does the same for any items and the answer of
tests/golden/run_lm_eval.py.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "src"))  # for `python tests/...`
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import pytest
import torch

from gpt2lab.config.schema import ModelConfig
from gpt2lab.evaluation.hellaswag import HellaSwag, summarize
from gpt2lab.evaluation.hellaswag_items import load_questions
from gpt2lab.evaluation.results import Results
from gpt2lab.model.gpt import build_model
from gpt2lab.tokenizers.gpt2 import GPT2
from one_process import Alone

GOLDEN = Path(__file__).parents[2] / "golden"


def agreement(items: Path, answer: dict[str, Any]) -> tuple[float, dict[str, int], Results]:
    """Return the largest relative difference of a log-likelihood, the decisions that differ, and our results.

    The model is the one that run_lm_eval.py built, with padding rows that must not count.
    """
    built = answer["model"]
    shape = {name: built[name] for name in ("n_layer", "n_head", "n_embd", "context_length")}
    model = build_model(ModelConfig(**shape), seed=built["seed"], device=torch.device("cpu"))
    with torch.no_grad():
        model.wte.weight *= built["gain"]
        model.wte.weight[50257:] = 100.0
    questions, length = load_questions(items, GPT2), built["context_length"]
    scorer = HellaSwag(questions, context_length=length, strategy=Alone("fp32"))
    ours = scorer.measure(model)
    theirs = np.array([item["nats"] for item in answer["items"]])
    difference = np.abs(ours.details["harness_nats"] - theirs) / np.abs(theirs)
    metrics = ("acc", "acc_norm")
    answers = {name: [item[name] for item in answer["items"]] for name in metrics}
    wrong = {name: int((ours.per_unit[name] != answers[name]).sum()) for name in metrics}
    return float(difference.max()), wrong, ours


@pytest.mark.parametrize("name", ["hellaswag_lm_eval.json", "hellaswag_lm_eval_short.json"])
def test_every_score_and_decision_equals_the_harness(name, tmp_path):
    """In the short one the model's context holds 24 tokens, so that most items are cut on the left."""
    answer = json.loads((GOLDEN / name).read_text())
    items = tmp_path / "items.jsonl"
    items.write_bytes((GOLDEN / "hellaswag_items.jsonl").read_bytes())
    difference, wrong, ours = agreement(items, answer)
    assert difference < 2e-5
    assert wrong == {"acc": 0, "acc_norm": 0}
    summary = summarize(ours)
    for metric in ("acc", "acc_se", "acc_norm", "acc_norm_se"):
        assert summary[metric] == pytest.approx(answer[metric], rel=1e-12)
    assert 0 < answer["acc"] < 1
    assert [i["acc"] for i in answer["items"]] != [i["acc_norm"] for i in answer["items"]]


if __name__ == "__main__":
    answer = json.loads(Path(sys.argv[2]).read_text())
    difference, wrong, ours = agreement(Path(sys.argv[1]), answer)
    likelihoods = f"{4 * ours.n} log-likelihoods"
    print(f"{ours.n} items, {likelihoods}: largest relative difference {difference:.2e}")
    print(f"decisions that differ: acc {wrong['acc']}, acc_norm {wrong['acc_norm']}")
    for metric in ("acc", "acc_se", "acc_norm", "acc_norm_se"):
        print(f"{metric}: lm-eval {answer[metric]!r}, ours {summarize(ours)[metric]!r}")
