"""Data of other tokenizers than GPT-2's: prepared, described, opened, refused where the tokenizer is another one."""

import json
from pathlib import Path

import numpy as np
import pytest

import corpora
from corpora import TEXTS, run_prepare, write_jsonl
from gpt2lab.data.manifest import tokenizer_of
from gpt2lab.data.prepare.assemble import merge
from gpt2lab.data.shards import TokenData, document_marks, open_data
from gpt2lab.data.verify import measure, verify
from gpt2lab.data.windows import WindowReader
from gpt2lab.errors import DataError
from gpt2lab.tokenizers.bpe import characters_of, train_bpe
from gpt2lab.tokenizers.gpt2 import GPT2
from gpt2lab.tokenizers.interface import Tokenizer
from gpt2lab.tokenizers.plain import BYTES, CharactersTokenizer

TEXT = [f"{text} é 你好 🙂" for text in TEXTS]
# More ids than 16 bits hold; the letters of the text come last.
FAR = [chr(n) for n in range(0x20000, 0x20000 + 70_000)]
MANY = CharactersTokenizer([*FAR, *sorted(set("".join(TEXT)))])
TOKENIZERS: dict[str, Tokenizer] = {"bytes": BYTES, "characters": characters_of(TEXT)}
TOKENIZERS |= {"trained": train_bpe(TEXT, 300), "70,000 ids": MANY}


@pytest.fixture
def source(tmp_path) -> Path:
    return write_jsonl(tmp_path / "corpus" / "a.jsonl", TEXT)


def documents_of(data: TokenData, split: str) -> list[str]:
    """Return the texts of a split, through its own tokenizer."""
    ids = np.concatenate([np.load(shard.path) for shard in data.splits[split]])
    starts = np.flatnonzero(ids == data.tokenizer.end_of_text)
    parts = np.split(ids, starts)
    assert len(parts[0]) == 0
    return [data.tokenizer.decode(part[1:].tolist()) for part in parts[1:]]


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_every_document_is_there_in_its_own_ids(tokenizer, source, tmp_path):
    run_prepare(source, tmp_path / "out", tokenizer=tokenizer)
    data = open_data(tmp_path / "out", vocab_size=2**17)
    assert data.tokenizer == tokenizer == tokenizer_of(tmp_path / "out")
    train, val = documents_of(data, "train"), documents_of(data, "val")
    assert sorted({*train, *val}) == sorted(TEXT)
    assert not {*train} & {*val}
    manifest = json.loads((tmp_path / "out" / "shards.json").read_text())
    assert manifest["tokenizer"] == tokenizer.record()
    assert {np.load(shard.path).dtype.str for shard in data.splits["train"]} == {tokenizer.dtype}
    facts = measure(tmp_path / "out")
    texts = sum(len(text.encode()) for text in (*train, *val))
    assert sum(split.text_bytes or 0 for split in facts.values()) == texts
    assert (len(facts["train"].lengths), verify(tmp_path / "out")) == (len(train), [])
    assert f"tokenizer {tokenizer.describe()}" in data.describe(0)


def test_the_same_documents_are_held_out_whatever_the_tokenizer(source, tmp_path):
    held_out = []
    for name, tokenizer in {"gpt2": GPT2, **TOKENIZERS}.items():
        run_prepare(source, tmp_path / name, tokenizer=tokenizer)
        held_out.append(set(documents_of(open_data(tmp_path / name, vocab_size=2**17), "val")))
    smallest = min(held_out, key=len)
    assert smallest
    assert all(smallest <= one for one in held_out)  # by their keys; how many is a matter of tokens


@pytest.mark.parametrize("name", ["trained", "70,000 ids"])
def test_workers_and_parts_change_no_byte(name, tmp_path):
    for number in range(4):
        write_jsonl(tmp_path / "corpus" / f"{number}.jsonl", TEXT[number::4] * 20)
    tokenizer = TOKENIZERS[name]
    how = {"tokenizer": tokenizer, "group_bytes": 20_000, "shard_tokens": 7000}
    run_prepare(tmp_path / "corpus", tmp_path / "one", num_workers=1, **how)  # type: ignore[arg-type]
    run_prepare(tmp_path / "corpus", tmp_path / "two", num_workers=2, **how)  # type: ignore[arg-type]
    merge(tmp_path / "merged", corpora.prepare_parts(tmp_path / "corpus", tmp_path, 2, **how)[::-1])
    expected = corpora.snapshot(tmp_path / "one")
    assert len(expected) > 4
    assert set(tokenizer.files) <= set(expected)
    assert corpora.snapshot(tmp_path / "two") == expected
    assert corpora.snapshot(tmp_path / "merged") == expected


@pytest.mark.parametrize("harm", ["another", "missing"])
def test_a_changed_tokenizer_file_is_refused_and_one_that_lacks_a_character(source, tmp_path, harm):
    out = tmp_path / "out"
    with pytest.raises(DataError, match="is not among the 3 of this tokenizer"):
        run_prepare(source, out, tokenizer=CharactersTokenizer("abc"))
    assert not out.exists()
    run_prepare(source, out, tokenizer=TOKENIZERS["characters"])
    if harm == "missing":
        (out / "characters.json").unlink()
    else:
        swapped = CharactersTokenizer(characters_of(TEXT).characters[::-1])
        (out / "characters.json").write_bytes(swapped.files["characters.json"])
    with pytest.raises(DataError, match="restore the"):
        open_data(out, vocab_size=50304)
    assert "restore the" in verify(out)[0]


def test_windows_of_32_bit_ids(source, tmp_path):
    run_prepare(source, tmp_path / "out", tokenizer=MANY)
    data = open_data(tmp_path / "out", vocab_size=2**17)
    (shard,) = data.splits["train"]
    reader = WindowReader((shard,), context_length=8, id_limit=MANY.size)
    windows = reader.read(np.array([0, 0]), np.array([0, 8]))
    ids = np.load(shard.path)
    assert windows.dtype == np.uint32
    assert windows.max() >= 70_000
    assert windows.tolist() == [ids[:9].tolist(), ids[8:17].tolist()]
    ends = np.flatnonzero(ids == MANY.end_of_text)
    assert document_marks(shard, MANY.end_of_text).tolist() == ends.tolist()
    reader.close()
    largest = int(windows[0].max())
    with pytest.raises(DataError, match=f"ids must be below {largest}"):
        reader = WindowReader((shard,), context_length=8, id_limit=largest)
        reader.read(np.zeros(1, int), np.zeros(1, int))
