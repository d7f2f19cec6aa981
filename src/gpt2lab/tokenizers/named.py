"""Which tokenizer a person means: built in, a file or a folder, also nanoGPT's meta.pkl. No torch."""

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

from gpt2lab import fmt
from gpt2lab.errors import DataError, system_errors_as
from gpt2lab.files import read_regular
from gpt2lab.paths import expand_user
from gpt2lab.tokenizers.huggingface import TOKENIZER_FILE, read_huggingface
from gpt2lab.tokenizers.interface import Tokenizer
from gpt2lab.tokenizers.opening import BUILT_IN, find_in
from gpt2lab.tokenizers.plain import (
    CHARACTERS_FILE,
    LARGEST_FILE,
    CharactersTokenizer,
    checked_characters,
    read_characters,
)

META_FILE = "meta.pkl"  # nanoGPT's
TOKENIZER = (
    "gpt2 | bytes | a tokenizer.json, characters.json or nanoGPT's meta.pkl | a folder with one"
)
_LEARNED = "gpt2lab data tokenizer train SOURCE --out DIR, by --kind characters or bpe"


def open_tokenizer(name: str, end_token: str | None = None) -> Tokenizer:
    """Return the tokenizer that a command line names: gpt2, bytes, or a file or folder.

    `end_token`: the end-of-text token of a Hugging Face tokenizer; default the one that its folder or its vocabulary
    names.

    Raises: DataError.
    """
    if name in BUILT_IN:
        found = BUILT_IN[name]
    else:
        path = expand_user(name)
        if not path.exists():
            hint = fmt.did_you_mean(
                name, BUILT_IN, f"known: {TOKENIZER}; one of a text: {_LEARNED}"
            )
            raise DataError(f"{name}: no such tokenizer; {hint}")
        found = _open(path, end_token)
    if end_token is not None and end_token != found.end_token:
        raise DataError(
            f"{name}: its end-of-text token is {found.end_token}; leave out --end_token"
        )
    return found


def _open(path: Path, end_token: str | None) -> Tokenizer:
    if path.is_dir():
        if (path / META_FILE).exists() and not (path / CHARACTERS_FILE).exists():
            return read_meta(path / META_FILE)
        if (found := find_in(path, end_token)) is None:
            raise DataError(f"{path}: holds no tokenizer: no {TOKENIZER_FILE}, {CHARACTERS_FILE}")
        return found
    if path.suffix == ".pkl":
        return read_meta(path)
    return (
        read_characters(path) if path.name == CHARACTERS_FILE else read_huggingface(path, end_token)
    )


def read_meta(path: Path) -> CharactersTokenizer:
    """Read nanoGPT's meta.pkl without running any code of it.

    It holds {"vocab_size": n, "itos": {id: character}, "stoi": {character: id}}.

    Raises: DataError if it is another file.
    """
    with system_errors_as(DataError, path):
        content = read_regular(path, at_most=LARGEST_FILE, follow=True)
    try:
        _check(content)
        meta = _DataOnly(io.BytesIO(content)).load()
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    except Exception as error:  # damaged pickles raise anything
        raise DataError(f"{path}: not a pickle of nanoGPT ({error!r})") from error
    itos: Any = meta.get("itos") if isinstance(meta, dict) else None
    if not isinstance(itos, dict) or set(itos) != set(range(len(itos))):
        raise DataError(f"{path}: no `itos` with the characters of ids 0, 1, 2, ...")
    found = checked_characters([itos[id] for id in range(len(itos))], path)
    stoi = {one: id for id, one in enumerate(found.characters)}
    if (meta.get("vocab_size", len(stoi)), meta.get("stoi", stoi)) != (len(stoi), stoi):
        raise DataError(f"{path}: vocab_size, itos and stoi contradict each other")
    return found


def _check(content: bytes) -> None:
    """Reject a pickle whose memo indices exceed its own length, or that has tuples.

    The library would allocate memory for all indices, and hash a tuple of tuples for years.
    """
    for operation, argument, _ in pickletools.genops(content):
        if operation.name in ("GLOBAL", "STACK_GLOBAL", "INST"):
            return  # loading ends there
        if operation.name.endswith("PUT") and int(argument or 0) > len(content):
            raise DataError("its memo is larger than the file; not nanoGPT's")
        if "TUPLE" in operation.name or operation.name == "FROZENSET":
            raise DataError("holds tuples; nanoGPT's file holds only dicts, texts and numbers")


class _DataOnly(pickle.Unpickler):
    """Reads dicts, texts and numbers; a pickle that names anything that could be called is rejected."""

    def find_class(self, module: str, name: str) -> Any:
        raise DataError(
            f"rejected, because loading it would call {module}.{name}; nanoGPT's file holds only texts and numbers"
        )
