"""gpt2lab data: verify, stats, show, import, merge; each as a user calls it. And the preparation of ClimbMix."""

import json
import pickle
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import launch
from corpora import (
    TEXTS,
    documents_of,
    encoded,
    expected_stream,
    prepare_parts,
    run_prepare,
    snapshot,
    write_jsonl,
)
from gpt2lab.commands.data import tokens_of_step
from gpt2lab.commands.prepare_data import PrepareData, prepare
from gpt2lab.data import verify as verify_module
from gpt2lab.data.manifest import read_manifest
from gpt2lab.data.prepare import sources
from gpt2lab.data.prepare.assemble import merge
from gpt2lab.data.prepare.pipeline import learning_texts
from gpt2lab.data.shards import open_data
from gpt2lab.data.verify import SplitStats, measure, measure_overlap, stats_table, verify
from gpt2lab.errors import ConfigError, DataError
from gpt2lab.interop.import_shards import import_folder
from gpt2lab.tokenizers.gpt2 import gpt2_encoding
from tiny import flip_bit, write_shards
from whole_run import Run


def data(*words: object) -> tuple[int, str, str]:
    """Call the command; return its exit code, stdout and last line of stderr."""
    code, said, error = launch.call("data", *words)
    return code, said, (error.splitlines() or [""])[-1]


@pytest.fixture
def many(tmp_path) -> Path:
    source = write_jsonl(tmp_path / "corpus.jsonl", TEXTS * 8)
    run_prepare(source, tmp_path / "many", shard_tokens=1500, val_tokens=700)
    return tmp_path / "many"


@pytest.mark.parametrize("block", [97, 1 << 22])
def test_the_overlap_counts_ngrams_of_validation_that_are_in_training(tmp_path, monkeypatch, block):
    monkeypatch.setattr(verify_module, "_BLOCK", block)
    generator = np.random.default_rng(1)
    train = [generator.integers(0, 50257, 2000).astype(np.uint16) for _ in range(2)]
    val = generator.integers(0, 50257, 1000).astype(np.uint16)
    val[500:800] = val[100:400] = train[1][90:390]
    for index, ids in enumerate(train):
        np.save(tmp_path / f"some_train_{index:06d}.npy", ids)
    np.save(tmp_path / "some_val_000000.npy", val)
    grams = {tuple(ids[i : i + 16]) for ids in train for i in range(len(ids) - 15)}
    of_val = [tuple(val[i : i + 16]) for i in range(len(val) - 15)]
    expected = sum(gram in grams for gram in of_val) / len(of_val)
    assert expected > 0.28
    assert measure_overlap(open_data(tmp_path, vocab_size=2**16)) == pytest.approx(expected)
    np.save(tmp_path / "some_val_000000.npy", val[:15])
    assert measure_overlap(open_data(tmp_path, vocab_size=2**16)) is None


def test_verify_finds_nothing_wrong_with_what_was_prepared_and_names_each_damaged_file(many):
    code, said, _ = data("verify", many)
    assert code == 0
    assert said.startswith("every file matches shards.json\n")
    assert re.search(r"^\d+\.\d% of the 16-grams of validation occur in training$", said, re.M)
    paths = sorted(many.glob("*_train_*.npy"))
    flip_bit(paths[0])
    paths[1].write_bytes(paths[1].read_bytes()[:-2])
    np.save(paths[2], np.load(paths[2]).astype(np.int32))
    paths[3].unlink()
    np.save(many / "corpus_train_000099.npy", np.zeros(50, np.uint16))
    code, said, _ = data("verify", many)
    assert code == 1
    lines = said.splitlines()
    for path, message in zip(
        [*paths[:4], many / "corpus_train_000099.npy"],
        ["sha256 is", "truncated", "int32", "No such file", "not listed"],
        strict=True,
    ):
        assert any(line.startswith(f"{path}: ") and message in line for line in lines), path
    assert lines[-1] == "5 damaged"


@pytest.mark.parametrize("bit", range(0, 1024, 37))
def test_verify_finds_any_flipped_bit(prepared, bit):
    path = prepared / "tiny_val_000000.npy"
    content = bytearray(path.read_bytes())
    content[bit * len(content) // 1024] ^= 1 << bit % 8
    path.write_bytes(content)
    assert len(verify(prepared)) == 1


def test_stats_are_those_of_the_text(many):
    stats = measure(many)
    lengths = [len(gpt2_encoding().encode_ordinary(text)) + 1 for text in TEXTS * 8]
    assert stats["train"].tokens + stats["val"].tokens == sum(lengths)
    assert sorted([*stats["train"].lengths, *stats["val"].lengths]) == sorted(lengths)
    found = stats["train"].text_bytes + stats["val"].text_bytes
    assert found == sum(len(text.encode()) for text in TEXTS * 8)
    code, said, _ = data("stats", many)
    assert code == 0
    assert f"{stats['train'].tokens:,}" in said
    for shards, windows in (((1025, 1023), "1"), ((1024, 1024), "0")):  # none spans two shards
        exact = SplitStats(shards, 0, None, None, np.array([]))
        assert stats_table(many, {"train": exact}).split()[-1] == windows


def test_imported_shards_train_without_a_warning_and_are_verified(tmp_path):
    folder = tmp_path / "old"
    folder.mkdir()
    for number, split in ((0, "val"), (1, "train"), (2, "train")):
        ids = np.array(expected_stream(TEXTS), np.uint16)
        np.save(folder / f"edufineweb_{split}_{number:06d}.npy", np.roll(ids, number))
    assert open_data(folder, vocab_size=50304).warnings != ()
    error = launch.rejected(data("verify", folder))
    assert "no shards.json to compare with" in error
    assert "gpt2lab data import" in error
    code, said, _ = data("import", folder)
    assert (code, said.count("3 files")) == (0, 1)
    assert open_data(folder, vocab_size=50304).warnings == ()
    assert verify(folder) == []
    assert json.loads((folder / "shards.json").read_text())["documents"] == 3 * len(TEXTS)
    with pytest.raises(DataError, match="exists already; check it with"):
        import_folder(folder)


def test_characters_are_not_taken_for_gpt2_ids(tmp_path):
    folder = tmp_path / "shakespeare_char"
    folder.mkdir()
    for split, size in (("train", 3000), ("val", 700)):
        ids = np.random.RandomState(size).randint(0, 65, size).astype("<u2")
        ids.tofile(folder / f"{split}.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65}))
    code, said, _ = data("import", folder)
    assert (code, said.count("tokenizer unknown")) == (0, 1)
    opened = open_data(folder, vocab_size=65)
    assert opened.tokenizer is None
    assert "tokenizer is not known" in opened.warnings[0]
    assert "n/a" in data("stats", folder)[1]


def test_show_gives_the_tokens_of_a_step_also_after_a_change_of_batch_and_order(run):
    run.train("--max_steps=12", "--stop_after_steps=8")
    changes = ["--total_batch_size=256", "--shuffle=windows"]
    run.train("--resume=latest", *changes, "--allow_change=total_batch_size,shuffle")
    run_dir = run.path
    sizes = [len(tokens_of_step(run_dir, step).windows) for step in (1, 8, 9, 12)]
    assert (sizes, tokens_of_step(run_dir, 9).first_sample) == ([8, 8, 16, 16], 8 * 8)
    assert tokens_of_step(run_dir, 12).hash == launch.steps(run_dir)[12]["batch_hash"]
    code, said, _ = data("show", "--run", run_dir, "--step", 9)
    assert code == 0
    assert said.splitlines()[0].endswith("as logged")
    shown = [line for line in said.splitlines()[1:] if not line.startswith("---")]
    windows = tokens_of_step(run_dir, 9).windows
    assert [list(map(int, line.split())) for line in shown] == windows.tolist()


def test_show_text_is_the_text_that_was_prepared(prepared, tmp_path):
    how = {"context_length": 64, "total_batch_size": 64, "mini_batch_size": 1, "val_tokens": 64}
    run = Run(prepared, tmp_path, **how, vocab_size=50304)
    run.train(max_steps=1)
    code, said, _ = data("show", "--run", run.path, "--step", 1, "--text")
    assert code == 0
    text = gpt2_encoding().decode(np.load(prepared / "tiny_train_000000.npy")[:65].tolist())
    assert text in said


def test_show_rejects_what_it_cannot_prove(tmp_path):
    folder = write_shards(tmp_path / "data", train=(1000, 900), val=(300,))
    (run := Run(folder, tmp_path / "runs")).train("--max_steps=3")
    run_dir = run.path
    with pytest.raises(ConfigError, match="no step 4; it has steps 1 to 3"):
        tokens_of_step(run_dir, 4)
    moved = folder.rename(tmp_path / "moved")
    with pytest.raises(DataError, match="if they were moved, say where with --data_dir"):
        tokens_of_step(run_dir, 2)
    code, said, _ = data("show", "--run", run_dir, "--step", 2, "--data_dir", moved)
    assert (code, said.splitlines()[0].endswith("as logged")) == (0, True)
    longer = write_shards(tmp_path / "longer", train=(1000, 950), val=(300,))  # from step 4 on
    with pytest.raises(DataError, match="longer: not the data that tiny was trained on"):
        tokens_of_step(run_dir, 2, (str(longer),))
    moved.rename(folder)
    path = folder / "tiny_train_000000.npy"
    np.save(path, np.load(path)[::-1].copy())
    with pytest.raises(DataError, match=r"trained on other tokens than .* holds now"):
        tokens_of_step(run_dir, 2)


def test_merge_as_a_user_calls_it(tmp_path):
    source = write_jsonl(tmp_path / "corpus.jsonl", TEXTS)
    parts = prepare_parts(source, tmp_path, 2, group_bytes=3_000, val_tokens=200)
    code, said, _ = data("merge", tmp_path / "out", *parts)
    assert code == 0
    assert f"{len(expected_stream(TEXTS)):,} tokens" in said
    assert verify(tmp_path / "out") == []


@pytest.mark.parametrize(
    "words", ["", "varify x", "verify", "verify nowhere", "merge out", "show --run x"]
)
def test_a_wrong_call_of_data_is_one_line(words, tmp_path, monkeypatch, wording):
    monkeypatch.chdir(tmp_path)
    wording(launch.rejected(data(*words.split())))


# nanochat's shuffled ClimbMix: the first files train, the last one is the validation split. Nothing is downloaded.
FILES = (0, 1, 2, 3, 6542)


def texts_of(number: int) -> list[str]:
    return [f"Document {row} of file {number}, as {row * 37 % 11} others." for row in range(30)]


@pytest.fixture
def climbmix(tmp_path, monkeypatch) -> Path:
    """Return files with the schema and the names of nanochat's; `climbmix` is this folder."""
    folder = tmp_path / "set"
    folder.mkdir()
    for number in FILES:
        pq.write_table(
            pa.table({"text": texts_of(number)}),
            folder / f"shard_{number:05d}.parquet",
            **{"row_group_size": 8, "use_dictionary": False, "write_statistics": False},
            **{"compression": "zstd", "compression_level": 3},
        )
    monkeypatch.setattr(sources, "CLIMBMIX", str(folder))
    return folder


def prepared_from(source: str | Path, out: Path, **flags: object) -> Path:
    return prepare(PrepareData(str(source), out, num_workers=1, **flags))  # type: ignore[arg-type]


def test_the_first_files_train_and_the_last_one_validates(climbmix, tmp_path):
    out = prepared_from("climbmix", tmp_path / "out", num_files=2)
    assert documents_of(out, "train") == encoded([*texts_of(0), *texts_of(1)])
    assert documents_of(out, "val") == encoded(texts_of(6542))
    assert read_manifest(out)["split"]["held_out"] == "file shard_06542.parquet"
    all_files = prepared_from("climbmix", tmp_path / "all")
    every = [text for number in FILES[:-1] for text in texts_of(number)]
    assert documents_of(all_files, "train") == encoded(every)
    named = {"val_file": "shard_06542.parquet", "num_files": 2}
    again = prepared_from(climbmix, tmp_path / "again", **named)
    assert documents_of(again, "val") == encoded(texts_of(6542))
    learned = sources.open_source("climbmix", text_column="text", num_files=2)
    texts = learning_texts(learned, max_bytes=10**6, cuts=None)
    assert sorted(texts) == sorted([*texts_of(0), *texts_of(1)])
    # Limits in tokens take the first ones of each side.
    out = prepared_from("climbmix", tmp_path / "few", num_files=1, max_tokens=300, val_tokens=200)
    for split, number, count in (("train", 0, 300), ("val", 6542, 200)):
        found = [token for document in documents_of(out, split) for token in document]
        assert found == expected_stream(texts_of(number))[:count]
    (climbmix / "shard_06542.parquet").unlink()
    with pytest.raises(DataError, match=r"^val_file shard_06542\.parquet: .* has no such file; "):
        prepared_from("climbmix", tmp_path / "without")


def test_parts_are_the_same_bytes(climbmix, tmp_path):
    how = {"num_files": 3, "group_bytes": 1500}
    prepared_from("climbmix", tmp_path / "one", **how)
    for count in (2, 3):  # of three the last has text for validation alone
        parts = [tmp_path / f"{number} of {count}" for number in range(1, count + 1)]
        for number, part in enumerate(parts, start=1):
            prepared_from("climbmix", part, part=f"{number}/{count}", **how)
        merge(tmp_path / f"{count}", parts)
        assert snapshot(tmp_path / f"{count}") == snapshot(tmp_path / "one")


@pytest.mark.parametrize(
    ("source", "flags"),
    [
        *(("climbmix", {"num_files": 5}), ("climbmix", {"subset": "x"}), ("climbmx", {})),
        ("climbmix", {"val_file": "shard_00009.parquet"}),
        ("set/shard_00000.parquet", {"val_file": "shard_00000.parquet"}),
    ],
    ids=str,
)
def test_what_is_unclear_is_one_line(climbmix, tmp_path, monkeypatch, source, flags, wording):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, check=wording):
        prepared_from(source, tmp_path / "out", **flags)
    assert not list(tmp_path.glob("out*"))
