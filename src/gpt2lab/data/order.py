"""Sample number -> (shard, offset): a pure function of (seed, number), never of rank, host or history.

Windows have stride T and take T + 1 tokens, so each token of a shard is a target at most once; the (n - 1) mod T
targets left at a shard's end are never visited and are counted in `unused_targets`.
"""

import functools
from typing import Literal

import numpy as np

from gpt2lab.errors import DataError

Shuffle = Literal["shards", "windows", "none"]
# A run keeps the version that it began with; manifests and `begin` events without one mean the first.
VERSION = 2
_ROUNDS = {1: 4, 2: 8}  # with 4, neighbours stayed neighbours up to 1.3 times as often as by chance


class Order:
    """The endless sequence of training samples over shards of given lengths."""

    def __init__(
        self,
        shard_tokens: list[int],
        *,
        context_length: int,
        shuffle: Shuffle,
        seed: int,
        version: int = VERSION,
    ) -> None:
        """Lay out windows of `context_length` over shards.

        Raises: DataError if a shard is too short for a single window.
        """
        self.context_length, self.shuffle, self.seed = context_length, shuffle, seed
        self.version = version
        targets = np.maximum(np.asarray(shard_tokens, dtype=np.int64) - 1, 0)
        self.windows = targets // context_length  # (num_shards,)
        for shard in np.flatnonzero(self.windows == 0):
            raise DataError(
                f"shard {shard}: {shard_tokens[shard]} tokens hold no window of context_length {context_length} + 1"
            )
        self.unused_targets = int((targets % context_length).sum())
        self.windows_per_epoch = int(self.windows.sum())

    def epoch_of(self, sample: int) -> int:
        """Return the epoch of a sample, from 0."""
        return sample // self.windows_per_epoch

    def shard_order(self, epoch: int) -> tuple[int, ...]:
        """Return the shards in the order in which an epoch visits them."""
        return tuple(int(shard) for shard in self._layout(epoch)[0])

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return shard index and token offset of each sample number; both (n,) int64."""
        epochs, places = np.divmod(np.asarray(samples, dtype=np.int64), self.windows_per_epoch)
        shards, offsets = np.empty_like(places), np.empty_like(places)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            place = places[chosen]
            if self.shuffle == "windows":
                key, rounds = (self.seed, int(epoch)), _ROUNDS[self.version]
                place = _permute(place, self.windows_per_epoch, key=key, rounds=rounds)
            order, starts = self._layout(int(epoch))
            slot = np.searchsorted(starts, place, side="right") - 1
            shards[chosen] = order[slot]
            offsets[chosen] = (place - starts[slot]) * self.context_length
        return shards, offsets

    @functools.lru_cache(maxsize=4)  # noqa: B019 - one Order lives as long as the run
    def _layout(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (shards in visiting order, number of windows before each)."""
        order = np.arange(len(self.windows))
        if self.shuffle == "shards" and epoch > 0:
            # RandomState, not Generator: only its streams are promised to stay the same across NumPy versions (NEP 19).
            order = np.random.RandomState([self.seed, epoch]).permutation(len(self.windows))
        starts = np.concatenate([[0], np.cumsum(self.windows[order])[:-1]])
        return order, starts


def _permute(index: np.ndarray, size: int, *, key: tuple[int, int], rounds: int) -> np.ndarray:
    """Map each index in [0, size) to its place in a permutation that is never stored.

    A Feistel network over the next even number of bits, walked along its cycle until the value is below `size`
    (at most 4 tries on average). Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains".
    """
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    round_keys = np.random.RandomState(key).randint(0, 2**32, size=rounds, dtype=np.uint64)
    value = index.astype(np.uint64)
    outside = np.ones(len(value), dtype=bool)
    while outside.any():
        left, right = value[outside] >> np.uint64(half), value[outside] & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right, round_key) & mask)
        value[outside] = (left << np.uint64(half)) | right
        outside = value >= np.uint64(size)
    return value.astype(np.int64)


def _mix(value: np.ndarray, key: np.uint64) -> np.ndarray:
    """Scramble 64-bit words. Source: Steele et al. 2014, SplitMix64's finaliser."""
    word = (value + key) * np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))
