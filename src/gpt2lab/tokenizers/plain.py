"""Tokenizers without merges: one id for each byte, or for each character of a text. No torch."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2lab.errors import DataError, system_errors_as
from gpt2lab.files import read_regular
from gpt2lab.tokenizers.interface import END_TOKEN, Tokenizer, byte_alphabet, json_without_merges

if TYPE_CHECKING:
    import numpy as np

CHARACTERS_FILE = "characters.json"
_ANYWHERE = re.compile("")
LARGEST_FILE = 16 * 1024 * 1024
_NUM_BYTES = 256


class BytesTokenizer(Tokenizer):
    """The bytes of UTF-8 as ids 0 to 255, and <|endoftext|>."""

    name, end_of_text, end_token = "bytes", _NUM_BYTES, END_TOKEN
    size = _NUM_BYTES + 1
    cuts = _ANYWHERE
    bytes_per_token = 1

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the bytes of each text, (n,) uint8."""
        import numpy as np

        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        ends = {self.end_of_text: END_TOKEN.encode()}
        return b"".join(ends.get(id) or bytes([id]) for id in ids).decode("utf-8", "replace")

    def byte_lengths(self) -> np.ndarray:
        """Return 1 for each byte and 0 for <|endoftext|>, (257,) int64."""
        import numpy as np

        return np.array([1] * _NUM_BYTES + [0], dtype=np.int64)

    def tokenizer_json(self) -> bytes:
        """Return the same tokenizer for Hugging Face's library: a BPE without merges over bytes."""
        vocabulary = {character: byte for byte, character in enumerate(byte_alphabet())}
        return json_without_merges(vocabulary, of_bytes=True)


BYTES = BytesTokenizer()


class CharactersTokenizer(Tokenizer):
    """One id for each of some characters, in their order, and <|endoftext|> after them."""

    name, end_token = "characters", END_TOKEN
    cuts = _ANYWHERE
    bytes_per_token = 1

    def __init__(self, characters: Sequence[str]) -> None:
        self.characters = tuple(characters)
        self.end_of_text = len(self.characters)
        self.size = self.end_of_text + 1
        content = {"characters": "".join(self.characters), "end_of_text": END_TOKEN}
        self.files = {CHARACTERS_FILE: (json.dumps(content) + "\n").encode()}

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, (n,) uint32.

        Raises: DataError naming the first character that has none.
        """
        import numpy as np

        points, ids = _table(self.characters)
        found = []
        for text in texts:
            wanted = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
            places = np.minimum(np.searchsorted(points, wanted), len(points) - 1)
            unknown = np.flatnonzero(points[places] != wanted)
            if len(unknown):
                character = text[int(unknown[0])]
                raise DataError(
                    f"the character {character!r} (U+{ord(character):04X}) is not among the {len(points)} of this "
                    f"tokenizer; train one on the full text (gpt2lab data tokenizer train), or use bytes"
                )
            found.append(ids[places])
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        texts = (*self.characters, END_TOKEN)
        return "".join(texts[id] for id in ids)

    def byte_lengths(self) -> np.ndarray:
        """Return the bytes of each character in UTF-8, and 0 for <|endoftext|>, (size,) int64."""
        import numpy as np

        lengths = [len(one.encode("utf-8", "surrogatepass")) for one in self.characters]
        return np.array([*lengths, 0], dtype=np.int64)

    def tokenizer_json(self) -> bytes:
        """Return the same for Hugging Face's library, which leaves out characters that have no id."""
        vocabulary = {character: id for id, character in enumerate(self.characters)}
        return json_without_merges(vocabulary, of_bytes=False)


@functools.lru_cache(maxsize=4)
def _table(characters: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the code points in ascending order, and the id of each, both (n,) uint32."""
    import numpy as np

    points = np.array([ord(one) for one in characters], dtype=np.uint32)
    order = np.argsort(points)
    return points[order], order.astype(np.uint32)


def read_characters(path: Path) -> CharactersTokenizer:
    """Read characters.json.

    Raises: DataError if it is another file.
    """
    with system_errors_as(DataError, path):
        content = read_regular(path, at_most=LARGEST_FILE, follow=True)
    try:
        characters = json.loads(content)["characters"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: not a list of characters ({error!r})") from error
    if not isinstance(characters, str):
        raise DataError(f"{path}: `characters` is not text")
    return checked_characters(list(characters), path)


def checked_characters(characters: list[Any], path: Path) -> CharactersTokenizer:
    """Return the tokenizer of the characters that a file lists.

    Raises: DataError if they are not single, different characters.
    """
    if not characters or not all(isinstance(one, str) and len(one) == 1 for one in characters):
        raise DataError(f"{path}: its ids are not single characters")
    if len(set(characters)) != len(characters):
        raise DataError(f"{path}: a character has two ids")
    return CharactersTokenizer(characters)
