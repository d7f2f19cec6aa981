"""scripts/export_hf.py: what transformers loads from it is the run's model, and nothing half-made appears."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import safetensors
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from corpora import snapshot
from ecosystem import works_with
from gpt2lab.errors import ConfigError
from gpt2lab.interop import export as exporting
from gpt2lab.interop.export import export
from gpt2lab.interop.model_card import _quoted, write_card
from gpt2lab.model.hf_weights import load_hf
from gpt2lab.runs.target import find_target
from gpt2lab.runs.weights import load_weights
from gpt2lab.tokenizers.gpt2 import gpt2_encoding
from launch import ask, events, rejected
from tiny import CONTEXT, VOCAB, flags_of, parse, pretrain, write_inputs


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with the runs `big` (GPT-2's vocabulary, padded) and `small` (256 ids); treat as read-only."""
    folder = write_inputs(tmp_path_factory.mktemp("export"), items=20)
    pretrain(parse(flags_of(folder, "big", "--dropout=0.1", "--hellaswag_metrics=harness")))
    pretrain(parse(flags_of(folder, "small", f"--vocab_size={VOCAB}")))
    (folder / "runs" / "small" / "estimate.json").unlink()
    hours = {"estimated_hours": 1.0, "low_hours": 0.5, "high_hours": 2.0}
    estimate = {"estimate": hours, "actual": {"hours": 1.5}}
    (folder / "runs" / "big" / "estimate.json").write_text(json.dumps(estimate))
    return folder


def ours(folder: Path, name: str) -> dict[str, torch.Tensor]:
    model = load_weights(find_target(name, folder / "runs"))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_a_round_trip_gives_the_same_bits_and_a_report_of_the_check(folder, tmp_path):
    out = tmp_path / "deep" / "big"
    answer = ask("export_hf.py", "big", f"--out={out}", "--json", folder=folder)
    assert answer["out"] == str(out)
    assert answer["max_abs_diff"] <= 1e-5 * max(1.0, answer["max_abs_logit"])
    tensors = ours(folder, "big")
    real = {**tensors, "wte.weight": tensors["wte.weight"][:50257]}
    assert answer["parameters"] == sum(tensor.numel() for tensor in real.values())
    back = dict(load_hf(out).named_parameters())
    assert set(back) == set(real)
    for name, tensor in real.items():
        assert torch.equal(back[name][: len(tensor)], tensor), name
    assert {*snapshot(tmp_path / "deep")} == {"big"} | {
        f"big/{name}"
        for name in (
            *("config.json", "generation_config.json", "model.safetensors", "README.md"),
            *("merges.txt", "vocab.json", "tokenizer_config.json", "special_tokens_map.json"),
        )
    }
    # The file holds the head once, and says that it is PyTorch's.
    with safetensors.safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        names = set(file.keys())
        assert file.get_slice("transformer.wte.weight").get_shape() == [50257, 16]
    assert "lm_head.weight" not in names
    config = json.loads((out / "config.json").read_text())
    assert (config["vocab_size"], config["n_positions"]) == (50257, CONTEXT)
    assert [config[name] for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")] == [0, 0, 0]


def test_transformers_generates_from_it_by_the_names_that_people_use(folder, tmp_path):
    works_with("transformers", version("transformers"), "exports load, tokenize and generate")
    ask("export_hf.py", "big", f"--out={tmp_path / 'x'}", folder=folder)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "x")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "x")
    assert model.dtype == torch.float32
    text = "It's naïve,\n\n  don't 12345 你好 🙂<|endoftext|>"
    expected = gpt2_encoding().encode(text, allowed_special="all")
    assert (tokenizer(text)["input_ids"], tokenizer.decode(expected)) == (expected, text)
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == 50256
    assert tokenizer.model_max_length == CONTEXT


def test_bfloat16_is_checked_against_the_rounded_weights(folder, tmp_path):
    out = tmp_path / "half"
    answer = ask("export_hf.py", "big", f"--out={out}", "--dtype=bfloat16", "--json", folder=folder)
    assert answer["max_abs_diff"] <= 1e-5 * max(1.0, answer["max_abs_logit"])
    tensors = safetensors.torch.load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    expected = ours(folder, "big")["wpe.weight"].to(torch.bfloat16)
    assert torch.equal(tensors["transformer.wpe.weight"], expected)
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16


def test_a_small_vocabulary_is_exported_as_it_is_and_without_a_tokenizer(folder, tmp_path):
    out = tmp_path / "small"
    answer = ask("export_hf.py", "small", f"--out={out}", "--json", folder=folder)
    assert {*snapshot(out)} == {"config.json", "model.safetensors", "README.md"}
    config = AutoModelForCausalLM.from_pretrained(out).config
    assert (config.vocab_size, config.eos_token_id) == (VOCAB, None)
    assert answer["parameters"] == sum(t.numel() for t in ours(folder, "small").values())
    assert "none: vocab_size 256 is below GPT-2's 50257" in (out / "README.md").read_text()
    assert find_target(str(out), folder).tokenizer() is None


def test_a_checkpoint_and_an_export_can_be_exported(folder, tmp_path):
    first = tmp_path / "first"
    ask("export_hf.py", "runs/big/step_00000002", f"--out={first}", folder=folder)
    ask("export_hf.py", str(first), f"--out={tmp_path / 'second'}", folder=folder)
    contents = [(tmp_path / n / "model.safetensors").read_bytes() for n in ("first", "second")]
    assert contents[0] == contents[1]
    assert "step 2 of the run `big`" in (first / "README.md").read_text()


def test_the_model_card_tells_the_runs_numbers_and_quotes_what_a_manifest_says(folder, tmp_path):
    quoted = _quoted("x`|\n<script>\n---\ntags: [y]")
    assert quoted[0] == quoted[-1] == "`"
    assert not set(quoted[1:-1]) & set("`|<>\n")
    ask("export_hf.py", "big", f"--out={tmp_path / 'x'}", folder=folder)
    card = (tmp_path / "x" / "README.md").read_text()
    loss, scores = (events(folder / "runs" / "big", kind)[-1] for kind in ("eval", "hellaswag"))
    assert f"{loss['val_loss']:.4f} +- {loss['val_loss_se']:.4f} nats/token" in card
    assert f"acc_norm {scores['acc_norm']:.4f} +- {scores['acc_norm_se']:.4f} on 20 items" in card
    assert "256 in 4 steps of 64" in card
    assert "| training data | `data`, fingerprint `" in card
    assert "planned 1h 00m (30m 00s ... 2h 00m), actual 1h 30m" in card
    target = find_target("small", folder / "runs")
    target.checkpoint.manifest["tokens"] = 200  # a resume had another batch
    numbers = {"out": "s", "dtype": "float32", "parameters": 1}
    write_card(target, tmp_path, {**numbers, "max_abs_diff": 0, "max_abs_logit": 1})
    card = (tmp_path / "README.md").read_text()
    assert (" 200 in 4 steps, " in card, "planned" in card) == (True, False)
    assert "HellaSwag" not in card


def test_an_export_that_transformers_reads_otherwise_is_not_kept(folder, tmp_path, monkeypatch):
    """Wrong heads change no shape: only the logits tell."""
    right = exporting.write_hf_config

    def wrong(*args: Any, **kwargs: Any) -> None:
        right(*args, **kwargs)
        path = args[1] / "config.json"
        path.write_text(path.read_text().replace('"n_head": 2', '"n_head": 4'))

    monkeypatch.setattr(exporting, "write_hf_config", wrong)
    code, line = ask("export_hf.py", "big", f"--out={tmp_path / 'x'}", folder=folder)
    assert code == 1
    assert "logits differ by" in line
    assert list(tmp_path.iterdir()) == []


def test_bad_input_is_one_line_and_writes_nothing(folder, tmp_path, monkeypatch):
    out = tmp_path / "x"
    before = snapshot(folder)
    assert ask("export_hf.py", "no/such/run", f"--out={out}", folder=folder)[0] == 2
    (tmp_path / "there").mkdir()
    line = rejected(ask("export_hf.py", "big", f"--out={tmp_path / 'there'}", folder=folder))
    assert "exists already" in line
    (tmp_path / "file").write_text("")
    code, line = ask("export_hf.py", "big", f"--out={tmp_path / 'file' / 'x'}", folder=folder)
    assert (code, "Not a directory" in line) == (75, True)
    truncated = tmp_path / "truncated"
    ask("export_hf.py", "big", f"--out={truncated}", folder=folder)
    content = (truncated / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(content[:-100])
    line = rejected(ask("export_hf.py", str(truncated), f"--out={out}", folder=folder))
    assert "model.safetensors" in line
    monkeypatch.setattr(exporting.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install") as rejection:
        export(find_target("big", folder / "runs"), out=out, dtype="float32", push_to_hub=None)
    assert (rejection.value.exit_code, snapshot(folder)) == (2, before)
    assert {path.name for path in tmp_path.iterdir()} == {"there", "file", "truncated"}


def test_pushing_needs_a_login_before_and_uploads_the_checked_folder(folder, tmp_path, monkeypatch):
    uploaded = []

    class Hub:
        def whoami(self) -> None:
            if not logged_in:
                raise OSError("Token is required\nmore")

        def create_repo(self, name: str, *, exist_ok: bool) -> Any:
            return type("Repository", (), {"repo_id": f"me/{name}"})

        def upload_folder(self, *, repo_id: str, folder_path: Path, **_: Any) -> None:
            if fails:
                raise OSError("quota exceeded")
            uploaded.append((repo_id, {*snapshot(folder_path)} >= {"config.json", "README.md"}))

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    out = tmp_path / "x"
    argv = ("small", f"--out={out}", "--push_to_hub=mine")
    logged_in, fails = False, False
    code, line = ask("export_hf.py", *argv, folder=folder)
    assert (code, out.exists()) == (2, False)
    assert "hf auth login" in line
    logged_in = True
    ask("export_hf.py", *argv, folder=folder)
    assert uploaded == [("me/mine", True)]
    fails = True
    code, line = ask("export_hf.py", "small", f"--out={tmp_path / 'y'}", argv[2], folder=folder)
    assert (code, "written and checked, but not pushed" in line) == (75, True)
