"""Which documents are held out for validation: those whose key is below a threshold, each up to a cap of tokens.

A key is a hash of the document's text, so equal documents never lie on both sides, and neither the order of files nor
the number of processes decides anything. What is beyond the cap is used in neither split.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpt2lab.data.prepare.encode import Encoded

KEYS = 2**64
_FEWEST = 12  # documents of which a standard error still means something
_TRACKED = 4096  # documents of the smallest keys that are remembered


@dataclass(frozen=True)
class SplitRule:
    """Keys below `threshold` (of 2^64) are held out; at most `cap` tokens of a document count for validation."""

    threshold: int
    cap: int


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

    def divide(self, encoded: Encoded) -> tuple[np.ndarray, np.ndarray]:
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
        document = np.cumsum(begins)  # 0: goes on with the document before
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

    For a text of so few documents that the threshold that fits on average holds out next to nothing, or all. No more
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
