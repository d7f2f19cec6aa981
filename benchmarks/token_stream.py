"""The tokens that every trainer of a comparison reads, in the formats that they want. No torch."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gpt2lab.data.prepare.groups import Share
from gpt2lab.data.prepare.readers import Document, read
from gpt2lab.data.prepare.sources import open_source
from gpt2lab.tokenizers.gpt2 import NUM_TOKENS, gpt2_encoding, vocabulary_files

# Where tiktoken would download its files from; it looks for them in its cache under the hash of this.
_TIKTOKEN_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"


def texts_of_stdlib() -> Iterator[str]:
    """Yield the files of Python's standard library that are text, in the order of a preparation."""
    source = open_source("python-stdlib", text_column="text")
    for file in source.files:
        for document in read(Share(file), text_column=source.text_column):
            if isinstance(document, Document):
                yield "".join(document.blocks)


def text_tokens(count: int, *, vocab_size: int) -> np.ndarray:
    """Return `count` ids of Python's standard library, (count,) uint16: GPT-2's, or bytes where V is too small."""
    texts, size, characters = [], 0, 8 * count
    for text in texts_of_stdlib():
        texts.append(text)
        size += len(text)
        if size >= characters:
            break
    if vocab_size < NUM_TOKENS:
        ids = np.frombuffer("".join(texts).encode(), dtype=np.uint8).astype(np.uint16) % vocab_size
    else:
        batches = gpt2_encoding().encode_ordinary_batch(texts)
        ids = np.concatenate([np.array(batch, dtype=np.uint16) for batch in batches])
    return np.resize(ids, count)


def markov_tokens(count: int, *, vocab_size: int, seed: int = 1337) -> np.ndarray:
    """Return `count` made-up ids, (count,) uint16, frequent ones as frequent as in text (Zipf, exponent 1.07).

    Every second id follows from the one before, so that there is something to learn. Uniform ids would
    hide the contention of embedding gradients.
    """
    random = np.random.RandomState(seed)
    ids = min(vocab_size, NUM_TOKENS)
    weights = 1 / np.arange(1, ids + 1) ** 1.07
    cumulative = np.cumsum(weights / weights.sum())
    drawn = np.minimum(np.searchsorted(cumulative, random.rand(count)), ids - 1)
    drawn[1::2] = (drawn[: count // 2 * 2 : 2] * 31 + 7) % ids
    return drawn.astype(np.uint16)


def write_formats(tokens: np.ndarray, folder: Path) -> None:
    """Write the same ids as `shards/*.npy` and as `tokens.bin`; the first 100,000 are the validation split's too."""
    shards = folder / "shards"
    shards.mkdir(parents=True)
    np.save(shards / "edufineweb_train_000001.npy", tokens)
    np.save(shards / "edufineweb_val_000000.npy", tokens[:100_000])
    tokens.tofile(folder / "tokens.bin")


def write_tiktoken_cache(folder: Path) -> None:
    """Fill a folder so that `tiktoken.get_encoding("gpt2")` of another program needs no network."""
    folder.mkdir(parents=True)
    for path in vocabulary_files():
        name = hashlib.sha1((_TIKTOKEN_URL + path.name).encode()).hexdigest()
        shutil.copyfile(path, folder / name)
