"""What nanochat says about CORE's tasks, for small models that our seed makes and a bundle of self-written items.

    git clone https://github.com/karpathy/nanochat && git -C nanochat checkout 92d63d4e8bb4
    PYTHONPATH=src:tests python tests/golden/run_nanochat_core.py nanochat tests/golden/core_nanochat.json

`test_core.py` compares ours with the output. nanochat's own evaluate_core runs, with our tokenizers behind its
interface.
"""

import json
import os
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch

from gpt2lab.config.schema import ModelConfig
from gpt2lab.model.gpt import GPT, build_model
from gpt2lab.tokenizers.named import open_tokenizer
from own_tasks import write_bundle

GAIN = 20.0  # spreads the scores, so that a wrong one would show; `mixing`: lets the context count
_GPT2 = {"n_layer": 2, "n_head": 2, "n_embd": 32, "context_length": 256}
_ROTARY = {"positions": "rotary", "norm": "rmsnorm", "context_length": 512}
# In the second, most examples are cut; the third draws them from 8 items.
SETTINGS: list[dict[str, Any]] = [
    {"tokenizer": "gpt2", "limit": None, "seed": 4, "mixing": 6, "model": _GPT2},
    {
        "tokenizer": "gpt2",
        "limit": None,
        "seed": 4,
        "mixing": 6,
        "model": _GPT2 | {"context_length": 24},
    },
    {"tokenizer": "gpt2", "limit": 8, "seed": 4, "mixing": 6, "model": _GPT2},
    {
        **{"tokenizer": "bytes", "limit": None, "seed": 5, "mixing": 10},
        "model": _GPT2 | _ROTARY | {"num_tokens": 257, "vocab_size": 272},
    },
]


def model_of(setting: dict[str, Any]) -> GPT:
    """Build a model with padding rows that must not count."""
    config = ModelConfig(**setting["model"])
    model = build_model(config, seed=setting["seed"], device=torch.device("cpu"))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight *= GAIN if name == "wte.weight" else setting["mixing"] if weight.ndim == 2 else 1
        model.wte.weight[config.num_tokens :] = 100.0
    return model.eval()


class _Model:
    """A model as nanochat calls it: ids to the logits of real ids."""

    def __init__(self, setting: dict[str, Any]) -> None:
        self.model = model_of(setting)
        self.max_seq_len = self.model.config.context_length

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids)[..., : self.model.config.num_tokens].contiguous()


class _Tokenizer:
    def __init__(self, name: str) -> None:
        self.ours = open_tokenizer(name)

    def get_bos_token_id(self) -> int:
        return self.ours.end_of_text

    def __call__(self, texts: list[str], prepend: int) -> list[list[int]]:
        return [[prepend, *self.ours.encode(text)] for text in texts]


def main(peer: str, out: str) -> None:
    """Run nanochat's evaluation with each setting, and write down its numbers and every decision."""
    sys.path.insert(0, peer)
    sys.modules["rustbpe"] = types.ModuleType("rustbpe")  # trains tokenizers; imported, not used
    from nanochat import core_eval

    from scripts import base_eval

    decisions: list[str] = []
    judge = core_eval.evaluate_example

    def kept(number: int, *more: Any) -> bool:
        decisions.extend([""] if number == 0 else [])
        decisions[-1] += str(int(right := judge(number, *more)))
        return right

    core_eval.evaluate_example = kept
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NANOCHAT_BASE_DIR"] = folder
        write_bundle(Path(folder) / "eval_bundle")
        answers = []
        for setting in SETTINGS:
            decisions.clear()
            found = base_eval.evaluate_core(
                _Model(setting),
                _Tokenizer(setting["tokenizer"]),
                torch.device("cpu"),
                max_per_task=setting["limit"] or -1,
            )
            right = dict(zip(found["results"], decisions, strict=True))
            answers.append({**setting, **found, "decisions": right})
    command = ["git", "-C", peer, "rev-parse", "HEAD"]
    commit = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    Path(out).write_text(json.dumps({"nanochat": commit, "answers": answers}, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
