"""shards.json: what a data folder holds, and its own hash, which is the data's fingerprint."""

import contextlib
import hashlib
import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpt2lab import fmt, paths
from gpt2lab.errors import DataError
from gpt2lab.files import (
    COUNT,
    HASH,
    NAME,
    OBJECT,
    TEXT,
    JsonFile,
    create_durably,
    list_of,
    one_of,
    or_null,
)
from gpt2lab.tokenizers.gpt2 import GPT2, UNKNOWN
from gpt2lab.tokenizers.interface import Tokenizer
from gpt2lab.tokenizers.opening import of_record

FORMAT = "gpt2lab-shards/1"
MANIFEST = "shards.json"
SPLITS = ("train", "val")
ID_BYTES = {"<u2": 2, "<u4": 4}
# Of the kinds in prepare/groups.py, which training need not import.
_TEXT_NAME = re.compile(r".*\.((txt|md|jsonl?|csv)(\.(gz|bz2|zst))?|parquet)")
_OTHER_NAMES = (MANIFEST, "config.json", ".npy", ".bin", ".ds")
_MOST_NAMES = 10_000  # that are looked at in a folder


def no_shards(path: Path, problem: str, fix: str) -> DataError:
    """Return the error for a path without shards: it is text, or `problem` and a similar name or `fix`."""
    if _holds_text(path):
        prepare = [*paths.command_words("prepare"), paths.display_path(path)]
        how = fmt.command_line(prepare)
        return DataError(f"{path}: is text, not token shards; prepare it with: {how}")
    if path.is_file():
        return DataError(f"{path}: is a file; give the folder that holds the shards")
    if not path.is_dir():
        for place in (path.parent, paths.from_repository(Path("data"))):
            found = [*place.glob(f"*/{MANIFEST}"), *place.glob("*/*_train_*")]
            names = {file.parent.name for file in found}
            if hint := fmt.did_you_mean(path.name, names, flag=f"{paths.display_path(place)}/"):
                fix = hint
                break
    return DataError(f"{path}: {problem}; {fix}")


def _holds_text(path: Path) -> bool:
    """Tell whether a file has the name of a text that `prepare` reads, or a folder holds one and no shard or run."""
    some = itertools.islice(path.rglob("*"), _MOST_NAMES) if path.is_dir() else [path]
    names = [one.name.lower() for one in some if one.is_file()]
    others = [name for name in names if name.endswith(_OTHER_NAMES)]
    return not others and any(_TEXT_NAME.fullmatch(name) for name in names)


@dataclass(frozen=True)
class EndOfText:
    """The id that separates documents, and whether it is before or after its document."""

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


def shares_of(manifest: dict[str, Any]) -> list[list[Any]]:
    """Return [name, number, count, sha256] of each share of a source file that was read, for prepared data."""
    return [share for group in manifest["groups"] for share in group["shares"]]


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write shards.json, complete or not at all; its `content`, a hash of all sources, and its fingerprint are set too.

    Raises: OSError.
    """
    request = manifest.get("request", {})
    if "listing" in request:  # else imported, or a part of an earlier version
        sources = {"listing": request["listing"], "shares": shares_of(manifest)}
        manifest["content"] = fingerprint_of(sources)
    manifest["fingerprint"] = fingerprint_of(manifest)
    create_durably(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())


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
    file = _file(folder)
    manifest = file.read()
    if manifest.get("format") != FORMAT:
        raise file.rejected(f"not a shard manifest of format {FORMAT!r}")
    if manifest.get("fingerprint") != fingerprint_of(manifest):
        raise file.rejected("damaged or edited (its own hash does not match)")
    check_manifest(folder, manifest)
    return manifest


def _file(folder: Path) -> JsonFile:
    return JsonFile(folder / MANIFEST, DataError, fix="prepare the data again", follow=True)


def check_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Reject a manifest without a key, or with a value of another kind: its hash may have been recomputed by hand."""
    file = _file(folder)
    file.check(
        manifest,
        {"tokenizer": OBJECT, "files": list_of(OBJECT, "a list of objects")},
        {"end_of_text": OBJECT, "folder": TEXT, "not_taken": list_of(NAME, "names")},
    )
    file.check(manifest["tokenizer"], {"name": TEXT}, where="tokenizer: ")
    if "end_of_text" in manifest:
        file.check(manifest["end_of_text"], _END_OF_TEXT_FIELDS, where="end_of_text: ")
    for number, one in enumerate(manifest["files"]):
        file.check(one, _FILE_FIELDS, {"index": OBJECT}, where=f"file {number}: ")
        if "dtype" in one or "offset" in one:
            file.check(one, _PLACE_FIELDS, where=f"file {number}: ")
        if "index" in one:
            file.check(one["index"], _INDEX_FIELDS, where=f"file {number}, index: ")
    names = [one["name"] for one in manifest["files"]]
    if len(names) != len(set(names)):
        raise file.rejected("a file is listed twice")


_FILE_FIELDS = {
    "name": NAME,
    "split": one_of(*SPLITS),
    "tokens": COUNT,
    "bytes": COUNT,
    "sha256": HASH,
    "max_id": COUNT,
}
_PLACE_FIELDS = {"dtype": one_of(*ID_BYTES), "offset": COUNT}  # of files that do not say it
_INDEX_FIELDS = {"name": NAME, "layout": one_of("datatrove", "megatron"), "sha256": HASH}
_END_OF_TEXT_FIELDS = {"id": or_null(COUNT), "place": one_of("before", "after", "none")}


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
        f"{folder / MANIFEST}: its files are in {place}, which does not exist; "
        f'if it has moved, correct "folder"'
    )
