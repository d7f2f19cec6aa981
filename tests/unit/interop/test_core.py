"""CORE gives nanochat's decisions and means, from a folder or a zip, for every tokenizer and number of ranks.

tests/golden/run_nanochat_core.py recorded what nanochat's own code says.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from golden.run_nanochat_core import model_of
from gpt2lab.config.schema import SystemConfig
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.interop.core import measure_core, read_bundle
from gpt2lab.interop.tasks import TaskResults
from gpt2lab.runs.target import Target
from gpt2lab.tokenizers.interface import Tokenizer
from gpt2lab.tokenizers.opening import open_tokenizer
from own_tasks import write_bundle

ANSWERS = json.loads((Path(__file__).parents[2] / "golden" / "core_nanochat.json").read_text())


class _Named(Target):
    """Weights that are in memory, with a tokenizer."""

    def tokenizer(self) -> Tokenizer:
        return open_tokenizer(self.name)


def measured(answer: dict[str, Any], bundle: Path) -> TaskResults:
    runtime = Runtime()
    runtime.use(SystemConfig(device="cpu"))
    return measure_core(
        read_bundle(bundle, answer["limit"]),
        _Named(answer["tokenizer"], bundle, None),
        model_of(answer),
        strategy=Strategy(runtime, SystemConfig(dtype="fp32")),
        runtime=runtime,
    )


@pytest.mark.parametrize(
    "answer",
    ANSWERS["answers"],
    ids=lambda a: f"{a['tokenizer']}-{a['limit']}-{a['model']['context_length']}",
)
def test_every_decision_and_mean_is_nanochats(answer, tmp_path):
    found = measured(answer, write_bundle(tmp_path))
    limit = answer["limit"]
    for label, decisions in answer["decisions"].items():
        name = f"core/{label}" + (f"-first{limit}" if limit else "")
        assert "".join(f"{right:.0f}" for right in found.items[name].per_unit["acc"]) == decisions
        metrics = found.numbers[name]["metrics"]
        assert metrics["acc"]["value"] == answer["results"][label]
        centered = metrics["centered"]["value"]
        assert centered == pytest.approx(answer["centered_results"][label], abs=1e-12)
    mean = found.numbers["core" + (f"-first{limit}" if limit else "")]["metrics"]["centered"]
    assert mean["value"] == pytest.approx(answer["core_metric"], abs=1e-12)
