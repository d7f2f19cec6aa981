"""The documents of a training split by number. No torch."""

from dataclasses import dataclass

import numpy as np

from gpt2lab.data.shards import TokenData, document_marks


@dataclass(frozen=True)
class Documents:
    """Where documents end; they are numbered from 1 through all shards, and one may continue in the next shard.

    Number 0 are the tokens before the first end of text, where it precedes each document.
    """

    ends: tuple[np.ndarray, ...]  # of each shard: places of its ends of text, in tokens
    first: tuple[int, ...]  # the number of each shard's first target

    def of_targets(self, shard: int, offset: int, length: int) -> np.ndarray:
        """Return the document of each of the targets of a window at (shard, offset), (length,) int64.

        As in validation, an end of text that is a target belongs to the document that it ends.
        """
        places = np.arange(offset + 1, offset + 1 + length)
        return self.first[shard] + np.searchsorted(self.ends[shard], places)


def find_documents(data: TokenData, *, shards: int | None = None) -> Documents | None:
    """Read the training tokens up to shard number `shards`, default all; None if nothing marks the documents.

    Raises: DataError if a shard is gone or shorter than it was.
    """
    ends: list[np.ndarray] = []
    first: list[int] = []
    before = 0
    for source in data.by_source():
        mark = source.end_of_text
        chosen = source.splits["train"]
        if shards is not None:
            chosen = chosen[: max(0, shards - len(ends))]
        for shard in chosen:
            places = document_marks(shard, mark.id)
            is_before = shard.index is None and mark.place == "before"
            ends.append(places)
            first.append(before + (0 if is_before else 1))
            before += len(places)
    return Documents(tuple(ends), tuple(first)) if before else None
