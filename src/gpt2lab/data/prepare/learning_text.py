"""The text that a tokenizer is learned from: what a preparation would train on, without what it holds out."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

from gpt2lab.data.prepare.encode import cut, key_of
from gpt2lab.data.prepare.groups import deal
from gpt2lab.data.prepare.pipeline import Sizes, plan_preparation
from gpt2lab.data.prepare.readers import BadRecordsError, Document, read
from gpt2lab.data.prepare.sources import Source
from gpt2lab.tokenizers.gpt2 import GPT2

_GROUP_BYTES = 64_000_000


def learning_texts(
    source: Source,
    *,
    max_bytes: int,
    val_tokens: int | None = None,
    max_tokens: int | None = None,
    skip_bad: bool = False,
    with_held_out: bool = False,
    cuts: re.Pattern[str] | None,
) -> Iterator[str]:
    """Yield texts of the documents that a preparation with the same token counts trains on, up to `max_bytes` in all.

    Of more text it takes shares of all files, mixed by their names. A long document comes in several texts, cut where
    `cuts` allows it. Documents are told apart as in a preparation, by the hash of their text; where that finds too few
    to hold out, a preparation chooses others, which may then have been seen.

    Raises: DataError on a record that cannot be read, unless `skip_bad`.
    """
    # The one that is learned will hold about as many bytes a token as GPT-2's.
    sizes = Sizes(val_tokens=val_tokens, max_tokens=max_tokens)
    plan = plan_preparation(source, sizes, tokenizer=GPT2)
    threshold = 0 if with_held_out else plan.tasks[0].rule.threshold
    seen = 0
    for group in deal(source.files, group_bytes=_GROUP_BYTES, shuffle=True):
        for share in group.shares:
            for document in read(share, text_column=source.text_column, digest=hashlib.sha256()):
                try:
                    for text in _texts(document, threshold, cuts):
                        yield text
                        seen += len(text.encode())
                except BadRecordsError as error:
                    if not (skip_bad or source.skips_bad):
                        raise error.unless_skipped() from None
                if seen >= max_bytes:
                    return


def _texts(
    document: Document | BadRecordsError, threshold: int, cuts: re.Pattern[str] | None
) -> Iterator[str]:
    if isinstance(document, BadRecordsError):
        raise document
    for chunk in cut(document.blocks, where=document.where, cuts=cuts):
        content = chunk.text.encode("utf-8", "surrogatepass")
        if chunk.begins and key_of(content) < threshold:
            return
        # Halves of surrogate pairs are what they become in a preparation.
        yield chunk.text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
