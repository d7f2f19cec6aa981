"""Token shards: files of ids, opened and checked against shards.json.

Ours are .npy; shards.json may name files of other programs too, with the type and the place of their ids.
"""

from __future__ import annotations

import functools
import itertools
import re
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tokenize import TokenError
from typing import Any, Literal

import numpy as np
from numpy.lib import format as npy

from gpt2lab import paths
from gpt2lab.data.manifest import (
    ID_BYTES,
    MANIFEST,
    SPLITS,
    EndOfText,
    end_of_text_of,
    fingerprint_of,
    no_shards,
    read_manifest,
    shards_folder,
)
from gpt2lab.errors import DataError, system_errors_as
from gpt2lab.files import open_regular, sha256_of
from gpt2lab.tokenizers.gpt2 import GPT2
from gpt2lab.tokenizers.interface import Tokenizer
from gpt2lab.tokenizers.opening import of_record
from gpt2lab.tokenizers.plain import BYTES

IndexLayout = Literal["datatrove", "megatron"]
JOURNAL = "progress.json"  # of a preparation that has not ended
RAW_SUFFIX = ".bin"
SHARD_NAME = re.compile(r"(?P<dataset>.+)_(?P<split>train|val)_(?P<index>\d{6,})\.npy")
SCAN_LIMIT_BYTES = 2 * 1024**3  # a set without manifest up to this size is read in full first
# numpy parses headers by ast, which fails in two threads at once up to Python 3.11.7
# (https://github.com/python/cpython/issues/106905).
_ONE_HEADER = threading.Lock()
_SAMPLE_BYTES = 1 << 16
_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_ROWS_OF_BYTES = 384  # of a model of bytes: their 257 ids, and rows up to the next multiple of 128


@dataclass(frozen=True)
class DocumentIndex:
    """The file of another program that gives the ends of a shard's documents."""

    path: Path
    layout: IndexLayout
    sha256: str


@dataclass(frozen=True)
class Shard:
    """One file of tokens: where its array starts, how long it is, and how wide its ids are."""

    path: Path
    tokens: int
    offset: int  # bytes before the first token
    sha256: str | None = None  # of the file, where shards.json records it
    dtype: str = "<u2"  # or <u4
    index: DocumentIndex | None = None  # where no id marks the documents

    @property
    def id_bytes(self) -> int:
        """Bytes of one id."""
        return ID_BYTES[self.dtype]

    def map_ids(self) -> np.ndarray:
        """Return all ids, (tokens,), by a memory map.

        Raises: DataError.
        """
        if not self.tokens:
            return np.empty(0, self.dtype)
        try:
            return np.memmap(self.path, self.dtype, "r", self.offset, (self.tokens,))
        except (OSError, ValueError) as error:
            raise self.rejected(f"cannot be read ({error})") from error

    def rejected(self, problem: str) -> DataError:
        """Return the error that names the file, the problem and the fix."""
        error = DataError(f"{self.path}: {problem}; restore the file or prepare the data again")
        error.is_local = True  # each rank reads other windows
        return error


@dataclass(frozen=True)
class TokenData:
    """A folder of shards that passed its checks."""

    folder: Path
    fingerprint: str
    splits: dict[str, tuple[Shard, ...]]
    warnings: tuple[str, ...]
    tokenizer: Tokenizer | None = GPT2  # that the ids are of; None where it is not known
    end_of_text: EndOfText = EndOfText()

    def __post_init__(self) -> None:
        """Raises: DataError if a split has no token."""
        for split, shards in self.splits.items():
            if not self.tokens(split):
                raise shards[-1].rejected(f"holds no token, and no other {split} shard does")

    def tokens(self, split: str) -> int:
        """Count the tokens of a split."""
        return sum(shard.tokens for shard in self.splits[split])

    def by_source(self) -> tuple[TokenData, ...]:
        """Return the folders of a mixture; of a single folder, itself."""
        return (self,)

    def describe(self, unused_targets: int) -> str:
        """Describe the data in one line; `unused_targets` at the shards' ends belong to no window."""
        other = "" if self.tokenizer in (GPT2, None) else f", tokenizer {self.tokenizer.describe()}"
        return (
            f"{paths.display_path(self.folder)}, {self.tokens('train'):,} training tokens "
            f"({unused_targets:,} targets at shard ends unused), fingerprint {self.fingerprint[:12]}{other}"
        )


def open_data(folder: Path, *, vocab_size: int | None) -> TokenData:
    """Check a folder of shards in milliseconds: manifest, tokenizer, names, sizes, dtype, largest id.

    A folder without shards.json is accepted with a warning: its fingerprint covers names, sizes and dtype only, and its
    ids count as GPT-2's. `vocab_size`: of the model that reads it; None: of any.

    Raises: DataError naming the file, what is wrong and the fix.
    """
    prepare = _how_to_prepare(folder, vocab_size)
    if not folder.is_dir():
        raise no_shards(folder, "no such data folder", prepare)
    manifest = read_manifest(folder) if (folder / MANIFEST).exists() else None
    if manifest is None and (folder / JOURNAL).exists():
        raise DataError(
            f"{folder}: preparation is not finished; repeat its command, it continues where it stopped"
        )
    files: list[dict[str, Any]] = [] if manifest is None else manifest["files"]
    listed = {split: [file for file in files if file["split"] == split] for split in SPLITS}
    for split in SPLITS:
        if not (listed[split] or (manifest is None and names_on_disk(folder, split))):
            if any(path.suffix in (".bin", ".ds") for path in folder.iterdir()):
                prepare = "token files of another program? gpt2lab data import reads them in place"
            raise no_shards(folder, f"no {split} shards (NAME_{split}_000000.npy)", prepare)
    tokenizer = GPT2 if manifest is None else of_record(manifest["tokenizer"], folder, MANIFEST)
    rows = 2**32 if vocab_size is None else vocab_size
    size = rows if tokenizer is None else tokenizer.size
    check_ids = functools.partial(_check_ids, limit=min(rows, size), size=size)
    if manifest is None:
        splits = {
            split: tuple(open_shard(folder / name) for name in names_on_disk(folder, split))
            for split in SPLITS
        }
        facts = {s: [(d.path.name, d.tokens, d.dtype) for d in splits[s]] for s in SPLITS}
        unknown = f"{folder}: no {MANIFEST}; contents cannot be verified, only names and sizes"
        return TokenData(
            folder, fingerprint_of(facts), splits, (unknown, *_scan(splits, check_ids))
        )
    place = shards_folder(folder, manifest)
    splits = {
        split: tuple(_compare(place, file, check_ids) for file in listed[split]) for split in SPLITS
    }
    if strays := find_strays(folder, manifest):
        raise DataError(
            f"{place / strays[0]}: not listed in {MANIFEST}; move it away or prepare the data again"
        )
    warnings: tuple[str, ...] = ()
    if tokenizer is None:
        warnings = (f"{folder}: its tokenizer is not known, so ids cannot be shown as text",)
    end_of_text = end_of_text_of(manifest)
    return TokenData(folder, manifest["fingerprint"], splits, warnings, tokenizer, end_of_text)


def _how_to_prepare(folder: Path, vocab_size: int | None) -> str:
    """Return a command that prepares data for a model of `vocab_size` rows."""
    prepare = "prepare one with: gpt2lab prepare python-stdlib (or fineweb-edu, a file, a folder)"
    if vocab_size is None or not BYTES.size <= vocab_size < GPT2.size:
        return prepare
    name, before = BYTES.name, ""  # of another tokenizer than GPT-2's
    if vocab_size > _ROWS_OF_BYTES:
        name = f"tok{vocab_size}"
        before = (
            f"gpt2lab data tokenizer train python-stdlib --vocab_size {vocab_size} --out {name} && "
        )
    return (
        f"prepare one with: {before}gpt2lab prepare python-stdlib --tokenizer {name} "
        f"--out {paths.display_path(folder)}"
    )


def open_listed(folder: Path, listed: dict[str, Any]) -> Shard:
    """Open a file by its entry in the manifest, after checking its size.

    Raises: DataError.
    """
    path = folder / listed["name"]
    if "dtype" not in listed:  # .npy, or nanoGPT's .bin in a manifest of an earlier version
        return open_shard(path)
    dtype, offset, tokens = listed["dtype"], listed["offset"], listed["tokens"]
    with system_errors_as(DataError, path, fix="restore the file"):
        size = path.stat().st_size
    if size != listed["bytes"] or size != offset + ID_BYTES[dtype] * tokens:
        raise DataError(
            f"{path}: {size} bytes, {MANIFEST} says {listed['bytes']} with {tokens} tokens; truncated copy?"
        )
    index = None
    if where := listed.get("index"):
        index = DocumentIndex(folder / where["name"], where["layout"], where["sha256"])
    return Shard(path, tokens, offset, dtype=dtype, index=index)


def document_ends(shard: Shard) -> np.ndarray:
    """Return where a shard's documents end by its index, (documents,) int64, in tokens from its beginning.

    Raises: DataError if the index is missing or has changed.
    """
    assert shard.index is not None
    path = shard.index.path
    with system_errors_as(DataError, path, fix="restore the file"):
        if sha256_of(path) != shard.index.sha256:
            raise DataError(
                f"{path}: damaged (its sha256 is not the one in {MANIFEST}); restore the file"
            )
        return read_document_ends(shard.index.layout, path)


def document_marks(shard: Shard, end_of_text: int | None) -> np.ndarray:
    """Return the places of an id in a shard, in tokens from its beginning; reads every token once.

    Where it has an index of its documents, the places of their last tokens; without either, none.

    Raises: DataError if the shard is gone or shorter than it was.
    """
    if shard.index is not None:
        return document_ends(shard) - 1
    return np.flatnonzero([] if end_of_text is None else shard.map_ids() == end_of_text)


def read_document_ends(layout: IndexLayout, index: Path) -> np.ndarray:
    """Return where the documents of a file end by the index beside it, (documents,) int64; empty ones are omitted.

    Raises: DataError; OSError.
    """
    if layout == "datatrove":
        ends = read_datatrove_index(index)
    else:
        _, lengths, _, bounds = map_megatron_index(index)
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[bounds[1:]]
    return ends[np.diff(ends, prepend=0) > 0]


def read_datatrove_index(path: Path) -> np.ndarray:
    """Return the ends of the documents of a datatrove file, (documents,) int64; stored as uint64.

    Raises: DataError; OSError.
    """
    size = path.stat().st_size
    if size % 8:
        raise DataError(
            f"{path}: {size} bytes, but an index has 8 bytes a document; truncated copy?"
        )
    ends = np.fromfile(path, "<u8")
    if (ends >= 2**62).any() or (np.diff(ends.astype(np.int64), prepend=0) < 0).any():
        raise DataError(f"{path}: the ends of its documents do not ascend; damaged")
    return ends.astype(np.int64)


def map_megatron_index(index: Path) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    """Return the code of the ids' type, and by memory map lengths and byte offsets of sequences and documents' bounds.

    Header: magic (9 bytes), version, code of the type (1 byte), number of sequences, number of bounds; then lengths
    (int32), offsets (int64), bounds (int64, in sequences, from 0). Source: Megatron-LM
    megatron/core/datasets/indexed_dataset.py.

    Raises: DataError; OSError.
    """
    size = index.stat().st_size
    with open_regular(index, follow=True) as file:
        head = file.read(_MEGATRON_HEADER.size)
    if head.startswith(b"TNTIDX\x00\x00"):
        raise DataError(
            f"{index}: Megatron's format before MMIDIDX (lazy, cached); write it again as mmap"
        )
    if not head.startswith(_MEGATRON_MAGIC):
        raise DataError(f"{index}: does not begin with MMIDIDX as Megatron's indices do")
    if len(head) < _MEGATRON_HEADER.size:
        raise DataError(f"{index}: {size} bytes; truncated copy?")
    _, version, code, sequences, bounds = _MEGATRON_HEADER.unpack(head)
    if version != 1:
        raise DataError(f"{index}: version {version} of Megatron's index; known is 1")
    starts = list(
        itertools.accumulate([_MEGATRON_HEADER.size, 4 * sequences, 8 * sequences, 8 * bounds])
    )
    if size == starts[-1] + sequences and sequences:
        raise DataError(f"{index}: has a mode for each sequence, of images perhaps; not only text")
    if size != starts[-1]:
        raise DataError(f"{index}: {size} bytes, but its header says {starts[-1]}; truncated copy?")
    lengths, pointers, documents = (
        np.memmap(index, kind, "r", offset=start, shape=(count,)) if count else np.empty(0, kind)
        for kind, start, count in zip(
            ("<i4", "<i8", "<i8"), starts[:3], (sequences, sequences, bounds), strict=True
        )
    )
    ascends = bounds > 0 and bool((np.diff(documents, prepend=0) >= 0).all())
    if not ascends or documents[0] != 0 or documents[-1] != sequences:
        raise DataError(
            f"{index}: its documents do not begin at sequence 0 and end at {sequences}; damaged"
        )
    return code, lengths, pointers, documents


def looks_wider(path: Path, offset: int = 0, *, width: int = 2) -> bool:
    """Tell whether ids taken for `width` bytes have twice as many: at every second place nothing above 15, else larger.

    The upper half of an id is at most 15 in vocabularies of up to a million.
    """
    with open_regular(path, follow=True) as file:
        file.seek(offset)
        sample = file.read(_SAMPLE_BYTES)
    ids = np.frombuffer(sample[: len(sample) // (2 * width) * 2 * width], f"<u{width}")
    return len(ids) > 0 and int(ids[1::2].max()) < 16 <= int(ids[::2].max())


def open_shard(path: Path) -> Shard:
    """Read a shard's header and check it against the file's size; a .bin is nanoGPT's, uint16 without header.

    Raises: DataError if it is missing, truncated, not one-dimensional or not uint16 or uint32.
    """
    try:
        size = path.stat().st_size
        if path.suffix == RAW_SUFFIX:
            if size % 2 or looks_wider(path):
                kind = "an odd number of bytes" if size % 2 else "32-bit ids"
                raise DataError(f"{path}: {kind}, not uint16 ids; import the folder again")
            return Shard(path, size // 2, 0)
        with open_regular(path, follow=True) as file:
            version = npy.read_magic(file)
            read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            with _ONE_HEADER:
                shape, _, dtype = read(file)
            offset = file.tell()
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}; prepare the data again or restore the file"
        ) from error
    except (ValueError, TypeError, SyntaxError, EOFError, TokenError) as error:  # numpy's parsing
        raise DataError(f"{path}: not a .npy file ({error})") from error
    if dtype.str not in ID_BYTES or len(shape) != 1:
        raise DataError(
            f"{path}: {len(shape)}-dimensional {dtype} array; a shard is one-dimensional uint16 or uint32"
        )
    promised = offset + ID_BYTES[dtype.str] * shape[0]
    if size != promised:
        raise DataError(f"{path}: {size} bytes, but its header says {promised}; truncated copy?")
    return Shard(path, shape[0], offset, dtype=dtype.str)


def find_strays(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """Return the names of shards in the folder that the manifest does not list."""
    place = shards_folder(folder, manifest)
    present = {name for split in SPLITS for name in names_on_disk(place, split)}
    listed = {file["name"] for file in manifest["files"]}
    if "not_taken" in manifest:  # of another program, whose files have other names
        suffixes = {Path(name).suffix for name in listed}
        found = {path.name for path in place.iterdir() if path.suffix in suffixes}
        present |= {name for name in found if not name.startswith(".")}
    return sorted(present - listed - set(manifest.get("not_taken", ())))


def names_on_disk(folder: Path, split: str) -> list[str]:
    """Return the names of a split's .npy shards in the order of their numbers."""
    matches = [SHARD_NAME.fullmatch(path.name) for path in folder.iterdir() if path.is_file()]
    found = [match for match in matches if match and match["split"] == split]
    return [match.string for match in sorted(found, key=lambda m: (m["dataset"], int(m["index"])))]


def _check_ids(path: Path, largest: int, *, limit: int, size: int) -> None:
    if largest >= limit:
        raise DataError(
            f"{path}: token id {largest}, but ids must be below min(vocab_size, {size}) = {limit}; "
            f"another tokenizer?"
        )


def _compare(folder: Path, listed: dict[str, Any], check_ids: Callable[[Path, int], None]) -> Shard:
    shard = open_listed(folder, listed)
    if shard.tokens != listed["tokens"]:
        raise DataError(f"{shard.path}: {shard.tokens} tokens, {MANIFEST} says {listed['tokens']}")
    check_ids(shard.path, listed["max_id"])
    return replace(shard, sha256=listed["sha256"])


def _scan(
    splits: dict[str, tuple[Shard, ...]], check_ids: Callable[[Path, int], None]
) -> tuple[str, ...]:
    """Check the ids of a set without manifest now, if it is small enough to read in full."""
    shards = [shard for split in SPLITS for shard in splits[split]]
    total = sum(shard.id_bytes * shard.tokens for shard in shards)
    if total > SCAN_LIMIT_BYTES:
        return (
            f"no {MANIFEST}: ids of {total / 1e9:.1f} GB are checked batch by batch during training",
        )
    for shard in shards:
        check_ids(shard.path, int(shard.map_ids().max(initial=0)))
    return ()
