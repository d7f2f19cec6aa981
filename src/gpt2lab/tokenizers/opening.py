"""Which tokenizer a folder or a manifest means. No torch."""

import contextlib
from pathlib import Path
from typing import Any

from gpt2lab.errors import DataError
from gpt2lab.files import parse_json, read_regular
from gpt2lab.tokenizers.gpt2 import GPT2, UNKNOWN
from gpt2lab.tokenizers.huggingface import (
    CONFIG_FILE,
    MERGES_FILE,
    TOKENIZER_FILE,
    VOCABULARY_FILE,
    read_huggingface,
    read_merges,
)
from gpt2lab.tokenizers.interface import Tokenizer
from gpt2lab.tokenizers.plain import BYTES, CHARACTERS_FILE, read_characters

BUILT_IN: dict[str, Tokenizer] = {one.name: one for one in (GPT2, BYTES)}
HF_TOKENIZER_FILES = (TOKENIZER_FILE, CONFIG_FILE, VOCABULARY_FILE, MERGES_FILE)


def find_in(folder: Path, end_token: str | None = None) -> Tokenizer | None:
    """Return the tokenizer whose files are in a folder, None if there are none.

    Raises: DataError if they cannot be used.
    """
    if (folder / CHARACTERS_FILE).exists():
        return read_characters(folder / CHARACTERS_FILE)
    if (folder / TOKENIZER_FILE).exists():
        return read_huggingface(folder / TOKENIZER_FILE, end_token or _end_token_of(folder))
    if (folder / VOCABULARY_FILE).exists() and (folder / MERGES_FILE).exists():
        return read_merges(folder, end_token or _end_token_of(folder))
    return None


def _find_by_hash(folder: Path, digest: object) -> Tokenizer | None:
    """Return the tokenizer in a folder that has this hash, else the first; there may be files of two."""
    with contextlib.suppress(DataError):
        found = read_huggingface(folder / TOKENIZER_FILE, _end_token_of(folder))
        if found.hash == digest:
            return found
    return find_in(folder)


def _end_token_of(folder: Path) -> str | None:
    try:
        found = read_regular(folder / CONFIG_FILE, at_most=10**7, follow=True)
        token = parse_json(found)["eos_token"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # then the vocabulary decides, or the user
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def record_of(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return what a manifest records of a tokenizer, also of an unknown one."""
    return {"name": UNKNOWN, "sha256": None} if tokenizer is None else tokenizer.record()


def why_no_text(tokenizer: Tokenizer | None, vocab_size: int) -> str | None:
    """Return why a model of `vocab_size` rows cannot read and write text; None if it can."""
    if tokenizer is None:
        return "the tokenizer of the data is not known"
    if tokenizer.size > vocab_size:
        return f"vocab_size {vocab_size} is below {tokenizer.title}'s {tokenizer.size}"
    return None


def require_same(
    of_model: Tokenizer | None, of_data: Tokenizer | None, *, model: str, data: str
) -> None:
    """Reject data of another tokenizer than the model's; a model of an unknown one may read what it can.

    Raises: DataError.
    """
    if of_model is None or of_model == of_data:
        return
    other = "of a tokenizer that is not known" if of_data is None else of_data.describe()
    raise DataError(
        f"{data}: its ids are {other}, but {model} was trained with {of_model.describe()}: they would decode to other "
        f"text; prepare the text with that tokenizer"
    )


def of_record(record: Any, folder: Path, manifest: str) -> Tokenizer | None:
    """Return the tokenizer that a manifest in `folder` records, after comparing its files; None for an unknown one.

    Raises: DataError if the record is not one of a tokenizer, or the files beside it are another's.
    """
    if not isinstance(record, dict) or "name" not in record:
        raise DataError(
            f"{folder / manifest}: does not record the tokenizer; prepare the data again"
        )
    name, digest = str(record["name"]), record.get("sha256")
    if name == UNKNOWN:
        return None
    found = BUILT_IN[name] if name in BUILT_IN else _find_by_hash(folder, digest)
    if found is None:
        raise DataError(f"{folder}: the files of its tokenizer {name} are missing; restore them")
    if digest is not None and found.hash != digest:
        raise DataError(
            f"{folder}: its tokenizer is {found.describe()}, {manifest} says {name}, sha256 {str(digest)[:12]}; "
            f"restore the files beside it"
        )
    return found
