"""Which windows of a validation split are measured, and which of their targets belong to which document. No torch."""

from __future__ import annotations

import hashlib
import itertools
import zlib
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gpt2lab.data.order import Order


def choose_windows(order: Order, wanted: int) -> np.ndarray:
    """Return the numbers of `wanted` windows spread evenly over the split, (N,) int64; all of a smaller split."""
    total = order.windows_per_epoch
    chosen = min(total, wanted)
    return np.arange(chosen, dtype=np.int64) * total // chosen


def checksums_of(windows: np.ndarray) -> np.ndarray:
    """Return a checksum of the ids of each window, (N, T + 1) -> (N,)."""
    return np.array([zlib.crc32(window.tobytes()) for window in windows], dtype=np.uint32)


def hash_checksums(checksums: np.ndarray) -> str:
    """Return 64 hex digits that tell which windows were measured, from the checksums of all of them."""
    return hashlib.sha256(checksums.astype("<u4").tobytes()).hexdigest()


@dataclass(frozen=True)
class Parts:
    """The windows' targets, divided where a document ends: part p is targets [begin, end) of window `window[p]`.

    All arrays are (P,), ordered by window and place.
    """

    kind: Literal["document", "window"]
    window: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    unit: np.ndarray  # the document, or the window itself; numbered 0 to U - 1

    def fill(self, nats: np.ndarray, windows: np.ndarray, losses: np.ndarray) -> None:
        """Write the sums of some windows' losses, (len(windows), T), to their places in `nats`, (P,)."""
        for row, window in enumerate(windows.tolist()):
            first, last = np.searchsorted(self.window, [window, window + 1])
            nats[first:last] = np.add.reduceat(losses[row], self.begin[first:last])

    def by_unit(self, nats: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return nats and targets of each unit, both (U,)."""
        targets = np.bincount(self.unit, weights=self.end - self.begin)
        return np.bincount(self.unit, weights=nats), targets


def divide_windows(order: Order, samples: np.ndarray, ends: list[np.ndarray]) -> Parts:
    """Return the parts of some windows, given the places of <|endoftext|>, or of documents' last tokens, in each shard.

    Before or after a document, <|endoftext|> as a target belongs to the document that it ends.
    """
    shards, offsets = order.locate(samples)
    T, count = order.context_length, len(samples)
    # A document may go on in the next shard: documents are numbered through all of them.
    before = np.cumsum([0, *map(len, ends)]).tolist()
    parts: list[tuple[int, int, int, int]] = []  # window, begin, end, document
    for window, (shard, offset) in enumerate(zip(shards.tolist(), offsets.tolist(), strict=True)):
        places = ends[shard] if ends else np.empty(0, np.int64)
        first, last = np.searchsorted(places, [offset + 1, offset + T])
        # A target's index is its place - offset - 1.
        cuts = [0, *(places[first:last] - offset).tolist(), T]
        for number, (begin, end) in enumerate(itertools.pairwise(cuts)):
            parts.append((window, begin, end, before[shard] + int(first) + number if ends else 0))
    in_order = dict.fromkeys(part[3] for part in parts)
    documents = {document: number for number, document in enumerate(in_order)}
    if len(documents) < 2 or not ends or not any(map(len, ends)):
        every = np.arange(count)
        return Parts("window", every, np.zeros(count, np.int64), np.full(count, T), every)
    window, begin, end = np.array([part[:3] for part in parts], dtype=np.int64).T
    return Parts("document", window, begin, end, np.array([documents[part[3]] for part in parts]))
