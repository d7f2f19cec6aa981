"""Models that transformers does not know: its modelling file computes the same, and the folder stands alone."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, StaticCache

from conversations import write_pairs
from corpora import TEXTS, train_on
from gpt2lab.config.presets import preset
from gpt2lab.config.schema import ModelConfig
from gpt2lab.config.settings import OPTIONS
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.errors import CheckpointError
from gpt2lab.evaluation.generation import draw
from gpt2lab.finetuning.recipe import FINETUNING
from gpt2lab.interop.configuration_gpt2lab import FORMAT, GPT2LabConfig
from gpt2lab.interop.export import OWN_FILES
from gpt2lab.interop.modeling_gpt2lab import GPT2LabForCausalLM
from gpt2lab.model import hf_config
from gpt2lab.model.gpt import GPT, build_model
from gpt2lab.model.hf_config import HF_CONFIG, read_hf_config
from gpt2lab.model.hf_weights import load_hf
from gpt2lab.runs.target import find_target
from gpt2lab.runs.weights import load_initial, load_weights
from gpt2lab.tokenizers.bpe import characters_of, train_bpe
from gpt2lab.tokenizers.chat_template import Turn, encode
from gpt2lab.tokenizers.interface import Tokenizer
from gpt2lab.tokenizers.plain import BYTES
from gpt2lab.training.init_from import begin_from
from launch import WORKERS, ask, rejected, worked
from one_process import disturbed
from tiny import MODERN, edit_json, parse, pretrain, resolved

CONTEXT, NEW = 64, 20
SHAPE = {"n_layer": 2, "n_head": 4, "n_embd": 48, "context_length": CONTEXT, "vocab_size": 211}
EACH = [pytest.param({name: value}, id=name) for name, value in MODERN.items()]
SPEEDRUN = {name: getattr(preset("speedrun").model, name) for name in OPTIONS}
OF_MODERN = {name: getattr(preset("modern-nano").model, name) for name in OPTIONS}
EACH += [pytest.param({}, id="gpt2"), pytest.param(MODERN, id="all")]
EACH += [pytest.param(SPEEDRUN, id="speedrun")]
TEXT = [f"{text} é 你好 🙂" for text in TEXTS] * 3


def pair(**options: Any) -> tuple[GPT, GPT2LabForCausalLM]:
    """Return our model with parameters far from their initial values, and transformers' with the same."""
    config = ModelConfig(**SHAPE, num_tokens=211, **options)
    ours = disturbed(config).eval()
    theirs = GPT2LabForCausalLM(GPT2LabConfig(**SHAPE, **options)).eval()
    state = ours.state_dict()
    theirs.load_state_dict(
        {name if name.startswith("lm_head") else f"model.{name}": t for name, t in state.items()},
        strict=config.head == "untied",  # else lm_head.weight is model.wte.weight
    )
    return ours, theirs


def ids_of(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 211, (batch, length), generator=torch.Generator().manual_seed(3))


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("options", EACH)
@torch.no_grad()
def test_every_option_gives_our_logits_and_our_loss(options):
    ours, theirs = pair(**options)
    ids = ids_of(2, CONTEXT)
    found = theirs(ids, labels=ids, output_hidden_states=True)
    assert_close(found.logits, ours(ids))
    loss = ours(ids[:, :-1], ids[:, 1:]) / (2 * (CONTEXT - 1))
    assert found.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    assert len(found.hidden_states) == 3
    assert_close(found.hidden_states[-1], ours.hidden(ids))
    assert_close(theirs(ids, logits_to_keep=1).logits, ours(ids)[:, -1:])
    assert torch.equal(theirs(ids, return_dict=False)[0], theirs(ids).logits)


@pytest.mark.parametrize("options", EACH)
@torch.no_grad()
def test_cache_and_padding_change_nothing(options):
    ours, theirs = pair(**options)
    ids = ids_of(2, CONTEXT)
    expected = ours(ids)
    for cache in (None, StaticCache(config=theirs.config, max_cache_len=CONTEXT + 5)):
        parts = []
        for piece in ids.split([7, 1, 1, CONTEXT - 9], dim=1):
            found = theirs(piece, past_key_values=cache)
            cache = found.past_key_values
            parts.append(found.logits)
        assert_close(torch.cat(parts, dim=1), expected)
    # Two texts, one shorter: padded on the left, then on the right; pieces through the cache as well.
    short = ids[1:, 11:30]
    for before in (11, 0):
        rows = torch.zeros(2, 30, dtype=torch.int64)
        rows[0], rows[1, before : before + 19] = ids[0, :30], short[0]
        mask = torch.ones_like(rows)
        mask[1, :before], mask[1, before + 19 :] = 0, 0
        cache, parts = None, []
        for end, piece in ((25, rows[:, :25]), (26, rows[:, 25:26]), (30, rows[:, 26:])):
            found = theirs(piece, attention_mask=mask[:, :end], past_key_values=cache)
            cache = found.past_key_values
            parts.append(found.logits)
        for logits in (theirs(rows, attention_mask=mask).logits, torch.cat(parts, dim=1)):
            assert_close(logits[:1], ours(ids[:1, :30]))
            assert_close(logits[1:, before : before + 19], ours(short))
            assert torch.isfinite(logits).all()


@pytest.mark.parametrize("options", EACH)
def test_generate_is_ours_with_any_cache(options):
    ours, theirs = pair(**options)
    prompt = ids_of(1, 9)
    how = {"generators": [torch.Generator()], "end_of_text": -1, "temperature": 0}
    expected = [id for (id,) in draw(ours, prompt[0].tolist(), max_new_tokens=NEW, **how)]
    for how in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        plain = {"do_sample": False, "pad_token_id": 0, "disable_compile": True}
        found = theirs.generate(prompt, max_new_tokens=NEW, **plain, **how)
        assert found[0, 9:].tolist() == expected


def test_it_trains_and_loads_in_half_precision(tmp_path):
    ours, theirs = pair(**MODERN)
    ids = ids_of(2, CONTEXT)
    theirs(ids, labels=ids).loss.backward()
    loss = ours(ids[:, :-1], ids[:, 1:]) / (2 * (CONTEXT - 1))
    loss.backward()
    gradients = dict(theirs.model.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(gradients[name].grad, parameter.grad, rtol=1e-4, atol=1e-6)
    theirs.save_pretrained(tmp_path)
    half = GPT2LabForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        found, expected = half(ids).logits, ours(ids)
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).abs().max() < 0.1 * expected.abs().max()


def test_an_unknown_format_or_option_is_rejected_by_both_readers():
    assert FORMAT == hf_config.FORMAT
    with pytest.raises(ValueError, match="format 3, these files read 2"):
        GPT2LabConfig(gpt2lab_format=3)
    for name in sorted(set(OPTIONS) - {"norm_eps", "attention_scale", "logit_cap"}):
        with pytest.raises(ValueError, match=f"{name} 'new' is unknown"):
            GPT2LabConfig(**{name: "new"})


def tokenizer_named(name: str) -> Tokenizer:
    if name == "characters":
        return characters_of(["".join(TEXT), *map(chr, range(128))])
    return BYTES if name == "bytes" else train_bpe(TEXT, 300)


def train(folder: Path, name: str, *more: str) -> None:
    usual = ("--model=modern-nano", "--n_embd=32", "--max_steps=4", "--max_lr=0.05")
    usual += ("--eval_freq=2", "--val_tokens=320")
    train_on(folder, name, TEXT, tokenizer_named(name), *usual, *more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with the modern run `bpe` and its export; treat as read-only."""
    folder = tmp_path_factory.mktemp("modern")
    train(folder, "bpe")
    ask("export_hf.py", "bpe", f"--out={folder / 'x'}", folder=folder)
    return folder


def test_a_modern_run_is_exported_with_its_own_files(folder):
    out = folder / "x"
    assert {path.name for path in out.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "README.md", *OWN_FILES),
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    }
    sources = Path(hf_config.__file__).parents[1] / "interop"
    for name in OWN_FILES:
        assert (out / name).read_bytes() == (sources / name).read_bytes()
    config = json.loads((out / "config.json").read_text())
    assert config["gpt2lab_format"] == FORMAT
    assert {name: config[name] for name in OPTIONS} == OF_MODERN
    assert config["eos_token_id"] == tokenizer_named("bpe").end_of_text
    card = (out / "README.md").read_text()
    assert "GPT-2 with positions rotary, norm rmsnorm" in card
    assert ("trust_remote_code=True" in card, "| validation loss |" in card) == (True, True)


def test_it_comes_back_bit_for_bit_and_a_run_begins_with_it(folder, tmp_path):
    out = folder / "x"
    ours = dict(load_weights(find_target("bpe", folder / "runs")).named_parameters())
    back = dict(load_hf(out).named_parameters())
    assert set(back) == set(ours)
    for name, tensor in back.items():
        assert torch.equal(tensor, ours[name][: len(tensor)]), name
    flags = (f"--val={folder / 'bpe'}", "--val_tokens=320", "--device=cpu", "--dtype=fp32")
    names = ("bpe", str(out))
    losses = [
        ask("evaluate.py", name, *flags, "--json", folder=folder)["val_loss"] for name in names
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    run = [f"--init_from={out}", f"--data_dir={folder / 'bpe'}", f"--checkpoint_dir={tmp_path}"]
    start = resolved([*run, "--max_steps=1"])
    assert {name: getattr(start.config.model, name) for name in OPTIONS} == OF_MODERN
    fresh = build_model(start.config.model, seed=1, device=torch.device("cpu"))
    load_initial(find_target(str(out), tmp_path), fresh, Runtime())
    for name, tensor in fresh.named_parameters():
        assert torch.equal(tensor, back[name]), name


def test_the_preset_of_an_export_is_the_one_with_its_options(tmp_path):
    """Its rates and optimizer are those of modern-nano, not of gpt2-nano, which has the same sizes."""
    sizes = {name: getattr(preset("modern-nano").model, name) for name in SHAPE}
    sizes["vocab_size"] = 300
    for name, values in (("modern-nano", MODERN), ("gpt2-nano", {})):
        GPT2LabForCausalLM(GPT2LabConfig(**sizes, **values)).save_pretrained(tmp_path / name)
        config, _ = begin_from(parse([f"--init_from={tmp_path / name}", "--max_steps=1"]))
        assert config.optim == preset(name).optim


@pytest.mark.parametrize(
    "change",
    [
        *({"gpt2lab_format": 3}, {"positions": "alibi"}, {"norm": None}, {"logit_cap": -1}),
        *({"norm_eps": "small"}, {"n_head": 32}, {"tie_word_embeddings": False}),
        *({"qk_norm": "none"}, {"context_length": 0}),
    ],
    ids=str,
)
def test_a_folder_of_another_network_is_rejected_by_name(change, folder, tmp_path, wording):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / "x" / name).read_bytes())
    edit_json(tmp_path / HF_CONFIG, **change)
    with pytest.raises(CheckpointError, check=wording):
        load_hf(tmp_path)


def test_a_tuned_modern_model_carries_its_chat_template(folder, tmp_path):
    write_pairs(tmp_path / "pairs.jsonl")
    tune = [f"--init_from={folder / 'x'}", f"--instructions={tmp_path / 'pairs.jsonl'}"]
    tune += [f"--checkpoint_dir={tmp_path / 'runs'}", "--max_steps=2", "--mini_batch_size=1"]
    system = ["--device=cpu", "--dtype=fp32", "--compile=off", "--total_batch_size=128"]
    lora = ["--lora_r=2", "--optimizer=adamw", "--sample_freq=0"]
    pretrain(parse([*tune, *system, *lora, "--run_name=tuned"], "finetune"), recipe=FINETUNING)
    answer = ask("export_hf.py", "tuned", f"--out={tmp_path / 'x'}", "--json", folder=tmp_path)
    assert answer["max_abs_diff"] <= 1e-5 * max(1.0, answer["max_abs_logit"])
    loaded = AutoTokenizer.from_pretrained(tmp_path / "x", trust_remote_code=False)
    talk = [{"role": "user", "content": "What is 3?"}]
    expected, _ = encode([Turn("user", "What is 3?")], tokenizer_named("bpe"))
    assert loaded.apply_chat_template(talk, return_dict=False) == expected
    assert "LoRA of rank 2, merged" in (tmp_path / "x" / "README.md").read_text()


def test_the_card_of_an_untied_head_says_so(tmp_path):
    train(tmp_path, "bpe", "--head=untied", "--max_steps=1")
    ask("export_hf.py", "bpe", f"--out={tmp_path / 'x'}", folder=tmp_path)
    assert "the head is a matrix with a bias, " in (tmp_path / "x" / "README.md").read_text()


@pytest.fixture
def sharded(folder, tmp_path) -> Path:
    out = tmp_path / "sharded"
    ask("export_hf.py", "bpe", f"--out={out}", "--max_shard_size=20KB", folder=folder)
    return out


def test_large_weights_are_split_as_transformers_splits_them(folder, sharded, tmp_path):
    model = GPT2LabForCausalLM.from_pretrained(sharded)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    names = {path.name for path in sharded.glob("model[.-]*")}
    assert len(names) > 3
    assert names == {path.name for path in (tmp_path / "theirs").glob("model[.-]*")}
    index = "model.safetensors.index.json"
    found, expected = (json.loads((f / index).read_text()) for f in (sharded, tmp_path / "theirs"))
    assert found == expected
    for path in sharded.glob("model-*"):
        tensors = path.stat().st_size - 8 - int.from_bytes(path.read_bytes()[:8], "little")
        assert tensors <= 20_000 or list(found["weight_map"].values()).count(path.name) == 1


def test_shards_come_back_bit_for_bit_and_their_export_is_the_runs_file(folder, sharded, tmp_path):
    one, many = (dict(load_hf(path).named_parameters()) for path in (folder / "x", sharded))
    assert list(one) == list(many)
    assert all(torch.equal(one[name], many[name]) for name in one)
    ask("export_hf.py", str(sharded), f"--out={tmp_path / 'y'}", folder=folder)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "y" / name).read_bytes() == (folder / "x" / name).read_bytes()


def test_damaged_shards_are_rejected_by_name(sharded):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first, second, *_ = sorted(set(index["weight_map"].values()))
    name = next(name for name, file in index["weight_map"].items() if file == first)
    for weight_map, problem in (
        (index["weight_map"] | {name: second}, f"{first}: holds other tensors"),
        (index["weight_map"] | {name: "../" + first}, "'weight_map' does not map every tensor"),
        ({}, "'weight_map' does not map every tensor"),
        (index["weight_map"] | {name: "model-none.safetensors"}, "holds other tensors|No such"),
    ):
        path.write_text(json.dumps(index | {"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=problem):
            read_hf_config(sharded)
    path.write_text(json.dumps(index))
    (sharded / second).unlink()
    with pytest.raises(CheckpointError, match=f"{second}: No such file"):
        read_hf_config(sharded)


@pytest.mark.parametrize("size", ["5", "0GB", "-1MB", "many", "1.5", "GB"])
def test_a_wrong_size_is_one_line(folder, tmp_path, size):
    words = ("bpe", f"--out={tmp_path / 'x'}", f"--max_shard_size={size}")
    assert "--max_shard_size" in rejected(ask("export_hf.py", *words, folder=folder))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_process_without_gpt2lab_computes_and_generates_the_same(folder, tmp_path):
    """Every tokenizer of ours, a modern model and GPT-2's; offline, and gpt2lab cannot be imported."""
    others = tmp_path / "made"
    train(others, "bytes")
    train(others, "characters", "--positions=learned", "--norm=layernorm", "--optimizer=adamw")
    gpt2 = ("--positions=learned", "--norm=layernorm", "--qk_norm=none", "--activation=gelu")
    train(others, "bpe", *gpt2, "--optimizer=adamw")
    asked, expected = {}, {}
    for home, name in ((folder, "bpe"), *((others, n) for n in ("bytes", "characters", "bpe"))):
        out = str(tmp_path / f"{home.name}-{name}")
        ask("export_hf.py", name, f"--out={out}", folder=home)
        target = find_target(name, home / "runs")
        model, tokenizer = load_weights(target).eval(), target.tokenizer()
        generator = torch.Generator().manual_seed(4)
        ids = torch.randint(0, tokenizer.size, (2, CONTEXT), generator=generator)
        asked[out] = {"ids": ids.tolist(), "prompt": 9, "new": NEW, "text": TEXT[3]}
        with torch.no_grad():
            logits = model(ids)[..., : tokenizer.size]
        generators = [torch.Generator()]
        how: Any = {"max_new_tokens": NEW, "generators": generators, "temperature": 0}
        rows = [draw(model, row[:9], end_of_text=-1, **how) for row in ids.tolist()]
        texts = [[id for (id,) in row] for row in rows]
        expected[out] = (logits, texts, tokenizer.encode(TEXT[3]))
    environment = {"PATH": os.environ["PATH"], "HF_HOME": str(tmp_path / "hub")}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-I", str(WORKERS / "load_export.py"), json.dumps(asked)]
    how = {"env": environment, "cwd": tmp_path, "capture_output": True, "text": True}
    found = json.loads(worked(subprocess.run(command, **how)).stdout)
    for out, (logits, texts, ids) in expected.items():
        assert_close(torch.tensor(found[out]["logits"]), logits)
        for way in ("cached", "whole", "padded"):
            assert found[out][way] == texts, (out, way)
        assert (found[out]["text_ids"], found[out]["text"]) == (ids, TEXT[3])
    names = [found[out]["model"] for out in asked]
    assert names == ["GPT2LabForCausalLM"] * 3 + ["GPT2LMHeadModel"]
