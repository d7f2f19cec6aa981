"""Groups of validation tokens by which a difference of losses is split: what they are and where they stand. No torch.

Each function maps windows of ids, (N, T + 1), or places of targets to the number of each target's group, (N, T).
"""

import itertools
import re
from collections.abc import Sequence

import numpy as np

from gpt2lab.data.shards import TokenData
from gpt2lab.tokenizers.interface import Tokenizer

# -- frequency -------------------------------------------------------------------------------------------------------

_PER_MILLION = (1, 10, 100, 1000, 10_000)  # training tokens
FREQUENCIES = (
    "never",
    "below 1 per million",
    *("1 to 10", "10 to 100", "100 to 1,000", "1,000 to 10,000", "above 10,000 per million"),
)
MOST_COUNTED = 1 << 27  # tokens of a source; of more, blocks spread evenly
_BLOCK = 1 << 20


def count_training_tokens(data: TokenData) -> np.ndarray:
    """Return how often each id occurs in the training shards, per million of their tokens, (largest id + 1,).

    Of a split above MOST_COUNTED tokens, blocks are counted that are spread evenly.

    Raises: DataError if a shard is gone.
    """
    shards = data.splits["train"]
    step = max(1, -(-sum(shard.tokens for shard in shards) // MOST_COUNTED))
    counts = np.zeros(0, np.int64)
    blocks = [(shard, begin) for shard in shards for begin in range(0, shard.tokens, _BLOCK)]
    for shard, begin in blocks[::step]:
        found = np.bincount(shard.map_ids()[begin : begin + _BLOCK], minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    return np.asarray(counts * (1e6 / max(1, counts.sum())))


def by_frequency(windows: np.ndarray, per_million: np.ndarray) -> np.ndarray:
    """Group targets by how often their id occurs in training, given counts per million of each id."""
    targets = windows[:, 1:]
    table = np.zeros(max(len(per_million), int(targets.max(initial=0)) + 1))
    table[: len(per_million)] = per_million
    group = (table > 0) + np.digitize(table, _PER_MILLION)
    return group.astype(np.uint8)[targets]


# -- place -----------------------------------------------------------------------------------------------------------

IN_DOCUMENT = (16, 64, 256, 1024, 4096, 16_384)  # last places of groups
DOCUMENT_PLACES = (
    *("first 16 tokens", "17 to 64", "65 to 256", "257 to 1,024", "1,025 to 4,096"),
    *("4,097 to 16,384", "later"),
)


def window_bounds(T: int) -> list[int]:
    """Return the last places of groups in a window: 1, 4, 16, ..., T."""
    bounds = [1]
    while bounds[-1] < T:
        bounds.append(min(4 * bounds[-1], T))
    return bounds


def window_places(T: int) -> tuple[str, ...]:
    """Name the groups of places in a window."""
    pairs = itertools.pairwise(window_bounds(T))
    return ("1 token before it", *(f"{low + 1:,} to {high:,}" for low, high in pairs))


def by_place(places: np.ndarray, bounds: Sequence[int]) -> np.ndarray:
    """Group places, from 1 on, by the first bound that they do not exceed; beyond all is one group more."""
    return np.searchsorted(bounds, places).astype(np.uint8)


def places_in_documents(
    ends: list[np.ndarray],
    shard_tokens: Sequence[int],
    shards: np.ndarray,
    offsets: np.ndarray,
    T: int,
) -> np.ndarray:
    """Return how many tokens after its document's beginning each target of some windows stands, (N, T), from 1 on.

    `ends`: places of the tokens that end or divide documents in each shard. A document may go on in the next shard.
    """
    begins = np.cumsum([0, *shard_tokens])  # places from here on count through all shards
    marks = np.concatenate([[-1], *map(np.add, ends, begins)])
    targets = (begins[shards] + offsets)[:, None] + np.arange(1, T + 1)  # (N, T)
    return np.asarray(targets - marks[np.searchsorted(marks, targets) - 1])


# -- repetition ------------------------------------------------------------------------------------------------------

REPETITIONS = (
    "token new to the window",
    "token seen, but not after the same token",
    "pair seen, but not triple",
    "triple seen",
)


def by_repetition(windows: np.ndarray) -> np.ndarray:
    """Group targets by how much of the text that ends in them occurred earlier in the same window.

    A pair is the target and the token before it, a triple has one more.
    """
    N, width = windows.shape
    _, ranks = np.unique(windows, return_inverse=True)
    one = ranks.reshape(N, width).astype(np.int64)
    # At most N (T + 1): up to 2^21, three of them fit into 63 bits.
    base = int(one.max(initial=0)) + 1
    group = _seen_earlier(one)[:, 1:].astype(np.uint8)
    two = one[:, :-1] * base + one[:, 1:]
    group += _seen_earlier(two)
    three = two[:, :-1] * base + one[:, 2:]
    group[:, 1:] += _seen_earlier(three)
    return group


def _seen_earlier(keys: np.ndarray) -> np.ndarray:
    """Tell of each key, (N, K), whether an equal one stands before it in its row."""
    seen = np.ones(keys.shape, bool)
    for own, row in zip(seen, keys, strict=True):
        own[np.unique(row, return_index=True)[1]] = False  # the first of each
    return seen


# -- kind of text ----------------------------------------------------------------------------------------------------

KINDS = (
    "word in a line of prose",
    "word in a line of code",
    "digits",
    "punctuation",
    "whitespace",
    "end of a document, special",
)
_PROSE, _CODE, _DIGITS, _PUNCTUATION, _WHITESPACE, _END = range(len(KINDS))
# A line is code if it has a character of these, a name before a bracket or on both sides of a dot, or begins or ends
# as statements do.
_CODE_LINE = re.compile(
    r"[{}\[\]=<>;_\\|]|\w\(|[a-z]\.[a-z]|^\s*(?:import|from|return|def|class|pass|raise|@)\b|^\s+\S.*:\s*$"
)


class TextKinds:
    """Groups targets by the text of their ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises: DataError if the tokenizer's vocabulary is missing."""
        self._tokenizer = tokenizer
        self._has_text = tokenizer.byte_lengths() > 0
        self._text = np.full(tokenizer.size, None, dtype=object)  # of ids met so far
        self._kind = np.zeros(tokenizer.size, np.uint8)
        self._newlines = np.zeros(tokenizer.size, np.int64)

    def group(self, windows: np.ndarray) -> np.ndarray:
        """Group targets: digits, punctuation and whitespace are tokens of nothing else; words have a letter.

        A word's line is code or prose by the text of the whole line, as far as it lies in the window.
        """
        self._meet(np.unique(windows))
        kinds = self._kind[windows[:, 1:]]
        lines = np.cumsum(self._newlines[windows], axis=1)[:, :-1]  # newlines before each target
        for row, window in enumerate(windows):
            text = "".join(self._text[window])
            is_code = np.array([_CODE_LINE.search(line) is not None for line in text.split("\n")])
            kinds[row] += (kinds[row] == _PROSE) & is_code[lines[row]]
        return kinds

    def _meet(self, ids: np.ndarray) -> None:
        for id in ids.tolist():
            if self._text[id] is not None:
                continue
            text = self._tokenizer.decode([id]) if self._has_text[id] else "\n"
            self._text[id], self._newlines[id] = text, text.count("\n")
            self._kind[id] = _END if not self._has_text[id] else _kind_of(text.strip())


def _kind_of(text: str) -> int:
    if not text:
        return _WHITESPACE
    if text.isdigit():
        return _DIGITS
    # U+FFFD stands for a part of a character, mostly of a letter beyond ASCII.
    return _PROSE if any(one.isalnum() or one == "\ufffd" for one in text) else _PUNCTUATION
