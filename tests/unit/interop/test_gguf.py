"""--format gguf: gguf's reader finds the run's values, and llama.cpp generates the run's text."""

import dataclasses
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from corpora import TEXTS, train_on
from ecosystem import works_with
from gpt2lab.config.schema import ModelConfig
from gpt2lab.errors import ConfigError
from gpt2lab.evaluation.generation import draw
from gpt2lab.interop import gguf_file
from gpt2lab.interop.gguf_file import export_gguf
from gpt2lab.runs.target import find_target
from gpt2lab.runs.weights import load_weights
from gpt2lab.tokenizers.bpe import characters_of, train_bpe
from gpt2lab.tokenizers.gpt2 import GPT2
from gpt2lab.tokenizers.huggingface import HuggingFaceTokenizer
from gpt2lab.tokenizers.interface import END_TOKEN, Tokenizer, byte_alphabet
from gpt2lab.tokenizers.plain import BYTES
from launch import ask, rejected
from tiny import flip_bit

gguf = pytest.importorskip("gguf", reason="gguf is not installed (requirements-dev.txt)")

CONTEXT, NEW = 64, 32
TEXT = [f"{text} é 你好 🙂 don't 12345\n\n\t x" for text in TEXTS] * 3
BLOCK = {  # llama.cpp's names within a block, ours, and the weight's shape in numpy's order
    **{"attn_norm": ("ln_1", (64,)), "attn_qkv": ("attn.c_attn", (192, 64))},
    **{"attn_output": ("attn.c_proj", (64, 64)), "ffn_norm": ("ln_2", (64,))},
    **{"ffn_up": ("mlp.c_fc", (256, 64)), "ffn_down": ("mlp.c_proj", (64, 256))},
}


def train(folder: Path, name: str, tokenizer: Tokenizer, *more: str) -> None:
    usual = ("--model=gpt2-nano", "--n_embd=64", "--max_steps=8", "--max_lr=0.02")
    usual += ("--eval_freq=0", "--val_tokens=128")
    train_on(folder, name, TEXT, tokenizer, *usual, *more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with the run `bpe` of GPT-2's shape and a learned tokenizer; treat as read-only."""
    folder = tmp_path_factory.mktemp("gguf")
    train(folder, "bpe", train_bpe(TEXT, 300))
    return folder


def parameters(folder: Path, name: str) -> dict[str, np.ndarray]:
    model = load_weights(find_target(name, folder / "runs"))
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("dtype", "kind", "step"),
    [("float32", "F32", 0), ("float16", "F16", 2**-11), ("q8_0", "Q8_0", 1 / 254)],
)
def test_ggufs_reader_finds_every_value_and_the_tokenizer(folder, tmp_path, dtype, kind, step):
    works_with("gguf", version("gguf"), "every value and the tokenizer read back")
    out = tmp_path / "deep" / "x.gguf"
    words = ("bpe", f"--out={out}", "--format=gguf", f"--dtype={dtype}", "--json")
    answer = ask("export_hf.py", *words, folder=folder)
    assert [path.name for path in out.parent.iterdir()] == ["x.gguf"]
    ours = parameters(folder, "bpe")
    ours["wte.weight"] = ours["wte.weight"][:300]  # the padding rows are no tokens
    reader = gguf.GGUFReader(out)
    found = {tensor.name: tensor for tensor in reader.tensors}
    names = {"token_embd": "wte", "position_embd": "wpe", "output_norm": "ln_f"}
    for n in "01":
        names |= {f"blk.{n}.{name}": f"blocks.{n}.{mine}" for name, (mine, _) in BLOCK.items()}
    expected = {
        f"{name}.{kind}": ours[f"{mine}.{kind}"]
        for name, mine in names.items()
        for kind in ("weight", "bias")
        if f"{mine}.{kind}" in ours
    }
    assert (len(expected), set(found)) == (2 * 12 + 4, set(expected))
    for name, values in expected.items():
        tensor = found[name]
        is_matrix = values.ndim == 2 and name != "position_embd.weight"
        assert tensor.tensor_type.name == (kind if is_matrix else "F32")
        assert tuple(reversed(tensor.shape.tolist())) == values.shape
        part, _, ending = name.removeprefix("blk.0.").rpartition(".")
        if part in BLOCK:
            assert values.shape == BLOCK[part][1][: 2 if ending == "weight" else 1]
        read = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if not is_matrix or dtype == "float32":
            assert np.array_equal(read, values), name
        elif dtype == "float16":
            assert np.array_equal(read, values.astype(np.float16).astype(np.float32)), name
        else:  # half a step of the largest in each row of 32, and the scale's own fp16 rounding
            rows, back = values.reshape(-1, 32), read.reshape(-1, 32)
            bound = np.abs(rows).max(axis=1, keepdims=True) * (step * 1.01 + 2**-10)
            assert (np.abs(back - rows) <= bound).all(), name
    assert answer["parameters"] == sum(values.size for values in expected.values())
    assert (answer["dtype"], answer["max_abs_diff"] == 0) == (dtype, dtype == "float32")
    assert answer["max_abs_diff"] < 0.1 * answer["max_abs_logit"]

    def value(key: str) -> Any:
        return reader.get_field(key).contents()

    tokenizer = train_bpe(TEXT, 300)
    assert value("general.architecture") == value("tokenizer.ggml.model") == "gpt2"
    assert (value("tokenizer.ggml.pre"), value("general.name")) == ("gpt-2", "bpe")
    assert "step 8 of the run bpe" in value("general.description")
    sizes = {"context_length": CONTEXT, "embedding_length": 64, "feed_forward_length": 256}
    for name, size in {**sizes, "block_count": 2, "attention.head_count": 2}.items():
        assert value(f"gpt2.{name}") == size
    assert value("gpt2.attention.layer_norm_epsilon") == np.float32(1e-5)
    tokens = value("tokenizer.ggml.tokens")
    as_bytes = {shown: bytes([byte]) for byte, shown in enumerate(byte_alphabet())}
    for id, token in enumerate(tokens):
        text = b"".join(as_bytes[one] for one in token).decode("utf-8", "replace")
        assert tokenizer.decode([id]) == (text if id != tokenizer.end_of_text else token)
    control = [id for id, kind in enumerate(value("tokenizer.ggml.token_type")) if kind == 3]
    assert control == [tokenizer.end_of_text]
    assert {value(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos")} == {control[0]}
    assert value("tokenizer.ggml.add_bos_token") is False
    first, second = value("tokenizer.ggml.merges")[0].split(" ")
    assert first + second in tokens


SHAPE = ModelConfig(n_layer=2, n_head=2, n_embd=64, context_length=8, vocab_size=50304)
CUT = json.loads(GPT2.tokenizer_json())
CUT["model"]["merges"] = []  # single bytes, and words that nothing leads to


def of(tokenizer: Tokenizer) -> ModelConfig:
    return dataclasses.replace(SHAPE, vocab_size=tokenizer.size, num_tokens=tokenizer.size)


NO_GGUF: dict[str, tuple[Any, Any]] = {
    "bytes": (of(BYTES), BYTES),
    "characters": (of(characters_of(TEXT)), characters_of(TEXT)),
    "cut otherwise": (SHAPE, HuggingFaceTokenizer(json.dumps(CUT).encode(), END_TOKEN, "x")),
    "no tokenizer": (SHAPE, None),
    "few ids": (dataclasses.replace(SHAPE, vocab_size=256), GPT2),
    "RoPE": (dataclasses.replace(SHAPE, positions="rotary"), GPT2),
    "RMSNorm": (dataclasses.replace(SHAPE, norm="rmsnorm"), GPT2),
    "QK-norm": (dataclasses.replace(SHAPE, qk_norm="rmsnorm"), GPT2),
    "relu2": (dataclasses.replace(SHAPE, activation="relu2"), GPT2),
}


@pytest.mark.parametrize("case", NO_GGUF)
def test_what_llama_cpp_cannot_compute_has_a_reason(case, wording):
    wording(gguf_file._why_not(*NO_GGUF[case], "float16"))
    bpe = train_bpe(TEXT, 300)
    assert gguf_file._why_not(SHAPE, GPT2, "float16") is None
    assert gguf_file._why_not(of(bpe), bpe, "float16") is None


def test_a_modern_run_is_rejected_before_anything_is_written(tmp_path):
    train(tmp_path, "odd", train_bpe(TEXT, 300), "--n_embd=48", "--max_steps=1", "--norm=rmsnorm")
    out = tmp_path / "out" / "x.gguf"
    code, line = ask("export_hf.py", "odd", f"--out={out}", "--format=gguf", folder=tmp_path)
    assert (code, "odd cannot be exported as GGUF: norm rmsnorm" in line) == (2, True), line
    assert not out.parent.exists()
    narrow = dataclasses.replace(SHAPE, n_embd=48)
    assert "a multiple of 32, but it is 48" in str(gguf_file._why_not(narrow, GPT2, "q8_0"))


@pytest.mark.parametrize(
    "words",
    [
        *("--dtype=bfloat16", "--push_to_hub=me/x", "--max_shard_size=1GB", "--out=x.bin"),
        *("--format=transformers --dtype=q8_0", "--format=transformers --out=x.gguf"),
    ],
)
def test_flags_that_do_not_go_together_are_one_line(folder, tmp_path, words, wording):
    argv = ["bpe", f"--out={tmp_path / 'x.gguf'}", "--format=gguf"]
    wording(rejected(ask("export_hf.py", *argv, *words.split(), folder=folder)))
    assert not list(tmp_path.iterdir())


def test_an_existing_file_is_kept_and_a_missing_package_is_named(folder, tmp_path, monkeypatch):
    out = tmp_path / "x.gguf"
    out.write_text("mine")
    code, line = ask("export_hf.py", "bpe", f"--out={out}", "--format=gguf", folder=folder)
    assert (code, "exists already" in line, out.read_text()) == (2, True, "mine")
    target = find_target("bpe", folder / "runs")
    monkeypatch.setitem(sys.modules, "gguf", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"extra `gguf`.*pip install gguf"):
        export_gguf(target, out=tmp_path / "y.gguf", dtype="float32")
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]


def test_a_file_that_reads_back_otherwise_is_not_kept(folder, tmp_path, monkeypatch):
    """One byte of the file is another: the reader finds it, and nothing appears."""
    right = gguf_file._write

    def wrong(gguf: Any, path: Path, *rest: Any) -> None:
        right(gguf, path, *rest)
        flip_bit(path)

    monkeypatch.setattr(gguf_file, "_write", wrong)
    out = tmp_path / "x.gguf"
    code, line = ask("export_hf.py", "bpe", f"--out={out}", "--format=gguf", folder=folder)
    assert (code, "gguf reads back another" in line) == (1, True), line
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bpe", "gpt2"])
def test_llama_cpp_generates_our_greedy_text(folder, tmp_path, kind, capfd):
    """llama.cpp itself, from the f32 file: the same ids of a text, and the same 32 greedy tokens."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    what = "32 greedy tokens equal, where it is installed"
    works_with("llama-cpp-python", version("llama-cpp-python"), what)
    home = folder
    if kind == "gpt2":
        home = tmp_path / "made"
        train(home, kind, GPT2, "--max_steps=2", "--total_batch_size=128")
    out = tmp_path / "x.gguf"
    ask("export_hf.py", kind, f"--out={out}", "--format=gguf", folder=home)
    target = find_target(kind, home / "runs")
    ours, tokenizer = load_weights(target).eval(), target.tokenizer()
    llama = llama_cpp.Llama(str(out), n_ctx=CONTEXT, n_threads=1, logits_all=True, verbose=False)
    text = "The quick fox's  naïve café, 你好 🙂\n\n\tdef f(x): return 12345 <|endoftext|>"
    ids = tokenizer.encode(text)
    assert llama.tokenize(text.encode(), add_bos=False, special=False) == ids
    assert (llama.detokenize(ids).decode(), llama.token_eos()) == (text, tokenizer.end_of_text)
    prompt = ids[:9]
    generators = [torch.Generator()]
    how = {"generators": generators, "end_of_text": -1, "temperature": 0}
    expected = [id for (id,) in draw(ours, prompt, max_new_tokens=NEW, **how)]
    llama.reset()
    llama.eval([*prompt, *expected])
    scores = torch.from_numpy(np.array(llama.scores[: len(prompt) + NEW]))
    with torch.no_grad():
        logits = ours(torch.tensor([[*prompt, *expected]]))[0, :, : tokenizer.size]
    # Not closer: llama.cpp looks GELU up in a table of fp16 values.
    assert (scores - logits).abs().max() <= 1e-3 * max(1.0, logits.abs().max().item())
    llama.reset()
    found = []
    for id in llama.generate(prompt, temp=0, repeat_penalty=1.0):
        found.append(id)
        if len(found) == NEW:
            break
    assert found == expected
