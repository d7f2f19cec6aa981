"""Documents divided into training and validation, and ids written to shard files of equal size.

A document is held out if its key is below a threshold. A key is a hash of the text, so equal documents never lie on
both sides, and neither the order of files nor the number of processes decides anything. A held-out document counts up
to a cap of tokens; what is beyond the cap is used in neither split.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from gpt2lab.checkpoint.faults import faultpoint
from gpt2lab.data.manifest import ID_BYTES
from gpt2lab.data.prepare.encode import EncodedChunks
from gpt2lab.files import open_regular, sync_folder
from gpt2lab.tokenizers.interface import Tokenizer

KEYS = 2**64
_FEWEST = 12  # documents that a meaningful standard error needs
_TRACKED = 4096  # documents of the smallest keys that are remembered
_BLOCK = 1 << 22  # bytes read at a time


@dataclass(frozen=True)
class SplitRule:
    """Keys below `threshold` (of 2^64) are held out; at most `cap` tokens of a document count for validation."""

    threshold: int
    cap: int


EVERY_DOCUMENT = SplitRule(KEYS, KEYS)  # of a file that is the validation split


class Divider:
    """Divides a stream of chunks into the ids of the two splits, up to a budget of tokens."""

    def __init__(self, rule: SplitRule, *, budget: int | None) -> None:
        self.tokens = 0  # used so far, of both splits
        self.held_back = 0  # tokens of held-out documents beyond the cap
        self._rule, self._budget = rule, budget
        self._in_val, self._key = False, 0  # of the document that the last chunk belongs to
        self._used: dict[int, int] = {}  # tokens used of each held-out key: copies share one cap
        self._documents: dict[int, int] = {}  # key: tokens, of the smallest keys
        self._last_key: int | None = None

    @property
    def is_full(self) -> bool:
        """Whether the budget is used up."""
        return self._budget is not None and self.tokens >= self._budget

    def divide(self, encoded: EncodedChunks) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of some chunks for training and for validation, both (n,)."""
        ids, lengths, begins = encoded.ids, encoded.lengths, encoded.begins
        if not len(lengths):
            return ids, ids
        # A chunk that continues a document is on the side of the last one that began.
        latest = np.maximum.accumulate(np.where(begins, np.arange(len(begins)), -1))
        held_out = encoded.keys < np.uint64(min(self._rule.threshold, KEYS - 1))
        of_val = np.where(latest >= 0, held_out[latest], self._in_val)  # (c,)
        kept = lengths.copy()
        for chunk in np.flatnonzero(of_val).tolist():
            if begins[chunk]:
                self._key = int(encoded.keys[chunk])
            used = self._used.get(self._key, 0)
            kept[chunk] = min(int(lengths[chunk]), self._rule.cap - used)
            self._used[self._key] = used + int(kept[chunk])
        self._in_val = bool(of_val[-1])
        before = self.tokens + np.cumsum(kept) - kept
        count = len(kept) if self._budget is None else int((before < self._budget).sum())
        self.held_back += int((lengths - kept)[:count].sum())
        if self._budget is not None:
            kept = np.clip(self._budget - before, 0, kept)
        self._track(encoded.keys[:count], begins[:count], lengths[:count])
        self.tokens += int(kept.sum())
        starts = np.cumsum(lengths) - lengths
        inside = np.arange(len(ids)) - np.repeat(starts, lengths) < np.repeat(kept, lengths)
        in_val = np.repeat(of_val, lengths)
        return ids[inside & ~in_val], ids[inside & in_val]

    def smallest(self) -> list[tuple[int, int]]:
        """Return (key, tokens) of the different documents with the smallest keys, ascending."""
        return sorted(self._documents.items())[:_TRACKED]

    def _track(self, keys_of_chunks: np.ndarray, begins: np.ndarray, lengths: np.ndarray) -> None:
        keys = keys_of_chunks[begins].tolist()
        document = np.cumsum(begins)  # 0: continues the document before
        tokens = np.bincount(document, weights=lengths, minlength=1).astype(int).tolist()
        if tokens[0] and self._last_key in self._documents:
            self._documents[self._last_key] += tokens[0]
        for key, count in zip(keys, tokens[1:], strict=True):
            self._documents[key] = self._documents.get(key, 0) + count
        self._last_key = keys[-1] if keys else self._last_key
        if len(self._documents) > 4 * _TRACKED:
            self._documents = dict(self.smallest())


def rule_for(wanted: int, expected: int | None) -> SplitRule:
    """Return the rule by which about `wanted` of `expected` tokens are held out."""
    share = 0.5 if not expected else min(0.5, wanted / expected)
    return SplitRule(int(share * KEYS), cap_of(wanted))


def rule_by_documents(wanted: int, smallest: list[tuple[int, int]], total: int) -> SplitRule | None:
    """Return the rule that holds out whole documents of the smallest keys, about `wanted` tokens of them in all.

    For a text of so few documents that the threshold for the average holds out almost nothing, or everything. No more
    than three times `wanted` is taken from training, unless the first document alone is longer; where these documents
    are few, each may fill up to a twelfth of the split. None if no document can be held out while half of the text
    is left.
    """
    cap, threshold = cap_of(wanted), None
    lengths: list[int] = []  # of the documents held out
    for key, tokens in smallest:
        taken = sum(lengths) + tokens
        if taken > total // 2 or (lengths and taken > 3 * wanted):
            break
        lengths.append(tokens)
        threshold = key + 1
        if sum(min(length, cap) for length in lengths) >= wanted:
            break
    if threshold is None:
        return None
    largest = wanted // _FEWEST
    while cap < largest and sum(min(length, cap) for length in lengths) < wanted:
        cap = min(2 * cap, largest)
    return SplitRule(threshold, cap)


def cap_of(wanted: int) -> int:
    """Return the most tokens of one document in a validation split: 2 %, or all of a short one."""
    return max(wanted // 50, 1024)


SMALLEST_LAST_SHARD = 65_536  # tokens; a smaller remainder joins the shard before
_HEADER_BYTES = 128  # of a .npy file with one dimension, whatever its length


class ShardWriter:
    """Fills shards of equal size; a file that has its final name is complete.

    A small remainder is added to the last shard: a separate shard could be too short for a window, and training
    rejects such shards.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        *,
        shard_tokens: int,
        tokenizer: Tokenizer,
        dataset: str | None = None,
        first: int = 0,
    ) -> None:
        """Write shards of a split into `folder`; `dataset` begins their names, and `first` is the first number."""
        self.files: list[dict[str, Any]] = []  # as in shards.json
        self.tokens = 0
        self._folder, self._split, self._first = folder, split, first
        self._shard_tokens, self._tokenizer = shard_tokens, tokenizer
        self._prefix = f"{dataset}_{split}" if dataset else split
        self._temporary = folder / f"{split}.tmp"
        self._open: IO[bytes] | None = None
        self._written = 0  # tokens in the open file
        self._rest: list[np.ndarray] = []  # beyond shard_tokens: of the same shard or of the next
        self._held = 0

    def add(self, ids: np.ndarray) -> None:
        """Append ids, (n,) of the tokenizer's type.

        Raises: OSError, of a full disk for example.
        """
        self.tokens += len(ids)
        while len(ids):
            room = self._shard_tokens - self._written
            if room:
                self._append(ids[:room])
                ids = ids[room:]
                continue
            self._rest.append(ids)
            self._held += len(ids)
            if self._held < min(self._shard_tokens, SMALLEST_LAST_SHARD):
                return
            ids = np.concatenate(self._rest)
            self._rest, self._held = [], 0
            self._commit()

    def finish(self) -> None:
        """Commit the last shard."""
        for ids in self._rest:
            self._append(ids)
        self._rest, self._held = [], 0
        if self._written:
            self._commit()

    def close(self) -> None:
        """Drop the shard that is not finished."""
        if self._open is not None:
            with contextlib.suppress(OSError):
                self._open.close()
            self._temporary.unlink(missing_ok=True)
            self._open = None

    def _append(self, ids: np.ndarray) -> None:
        if self._open is None:
            self._open = open(self._temporary, "wb+")  # noqa: SIM115 - closed at commit or in close()
            self._open.write(bytes(_HEADER_BYTES))
        self._open.write(ids.astype(self._tokenizer.dtype, copy=False).tobytes())
        self._written += len(ids)

    def _commit(self) -> None:
        """Write the header, read every byte once more to measure it, and give the file its name."""
        assert self._open is not None
        name = f"{self._prefix}_{self._first + len(self.files):06d}.npy"
        self._open.seek(0)
        dtype = self._tokenizer.dtype
        header = {"shape": (self._written,), "fortran_order": False, "descr": dtype}
        npy.write_array_header_1_0(self._open, header)
        assert self._open.tell() == _HEADER_BYTES
        self._open.flush()
        os.fsync(self._open.fileno())
        facts = measure_shard(
            self._temporary,
            offset=_HEADER_BYTES,
            dtype=dtype,
            tokenizer=self._tokenizer,
            end_of_text=self._tokenizer.end_of_text,
        )
        self._open.close()
        self._open = None
        faultpoint("data.before_rename", len(self.files))
        os.rename(self._temporary, self._folder / name)
        sync_folder(self._folder)
        self.files.append({"name": name, "split": self._split, "tokens": self._written, **facts})
        self._written = 0


def measure_shard(
    path: Path,
    *,
    offset: int,
    dtype: str = "<u2",
    tokenizer: Tokenizer | None = None,
    end_of_text: int | None = None,
    watch: Callable[[np.ndarray], None] = lambda ids: None,
) -> dict[str, Any]:
    """Read every byte of a shard: bytes, sha256, max_id, documents and text_bytes.

    `offset`: bytes before the first token. `documents` counts the id `end_of_text`. `text_bytes` is None without a
    tokenizer, and where an id is not the tokenizer's. `watch` is given all ids in order.
    """
    digest, largest, documents, text_bytes = hashlib.sha256(), 0, 0, 0
    width = ID_BYTES[dtype]
    lengths = np.zeros(0, np.int64) if tokenizer is None else tokenizer.byte_lengths()
    with open_regular(path, follow=True) as file:
        digest.update(file.read(offset))
        while block := file.read(_BLOCK):
            digest.update(block)
            # A file that grows while it is read may end within an id; its size is compared afterwards.
            ids = np.frombuffer(block[: len(block) // width * width], dtype)
            largest = max(largest, int(ids.max(initial=0)))
            if end_of_text is not None:
                documents += int(np.count_nonzero(ids == end_of_text))
            if largest < len(lengths):
                text_bytes += int(lengths[ids].sum())
            watch(ids)
        size = file.tell()
    return {
        "bytes": size,
        "sha256": digest.hexdigest(),
        "max_id": largest,
        "documents": documents,
        "text_bytes": text_bytes if largest < len(lengths) else None,
    }
