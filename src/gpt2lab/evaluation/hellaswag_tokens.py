"""HellaSwag as token ids: tokenized once, cached in a file beside the items, and cut to a subset. No torch."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpt2lab import paths
from gpt2lab.evaluation.hellaswag_items import STYLES, Style, read_items, tokenize
from gpt2lab.files import replace_durably, sha256_of
from gpt2lab.tokenizers.gpt2 import GPT2
from gpt2lab.tokenizers.interface import Tokenizer

# Raise the number when `tokenize` or the arrays of `Questions` change: older caches are then ignored.
FORMAT = "gpt2lab-hellaswag-tokens/1"


@dataclass(frozen=True)
class Questions:
    """N items, tokenized in both styles. Ragged: ids lie end to end, `lengths` says where each sequence ends."""

    labels: np.ndarray  # (N,) int64, which ending is true
    ids: dict[Style, np.ndarray]  # (total,) uint16 or uint32
    lengths: dict[Style, np.ndarray]  # (N, 5) int64: tokens of the context and of each ending
    ending_chars: np.ndarray  # (N, 4) int64, of the harness text

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def fingerprint(self) -> str:
        """Hash the items: equal for equal items in equal order, from any file."""
        digest = hashlib.sha256(self.labels.astype("<i8").tobytes())
        for style in STYLES:
            digest.update(self.lengths[style].astype("<i8").tobytes())
            ids = self.ids[style]
            digest.update(ids.astype("<u2" if ids.dtype == np.uint16 else "<u4").tobytes())
        return digest.hexdigest()

    def sequences(self, style: Style) -> list[list[np.ndarray]]:
        """Return for each item its context and four endings, arrays of ids."""
        ends = np.cumsum(self.lengths[style])
        parts = np.split(self.ids[style], ends[:-1])
        return [parts[i : i + 5] for i in range(0, len(parts), 5)]

    def subset(self, limit: int) -> Questions:
        """Return a fixed random subset of `limit` items in their own order; all if there are no more, or for 0."""
        if not 0 < limit < len(self):
            return self
        chosen = np.sort(np.random.RandomState(0).permutation(len(self))[:limit])
        sequences = {style: self.sequences(style) for style in STYLES}
        return Questions(
            labels=self.labels[chosen],
            ids={
                style: np.concatenate([part for i in chosen for part in sequences[style][i]])
                for style in STYLES
            },
            lengths={style: self.lengths[style][chosen] for style in STYLES},
            ending_chars=self.ending_chars[chosen],
        )


def load_questions(path: Path, tokenizer: Tokenizer) -> Questions:
    """Return the items of a file as token ids, from the cache if it holds exactly these items in these ids.

    The cache lies beside the items, or in the user's cache folder if that place cannot be written. A stale or damaged
    cache is ignored and the items are tokenized again.

    Raises: DataError naming file and line.
    """
    items = read_items(path)
    key = _key(path, tokenizer)
    caches = paths.of_user("XDG_CACHE_HOME", ".cache") / "gpt2lab"
    own = "" if tokenizer == GPT2 else f".{tokenizer.hash[:8]}"
    places = [path.with_name(f".{path.name}{own}.tokens"), caches / f"hellaswag-{key}.tokens"]
    for place in places:
        questions = _read_cache(place, key)
        if questions is not None:
            return questions
    written = {style: [tokenize(item, style, tokenizer) for item in items] for style in STYLES}
    questions = Questions(
        labels=np.array([item.label for item in items]),
        ids={
            style: np.array(
                [t for q in written[style] for part in (q.context, *q.endings) for t in part],
                dtype=tokenizer.dtype,
            )
            for style in STYLES
        },
        lengths={
            style: np.array([[len(q.context), *map(len, q.endings)] for q in written[style]])
            for style in STYLES
        },
        ending_chars=np.array([q.ending_chars for q in written["harness"]]),
    )
    for place in places:
        if _write_cache(place, key, questions):
            break
    return questions


def _key(path: Path, tokenizer: Tokenizer) -> str:
    """Return a hash of all that the ids depend on: the items, the vocabulary and the format."""
    facts = f"{FORMAT} {tokenizer.hash} {sha256_of(path)}"
    return hashlib.sha256(facts.encode()).hexdigest()[:32]


def _read_cache(place: Path, key: str) -> Questions | None:
    """Return the content of a cache file; None if it is missing, damaged or made from something else."""
    try:
        head, payload = place.read_bytes().split(b"\n", 1)
        if head.decode() != f"{key} {hashlib.sha256(payload).hexdigest()}":
            return None
        with np.load(io.BytesIO(payload), allow_pickle=False) as file:
            arrays = dict(file)
    except (OSError, ValueError):
        return None
    return Questions(  # the hash vouches for the rest
        labels=arrays["labels"],
        ids={style: arrays[f"{style}_ids"] for style in STYLES},
        lengths={style: arrays[f"{style}_lengths"] for style in STYLES},
        ending_chars=arrays["ending_chars"],
    )


def _write_cache(place: Path, key: str, questions: Questions) -> bool:
    """Write the cache file in one step; return False if that fails."""
    arrays: dict[str, Any] = {
        "labels": questions.labels,
        "ending_chars": questions.ending_chars,
        **{f"{style}_ids": questions.ids[style] for style in STYLES},
        **{f"{style}_lengths": questions.lengths[style] for style in STYLES},
    }
    payload = io.BytesIO()
    np.savez(payload, **arrays)
    content = payload.getvalue()
    head = f"{key} {hashlib.sha256(content).hexdigest()}\n".encode()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        replace_durably(place, head + content)
    except OSError:
        return False
    return True
