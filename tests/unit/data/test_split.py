"""What is held out of odd corpora, and that no share of the work is lost or too small."""

import contextlib
import csv
import gzip
import io
import json

import numpy as np
import pytest

from corpora import TEXTS, assert_divided, prepare_parts, run_prepare, snapshot, write_jsonl
from edited_manifests import Manifest, edit
from gpt2lab.data.prepare import sources, work, write
from gpt2lab.data.prepare.assemble import merge
from gpt2lab.data.prepare.encode import EncoderPool, TextChunk, encode_chunks
from gpt2lab.data.prepare.groups import File, Share, deal
from gpt2lab.data.prepare.pipeline import Sizes, plan_preparation
from gpt2lab.data.prepare.readers import read
from gpt2lab.data.prepare.sources import open_source
from gpt2lab.data.prepare.write import KEYS, Divider, SplitRule, rule_by_documents
from gpt2lab.errors import DataError
from gpt2lab.tokenizers.gpt2 import GPT2

MANY = [f"{i} {TEXTS[i % len(TEXTS)]}" for i in range(600)]


def test_the_size_of_a_text_is_estimated_also_where_a_file_is_empty_or_a_line_long(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number, text in enumerate(MANY[:200]):
        (folder / f"{number:03d}.txt").write_text(text if number else "")
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert open_source(str(folder), text_column="text").text_bytes() == size
    for note in ("", "n" * 3_000_000):  # beside a text of 1,500,000 bytes
        row = json.dumps({"text": "word " * 300_000, "note": note})
        (tmp_path / "corpus.jsonl").write_text(f"{row}\n" * 4)
        source = open_source(str(tmp_path / "corpus.jsonl"), text_column="text")
        assert source.text_bytes() == pytest.approx(4 * 1_500_000, rel=0.01)


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.jsonl.gz", "guessed.csv"])
def test_a_twentieth_of_the_text_is_held_out_of_a_small_column(name, tmp_path, monkeypatch):
    """Not of the bytes that a compression left, nor where the guess of the text was wrong."""
    file = io.StringIO(newline="")
    rows = [{"note": "n" * 1_000, "text": text} for text in MANY]
    csv.writer(file).writerows([rows[0], *(row.values() for row in rows)])
    content = file.getvalue()
    if "jsonl" in name:
        content = "".join(json.dumps(row) + "\n" for row in rows)
    raw = content.encode()
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    size = open_source(str(tmp_path / name), text_column="text").text_bytes()
    assert size == pytest.approx(sum(len(text.encode()) for text in MANY), rel=0.03)
    if name == "guessed.csv":
        monkeypatch.setattr(sources, "text_per_byte", lambda *_: 20.0)
    result = run_prepare(tmp_path / name, tmp_path / "out")
    assert 0.02 < result.total("tokens", "val") / result.total("tokens") < 0.1


@pytest.mark.parametrize(
    ("count", "tokens", "wanted"), [(10, 100_000, 50_000), (60, 150_000, 450_000)]
)
def test_few_long_documents_lose_little_of_their_text(count, tokens, wanted):
    total = count * tokens
    rule = rule_by_documents(wanted, [(key, tokens) for key in range(count)], total)
    held = rule.threshold
    assert 1 <= held * tokens <= max(tokens, 3 * wanted)
    assert rule.cap == wanted // 12


def test_half_of_the_text_is_left_and_copies_of_a_held_out_document_share_one_cap():
    assert rule_by_documents(100, [(1, 700), (2, 300)], 1000) is None
    assert rule_by_documents(100, [(1, 400), (2, 600)], 1000), "the first alone may be longer"
    divider = Divider(SplitRule(threshold=KEYS, cap=1024), budget=None)
    copies = encode_chunks([TextChunk("copied " * 150, begins=True)] * 20, GPT2)
    others = encode_chunks([TextChunk("another " * 150, begins=True)], GPT2)
    held = [divider.divide(one)[1] for one in (copies, others, copies)]
    assert [len(ids) for ids in held] == [1024, len(others.ids), 0]
    assert divider.held_back == 2 * len(copies.ids) - 1024
    divider = Divider(SplitRule(threshold=KEYS, cap=1024), budget=None)
    long, rest = (encode_chunks([TextChunk("long ", begins=one)], GPT2) for one in (True, False))
    for chunks in (long, rest, rest):
        divider.divide(chunks)
    assert [tokens for _, tokens in divider.smallest()] == [len(long.ids) + 2 * len(rest.ids)]


def test_a_small_file_beside_a_large_one_has_no_group_of_its_own():
    files = [File(name, size, name, "text") for name, size in (("a", 2_000), ("b", 5 * 10**9))]
    for order in (files, files[::-1]):
        groups = deal(order, group_bytes=10**9, shuffle=False)
        assert [len(group.shares) for group in groups] == [2]
    halves = [File(str(number), 5 * 10**8, "", "text") for number in range(4)]
    groups = deal(halves, group_bytes=10**9, shuffle=False)
    assert [len(group.shares) for group in groups] == [2, 2]


def test_groups_with_little_text_have_no_shards_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(write, "SMALLEST_LAST_SHARD", 300)
    folder = tmp_path / "corpus"
    write_jsonl(folder / "a.jsonl", MANY[:200])
    (folder / "b.jsonl").write_text("\n" * 6_000 + json.dumps({"text": MANY[200]}) + "\n")
    write_jsonl(folder / "c.jsonl", MANY[201:400])
    sizes = {"group_bytes": 6_000, "shard_tokens": 5_000, "val_tokens": 700}
    run_prepare(folder, tmp_path / "one", **sizes)
    assert_divided(tmp_path / "one", MANY[:400])
    manifest = json.loads((tmp_path / "one" / "shards.json").read_text())
    assert all(file["tokens"] >= 300 for file in manifest["files"])
    merge(tmp_path / "merged", prepare_parts(folder, tmp_path, 3, **sizes))
    assert snapshot(tmp_path / "merged") == snapshot(tmp_path / "one")


def test_parts_divided_by_other_rules_do_not_merge(tmp_path):
    source = write_jsonl(tmp_path / "corpus.jsonl", MANY)
    parts = prepare_parts(source, tmp_path, 2, group_bytes=6_000, val_tokens=700)

    def lower(manifest: Manifest) -> None:
        manifest["split"]["threshold"] -= 1

    edit(parts[1], lower)
    with pytest.raises(DataError, match="of another source or with other options"):
        merge(tmp_path / "out", parts)


def test_a_share_may_begin_where_a_line_does(tmp_path):
    path = write_jsonl(tmp_path / "c.jsonl", [f"line {number}" for number in range(8)])
    (file,) = open_source(str(path), text_column="text").files
    shares = [read(Share(file, number, 4), text_column="text") for number in range(4)]
    found = [text for share in shares for document in share for text in document.blocks]
    assert found == [f"line {number}" for number in range(8)]


def test_a_bad_byte_of_a_csv_costs_its_own_row(tmp_path):
    rows = [f"{i},text number {i}".encode() for i in range(3000)]
    rows[2900] = b"2900,caf\xe9"
    (tmp_path / "corpus.csv").write_bytes(b"id,text\n" + b"\n".join(rows) + b"\n")
    with pytest.raises(DataError, match=r"corpus.csv row 2902: not UTF-8"):
        run_prepare(tmp_path / "corpus.csv", tmp_path / "no")
    result = run_prepare(tmp_path / "corpus.csv", tmp_path / "out", skip_bad=True)
    assert result.manifest["left_out"] == {"bad": 1, "empty": 0}
    assert result.total("documents") == 2999
    rows[0] = b"0,a text with its own comma,"
    (tmp_path / "corpus.csv").write_bytes(b"id,text\n" + b"\n".join(rows) + b"\n")
    result = run_prepare(tmp_path / "corpus.csv", tmp_path / "again", skip_bad=True)
    assert result.total("documents") == 2998, "the next row is in doubt"


@pytest.mark.parametrize(
    ("head", "row", "says"),
    [
        ("text,id,text", "an old text,1,a new text", "two columns text; rename one of them"),
        ("text,id", "a text, with a comma,1", "row 42: more fields than the first row has names"),
        ("id,text", "1,a text with its own comma,", "row 42: more fields .* or than other rows"),
        ("text,id", '"a quote that nothing ends,2', r"not readable after row 41 \("),
        ("text,id", '"he said "no" again",2', r"not readable after row 41 \("),
    ],
)
def test_a_csv_that_could_be_read_in_two_ways_is_an_error(head, row, says, tmp_path):
    """Read leniently, the first quote swallows all rows below it, and the second loses one of four."""
    lines = [head, *(f"text number {i},{i}" for i in range(40)), row, "the last,3", ""]
    (tmp_path / "corpus.csv").write_text("\n".join(lines))
    with pytest.raises(DataError, match=rf"corpus.csv:? {says}"):
        run_prepare(tmp_path / "corpus.csv", tmp_path / "out")


def test_two_workers_may_finish_one_group(tmp_path, monkeypatch):
    """On a cluster a task that was taken for dead may still be running."""
    source = open_source(str(write_jsonl(tmp_path / "c.jsonl", MANY)), text_column="text")
    (task,) = plan_preparation(source, Sizes(val_tokens=700), tokenizer=GPT2).tasks
    half = source.text_bytes() // GPT2.bytes_per_token // 2
    sizes = [Sizes(val_tokens=tokens) for tokens in (half, half + 1)]
    notes = [plan_preparation(source, size, tokenizer=GPT2).note for size in sizes]
    assert (notes[0], notes[1] is None) == (None, False), "over half of the text"
    original, staging = work._write, tmp_path / "groups"
    staging.mkdir()

    def slow(*args: object) -> object:
        facts = original(*args)  # type: ignore[arg-type]
        monkeypatch.setattr(work, "_write", original)
        with contextlib.closing(EncoderPool(1, GPT2)) as others:
            work.run_task(task, staging, others, lambda count: None)
        return facts

    monkeypatch.setattr(work, "_write", slow)
    with contextlib.closing(EncoderPool(1, GPT2)) as pool:
        finished = work.run_task(task, staging, pool, lambda count: None)
    assert sum(file["tokens"] for file in finished.files) == finished.facts["train_tokens"]
    assert [path.name for path in staging.iterdir()] == ["group_00000"]
    assert np.load(finished.folder / "val.npy").size == finished.facts["val_tokens"]
