"""All tokenizers through one interface: exact text, bytes of ids, files that identify them, errors in one line."""

import json
import os
import pickle
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Encoder
from tokenizers import decoders, models, pre_tokenizers

import launch
from gpt2lab.errors import DataError
from gpt2lab.tokenizers.bpe import characters_of, train_bpe
from gpt2lab.tokenizers.gpt2 import GPT2, VOCABULARY_HASH, gpt2_encoding, vocabulary_files
from gpt2lab.tokenizers.huggingface import of_json
from gpt2lab.tokenizers.interface import END_TOKEN, Tokenizer
from gpt2lab.tokenizers.named import open_tokenizer
from gpt2lab.tokenizers.opening import find_in, of_record, why_no_text
from gpt2lab.tokenizers.plain import BYTES, CharactersTokenizer

TEXTS = [
    "Hello, I'm a model: naïve café, 你好, 🙂\n\tdef f(x):\n    return x  # 12345",
    *(f"what looks like {END_TOKEN} is text", "", " leading and trailing  \n\n"),
    "caf\u0065\u0301 \x00 \u2028 end",
]
CORPUS = [*TEXTS, *(f"number {n} of {n * n} words, {'again ' * (n % 5)}" for n in range(400))]


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return train_bpe(CORPUS, 400)


@pytest.fixture(params=["gpt2", "bytes", "characters", "trained"])
def tokenizer(request, trained) -> Tokenizer:
    known = {"gpt2": GPT2, "bytes": BYTES, "characters": characters_of(CORPUS), "trained": trained}
    return known[request.param]


def write(tokenizer: Tokenizer, folder: Path) -> Path:
    folder.mkdir()
    for name, content in tokenizer.files.items():
        (folder / name).write_bytes(content)
    return folder


def test_text_comes_back_and_no_text_ends_a_document(tokenizer):
    for text, ids in zip(TEXTS, tokenizer.encode_documents(TEXTS), strict=True):
        assert (ids.tolist(), tokenizer.decode(ids.tolist())) == (tokenizer.encode(text), text)
        assert "".join(tokenizer.stream(ids.tolist())) == text
        assert tokenizer.end_of_text not in ids
        assert max(ids, default=0) < tokenizer.size


@pytest.mark.parametrize("tokenizer", ["gpt2", "bytes", "trained"], indirect=True)
def test_a_byte_that_is_not_utf_8_becomes_a_replacement_character(tokenizer):
    """The command line gives it as half of a surrogate pair."""
    typed = os.fsdecode(b"the \xff king")
    assert tokenizer.decode(tokenizer.encode(typed)) == "the \ufffd king"


@pytest.mark.parametrize("letters", ["</>spad ", "spad "])
def test_a_special_token_that_is_a_piece_is_text_as_well(letters):
    pieces = [*((one, 0.0) for one in ("<unk>", "</s>", "<pad>")), ("spad", -5.0), ("d☃", -14.0)]
    whole = Encoder(models.Unigram([*pieces, *((one, -14.0) for one in letters)], 0))
    whole.add_special_tokens(["<unk>", "</s>", "<pad>", "<mask>"])
    whole.add_tokens(["ask"])  # whose id comes after that of a special one
    found = of_json(whole.to_str().encode(), "</s>", "pieces")
    assert {1, 2}.isdisjoint(found.encode("a <pad> </s>"))
    assert found.tokenizer_json() == whole.to_str().encode()
    for text in ("spad☃", "\0001\0 ask"):  # scores, numbers and texts as they are
        assert list(found.encode(text)) == whole.encode(text).ids
    words = Encoder(models.WordLevel({"<unk>": 0, "</s>": 1, "<pad>": 2, "spad": 3}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["<unk>", "</s>", "<pad>"])
    found = of_json(words.to_str().encode(), "</s>", "words")
    assert list(found.encode("spad <pad> </s> <unk>")) == [3, 0, 0, 0]


def test_lengths_of_ids_are_bytes_of_text(tokenizer):
    lengths = tokenizer.byte_lengths()
    assert (lengths.shape, lengths.dtype) == ((tokenizer.size,), np.int64)
    assert np.flatnonzero(lengths == 0).tolist() == [tokenizer.end_of_text]
    for text in TEXTS:
        assert lengths[tokenizer.encode(text)].sum() == len(text.encode())


def test_bytes_are_known_where_the_decoder_is_a_sequence(trained):
    values = json.loads(trained.tokenizer_json())
    values["decoder"] = {"type": "Sequence", "decoders": [values["decoder"]]}
    word = {"id": trained.size, "content": "Grüße", "special": False}  # letters that mean bytes too
    values["added_tokens"].append({**values["added_tokens"][0], **word})
    found = of_json(json.dumps(values).encode(), trained.end_token, "sequence")
    assert found.byte_lengths().tolist() == [*trained.byte_lengths().tolist(), 7]


def test_a_text_may_be_cut_where_the_tokenizer_says(tokenizer):
    text = " ".join(TEXTS)
    places = [match.start() for match in tokenizer.cuts.finditer(text)]
    assert len(places) > 10
    for place in places:
        parts = [*tokenizer.encode(text[:place]), *tokenizer.encode(text[place:])]
        assert parts == tokenizer.encode(text)


def test_files_of_another_tokenizer_are_rejected(tmp_path):
    folder = write(characters_of("abc"), tmp_path / "it")
    record = characters_of("abd").record()
    with pytest.raises(DataError, match=r"its tokenizer is characters, 4 ids.* restore the files"):
        of_record(record, folder, "shards.json")
    with pytest.raises(DataError, match="does not record the tokenizer"):
        of_record(None, folder, "shards.json")
    assert of_record({"name": "unknown", "sha256": None}, folder, "shards.json") is None


def test_its_files_are_the_same_tokenizer(tokenizer, tmp_path):
    folder = write(tokenizer, tmp_path / "it")
    record = json.loads(json.dumps(tokenizer.record()))
    found = of_record(record, folder, "shards.json")
    assert found == tokenizer
    facts = [(one.size, one.end_of_text, one.hash) for one in (found, tokenizer)]
    assert facts[0] == facts[1]
    again = pickle.loads(pickle.dumps(tokenizer))  # what a process that tokenizes gets
    assert (again, again.encode(TEXTS[0])) == (tokenizer, tokenizer.encode(TEXTS[0]))
    if tokenizer.files:
        assert open_tokenizer(str(folder)) == tokenizer
        assert of_record(GPT2.record(), folder, "shards.json") == GPT2
        (folder / min(tokenizer.files)).unlink()
        with pytest.raises(DataError, match=f"files of its tokenizer {tokenizer.name} are missing"):
            of_record(record, folder, "shards.json")


def test_hugging_face_reads_each_of_them(tokenizer, tmp_path):
    from transformers import PreTrainedTokenizerFast

    (tmp_path / "tokenizer.json").write_bytes(tokenizer.tokenizer_json())
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for text in TEXTS:
        if END_TOKEN in text:
            continue
        ids = tokenizer.encode(text)
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids, clean_up_tokenization_spaces=False) == text
    assert theirs.convert_tokens_to_ids(tokenizer.end_token) == tokenizer.end_of_text
    assert open_tokenizer(str(tmp_path / "tokenizer.json")) == tokenizer


def test_gpt2_keeps_its_record_and_ids():
    assert GPT2.record() == {"name": "gpt2", "sha256": VOCABULARY_HASH}
    assert (GPT2.files, GPT2.dtype) == ({}, "<u2")
    assert GPT2.encode(TEXTS[0]) == gpt2_encoding().encode_ordinary(TEXTS[0])


def test_gpt2_is_recognised_in_any_form(tmp_path, trained):
    (tmp_path / "tokenizer.json").write_bytes(GPT2.tokenizer_json())
    assert open_tokenizer(str(tmp_path / "tokenizer.json")) is GPT2
    merges, ids = vocabulary_files()
    old = tmp_path / "old"
    old.mkdir()
    (old / "vocab.json").write_bytes(ids.read_bytes())
    (old / "merges.txt").write_bytes(merges.read_bytes())
    assert open_tokenizer(str(old)) is GPT2
    model = json.loads(trained.tokenizer_json())["model"]
    (old / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "".join(f"{a} {b}\n" for a, b in model["merges"])
    (old / "merges.txt").write_text(f"#version: 0.2\n{merges}")
    found = open_tokenizer(str(old))
    assert found.encode(TEXTS[0]) == trained.encode(TEXTS[0])
    assert (found.size, found.end_of_text) == (400, 0)


def test_ids_of_characters_above_16_bits_need_32_and_a_character_without_one_is_named():
    assert CharactersTokenizer([chr(n) for n in range(0x10000, 0x10000 + 65_535)]).dtype == "<u2"
    many = CharactersTokenizer([chr(n) for n in range(0x10000, 0x10000 + 65_536)])
    assert (many.dtype, many.encode(chr(0x10000 + 65_535))) == ("<u4", [65_535])
    assert many.end_of_text == 65_536
    with pytest.raises(DataError, match=r"the character 'é' \(U\+00E9\) is not among the 3"):
        CharactersTokenizer("abc").encode("abécé")


def test_ids_may_have_gaps_and_an_id_counts_in_bytes():
    vocabulary = {"[UNK]": 0, "a": 2, "\u00e9": 5, END_TOKEN: 9}
    words = Encoder(models.WordLevel(vocabulary, unk_token="[UNK]"))
    found = of_json(words.to_str().encode(), END_TOKEN, "words")
    assert found.size == 10
    assert found.byte_lengths()[[2, 5]].tolist() == [2, 3], "with the space before it"
    assert (why_no_text(found, 10), why_no_text(found, 9) is None) == (None, False)


def test_a_text_after_another_keeps_the_space_that_a_beginning_drops():
    words = Encoder(models.WordLevel({"\u2581a": 0, "\u2581b": 1, END_TOKEN: 2}, END_TOKEN))
    words.decoder = decoders.Metaspace()
    found = of_json(words.to_str().encode(), END_TOKEN, "words")
    assert (found.decode([0, 1]), found.decode([1])) == ("a b", "b")
    assert (found.decode_after([0], [1]), "".join(found.stream([1, 1], [0]))) == (" b", " b b")


def test_the_end_of_text_is_said_where_it_is_not_clear(trained, tmp_path):
    values = json.loads(trained.tokenizer_json())
    path = tmp_path / "tokenizer.json"

    def with_tokens(*names: str) -> str:
        values["added_tokens"] = [
            {**values["added_tokens"][0], "id": 0 if n == 0 else 399 + n, "content": name}
            for n, name in enumerate(names)
        ]
        kept = {token: id for token, id in values["model"]["vocab"].items() if id}
        values["model"]["vocab"] = kept | {names[0]: 0}
        path.write_text(json.dumps(values))
        return str(path)

    with pytest.raises(DataError, match="none of the usual names; give --end_token"):
        open_tokenizer(with_tokens("<stop>"))
    assert open_tokenizer(str(path), "<stop>").end_of_text == 0
    with pytest.raises(DataError, match="has </s> and <eos>; give --end_token"):
        open_tokenizer(with_tokens("</s>", "<eos>"))
    first, second = open_tokenizer(str(path), "</s>"), open_tokenizer(str(path), "<eos>")
    assert (first.end_of_text, second.end_of_text) == (0, 400)
    assert first.hash != second.hash
    with pytest.raises(DataError, match="no token '<nothing>'"):
        open_tokenizer(str(path), "<nothing>")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<eos>"}}')
    assert find_in(tmp_path) == second


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"model": {"type": "BPE", "dropout": 0.1}}'])
def test_what_is_no_tokenizer_is_one_line(tmp_path, content, wording):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, check=wording):
        open_tokenizer(str(tmp_path))


def test_an_unknown_name_lists_the_known_ones(tmp_path):
    with pytest.raises(DataError, match=r"no such tokenizer; known: gpt2 \| bytes"):
        open_tokenizer("llama")
    with pytest.raises(DataError, match=r"no such tokenizer; did you mean gpt2\?"):
        open_tokenizer("gtp2")
    with pytest.raises(DataError, match="holds no tokenizer"):
        open_tokenizer(str(tmp_path))
    with pytest.raises(DataError, match=r"its end-of-text token is <\|endoftext\|>; leave out"):
        open_tokenizer("bytes", "</s>")


def meta_of(characters: str) -> dict[str, object]:
    itos = dict(enumerate(characters))
    return {"vocab_size": len(itos), "itos": itos, "stoi": {one: id for id, one in itos.items()}}


def test_nanogpts_characters_are_read(tmp_path):
    path = tmp_path / "meta.pkl"
    path.write_bytes(pickle.dumps(meta_of("\n !abc")))
    found = open_tokenizer(str(path))
    assert found.encode("abc!\n") == [3, 4, 5, 2, 0]
    assert (found.size, found.end_of_text) == (7, 6)
    assert open_tokenizer(str(tmp_path)) == found == CharactersTokenizer("\n !abc")


class Harmful:
    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(Path(sys.argv[0]).parent / "harm"), "w")


def test_a_pickle_that_would_run_code_or_holds_no_characters_is_rejected(tmp_path):
    path = tmp_path / "meta.pkl"
    path.write_bytes(pickle.dumps({"itos": Harmful()}))
    with pytest.raises(DataError, match=r"it would call (_?io)\.open"):
        open_tokenizer(str(path))
    # Characters that contradict each other, and what is no such file.
    changes = ({"vocab_size": 9}, {"stoi": {"a": 1}}, {"itos": {0: "ab"}}, {"itos": {1: "a"}})
    whole, *changed = (pickle.dumps(meta_of("abc") | change) for change in ({}, *changes))
    for content in (b"", b"\x80\x04garbage", pickle.dumps([1]), whole[:-3], *changed):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"meta\.pkl: "):
            open_tokenizer(str(path))


def test_training_depends_neither_on_order_nor_on_threads(trained):
    shuffled = list(CORPUS)
    random.Random(0).shuffle(shuffled)
    assert train_bpe(shuffled, 400).hash == trained.hash
    code = (
        "import sys; sys.path.insert(0, 'tests/unit/tokenizers')\n"
        "from test_interface import CORPUS\n"
        "from gpt2lab.tokenizers.bpe import train_bpe\n"
        "print(train_bpe(CORPUS, 400).hash)"
    )
    for threads in ("1", "3"):
        environment = {"RAYON_NUM_THREADS": threads, "PYTHONPATH": os.pathsep.join(sys.path)}
        answer = launch.python("-c", code, **environment)
        assert answer.stdout.strip() == trained.hash, answer.stderr


def test_training_says_what_does_not_fit():
    with pytest.raises(DataError, match="must be at least 257"):
        train_bpe(CORPUS, 256)
    with pytest.raises(DataError, match=r"yields only 2\d\d ids, not 5,000"):
        train_bpe(["a b c d"], 5000)
    assert train_bpe(["abc"], 257).decode([0]) == END_TOKEN


def test_tokenizers_are_opened_without_torch():
    code = (
        "import sys; from gpt2lab.tokenizers import named; "
        "named.open_tokenizer('bytes'); "
        "assert not {'torch', 'transformers', 'tokenizers', 'numpy'} & set(sys.modules)"
    )
    launch.worked(launch.python("-c", code))
