"""A long document is tokenized in chunks: the ids must be those of the full text, whatever the text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2lab.data.prepare import encode
from gpt2lab.data.prepare.encode import cut, encode_chunks
from gpt2lab.errors import DataError
from gpt2lab.tokenizers.gpt2 import END_OF_TEXT, GPT2, gpt2_encoding

# What GPT-2's pattern treats specially: contractions, digits, all kinds of white space, marks, scripts, controls.
AWKWARD = st.text(
    alphabet=st.one_of(
        st.sampled_from("ab'sdtmlrve 019 \t\r\n\u00a0\u2003\u3000\x1c\x85é中🙂\u0301-_"),
        st.characters(codec="utf-8"),
    ),
    max_size=300,
)


@settings(derandomize=True, max_examples=400, deadline=None)
@given(text=AWKWARD, length=st.integers(1, 40), block=st.integers(1, 50))
def test_chunks_give_the_ids_of_the_full_text(text, length, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "CHUNK_CHARS", length)
        texts = [text[i : i + block] for i in range(0, len(text), block)]
        found = list(cut(texts, where="here", cuts=GPT2.cuts))
    assert "".join(chunk.text for chunk in found) == text
    begins = [chunk.begins for chunk in found]
    assert begins == ([True] + [False] * (len(found) - 1) if text else [])
    whole = [END_OF_TEXT, *gpt2_encoding().encode_ordinary(text)] if text else []
    assert encode_chunks(found, GPT2).ids.tolist() == whole


def test_text_with_many_places_to_cut_is_cut_and_with_none_for_long_rejected(monkeypatch):
    found = list(cut(["word " * 1_000_000], where="here", cuts=GPT2.cuts))
    assert len(found) == 5
    assert max(len(chunk.text) for chunk in found) < encode.CHUNK_CHARS + 10
    monkeypatch.setattr(encode, "CHUNK_CHARS", 100)
    monkeypatch.setattr(encode, "LONGEST_WORD", 1000)
    with pytest.raises(DataError, match=r"b\.txt: .* without white space; probably not text"):
        list(cut(["A" * 5000], where="b.txt", cuts=GPT2.cuts))


def test_half_a_surrogate_pair_becomes_the_replacement_character():
    (chunk,) = cut(["a\ud800b"], where="here", cuts=GPT2.cuts)
    expected = gpt2_encoding().encode_ordinary("a\ufffdb")
    assert encode_chunks([chunk], GPT2).ids.tolist() == [END_OF_TEXT, *expected]
