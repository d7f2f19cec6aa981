"""Documents as pieces of bounded length that tokenise, one by one, to exactly the ids of the whole."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gpt2lab.errors import DataError

PIECE_CHARS = 1 << 20
LONGEST_WORD = 16 * PIECE_CHARS

# GPT-2 splits text into words by a pattern that looks ahead but never back, and of which no match crosses from
# something visible into white space. So a text may be cut before any white space that follows something visible:
# every word, and hence every id, stays what it is. (Python's \s covers all of the pattern's own.)
_CUT = re.compile(r"(?<=\S)[ \n]")


@dataclass(frozen=True)
class Piece:
    """Part of a document; `begins` on its first one, which <|endoftext|> precedes."""

    text: str
    begins: bool


def cut(chunks: Iterable[str], *, where: str) -> Iterator[Piece]:
    """Yield a document, read as chunks of any length, as pieces of about a million characters.

    Nothing is yielded for a document without a single character.

    Raises: DataError on 16 million characters without a place to cut: not text.
    """
    held, begins = "", True
    for chunk in chunks:
        held += chunk
        while len(held) > PIECE_CHARS:
            place = _CUT.search(held, PIECE_CHARS)
            if place is None:
                if len(held) > LONGEST_WORD:
                    raise DataError(
                        f"{where}: {len(held):,} characters without white space; is this text?"
                    )
                break
            yield Piece(held[: place.start()], begins)
            held, begins = held[place.start() :], False
    if held:
        yield Piece(held, begins)
