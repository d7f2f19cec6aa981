"""Tokenizers that are made to hurt: one line and exit code 2, whatever the library does with them."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import launch
from gpt2lab.errors import DataError
from gpt2lab.tokenizers import huggingface
from gpt2lab.tokenizers.bpe import train_bpe
from gpt2lab.tokenizers.interface import END_TOKEN
from gpt2lab.tokenizers.named import open_tokenizer
from gpt2lab.tokenizers.opening import of_record

GOOD = json.loads(train_bpe(["a few words for a few ids"], 258).tokenizer_json())
END = GOOD["added_tokens"][0]
WORDS = {"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"few": 0, END_TOKEN: 1}}
PIECES = {"continuing_subword_prefix": "##", "max_input_chars_per_word": 9, "type": "WordPiece"}
DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
LONG_PREFIX = {"continuing_subword_prefix": "#" * 9, "merges": [["a", "b"]]}
CASES: dict[str, dict[str, Any]] = {
    "panics when opened": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "aborts when opened": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/" * 16}},
    "panics in its merges": {"model": GOOD["model"] | LONG_PREFIX},
    "panics when it encodes": {"normalizer": {"type": "Prepend", "prepend": ""}},
    "panics when it decodes": {
        "decoder": {"type": "Strip", "content": "a", "start": 10**9, "stop": 10**9}
    },
    "grows without end": {"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 60}},
    "an id of 32 bits": {"added_tokens": [END, END | {"id": 2**32 - 2, "content": "x"}]},
    "an id that is no number": {"added_tokens": [END, END | {"id": "7", "content": "x"}]},
    "words without [UNK]": {"model": WORDS, "pre_tokenizer": {"type": "Whitespace"}},
    "bytes without [UNK]": {"model": WORDS},
    "pieces without [UNK]": {"model": WORDS | PIECES, "pre_tokenizer": {"type": "Whitespace"}},
}


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """Return the file of the tokenizers that passed; no other is known."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface, "_TRIAL_SECONDS", 2)
    return tmp_path / "cache" / "gpt2lab" / "tokenizers_that_passed"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("cache")
def test_a_hostile_tokenizer_is_one_line(tmp_path, case):
    (tmp_path / "tokenizer.json").write_text(json.dumps(GOOD | CASES[case]))
    (tmp_path / "text.txt").write_text("a few words")
    flags = ("--tokenizer", tmp_path / "tokenizer.json", "--out", tmp_path / "out")
    code, _, said = launch.call("prepare", tmp_path / "text.txt", *flags)
    assert (code, len(said.splitlines())) == (2, 1), said
    assert str(tmp_path) in said
    assert not (tmp_path / "out").exists()
    record = {"name": "bpe-258", "sha256": "0" * 64}  # as in the manifest of a checkpoint
    with pytest.raises(DataError):
        of_record(record, tmp_path, "manifest.json")


def test_a_vocabulary_and_merges_are_tried_too_and_a_pickle_is_read_with_care(tmp_path, cache):
    (tmp_path / "vocab.json").write_text(json.dumps(GOOD["model"]["vocab"]))
    (tmp_path / "merges.txt").write_text("a b")
    with pytest.raises(DataError):  # "ab" has no id
        open_tokenizer(str(tmp_path))
    (tmp_path / "merges.txt").write_text("")
    assert (open_tokenizer(str(tmp_path)).size, len(cache.read_text().split())) == (258, 1)
    (hostile := tmp_path / "pickle").mkdir()  # a key of it takes years to hash
    (hostile / "meta.pkl").write_bytes(b"\x80\x02})" + b"2\x86" * 40 + b"K\x00s.")
    with pytest.raises(DataError, match="tuples"):
        open_tokenizer(str(hostile))


def test_a_tokenizer_is_tried_once(tmp_path, cache, monkeypatch):
    (tmp_path / "tokenizer.json").write_text(json.dumps(GOOD))
    found = open_tokenizer(str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    assert open_tokenizer(str(tmp_path)) == found
    cache.unlink()
    huggingface._try_out.cache_clear()
    with pytest.raises(DataError):
        open_tokenizer(str(tmp_path))


def test_a_text_on_which_the_library_panics_is_one_line():
    content = json.dumps(GOOD | CASES["panics when it encodes"]).encode()
    with pytest.raises(DataError, match="it: "):
        huggingface.of_json(content, END_TOKEN, "it").encode("na\u00efve \x00 \U0001f642")
