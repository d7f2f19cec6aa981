"""Token shards on disk: uint16 or uint32 files beside shards.json, whose own hash is the data's fingerprint.

Ours are .npy; where shards.json names one, a raw .bin file as nanoGPT writes it is read as well.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from tokenize import TokenError
from typing import Any

from gpt2lab import paths
from gpt2lab.errors import DataError
from gpt2lab.files import sync_folder, write_durably
from gpt2lab.tokenizers.gpt2 import GPT2
from gpt2lab.tokenizers.interface import Tokenizer
from gpt2lab.tokenizers.opening import of_record

FORMAT = "gpt2lab-shards/1"
MANIFEST = "shards.json"
JOURNAL = "progress.json"  # of a preparation that has not ended
MAX_MANIFEST_BYTES = 64 * 1024 * 1024
SPLITS = ("train", "val")
RAW_SUFFIX = ".bin"
SHARD_NAME = re.compile(r"(?P<dataset>.+)_(?P<split>train|val)_(?P<index>\d{6,})\.npy")
SCAN_LIMIT_BYTES = 2 * 1024**3  # a set without manifest up to this size is read in full first
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Shard:
    """One file of tokens: where its array starts and how long it is."""

    path: Path
    tokens: int
    offset: int  # bytes before the first token
    sha256: str | None = None  # of the file, where shards.json records it
    dtype: str = "<u2"  # of a token, or <u4

    @property
    def item_bytes(self) -> int:
        """Bytes of a token."""
        return int(self.dtype[-1])


@dataclass(frozen=True)
class TokenData:
    """A folder of shards that passed its checks."""

    folder: Path
    fingerprint: str
    splits: dict[str, tuple[Shard, ...]]
    warnings: tuple[str, ...]
    tokenizer: Tokenizer | None = GPT2  # that the ids are of; None where it is not known

    def tokens(self, split: str) -> int:
        """Count the tokens of a split."""
        return sum(shard.tokens for shard in self.splits[split])

    def describe(self, unused_targets: int) -> str:
        """Describe the data for people; `unused_targets` at the shards' ends belong to no window."""
        other = "" if self.tokenizer in (GPT2, None) else f", tokenizer {self.tokenizer.describe()}"
        return (
            f"{paths.for_people(self.folder)}, {self.tokens('train'):,} training tokens "
            f"({unused_targets:,} targets at shard ends unused), fingerprint {self.fingerprint[:12]}{other}"
        )


def shard_name(dataset: str, split: str, index: int) -> str:
    """Name a shard file, e.g. edufineweb_train_000001.npy."""
    return f"{dataset}_{split}_{index:06d}.npy"


def fingerprint_of(manifest: dict[str, Any]) -> str:
    """Hash a manifest's content (without the fingerprint field itself) to 64 hex digits."""
    body = {key: value for key, value in manifest.items() if key != "fingerprint"}
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


def open_data(folder: Path, *, vocab_size: int) -> TokenData:
    """Check a folder of shards in milliseconds: manifest, tokenizer, names, sizes, dtype, largest id.

    A folder without shards.json is accepted with a warning: its fingerprint covers names, sizes and dtype only, and its
    ids count as GPT-2's.

    Raises: DataError naming the file, what is wrong and the fix.
    """
    prepare = "prepare one with: python scripts/prepare_data.py python-stdlib (or fineweb-edu, a file, a folder)"
    if not folder.is_dir():
        raise DataError(f"{folder}: no such data folder; {prepare}")
    manifest = read_manifest(folder) if (folder / MANIFEST).exists() else None
    if manifest is None and (folder / JOURNAL).exists():
        raise DataError(
            f"{folder}: preparation is not finished; repeat its command, it goes on where it stopped"
        )
    if manifest is None:
        names = {split: names_on_disk(folder, split) for split in SPLITS}
    else:
        files = manifest["files"]
        names = {split: [f["name"] for f in files if f["split"] == split] for split in SPLITS}
    for split in SPLITS:
        if not names[split]:
            raise DataError(f"{folder}: no {split} shards (NAME_{split}_000000.npy); {prepare}")
    splits = {split: tuple(open_shard(folder / name) for name in names[split]) for split in SPLITS}
    tokenizer = GPT2 if manifest is None else of_record(manifest.get("tokenizer"), folder, MANIFEST)
    limit = _IdLimit(vocab_size, tokenizer)
    if manifest is None:
        facts = {s: [(one.path.name, one.tokens, one.dtype) for one in splits[s]] for s in SPLITS}
        unknown = f"{folder}: no {MANIFEST}; contents cannot be verified, only names and sizes"
        return TokenData(folder, fingerprint_of(facts), splits, (unknown, *_scan(splits, limit)))
    listed = {file["name"]: file for file in manifest["files"]}
    splits = {
        split: tuple(_compare(shard, listed[shard.path.name], limit) for shard in shards)
        for split, shards in splits.items()
    }
    if strays := find_strays(folder, manifest):
        raise DataError(
            f"{folder / strays[0]}: not listed in {MANIFEST}; move it away or prepare the data again"
        )
    warnings: tuple[str, ...] = ()
    if tokenizer is None:
        warnings = (f"{folder}: its tokenizer is not known, so there are no texts to show",)
    return TokenData(folder, manifest["fingerprint"], splits, warnings, tokenizer)


def tokenizer_of(folder: Path) -> Tokenizer | None:
    """Return the tokenizer of a folder of shards, GPT-2's without shards.json; None if it is not known.

    Raises: DataError.
    """
    if not (folder / MANIFEST).exists():
        return GPT2
    return of_record(read_manifest(folder).get("tokenizer"), folder, MANIFEST)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return shards.json after checking its own hash.

    Raises: DataError.
    """
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise DataError(f"{path}: over {MAX_MANIFEST_BYTES} bytes; not a shard manifest")
        manifest = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: not readable as JSON ({error}); prepare the data again"
        ) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(
            f"{path}: not a shard manifest of format {FORMAT!r}; prepare the data again"
        )
    if manifest.get("fingerprint") != fingerprint_of(manifest):
        raise DataError(
            f"{path}: damaged or edited (its own hash does not match); prepare the data again"
        )
    return manifest


def open_shard(path: Path) -> Shard:
    """Read a shard's header and check it against the file's size.

    Raises: DataError if it is missing, truncated, not one-dimensional or neither uint16 nor uint32.
    """
    from numpy.lib import format as npy  # numpy only where shards are really opened

    try:
        size = path.stat().st_size
        if path.suffix == RAW_SUFFIX:
            if size % 2:
                raise DataError(f"{path}: {size} bytes; raw uint16 tokens are an even number")
            return Shard(path, size // 2, 0)
        with open(path, "rb") as file:
            version = npy.read_magic(file)
            read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, _, dtype = read(file)
            offset = file.tell()
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}; prepare the data again or restore the file"
        ) from error
    except (ValueError, TypeError, SyntaxError, EOFError, TokenError) as error:  # numpy's parsing
        raise DataError(f"{path}: not a .npy file ({error})") from error
    if dtype.str not in ("<u2", "<u4") or len(shape) != 1:
        raise DataError(
            f"{path}: {len(shape)}-dimensional {dtype} array; a shard is one-dimensional uint16 or uint32"
        )
    promised = offset + dtype.itemsize * shape[0]
    if size != promised:
        raise DataError(
            f"{path}: {size} bytes, but its header promises {promised}; truncated copy?"
        )
    return Shard(path, shape[0], offset, dtype=dtype.str)


def measure_shard(
    path: Path, *, offset: int, tokenizer: Tokenizer | None, dtype: str = "<u2"
) -> dict[str, Any]:
    """Read every byte of a shard: bytes, sha256, max_id, documents and text_bytes.

    `offset`: bytes before the first token. Without a tokenizer there are no documents and text_bytes is None, as it is
    where an id is not the tokenizer's.
    """
    import numpy as np

    digest, largest, documents, text_bytes = hashlib.sha256(), 0, 0, 0
    lengths = np.zeros(0, np.int64) if tokenizer is None else tokenizer.byte_lengths()
    with open(path, "rb") as file:
        digest.update(file.read(offset))
        while block := file.read(_BLOCK):
            digest.update(block)
            ids = np.frombuffer(block, dtype)
            largest = max(largest, int(ids.max()))
            if tokenizer is not None:
                documents += int(np.count_nonzero(ids == tokenizer.end_of_text))
            if largest < len(lengths):
                text_bytes += int(lengths[ids].sum())
        size = file.tell()
    return {
        "bytes": size,
        "sha256": digest.hexdigest(),
        "max_id": largest,
        "documents": documents,
        "text_bytes": text_bytes if largest < len(lengths) else None,
    }


def find_strays(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """Return the names of shards that are in a folder but not in its manifest."""
    present = {name for split in SPLITS for name in names_on_disk(folder, split)}
    return sorted(present - {file["name"] for file in manifest["files"]})


def names_on_disk(folder: Path, split: str) -> list[str]:
    """Return the names of a split's .npy shards in the order of their numbers."""
    matches = [SHARD_NAME.fullmatch(path.name) for path in folder.iterdir() if path.is_file()]
    found = [match for match in matches if match and match["split"] == split]
    return [match.string for match in sorted(found, key=lambda m: (m["dataset"], int(m["index"])))]


@dataclass(frozen=True)
class _IdLimit:
    """Ids must be below the rows of the model and the size of the tokenizer."""

    vocab_size: int
    tokenizer: Tokenizer | None

    def check(self, path: Path, largest: int) -> None:
        size = self.vocab_size if self.tokenizer is None else self.tokenizer.size
        limit = min(self.vocab_size, size)
        if largest >= limit:
            raise DataError(
                f"{path}: token id {largest}, but ids must be below min(vocab_size, {size}) = {limit}; "
                f"another tokenizer?"
            )


def _compare(shard: Shard, listed: dict[str, Any], limit: _IdLimit) -> Shard:
    """Compare a shard with its entry in the manifest; return it with its recorded hash."""
    if shard.tokens != listed["tokens"]:
        raise DataError(f"{shard.path}: {shard.tokens} tokens, {MANIFEST} says {listed['tokens']}")
    limit.check(shard.path, listed["max_id"])
    return replace(shard, sha256=listed["sha256"])


def _scan(splits: dict[str, tuple[Shard, ...]], limit: _IdLimit) -> tuple[str, ...]:
    """Check the ids of a set without manifest now, if it is small enough to read in full."""
    import numpy as np

    shards = [shard for split in SPLITS for shard in splits[split]]
    total = sum(shard.item_bytes * shard.tokens for shard in shards)
    if total > SCAN_LIMIT_BYTES:
        return (
            f"ids of {total / 1e9:.1f} GB without {MANIFEST} are checked batch by batch while training",
        )
    for shard in shards:
        tokens = np.memmap(
            shard.path, shard.dtype, mode="r", offset=shard.offset, shape=shard.tokens
        )
        if shard.tokens:
            limit.check(shard.path, int(tokens.max()))
    return ()
