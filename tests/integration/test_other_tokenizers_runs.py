"""From text to a model in transformers with other tokenizers than GPT-2's; all that differs from a run's is refused."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import launch
from conversations import write_pairs
from corpora import TEXTS, run_prepare, write_jsonl
from edited_manifests import edit
from gpt2lab.commands.data import tokens_as_text as describe_tokens
from gpt2lab.commands.data import tokens_of_step
from gpt2lab.config.schema import Config
from gpt2lab.config.settings import override, to_flat
from gpt2lab.data.prepare.pipeline import learning_texts
from gpt2lab.data.prepare.sources import open_source
from gpt2lab.data.shards import open_data
from gpt2lab.data.verify import measure
from gpt2lab.errors import DataError
from gpt2lab.finetuning.recipe import FINETUNING
from gpt2lab.runs.target import find_target
from gpt2lab.runs.weights import load_weights
from gpt2lab.tokenizers.bpe import characters_of, train_bpe
from gpt2lab.tokenizers.chat_template import Turn, encode
from gpt2lab.tokenizers.gpt2 import GPT2
from gpt2lab.tokenizers.interface import Tokenizer
from gpt2lab.tokenizers.named import open_tokenizer
from gpt2lab.tokenizers.plain import BYTES, CharactersTokenizer
from launch import ask, call, last, rejected
from tiny import CONTEXT, flags_of, parse, pretrain, write_items
from token_files import SPEECH, write_characters

TEXT = [f"{text} é 你好 🙂" for text in TEXTS] * 3


def letters(folder: Path) -> list[str]:
    """Return all characters of the texts, of the items, and of ASCII."""
    items = (folder / "items.jsonl").read_text()
    return sorted({*"".join(TEXT), *items, *map(chr, range(128))})


def build(name: str, folder: Path) -> Tokenizer:
    if name == "trained":
        return train_bpe(TEXT, 300)
    if name == "characters":
        return characters_of(letters(folder))
    if name == "bytes":
        return BYTES
    assert name == "70,000 ids"
    return CharactersTokenizer([*map(chr, range(0x20000, 0x20000 + 70_000)), *letters(folder)])


def make(name: str, folder: Path) -> Tokenizer:
    """Prepare data with a tokenizer below `folder`, and train a run of four steps on it."""
    write_jsonl(folder / "corpus" / "a.jsonl", TEXT)
    write_items(folder / "items.jsonl")
    tokenizer = build(name, folder)
    run_prepare(folder / "corpus", folder / "data", tokenizer=tokenizer)
    run_prepare(folder / "corpus", folder / "gpt2")
    run_prepare(folder / "corpus", folder / "bytes", tokenizer=BYTES)
    pretrain(parse([*flags_of(folder, "a"), "--sample_prompt=Document 1"]))
    return tokenizer


@pytest.fixture(scope="module", params=["trained", "characters", "bytes", "70,000 ids"])
def made(request, tmp_path_factory) -> tuple[Path, Tokenizer]:
    """Return a folder with data, the run `a` and its tokenizer; treat as read-only."""
    folder = tmp_path_factory.mktemp("tokenizer")
    return folder, make(request.param, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return the same of one tokenizer, for what does not depend on it."""
    folder = tmp_path_factory.mktemp("trained")
    make("trained", folder)
    return folder


def test_model_checkpoints_and_records_follow_the_tokenizer(made):
    folder, tokenizer = made
    run = folder / "runs" / "a"
    config = json.loads((run / "config.json").read_text())
    assert config["num_tokens"] == tokenizer.size
    assert config["vocab_size"] == math.ceil(tokenizer.size / 128) * 128
    first, *_ = launch.events(run, "eval")
    # Of random weights: padding rows take no part, so all ids of text are equally likely.
    assert first["val_loss"] == pytest.approx(math.log(tokenizer.size), rel=0.01)
    assert first["bits_per_byte"] > 0
    assert first["val_se_unit"] == "document"
    for place in (run, run / "step_00000004"):
        assert {name: (place / name).read_bytes() for name in tokenizer.files} == tokenizer.files
    manifest = json.loads((run / "step_00000004" / "manifest.json").read_text())
    assert manifest["tokenizer"] == tokenizer.record()
    assert set(tokenizer.files) < {*manifest["files"]} or not tokenizer.files
    assert last(run, "sample")["text"].startswith("Document 1")
    assert f"tokenizer {tokenizer.describe()}" in (run / "log.txt").read_text()
    shown = describe_tokens(run, tokens_of_step(run, 2), as_text=True)
    windows = tokens_of_step(run, 2).windows
    assert all(tokenizer.decode(ids) in shown for ids in windows.tolist())
    assert windows.dtype == (np.uint32 if tokenizer.size > 2**16 else np.uint16)


def test_bits_per_byte_are_of_the_same_text(made):
    """The loss of all targets in bits over the bytes of their text, recomputed from the shards."""
    folder, tokenizer = made
    found = ask("evaluate.py", "a", "--val=data", "--val_tokens=160", "--json", folder=folder)
    count = found["val_tokens"]
    (path,) = (folder / "data").glob("*_val_*.npy")
    ids = np.load(path)
    windows = (len(ids) - 1) // CONTEXT
    chosen = np.arange(count // CONTEXT) * windows // (count // CONTEXT)
    targets = np.concatenate([ids[k * CONTEXT + 1 : (k + 1) * CONTEXT + 1] for k in chosen])
    text = tokenizer.byte_lengths()[targets].sum()
    expected = found["val_loss"] * count / math.log(2) / text
    assert found["bits_per_byte"] == pytest.approx(expected, rel=1e-9)


def test_a_checkpoint_alone_samples_and_is_evaluated(made, tmp_path):
    folder, _ = made
    shutil.copytree(folder / "runs" / "a" / "step_00000004", tmp_path / "alone")
    words = ("--prompt=Document 1", "--max_new_tokens=9", "--seed=5")
    alone = launch.worked(call("sample.py", tmp_path / "alone", *words))
    assert alone.stdout == ask("sample.py", "a", *words, folder=folder)
    scores = ("--hellaswag", f"--hellaswag_path={folder / 'items.jsonl'}", "--json")
    found = ask("evaluate.py", str(tmp_path / "alone"), *scores, folder=folder)
    logged = last(folder / "runs" / "a", "hellaswag")
    assert found["hellaswag"] == {name: logged[name] for name in found["hellaswag"]}


def test_the_export_is_the_same_model_and_the_same_text(made, tmp_path):
    folder, tokenizer = made
    out = tmp_path / "x"
    ask("export_hf.py", "a", f"--out={out}", folder=folder)
    theirs, loaded = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    ours = load_weights(find_target("a", folder / "runs"))
    text = TEXT[3][: CONTEXT // 2]
    ids = loaded(text, return_tensors="pt")["input_ids"]
    assert (ids[0].tolist(), loaded.decode(ids[0])) == (tokenizer.encode(text), text)
    with torch.no_grad():
        expected = ours(ids)[..., : tokenizer.size]
        torch.testing.assert_close(theirs(ids).logits, expected, rtol=1e-5, atol=1e-5)
    assert theirs.config.eos_token_id == tokenizer.end_of_text == loaded.eos_token_id
    assert f"tokenizer | {tokenizer.describe()}" in (out / "README.md").read_text()
    # It is read as any model on the hub: same loss, same text, and training can go on from it.
    # An export has no dtype of its own: fp32 for both, as on a machine without bf16.
    flags = ("--val=data", "--val_tokens=320", "--dtype=fp32", "--json")
    numbers = [ask("evaluate.py", name, *flags, folder=folder) for name in ("a", str(out))]
    assert numbers[0]["val_loss"] == pytest.approx(numbers[1]["val_loss"], rel=1e-6)
    assert numbers[0]["bits_per_byte"] == pytest.approx(numbers[1]["bits_per_byte"], rel=1e-6)


def test_nanogpts_characters_train_and_sample(tmp_path):
    """Its two files and meta.pkl, as they lie there."""
    folder, characters = write_characters(tmp_path / "data"), sorted(set(SPEECH))
    assert "give its folder" in call("data", "import", folder / "train.bin").stderr
    done = call("data", "import", folder)
    assert (done.returncode, "train with: " in done.stdout) == (0, True)
    assert "no end of text" not in done.stderr
    assert "warning: a val shard has the bytes of a train shard" in done.stderr
    adopted = open_data(folder, vocab_size=128)
    assert adopted.tokenizer == CharactersTokenizer(characters)
    assert measure(folder)["val"].text_bytes == len(SPEECH)
    (folder / "meta.pkl").rename(folder / "other.pkl")
    done = call("data", "import", folder, f"--out={tmp_path / 'as_gpt2'}")
    assert "warning: no end of text of gpt2" in done.stderr
    (folder / "other.pkl").rename(folder / "meta.pkl")
    flags = [flag for flag in flags_of(tmp_path, "a") if "hellaswag" not in flag]
    pretrain(parse([*flags, "--sample_prompt=First", "--sample_tokens=8"]))
    (sample, *_) = launch.events(tmp_path / "runs" / "a", "sample")
    assert sample["text"].startswith("First")
    assert set(sample["text"]) <= set(SPEECH)
    config = json.loads((tmp_path / "runs" / "a" / "config.json").read_text())
    assert (config["num_tokens"], config["vocab_size"]) == (len(characters) + 1, 128)
    done = call("sample.py", "a", f"--checkpoint_dir={tmp_path / 'runs'}", "--prompt=é")
    assert (done.returncode, "U+00E9" in done.stderr) == (2, True)


def test_a_resume_with_other_data_is_refused(folder, tmp_path):
    shutil.copytree(folder / "runs", tmp_path / "runs")
    resume = ["--run_name=a", f"--checkpoint_dir={tmp_path / 'runs'}", "--resume=latest"]
    resume += ["--max_steps=6", "--allow_change=max_steps,data"]
    before = sorted(tmp_path.rglob("*"))
    for data in ("bytes", "unknown"):
        if data == "unknown":
            shutil.rmtree(folder / data, ignore_errors=True)
            shutil.copytree(folder / "bytes", folder / data)
            edit(folder / data, lambda m: m.update(tokenizer={"name": "unknown", "sha256": None}))
        with pytest.raises(DataError, match=r"but a was trained with bpe-300, 300 ids") as error:
            pretrain(parse([*resume, f"--data_dir={folder / data}"]))
        assert "\n" not in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before
    pretrain(parse([*resume, f"--data_dir={folder / 'data'}"]))  # its own
    assert max(launch.steps(tmp_path / "runs" / "a")) == 6


def test_weights_are_not_used_on_other_ids(folder, tmp_path):
    line = rejected(ask("evaluate.py", "a", f"--val={folder / 'bytes'}", folder=folder))
    assert "bytes: its ids are bytes, 257 ids" in line
    flags = [flag for flag in flags_of(folder, "b") if "--n_" not in flag and "data" not in flag]
    flags = [*flags, f"--init_from={folder / 'runs' / 'a'}", f"--checkpoint_dir={tmp_path}"]
    problems = {"bytes": "they would decode to other text", "gpt2": "another tokenizer?"}
    for data, problem in problems.items():
        with pytest.raises(DataError, match=problem):
            pretrain(parse([*flags, f"--data_dir={folder / data}"]))
    assert list(tmp_path.iterdir()) == []
    pretrain(parse([*flags, f"--data_dir={folder / 'data'}"]))
    end = last(folder / "runs" / "a", "eval")
    assert launch.events(tmp_path / "b", "eval")[0]["val_loss"] == end["val_loss"]
    assert json.loads((tmp_path / "b" / "config.json").read_text())["num_tokens"] == 300
    # Checkpoints from before other tokenizers have neither a record nor num_tokens: they are of GPT-2's.
    old = {name: value for name, value in to_flat(Config()).items() if name != "num_tokens"}
    model = override(Config(), old).model
    assert (model.num_tokens, model.id_limit) == (50_257, 50_257)
    assert replace(model, vocab_size=256).id_limit == 256


def test_fine_tuning_chat_and_its_export_use_the_models_tokenizer(folder, tmp_path):
    shape = ["--n_layer=1", "--n_head=2", "--n_embd=16", "--context_length=320"]
    common = ["--device=cpu", "--dtype=fp32", "--compile=off", f"--checkpoint_dir={tmp_path}"]
    common += ["--hellaswag_path=None", "--sample_tokens=2", "--max_steps=2"]
    write_jsonl(tmp_path / "corpus" / "a.jsonl", [text * 40 for text in TEXT[:60]])
    tokenizer = open_tokenizer(str(folder / "data"))
    run_prepare(tmp_path / "corpus", tmp_path / "data", tokenizer=tokenizer)
    base = [*shape, f"--data_dir={tmp_path / 'data'}", "--total_batch_size=320", "--val_tokens=320"]
    pretrain(parse([*common, *base, "--mini_batch_size=1", "--run_name=base"]))
    write_pairs(tmp_path / "pairs.jsonl")
    tune = [f"--init_from={tmp_path / 'base'}", f"--instructions={tmp_path / 'pairs.jsonl'}"]
    tune += ["--mini_batch_size=1", "--total_batch_size=640", "--run_name=tuned"]
    pretrain(parse([*common, *tune], "finetune"), recipe=FINETUNING)
    assert open_tokenizer(str(tmp_path / "tuned")) == tokenizer
    shown = describe_tokens(tmp_path / "tuned", tokens_of_step(tmp_path / "tuned", 1), as_text=True)
    assert "### Instruction:\nCount." in shown
    ids = tokens_of_step(tmp_path / "tuned", 1).windows
    assert ids.max() < tokenizer.size
    assert (ids[:, 0] == tokenizer.end_of_text).all()
    assert last(tmp_path / "tuned", "eval")["bits_per_byte"] > 0
    words = (f"--checkpoint_dir={tmp_path}", "--max_new_tokens=4")
    done = launch.worked(call("chat", "tuned", *words, stdin="Hello\n"))
    assert "warning" not in done.stderr
    out = tmp_path / "exported"
    assert call("export_hf.py", "tuned", f"--out={out}", words[0]).returncode == 0
    talk = [{"role": "user", "content": "What is 3?"}]
    loaded = AutoTokenizer.from_pretrained(out)
    expected, _ = encode([Turn("user", "What is 3?")], tokenizer)
    assert loaded.apply_chat_template(talk, return_dict=False) == expected
    assert "warning" not in call("chat", out, *words, stdin="Hello\n").stderr
    done = call("evaluate.py", "tuned", words[0], "--json")
    logged = last(tmp_path / "tuned", "eval")["val_loss"]
    assert json.loads(done.stdout)["val_loss"] == pytest.approx(logged, rel=1e-6)


def test_the_trainer_of_tokenizers_never_sees_what_is_held_out(tmp_path):
    texts = [f"text {n}: {'word ' * (n % 9)}{n * n}" for n in range(800)]
    write_jsonl(tmp_path / "corpus" / "a.jsonl", texts)
    run_prepare(tmp_path / "corpus", tmp_path / "data")
    val = open_data(tmp_path / "data", vocab_size=50304).splits["val"]
    ids = np.concatenate([np.load(shard.path) for shard in val])
    parts = np.split(ids, np.flatnonzero(ids == GPT2.end_of_text))[1:]
    held_out = {GPT2.decode(part[1:].tolist()) for part in parts}
    source = open_source(str(tmp_path / "corpus"), text_column="text")
    learned = list(learning_texts(source, max_bytes=10**9, cuts=GPT2.cuts))
    assert sorted([*learned, *held_out]) == sorted(texts)
    assert len(held_out) > 10
    few = list(learning_texts(source, max_bytes=1000, cuts=GPT2.cuts))
    assert 1000 <= sum(map(len, few)) < 1100


@pytest.mark.parametrize(
    "words",
    [
        *("--vocab_size=100", "--vocab_size=9000", "--out=corpus"),
        "--kind=characters --out=x.json",
        *("--kind=characters --vocab_size=300", "--kind=characters --max_tokens=300"),
    ],
)
def test_a_tokenizer_that_cannot_be_learned_leaves_nothing(tmp_path, words, wording):
    write_jsonl(tmp_path / "corpus" / "a.jsonl", TEXT)
    typed = words.split() if "--out" in words else ["--out=tok", *words.split()]
    wording(launch.rejected(call("data tokenizer", "train", "corpus", *typed, folder=tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_characters_and_a_single_file_are_written(tmp_path):
    write_jsonl(tmp_path / "corpus" / "a.jsonl", TEXT)
    for words in (("--kind=characters", "--out=letters"), ("--vocab_size=280", "--out=t.json")):
        launch.worked(call("data tokenizer", "train", "corpus", *words, folder=tmp_path))
    assert open_tokenizer(str(tmp_path / "letters")) == characters_of(TEXT)
    assert open_tokenizer(str(tmp_path / "t.json")).size == 280
    words = ("show", "gpt2", "t.json", "--end_token=a")
    shown = launch.worked(call("data tokenizer", *words, folder=tmp_path))
    ends = [line.split()[3:5] for line in shown.stdout.splitlines()[-2:]]
    # Ids of the bytes are in their order.
    assert ends == [["<|endoftext|>", "(50256)"], ["a", "(65)"]]


def test_the_planner_counts_the_datas_vocabulary(folder):
    words = ("--model=gpt2-nano", "--json", f"--checkpoint_dir={folder / 'runs'}")
    found = []
    for more in ((), (f"--data_dir={folder / 'data'}", "--steps=9", "--total_batch_size=64")):
        typed = (*words, *more, "--context_length=16")
        done = launch.worked(call("estimate_time.py", *typed, folder=folder))
        found.append(json.loads(done.stdout)["model"])
    plain, other = found
    assert plain["parameters"] - other["parameters"] == (50_304 - 384) * 64
    assert plain["flops_per_token"] > other["flops_per_token"]
