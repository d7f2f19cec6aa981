"""The interface of a tokenizer: text to ids and back, the facts that identify it, its tokenizer.json. No torch."""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

END_TOKEN = "<|endoftext|>"  # GPT-2's, and that of every tokenizer made here
_LARGEST_OF_16_BITS = 2**16
_TAIL = 8  # ids before a text that are decoded with it


class Tokenizer(ABC):
    """Text <-> ids 0 to `size` - 1. Two tokenizers are the same if their hashes are."""

    name: str
    size: int  # ids, without padding rows of a model
    end_of_text: int  # the id before each document and after each answer
    end_token: str  # that id as text
    files: dict[str, bytes]  # what it is made of; empty if it is built in
    cuts: re.Pattern[str] | None = None  # a text may be cut where this matches: its ids stay
    bytes_per_token: int = 4  # of English text, roughly

    def __init__(self) -> None:
        self.files = {}

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; what looks like a special token in it is text, half of a surrogate pair U+FFFD.

        Raises: DataError if the tokenizer has no ids for it.
        """
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids: list[int] = self.encode_documents([whole])[0].tolist()
        return ids

    @abstractmethod
    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, (n,) of some unsigned type.

        Raises: DataError as `encode` does.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; bytes that are not UTF-8 become U+FFFD."""

    def decode_after(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """Return the text that ids add to others: at the beginning of a text some decoders drop a space."""
        tail = [*before[-_TAIL:]]
        start, whole = self.decode(tail), self.decode([*tail, *ids])
        return whole[len(start) :] if whole.startswith(start) else self.decode(ids)

    def stream(self, ids: Iterable[int], before: Sequence[int] = ()) -> Iterator[str]:
        """Yield the text of `decode_after` id by id, each part as soon as it ends with a whole character."""
        held: list[int] = []
        shown = ""
        for id in ids:
            held.append(id)
            text = self.decode_after(before, held)
            if text.startswith(shown) and not text.endswith("\ufffd"):
                yield text[len(shown) :]
                shown = text
        yield self.decode_after(before, held)[len(shown) :]

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
        """Return the name that messages use."""
        return self.name

    def record(self) -> dict[str, Any]:
        """Return what a manifest records of it."""
        return {
            "name": self.name,
            "sha256": self.hash,
            "size": self.size,
            "end_of_text": self.end_of_text,
        }

    def describe(self) -> str:
        """Describe it in a few words."""
        return f"{self.title}, {self.size:,} ids, sha256 {self.hash[:12]}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)


# How public tokenizers name their end of text.
USUAL_END_TOKENS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[EOS]", "<|eos|>")


def json_of_merges(ids: bytes, merges: bytes, end_token: str | None) -> bytes:
    """Return the tokenizer.json of a vocab.json and a merges.txt.

    Raises: ValueError.
    """
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Encoder

    vocabulary = json.loads(ids)
    pairs = [
        tuple(line.split()) for line in merges.decode().splitlines() if line[:9] != "#version:"
    ]
    known = [pair for pair in pairs if len(pair) == 2]
    encoder = Encoder(models.BPE(vocab=vocabulary, merges=known))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    special = (
        [end_token] if end_token else [name for name in USUAL_END_TOKENS if name in vocabulary]
    )
    encoder.add_special_tokens([AddedToken(name, special=True) for name in special])
    return str(encoder.to_str()).encode()


def json_without_merges(vocabulary: dict[str, int], *, of_bytes: bool) -> bytes:
    """Return the tokenizer.json of single symbols, characters or bytes, followed by <|endoftext|>."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Encoder

    encoder = Encoder(models.BPE(vocab={**vocabulary, END_TOKEN: len(vocabulary)}, merges=[]))
    encoder.decoder = decoders.Fuse()
    if of_bytes:
        encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        encoder.decoder = decoders.ByteLevel()
    encoder.add_special_tokens([AddedToken(END_TOKEN, special=True)])
    return str(encoder.to_str()).encode()


def byte_alphabet() -> list[str]:
    """Return the character that stands for each byte in a byte-level BPE, in the order of the bytes.

    Source: Radford et al. 2019's encoder.py, bytes_to_unicode.
    """
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]
