"""Tokenizers of Hugging Face's `tokenizers` library: read from tokenizer.json. No torch."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2lab import paths
from gpt2lab.errors import DataError, first_line, is_out_of_memory, system_errors_as
from gpt2lab.files import is_count, read_regular, regular
from gpt2lab.tokenizers import gpt2
from gpt2lab.tokenizers.interface import (
    END_TOKEN,
    USUAL_END_TOKENS,
    Tokenizer,
    byte_alphabet,
    json_of_merges,
)
from gpt2lab.tokenizers.plain import BYTES, CharactersTokenizer

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer as Encoder

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"  # names the end-of-text token, as transformers does
VOCABULARY_FILE, MERGES_FILE = "vocab.json", "merges.txt"  # the older form of a byte-level BPE
_LARGEST_FILE = 256 * 1024 * 1024
_LARGEST_CACHE = 1 << 20
_MOST_IDS = 1 << 22  # the largest public vocabularies have 2^18
_TRIAL_SECONDS = 20  # of processor time; the largest public tokenizers need about 3
_BYTE_FALLBACK = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class HuggingFaceTokenizer(Tokenizer):
    """The tokenizer that a tokenizer.json describes."""

    def __init__(self, content: bytes, end_token: str, where: str) -> None:
        """`content`: of tokenizer.json; `where`: its path, for messages.

        Raises: DataError if it is not one, or has no such end-of-text token.
        """
        values = _parse(content, where)
        ids = _ids_of(values, where)
        if end_token not in ids:
            raise DataError(f"{where}: no token {end_token!r}; give another --end_token")
        self.size = 1 + max(ids.values())
        self.name = f"{str(values['model'].get('type', 'bpe')).lower()}-{self.size}"
        self.end_token, self.end_of_text = end_token, ids[end_token]
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": end_token,
            "eos_token": end_token,
            "clean_up_tokenization_spaces": False,
        }
        self.files = {
            TOKENIZER_FILE: content,
            CONFIG_FILE: (json.dumps(settings, indent=2) + "\n").encode(),
        }
        self.cuts = gpt2.CUTS if splits_as_gpt2(values) else None
        self._where = where

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, (n,) uint32.

        Raises: DataError if the tokenizer takes a part of a text for the end of a text, or fails.
        """
        import numpy as np

        with self._library():
            encoder = _encoder_of_text(self.files[TOKENIZER_FILE])
            encoded = encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        found = [np.array(one.ids, dtype=np.uint32) for one in encoded]
        if any((ids == self.end_of_text).any() for ids in found):
            raise DataError(
                f"{self._where}: encodes {self.end_token!r} within a text as the end of the text: it is a word of the "
                f"vocabulary, or not marked special; use another end token, or another tokenizer"
            )
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        with self._library():
            encoder = _encoder(self.files[TOKENIZER_FILE])
            text: str = encoder.decode(ids, skip_special_tokens=False)
        return text

    @contextlib.contextmanager
    def _library(self) -> Iterator[None]:
        """Turn an error of the library into a DataError: also a panic, which is no Exception."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:
            if is_out_of_memory(error):  # a thread of the library that cannot start makes it panic
                raise MemoryError(first_line(error)) from error
            raise DataError(f"{self._where}: fails on this text ({first_line(error)})") from error

    def byte_lengths(self) -> np.ndarray:
        """Return how many bytes of text each id stands for within a text, (size,) int64; 0 for special ids."""
        return _byte_lengths(self.files[TOKENIZER_FILE], self.size)

    def tokenizer_json(self) -> bytes:
        """Return the file itself."""
        return self.files[TOKENIZER_FILE]


def read_huggingface(path: Path, end_token: str | None) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json; GPT-2's own is recognised.

    `end_token`: its end-of-text token; default the one of the usual names that it has.

    Raises: DataError.
    """
    with system_errors_as(DataError, path):
        content = read_regular(path, at_most=_LARGEST_FILE, follow=True)
    _require_trial(content, end_token, str(path))
    return of_json(content, end_token, str(path))


def _require_trial(content: bytes, end_token: str | None, where: str) -> None:
    """Reject a tokenizer that another process cannot use (see trial.py, which reads `content`), once per content."""
    digest = hashlib.sha256(content).hexdigest()
    passed = paths.of_user("XDG_CACHE_HOME", ".cache") / "gpt2lab" / "tokenizers_that_passed"
    with contextlib.suppress(OSError):
        if digest.encode() in read_regular(passed, at_most=_LARGEST_CACHE).split():
            return
    if (problem := _try_out(content, end_token, where)) is not None:
        raise DataError(problem)
    with contextlib.suppress(OSError):
        passed.parent.mkdir(parents=True, exist_ok=True)
        with open(passed, "ab", opener=regular) as file:
            file.write(f"{digest}\n".encode())


@functools.lru_cache(maxsize=16)
def _try_out(content: bytes, end_token: str | None, where: str) -> str | None:
    words = [sys.executable, "-m", "gpt2lab.tokenizers.trial", str(_TRIAL_SECONDS), where]
    try:
        done = subprocess.run(
            [*words, *([end_token] if end_token else [])],
            input=content,
            capture_output=True,
            env={**paths.child_environment(), "OPENBLAS_NUM_THREADS": "1"},
            timeout=15 * _TRIAL_SECONDS,  # the machine may be busy
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return f"{where}: could not be tried out in another process ({first_line(error)})"
    if done.returncode > 0 and (said := done.stdout.decode(errors="replace").splitlines()):
        return said[-1]
    how = "takes too long or too much memory to open, or to encode a page of text"
    if done.returncode not in (0, -signal.SIGXCPU, -signal.SIGKILL):
        how = f"makes its library end the process (exit code {done.returncode})"
    return f"{where}: {how}; use another tokenizer" if done.returncode else None


def of_json(content: bytes, end_token: str | None, where: str) -> Tokenizer:
    """Return the tokenizer of the content of a tokenizer.json.

    Raises: DataError.
    """
    values = _parse(content, where)
    if end_token in (None, END_TOKEN) and (own := _find_own(values)) is not None:
        return own
    if _drops_text(values):
        raise DataError(
            f"{where}: silently drops characters without a token; use a tokenizer of bytes "
            f"(ByteLevel or byte_fallback), or one with an unknown token"
        )
    return HuggingFaceTokenizer(content, end_token or _find_end(values, where), where)


def read_merges(folder: Path, end_token: str | None) -> Tokenizer:
    """Return the byte-level BPE of a vocab.json and a merges.txt, as transformers' GPT2Tokenizer reads them.

    Raises: DataError.
    """
    try:
        ids, merges = (
            read_regular(folder / name, at_most=_LARGEST_FILE, follow=True)
            for name in (VOCABULARY_FILE, MERGES_FILE)
        )
        _require_trial(ids + b"\0" + merges, end_token, str(folder / VOCABULARY_FILE))
        content = json_of_merges(ids, merges, end_token)
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{folder}: no byte-level BPE in its {VOCABULARY_FILE} ({error})"
        ) from error
    return of_json(content, end_token, str(folder / VOCABULARY_FILE))


@functools.lru_cache(maxsize=4)
def _encoder(content: bytes) -> Encoder:
    # The library's threads would compete with a preparation's processes, and it warns after a fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer as Encoder

    encoder = Encoder.from_str(content.decode())
    encoder.no_truncation()
    encoder.no_padding()
    encoder.encode_special_tokens = True  # what looks like a special token is text
    return encoder


@functools.lru_cache(maxsize=4)
def _encoder_of_text(content: bytes) -> Encoder:
    """Return the encoder that takes what looks like a special token for text, also where the model has it whole."""
    values = json.loads(content)
    model, added = values["model"], values.get("added_tokens") or []
    # What is unknown stays: a text that holds its name holds an unknown word.
    special = {one["content"] for one in added if one.get("special")} - {model.get("unk_token")}
    for merge in model.get("merges") or ():  # which a renamed piece would be missing from
        parts = merge.split(" ") if isinstance(merge, str) else merge
        special -= {*parts, "".join(parts)}
    is_of_pieces = model.get("type") in ("Unigram", "WordLevel", "WordPiece")
    if not special or not (is_of_pieces or model.get("ignore_merges")):
        return _encoder(content)
    # No text holds the new names. Scores stay: the lowest decides what an unknown character costs. So do the places of
    # added tokens: the library numbers those outside of the vocabulary anew.
    names = {piece: f"\0{uuid.uuid4().hex}\0" for piece in special}
    pairs = model["vocab"].items() if isinstance(model["vocab"], dict) else model["vocab"]
    renamed = [(names.get(piece, piece), value) for piece, value in pairs]
    model["vocab"] = dict(renamed) if isinstance(model["vocab"], dict) else renamed
    for one in added:
        one["content"] = names.get(one["content"], one["content"])
    values["post_processor"] = None  # it names special tokens
    return _encoder(json.dumps(values).encode())


def _parse(content: bytes, where: str) -> dict[str, Any]:
    try:
        values = json.loads(content)
        if not isinstance(values, dict) or not isinstance(values.get("model"), dict):
            raise ValueError("no `model`")
        if values["model"].get("dropout"):
            raise ValueError(
                "its merges are dropped at random (dropout), so its ids are not a function of the text"
            )
        _encoder(content)
    except Exception as error:  # the library raises a plain Exception
        raise DataError(
            f"{where}: not a {TOKENIZER_FILE} that can be used ({str(error).strip()})"
        ) from error
    return values


def _ids_of(values: dict[str, Any], where: str) -> dict[str, int]:
    vocabulary = values["model"].get("vocab", {})
    ids = dict(vocabulary) if isinstance(vocabulary, Mapping) else {}
    if not ids:  # Unigram: pairs of token and score
        ids = {token: id for id, (token, _) in enumerate(vocabulary)}
    ids |= {added["content"]: added["id"] for added in values.get("added_tokens") or ()}
    if not ids:
        raise DataError(f"{where}: has no tokens")
    if not all(is_count(id) and id < _MOST_IDS for id in ids.values()):
        raise DataError(f"{where}: has ids that are not whole numbers below {_MOST_IDS:,}")
    return ids


def _find_end(values: dict[str, Any], where: str) -> str:
    ids = _ids_of(values, where)
    found = [name for name in USUAL_END_TOKENS if name in ids]
    if len(found) != 1:
        have = f"has {' and '.join(found)}" if found else "has none of the usual names"
        raise DataError(f"{where}: end-of-text token unknown: it {have}; give --end_token")
    return found[0]


def splits_as_gpt2(values: dict[str, Any]) -> bool:
    """Tell whether words are split as GPT-2 does, and nothing but words decides the ids."""
    splitter = values.get("pre_tokenizer") or {}
    added = values.get("added_tokens") or ()
    return (
        values.get("normalizer") is None
        and splitter.get("type") == "ByteLevel"
        and not splitter.get("add_prefix_space", True)
        and bool(splitter.get("use_regex", True))
        and all(one.get("special") for one in added)
    )


def _drops_text(values: dict[str, Any]) -> bool:
    """Tell whether characters without a token are dropped: there are neither byte tokens nor an unknown token."""
    model = values["model"]
    unknown, vocabulary = model.get("unk_token"), model.get("vocab")
    has_unknown = model.get("unk_id") is not None or (
        isinstance(vocabulary, dict) and unknown in vocabulary
    )
    is_by_byte = model.get("byte_fallback") or "ByteLevel" in _kinds(values, "pre_tokenizer")
    return not (has_unknown or is_by_byte)


def _kinds(values: dict[str, Any], part: str) -> set[str | None]:
    """Return the types of the decoder or pre_tokenizer, and of its parts if it is a sequence."""
    whole = values.get(part) or {}
    parts = (*whole.get("pretokenizers", ()), *whole.get("decoders", ()))
    return {one.get("type") for one in (whole, *parts)}


def _find_own(values: dict[str, Any]) -> Tokenizer | None:
    """Return GPT-2's tokenizer, bytes or characters if a tokenizer.json is another form of it."""
    if _is_gpt2(values):
        return gpt2.GPT2
    model, splitter = values["model"], values.get("pre_tokenizer") or {}
    vocabulary = model.get("vocab")
    if model.get("merges") or values.get("normalizer"):
        return None
    if not vocabulary or not isinstance(vocabulary, dict):
        return None
    *symbols, end = sorted(vocabulary, key=lambda token: vocabulary[token])
    if end != END_TOKEN or sorted(vocabulary.values()) != [*range(len(vocabulary))]:
        return None
    if splitter == json.loads(BYTES.tokenizer_json())["pre_tokenizer"]:
        return BYTES if symbols == byte_alphabet() else None
    is_plain = not splitter and all(len(one) == 1 for one in symbols)
    return CharactersTokenizer(symbols) if is_plain else None


def _is_gpt2(values: dict[str, Any]) -> bool:
    """Tell whether a tokenizer.json is OpenAI's GPT-2: the same ids, the same merges, the same words."""
    model = values["model"]
    vocabulary, merges = model.get("vocab"), model.get("merges")
    if not isinstance(vocabulary, dict) or len(vocabulary) != gpt2.NUM_TOKENS:
        return False
    if model.get("type", "BPE") != "BPE" or not splits_as_gpt2(values):
        return False
    try:
        theirs, ours = gpt2.vocabulary_files()
    except DataError:
        return False
    lines = theirs.read_text(encoding="utf-8").splitlines()[1:]
    found = [one if isinstance(one, str) else " ".join(one) for one in merges or ()]
    same_ids = vocabulary == json.loads(ours.read_bytes())
    extra = [one["content"] for one in values.get("added_tokens") or ()]
    return same_ids and found == lines and set(extra) <= {END_TOKEN}


@functools.lru_cache(maxsize=4)
def _byte_lengths(content: bytes, size: int) -> np.ndarray:
    import numpy as np

    values = json.loads(content)
    added = {one["id"]: one for one in values.get("added_tokens") or ()}
    special = {id for id, one in added.items() if one.get("special")}
    by_id = {
        id: token for token, id in _ids_of(values, TOKENIZER_FILE).items() if id not in special
    }
    lengths = np.zeros(size, dtype=np.int64)
    if "ByteLevel" in _kinds(values, "decoder") | _kinds(values, "pre_tokenizer"):
        alphabet = set(byte_alphabet())
        for id, token in by_id.items():
            is_word = id not in added or token in values["model"]["vocab"]  # else the text itself
            is_coded = is_word and alphabet.issuperset(token)
            lengths[id] = len(token) if is_coded else len(token.encode())
        return lengths
    encoder = _encoder(content)
    # What an id adds after another one: at the beginning of a text some decoders drop a space.
    words = (id for id in sorted(by_id) if encoder.decode([id]).strip().isalpha())
    first = next(words, min(by_id))
    before = len(encoder.decode([first]).encode())
    for id, token in by_id.items():
        if _BYTE_FALLBACK.fullmatch(token):
            lengths[id] = 1
        else:
            text = encoder.decode([first, id], skip_special_tokens=False)
            lengths[id] = max(0, len(text.encode()) - before)
    return lengths
