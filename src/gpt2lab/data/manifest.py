"""shards.json: what a data folder holds, and its own hash, which is the data's fingerprint."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpt2lab.errors import DataError
from gpt2lab.files import sync_folder, write_durably
from gpt2lab.tokenizers.gpt2 import GPT2, UNKNOWN
from gpt2lab.tokenizers.interface import Tokenizer
from gpt2lab.tokenizers.opening import of_record

FORMAT = "gpt2lab-shards/1"
MANIFEST = "shards.json"
MAX_MANIFEST_BYTES = 64 * 1024 * 1024
SPLITS = ("train", "val")
ID_BYTES = {"<u2": 2, "<u4": 4}


@dataclass(frozen=True)
class EndOfText:
    """The id that separates documents, and where it stands, seen from the document."""

    id: int | None = GPT2.end_of_text  # None: no id separates them, or it is not known
    place: Literal["before", "after", "none"] = "before"


def fingerprint_of(manifest: dict[str, Any]) -> str:
    """Hash a manifest's content to 64 hex digits.

    Not the fingerprint itself, nor the folder of the files: where they lie is no property of the data.
    """
    body = {key: value for key, value in manifest.items() if key not in ("fingerprint", "folder")}
    return hashlib.sha256(
        json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write shards.json durably; its fingerprint is set in `manifest` too.

    Raises: OSError.
    """
    manifest["fingerprint"] = fingerprint_of(manifest)
    write_durably(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    sync_folder(folder)


def tokenizer_of(folder: Path) -> Tokenizer | None:
    """Return the tokenizer of a folder of shards, GPT-2's without shards.json; None if it is not known.

    Raises: DataError.
    """
    if not (folder / MANIFEST).exists():
        return GPT2
    return of_record(read_manifest(folder).get("tokenizer"), folder, MANIFEST)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return shards.json after checking its own hash and what this module reads of it.

    Raises: DataError.
    """
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise DataError(f"{path}: over {MAX_MANIFEST_BYTES} bytes; not a shard manifest")
        manifest = json.loads(path.read_bytes())
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise DataError(
                f"{path}: not a shard manifest of format {FORMAT!r}; prepare the data again"
            )
        fingerprint = fingerprint_of(manifest)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: not readable as JSON ({error}); prepare the data again"
        ) from error
    if manifest.get("fingerprint") != fingerprint:
        raise DataError(
            f"{path}: damaged or edited (its own hash does not match); prepare the data again"
        )
    check_manifest(path, manifest)
    return manifest


def check_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Reject a manifest without a key, or with a value of another kind: its hash may have been made anew by hand."""
    _check_fields(path, "", manifest, {"tokenizer": _DICT, "files": _LIST})
    _check_fields(path, "tokenizer: ", manifest["tokenizer"], {"name": _TEXT})
    for key, rule in {"end_of_text": _DICT, "folder": _TEXT, "not_taken": _NAMES}.items():
        if key in manifest:
            _check_fields(path, "", manifest, {key: rule})
    if "end_of_text" in manifest:
        _check_fields(path, "end_of_text: ", manifest["end_of_text"], _END_OF_TEXT_FIELDS)
    for number, file in enumerate(manifest["files"]):
        _check_fields(path, f"file {number}: ", file, _FILE_FIELDS)
        if "dtype" in file or "offset" in file:
            _check_fields(path, f"file {number}: ", file, _PLACE_FIELDS)
        if "index" in file:
            _check_fields(path, f"file {number}: ", file, {"index": _DICT})
            _check_fields(path, f"file {number}, index: ", file["index"], _INDEX_FIELDS)
    names = [file["name"] for file in manifest["files"]]
    if len(names) != len(set(names)):
        raise DataError(f"{path}: a file is listed twice; prepare the data again")


def _check_fields(path: Path, where: str, found: dict[str, Any], rules: dict[str, _Rule]) -> None:
    for key, (is_fine, wanted) in rules.items():
        if key not in found:
            raise DataError(f"{path}: {where}no {key!r}; prepare the data again")
        if not is_fine(found[key]):
            shown = f"{found[key]!r:.60}"
            raise DataError(
                f"{path}: {where}{key!r} is {shown}, not {wanted}; prepare the data again"
            )


_Rule = tuple[Callable[[Any], bool], str]  # of a value in shards.json, and in words


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != "" and value.isprintable()


def _is_name(value: Any) -> bool:
    return _is_text(value) and "/" not in value and value not in (".", "..")


_TEXT: _Rule = (_is_text, "text")
_COUNT: _Rule = (_is_count, "a whole number")
_HASH: _Rule = (
    lambda value: isinstance(value, str) and bool(re.fullmatch("[0-9a-f]{64}", value)),
    "64 hex digits",
)
_NAME: _Rule = (_is_name, "the name of a file, without a folder")
_NAMES: _Rule = (lambda value: isinstance(value, list) and all(map(_is_name, value)), "names")
_DICT: _Rule = (lambda value: isinstance(value, dict), "an object")
_LIST: _Rule = (
    lambda value: isinstance(value, list) and all(isinstance(one, dict) for one in value),
    "a list of objects",
)


def _one_of(*values: str) -> _Rule:
    return lambda value: isinstance(value, str) and value in values, " or ".join(values)


_FILE_FIELDS = {
    "name": _NAME,
    "split": _one_of(*SPLITS),
    "tokens": _COUNT,
    "bytes": _COUNT,
    "sha256": _HASH,
    "max_id": _COUNT,
}
_PLACE_FIELDS = {"dtype": _one_of(*ID_BYTES), "offset": _COUNT}  # of files that do not say it
_INDEX_FIELDS = {"name": _NAME, "layout": _one_of("datatrove", "megatron"), "sha256": _HASH}
_END_OF_TEXT_FIELDS: dict[str, _Rule] = {
    "id": (lambda value: value is None or _is_count(value), "a whole number or null"),
    "place": _one_of("before", "after", "none"),
}


def end_of_text_of(manifest: dict[str, Any]) -> EndOfText:
    """Return what separates the documents of a data set: <|endoftext|> before each, unless it says otherwise."""
    if recorded := manifest.get("end_of_text"):
        return EndOfText(recorded["id"], recorded["place"])
    record = manifest["tokenizer"]
    if record["name"] == UNKNOWN:
        return EndOfText(None, "none")
    return EndOfText(record.get("end_of_text", GPT2.end_of_text))


def shards_folder(folder: Path, manifest: dict[str, Any]) -> Path:
    """Return where the files of a manifest lie: beside it, unless it names another folder.

    Raises: DataError if that is not there.
    """
    place = folder / manifest.get("folder", "")
    with contextlib.suppress(OSError):  # of a name too long, for example
        if place.is_dir():
            return place
    raise DataError(
        f"{folder / MANIFEST}: its files are in {place}, which is not there; "
        f'if it has moved, correct "folder"'
    )
