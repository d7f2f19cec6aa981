"""Data sets made of token files of another program: read once, measured, and named in a shards.json; never copied."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from gpt2lab.checkpoint.faults import faultpoint
from gpt2lab.config.flags import option
from gpt2lab.data.manifest import (
    FORMAT,
    MANIFEST,
    SPLITS,
    EndOfText,
    check_manifest,
    end_of_text_of,
    write_manifest,
)
from gpt2lab.data.prepare.write import measure_shard
from gpt2lab.data.shards import RAW_SUFFIX, names_on_disk, open_shard, read_document_ends
from gpt2lab.errors import ConfigError, DataError, system_errors_as
from gpt2lab.files import create_durably, sha256_of, sweep_temporaries
from gpt2lab.interop import token_files as formats
from gpt2lab.interop.token_files import DTYPES, SUFFIXES, Layout, Place, TokenFile
from gpt2lab.tokenizers.gpt2 import GPT2, UNKNOWN
from gpt2lab.tokenizers.huggingface import CONFIG_FILE, TOKENIZER_FILE
from gpt2lab.tokenizers.interface import Tokenizer
from gpt2lab.tokenizers.named import META_FILE, TOKENIZER, open_tokenizer, read_meta
from gpt2lab.tokenizers.opening import record_of
from gpt2lab.tokenizers.plain import CHARACTERS_FILE

# One of these words in a file's name, delimited by other characters than letters and digits, tells its split.
_WORDS = {"train": "train", "val": "val", "valid": "val", "validation": "val"}
_COMPANIONS = (".idx", ".index", ".metadata", ".loss", ".json", ".pkl")  # of token files
# Written before shards.json, so an interrupted import may leave them.
_TOKENIZER_FILES = {CHARACTERS_FILE, TOKENIZER_FILE, CONFIG_FILE}
_GPT2_NAMES = {"gpt2", "gpt-2", "openai-community/gpt2"}


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Facts that the user states about files that do not record them; None: the format's default."""

    tokenizer: str | None = option(
        None,
        f"unknown | {TOKENIZER}; default: the one that the files record, gpt2 for .npy and nanoGPT's",
    )
    end_token: str | None = option(
        None, "end-of-text token of a tokenizer.json, where that names none"
    )
    val_files: tuple[str, ...] = option(
        (),
        "names of the validation files, such as '00000_*.ds'; default those with val in the name",
    )
    train_files: tuple[str, ...] = option((), "names of the training files; default all others")
    end_of_text: Place | None = option(
        None, "position of the end-of-text id relative to its document; default: the format's"
    )
    end_of_text_id: int | None = option(None, "the end-of-text id of an unknown tokenizer", least=0)
    format: Layout | None = option(
        None, "default by the name and the first bytes; raw: ids without a header"
    )
    dtype: Literal["uint16", "uint32", "int16", "int32"] | None = option(
        None, "type of the ids if the files do not record it; default uint16"
    )
    offset: int = option(0, "bytes before the first id of raw files", least=0)


def import_folder(
    folder: Path, wanted: ImportOptions = ImportOptions(), out: Path | None = None
) -> dict[str, Any]:
    """Write and return shards.json for the token files of another program; nothing is copied.

    It is written into `folder`, or into the new or empty folder `out`. Files are taken in the order of the numbers in
    their names. Every byte is read once.

    Raises: DataError if there is a manifest already, a split is missing, or a file is not what it should be;
    ConfigError if a fact that the files do not record must be given.
    """
    target = out or folder
    _check_places(folder, target)
    names, not_taken = _choose(folder, wanted)
    splits = [split for split in SPLITS for _ in names[split]]
    files = [_read(folder / name, wanted) for split in SPLITS for name in names[split]]
    for file in files:
        if file.layout != files[0].layout:
            raise DataError(
                f"{file.path}: {file.layout}, but {files[0].path.name} is {files[0].layout}; "
                f"select the files of one format with --train_files and --val_files"
            )
    tokenizer = _tokenizer_of(folder, files, wanted)
    assumed = _assumed_end_of_text(files, tokenizer, wanted)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing releases Python's lock
        results = pool.map(lambda file: _measure(file, assumed.id, tokenizer), files)
        measured = list(tqdm(results, total=len(files), unit="file", leave=False, disable=None))
    end_of_text = _confirmed_end_of_text(files, measured, assumed, wanted.end_of_text)
    entries = [
        _entry(file, split, found, end_of_text)
        for file, split, found in zip(files, splits, measured, strict=True)
    ]
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "dataset": folder.resolve().name,
        "origin": "shards written by another program",
        "tokenizer": record_of(tokenizer),
        "documents": sum(entry["documents"] for entry in entries),
        "files": entries,
    }
    if files[0].layout != "npy":
        manifest["layout"] = files[0].layout
    if not_taken or "layout" in manifest:
        manifest["not_taken"] = not_taken
    if end_of_text != end_of_text_of(manifest):
        manifest["end_of_text"] = {"id": end_of_text.id, "place": end_of_text.place}
    if target != folder:
        manifest["folder"] = str(folder.resolve())
    # Another import may have written one meanwhile, which stays.
    with system_errors_as(DataError, target / MANIFEST, what="cannot be written"):
        target.mkdir(parents=True, exist_ok=True)
        _put_beside(target, tokenizer, is_separate=target != folder)
        check_manifest(target, manifest)
        write_manifest(target, manifest)
    return manifest


def _put_beside(target: Path, tokenizer: Tokenizer | None, *, is_separate: bool) -> None:
    files = tokenizer.files if tokenizer else {}
    if is_separate and (
        others := sorted(_TOKENIZER_FILES.intersection(os.listdir(target)) - set(files))
    ):
        raise DataError(f"{target / others[0]}: belongs to another tokenizer; choose another --out")
    for name, content in files.items():
        path = target / name
        if not path.exists():
            create_durably(path, content)
            faultpoint("import.after_tokenizer", 0)
        elif path.read_bytes() != content:
            raise DataError(f"{path}: belongs to another tokenizer than --tokenizer; move it away")


def _check_places(folder: Path, target: Path) -> None:
    """Check the folders before reading, which may take hours."""
    if not folder.is_dir():
        which = "a file; give its folder" if folder.exists() else "no such folder"
        raise DataError(f"{folder}: {which}")
    sweep_temporaries(target)
    if (target / MANIFEST).exists():
        raise DataError(f"{target / MANIFEST}: exists already; check it with gpt2lab data verify")
    if target == folder:
        if not os.access(folder, os.W_OK):
            raise DataError(
                f"{folder}: not writable; --out FOLDER puts {MANIFEST} into another folder"
            )
    elif target.exists() and (not target.is_dir() or set(os.listdir(target)) - _TOKENIZER_FILES):
        raise DataError(f"{target}: holds something else already; choose another --out")


def _choose(folder: Path, wanted: ImportOptions) -> tuple[dict[str, list[str]], list[str]]:
    """Return the names of the files of each split in order, and of the token files that are left out."""
    present = sorted(path.name for path in folder.iterdir() if path.is_file())
    present = [name for name in present if not name.startswith(".")]
    token_files = [name for name in present if name.endswith(SUFFIXES)]
    ours = {split: names_on_disk(folder, split) for split in SPLITS}
    nanogpt = {split: [split + RAW_SUFFIX] for split in SPLITS}
    if wanted.train_files or wanted.val_files:
        names = _by_patterns(folder, present, token_files, wanted)
    elif any(ours.values()):
        names = ours
    elif all(name in present for split in SPLITS for name in nanogpt[split]):
        names = nanogpt
    else:
        names = _by_words(folder, token_files)
    for split in SPLITS:
        if not names[split]:
            raise DataError(
                f"{folder}: no {split} shards (NAME_{split}_000000.npy, .bin or .ds); training needs both splits, "
                f"and --val_files GLOB selects the files for validation"
            )
    taken = {name for split in SPLITS for name in names[split]}
    suffixes = {Path(name).suffix for name in taken}
    left = [name for name in present if name not in taken and Path(name).suffix in suffixes]
    if names is ours:  # other .npy files beside ours are ignored
        left = []
    return names, left


def _by_patterns(
    folder: Path, present: list[str], token_files: list[str], wanted: ImportOptions
) -> dict[str, list[str]]:
    """Select by --train_files and --val_files; the shell may have expanded them to paths."""
    # With --format token files may have any name.
    candidates = (
        [n for n in present if not n.endswith(_COMPANIONS)] if wanted.format else token_files
    )

    def matching(patterns: Sequence[str], flag: str) -> list[str]:
        found: list[str] = []
        for pattern in patterns:
            some = [
                name
                for name in candidates
                if fnmatch.fnmatchcase(name, pattern) or Path(pattern).absolute() == folder / name
            ]
            if not some:
                raise DataError(f"{folder}: no file matches {flag} {pattern}")
            found += some
        return sorted(set(found), key=_natural)

    val = matching(wanted.val_files, "--val_files")
    train = matching(wanted.train_files, "--train_files")
    if not wanted.train_files:
        train = sorted(set(token_files) - set(val), key=_natural)
    if not wanted.val_files:
        val = _by_words(folder, [name for name in token_files if name not in train])["val"]
    if both := sorted(set(train) & set(val)):
        raise DataError(f"{folder / both[0]}: matches --train_files and --val_files; name it once")
    return {"train": train, "val": val}


def _by_words(folder: Path, names: list[str]) -> dict[str, list[str]]:
    chosen: dict[str, list[str]] = {split: [] for split in SPLITS}
    for name in sorted(names, key=_natural):
        words = re.split(r"[^a-z0-9]+", name.rpartition(".")[0].lower())
        found = {_WORDS[word] for word in words if word in _WORDS}
        if len(found) != 1:
            raise DataError(
                f"{folder / name}: its name does not tell whether it is for training or validation; "
                f"give --val_files GLOB, and --train_files GLOB if not all others are for training"
            )
        chosen[found.pop()].append(name)
    return chosen


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort by the numbers in a name, so that part_2 comes before part_10."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)
    ]


def _read(path: Path, wanted: ImportOptions) -> TokenFile:
    try:
        layout = wanted.format or ("raw" if wanted.offset else formats.recognise(path))
        if wanted.offset and layout != "raw":
            raise ConfigError(f"--offset is for raw files; {layout} files record it themselves")
        if layout == "raw":
            found = formats.read_raw(path, wanted.dtype, wanted.offset)
        elif layout == "datatrove":
            found = formats.read_datatrove(path, wanted.dtype)
        elif layout == "npy":
            shard = open_shard(path)
            dtype = {"<u2": "uint16", "<u4": "uint32"}[shard.dtype]
            found = TokenFile(path, "npy", shard.tokens, dtype, shard.offset, end_of_text="before")
        else:
            found = (formats.read_llmc if layout == "llm.c" else formats.read_megatron)(path)
    except OSError as error:
        raise DataError(f"{error.filename or path}: {error.strerror}") from error
    if wanted.dtype is not None and DTYPES[wanted.dtype] != DTYPES[found.dtype]:
        raise DataError(f"{path}: holds {found.dtype}, not {wanted.dtype}; leave --dtype out")
    if found.tokens == 0:
        raise DataError(f"{path}: empty")
    return found


def _tokenizer_of(folder: Path, files: list[TokenFile], wanted: ImportOptions) -> Tokenizer | None:
    """Return the tokenizer that the user gave or the files record; None for an unknown one."""
    typed = wanted.tokenizer
    if wanted.end_token is not None and typed in (None, UNKNOWN):
        raise ConfigError(f"--end_token {wanted.end_token}: needs --tokenizer with its file")
    given = None if typed in (None, UNKNOWN) else open_tokenizer(typed, wanted.end_token)
    for file in files:
        _check_tokenizer(file, typed, given)
    if typed is not None:
        return given
    if os.path.lexists(folder / META_FILE) and files[0].layout == "raw":  # nanoGPT's characters
        with contextlib.suppress(DataError):
            return read_meta(folder / META_FILE)
        return None
    if files[0].layout in ("npy", "raw") or all(file.tokenizer for file in files):
        return GPT2
    raise ConfigError(
        f"{folder}: the files do not record their tokenizer; give --tokenizer "
        f"{GPT2.name}, {UNKNOWN}, or the file of another one"
    )


def _check_tokenizer(file: TokenFile, typed: str | None, given: Tokenizer | None) -> None:
    if file.tokenizer is None:
        return
    named = file.tokenizer.lower()
    if typed is None and named not in _GPT2_NAMES:
        raise ConfigError(
            f"{file.path}: made with tokenizer {file.tokenizer!r}; give --tokenizer with its file, or {UNKNOWN}"
        )
    is_other = "gpt2" not in named if given == GPT2 else named in _GPT2_NAMES
    if given is not None and is_other:
        raise ConfigError(f"{file.path}: made with tokenizer {file.tokenizer!r}, not {typed}")


def _assumed_end_of_text(
    files: list[TokenFile], tokenizer: Tokenizer | None, wanted: ImportOptions
) -> EndOfText:
    """Return what separates documents, by the options and the format; an index may override it."""
    place, id = wanted.end_of_text, wanted.end_of_text_id
    if tokenizer is not None:
        if id not in (None, tokenizer.end_of_text):
            raise ConfigError(
                f"--end_of_text_id {id}: {tokenizer.title}'s is {tokenizer.end_of_text}"
            )
        id = tokenizer.end_of_text
    if place == "none":
        if wanted.end_of_text_id is not None:
            raise ConfigError("--end_of_text none and --end_of_text_id cannot be combined")
        return EndOfText(None, "none")
    if id is None:
        if place is not None:
            raise ConfigError(f"--end_of_text {place} needs --end_of_text_id N")
        return EndOfText(None, "none")
    first = files[0]
    if place is None and first.index is None and first.end_of_text is None:
        raise ConfigError(
            f"{first.path}: no index of document ends; give --end_of_text before, after or none"
        )
    return EndOfText(id, place or first.end_of_text or "none")


class _Marks:
    """Counts the documents of an index that begin with an id, and that end with it, as the ids pass."""

    def __init__(self, ends: np.ndarray, id: int) -> None:
        self.count, self.before, self.after = len(ends), 0, 0
        self._ends, self._id, self._seen = ends, id, 0

    def watch(self, ids: np.ndarray) -> None:
        """Look at the next ids."""
        last = self._seen + len(ids)
        first_end, end = np.searchsorted(self._ends, [self._seen, last], side="right")
        places = self._ends[first_end:end] - 1 - self._seen
        self.after += int(np.count_nonzero(ids[places] == self._id))
        first_start, end = np.searchsorted(self._ends, [self._seen, last])
        places = self._ends[first_start:end] - self._seen
        self.before += int(np.count_nonzero(ids[places] == self._id))
        if self._seen == 0:
            self.before += int(ids[0] == self._id)
        self._seen = last


# What `measure_shard` returns and, of a file with an index, the index and the marks.
_Measured = tuple[dict[str, Any], _Marks | None]


def _measure(file: TokenFile, end_of_text: int | None, tokenizer: Tokenizer | None) -> _Measured:
    """Read every byte of a file once."""
    dtype, bound = DTYPES[file.dtype]
    marks: _Marks | None = None
    index: dict[str, Any] = {}
    with system_errors_as(DataError, file.path, what="cannot be read"):
        if file.index is not None:
            assert file.layout in ("datatrove", "megatron")  # no others have one
            record = {"name": file.index.name, "layout": file.layout}
            index = {"index": {**record, "sha256": sha256_of(file.index)}}
            ends = read_document_ends(file.layout, file.index)
            marks = _Marks(ends, -1 if end_of_text is None else end_of_text)
        facts = measure_shard(
            file.path,
            offset=file.offset,
            dtype=dtype,
            end_of_text=end_of_text,
            tokenizer=tokenizer,
            watch=marks.watch if marks else lambda ids: None,
        )
    if facts["bytes"] != file.offset + file.tokens * np.dtype(dtype).itemsize:
        raise DataError(
            f"{file.path}: changed while it was read; repeat the import when it is complete"
        )
    if facts["max_id"] >= bound:
        raise DataError(
            f"{file.path}: a negative id, such as {facts['max_id'] - 2 * bound}; not token ids"
        )
    if tokenizer is not None and facts["max_id"] >= tokenizer.size:
        raise DataError(
            f"{file.path}: token id {facts['max_id']}, {tokenizer.title}'s end at {tokenizer.size - 1}; "
            f"another tokenizer, or not {file.dtype} tokens"
        )
    return facts | index, marks


def _confirmed_end_of_text(
    files: list[TokenFile], measured: list[_Measured], assumed: EndOfText, typed: Place | None
) -> EndOfText:
    """Return what separates the documents, by the indices where there are any."""
    marks = [one for _, one in measured if one is not None]
    if not marks or assumed.id is None:
        return assumed
    count, before, after = (
        sum(getattr(one, name) for one in marks) for name in ("count", "before", "after")
    )
    if typed in (None, "before") and before == count > after:
        return EndOfText(assumed.id, "before")
    if typed in (None, "after") and after == count > before:
        return EndOfText(assumed.id, "after")
    if typed is None and before == after == 0:
        return EndOfText(None, "none")
    raise DataError(
        f"{files[0].path.parent}: of {count} documents {before} begin and {after} end with id {assumed.id}; "
        f"--end_of_text none takes documents from the index alone"
    )


def _entry(
    file: TokenFile, split: str, measured: _Measured, end_of_text: EndOfText
) -> dict[str, Any]:
    facts, marks = measured
    entry = {"name": file.path.name, "split": split, "tokens": file.tokens, **facts}
    if end_of_text.id is None:
        entry["documents"] = marks.count if marks else 0
    else:
        entry.pop("index", None)
    if file.layout != "npy":
        entry |= {"dtype": DTYPES[file.dtype][0], "offset": file.offset}
    return entry
