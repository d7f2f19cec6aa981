"""What every tokenizer offers: text to ids and back, and the facts that identify it. No torch."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

END_TOKEN = "<|endoftext|>"  # GPT-2's, and that of every tokenizer made here
_LARGEST_OF_16_BITS = 2**16


class Tokenizer(ABC):
    """Text <-> ids 0 to `size` - 1. Two tokenizers are the same if their hashes are."""

    name: str
    size: int  # ids, without padding rows of a model
    end_of_text: int  # stands before each document and after each answer
    end_token: str  # the text by which people name that id
    files: dict[str, bytes]  # what it is made of; empty if it is built in
    cuts: re.Pattern[str] | None = (
        None  # a text may be cut where this matches: its ids stay the same
    )
    bytes_per_token: int = 4  # of English text, roughly

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; what looks like a special token in it is text.

        Raises: DataError if the tokenizer has no ids for it.
        """

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, (n,) of some unsigned type.

        Raises: DataError as `encode` does.
        """
        import numpy as np

        return [np.array(self.encode(text), dtype=np.uint32) for text in texts]

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; bytes that are not UTF-8 become U+FFFD."""

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Yield the text of `decode` id by id, each part as soon as it ends with a whole character."""
        held: list[int] = []
        shown = ""
        for id in ids:
            held.append(id)
            text = self.decode(held)
            if text.startswith(shown) and not text.endswith("\ufffd"):
                yield text[len(shown) :]
                shown = text
        yield self.decode(held)[len(shown) :] if held else ""

    @abstractmethod
    def byte_lengths(self) -> np.ndarray:
        """Return how many bytes of text each id stands for, (size,) int64; 0 for special ids."""

    @abstractmethod
    def tokenizer_json(self) -> bytes:
        """Return the same tokenizer as a Hugging Face tokenizer.json."""

    @property
    def hash(self) -> str:
        """Return 64 hex digits that depend on the name and every file."""
        digest = hashlib.sha256(self.name.encode())
        for name, content in sorted(self.files.items()):
            digest.update(f"\n{name} {hashlib.sha256(content).hexdigest()}".encode())
        return digest.hexdigest()

    @property
    def dtype(self) -> str:
        """Return the type of its ids in shards: `<u2`, or `<u4` where 16 bits do not hold them."""
        return "<u2" if self.size <= _LARGEST_OF_16_BITS else "<u4"

    @property
    def title(self) -> str:
        """Name it for people."""
        return self.name

    def record(self) -> dict[str, Any]:
        """Return what a manifest says of it."""
        return {
            "name": self.name,
            "sha256": self.hash,
            "size": self.size,
            "end_of_text": self.end_of_text,
        }

    def describe(self) -> str:
        """Describe it for people."""
        return f"{self.title}, {self.size:,} ids, sha256 {self.hash[:12]}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)
