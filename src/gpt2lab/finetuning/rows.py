"""Rows of T + 1 ids that hold conversations: the samples of fine-tuning. No torch.

A row is to fine-tuning what a window is to pretraining: the same `Order` locates it, so epochs, permutation, resume and
a change of world size work as in pretraining.
"""

import bisect
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from gpt2lab import paths
from gpt2lab.config.schema import Config
from gpt2lab.data.shards import Shard, TokenData
from gpt2lab.errors import ConfigError, DataError
from gpt2lab.finetuning.conversations import DEMO, HUB, Conversation, read_conversations
from gpt2lab.tokenizers import chat_template
from gpt2lab.tokenizers.gpt2 import GPT2
from gpt2lab.tokenizers.interface import Tokenizer
from gpt2lab.tokenizers.opening import why_no_text

NO_OWNER = -1


@dataclass(frozen=True)
class Rows:
    """`ids` (N, T + 1) of the tokenizer's type, padded with its end of text, and `owner` (N, T + 1) int32.

    The owner of an id of an answer is its conversation's number within the split; all other ids have -1. Only ids with
    an owner are targets.
    """

    ids: np.ndarray
    owner: np.ndarray
    tokenizer: Tokenizer

    def __len__(self) -> int:
        return len(self.ids)

    def targets(self) -> int:
        """Count the ids that are targets."""
        return int((self.owner >= 0).sum())


@dataclass(frozen=True)
class EncodedConversation:
    """One conversation as ids."""

    ids: list[int]
    is_answer: list[bool]
    digest: str  # of its turns


@dataclass(frozen=True, kw_only=True)
class InstructionData(TokenData):
    """Conversations in place of a folder of shards: each split is one shard of rows, in memory only."""

    rows: dict[str, Rows] = field(repr=False, compare=False)
    conversations: dict[str, int]
    first: EncodedConversation = field(repr=False, compare=False)

    def example(self) -> str:
        """Return the first conversation as the model reads it, what it is trained on between >>> and <<<."""
        first, text, decode = self.first, "", self.rows["train"].tokenizer.decode
        marked = zip(first.ids, first.is_answer, strict=True)
        for is_answer, part in itertools.groupby(marked, key=lambda one: one[1]):
            shown = decode([id for id, _ in part])
            text += f">>>{shown}<<<" if is_answer else shown
        return text

    def describe(self, unused_targets: int) -> str:
        """Describe the data in one line."""
        train, val = self.rows["train"], self.rows["val"]
        filled = train.targets() / (len(train) * (train.ids.shape[1] - 1))
        return (
            f"{paths.display_path(self.folder)}, {self.conversations['train']:,} conversations in {len(train):,} rows "
            f"({train.targets():,} answer tokens, {filled:.0%} of the positions), {self.conversations['val']:,} "
            f"in {len(val):,} rows held out, fingerprint {self.fingerprint[:12]}"
        )


def open_instructions(config: Config, tokenizer: Tokenizer | None) -> InstructionData:
    """Read, encode and split the conversations of `--instructions`, and build their rows.

    `tokenizer`: of the model to tune; None if it is not known.

    Conversations with an empty answer, or longer than the context, are left out; a warning counts them and names one.

    Raises: DataError, ConfigError.
    """
    source, T = config.tuning.instructions, config.model.context_length
    assert source is not None
    problem = why_no_text(tokenizer, config.model.vocab_size)
    if tokenizer is None or problem is not None:
        raise ConfigError(
            f"{problem}: the model cannot read text, so it cannot be fine-tuned on conversations; choose another"
        )
    kept, warnings = _encode(read_conversations(source), T, tokenizer)
    held_out = choose_held_out([one.digest for one in kept], config.tuning.val_fraction)
    warnings = (*warnings, *_warn_of_shared_beginnings(kept, held_out, tokenizer.end_of_text))
    parts = {
        "train": [one for one in kept if one.digest not in held_out],
        "val": [one for one in kept if one.digest in held_out],
    }
    for split, part in parts.items():
        if not part:
            raise DataError(
                f"{source}: of {len(kept)} usable conversations ({len({one.digest for one in kept})} different) none "
                f"is left for {split}; give more conversations, or another --val_fraction"
                + "".join(f"; {warning}" for warning in warnings)
            )
    rows = {
        name: build_rows(part, T, packing=config.tuning.packing, tokenizer=tokenizer)
        for name, part in parts.items()
    }
    of_tokenizer = () if tokenizer == GPT2 else (tokenizer.hash,)
    return InstructionData(
        folder=Path(source),
        fingerprint=_hash(chat_template.NAME, *of_tokenizer, *(one.digest for one in kept)),
        splits={
            split: (Shard(Path(f"{Path(source).stem}_{split}"), len(part) * T + 1, 0),)
            for split, part in rows.items()
        },
        warnings=warnings,
        tokenizer=tokenizer,
        rows=rows,
        first=kept[0],
        conversations={split: len(part) for split, part in parts.items()},
    )


def open_held_out(config: Config, tokenizer: Tokenizer | None, *, fingerprint: str) -> Rows:
    """Return the conversations that a run held out; `fingerprint`: of all that it read.

    Raises: DataError if the conversations have changed since; ConfigError.
    """
    source = config.tuning.instructions or ""
    if source != DEMO and not source.startswith(HUB) and not Path(source).is_file():
        raise DataError(
            f"{source}: not there, so the conversations held out are unknown; restore it"
        )
    data = open_instructions(config, tokenizer)
    if data.fingerprint != fingerprint:
        raise DataError(
            f"{config.tuning.instructions}: not the conversations that the run trained on (fingerprint "
            f"{data.fingerprint[:12]}, the run's {fingerprint[:12]}), so those held out are unknown; restore the file"
        )
    return data.rows["val"]


def _encode(
    conversations: list[Conversation], T: int, tokenizer: Tokenizer
) -> tuple[list[EncodedConversation], tuple[str, ...]]:
    kept: list[EncodedConversation] = []
    empty: list[str] = []
    long: list[str] = []
    for one in conversations:
        if any(turn.role == "assistant" and not turn.text for turn in one.turns):
            empty.append(one.where)
            continue
        try:
            ids, is_answer = chat_template.encode(one.turns, tokenizer)
        except DataError as error:
            raise DataError(f"{one.where}: {error}") from error
        if len(ids) > T + 1:
            long.append(f"{one.where} has {len(ids) - 1}")
            continue
        digest = _hash(*(part for turn in one.turns for part in (turn.role, turn.text)))
        kept.append(EncodedConversation(ids, is_answer, digest))
    warnings = []
    if empty:
        warnings.append(
            f"{len(empty):,} conversations with an empty answer left out, first {empty[0]}"
        )
    if long:
        warnings.append(
            f"{len(long):,} of {len(conversations):,} conversations are longer than the context of {T} tokens and "
            f"left out, first {long[0]}"
        )
    return kept, tuple(warnings)


def _warn_of_shared_beginnings(
    kept: Sequence[EncodedConversation], held_out: set[str], end_of_text: int
) -> list[str]:
    """Warn of held-out conversations that continue one of the training split: their beginning has been seen."""
    learned = {tuple(one.ids) for one in kept if one.digest not in held_out}
    count = 0
    for ids in (one.ids for one in kept if one.digest in held_out):
        ends_of_answers = [place + 1 for place, id in enumerate(ids[1:-1], 1) if id == end_of_text]
        count += any(tuple(ids[:end]) in learned for end in ends_of_answers)
    said = f"{count:,} held-out conversations begin with one of the training split"
    return [said] if count else []


def choose_held_out(digests: Sequence[str], fraction: float) -> set[str]:
    """Return the digests of the conversations to validate on: `fraction` of the distinct ones, at least one.

    Only their texts decide, not order or seed: added records move few others, and of equal conversations all or none
    are held out.
    """
    different = sorted(set(digests))
    return set(different[: max(1, round(fraction * len(different)))])


def build_rows(
    part: Sequence[EncodedConversation],
    T: int,
    *,
    packing: Literal["on", "off"],
    tokenizer: Tokenizer,
) -> Rows:
    """Put conversations into rows of T + 1 ids, as many as fit into each, or with packing off one.

    Packing is best fit decreasing: the longest first, each into the fullest row that still has room.
    """
    rows: list[list[int]] = []
    if packing == "off":
        rows = [[number] for number in range(len(part))]
    else:
        by_room: list[tuple[int, int]] = []  # (room, row), sorted
        for number in sorted(range(len(part)), key=lambda n: (-len(part[n].ids), n)):
            length = len(part[number].ids)
            place = bisect.bisect_left(by_room, (length, 0))
            if place == len(by_room):
                room, row = T + 1, len(rows)
                rows.append([])
            else:
                room, row = by_room.pop(place)
            rows[row].append(number)
            bisect.insort(by_room, (room - length, row))
    ids = np.full((len(rows), T + 1), tokenizer.end_of_text, dtype=tokenizer.dtype)
    owner = np.full((len(rows), T + 1), NO_OWNER, dtype=np.int32)
    for row, numbers in enumerate(rows):
        begin = 0
        for number in numbers:
            end = begin + len(part[number].ids)
            ids[row, begin:end] = part[number].ids
            owner[row, begin:end] = np.where(part[number].is_answer, number, NO_OWNER)
            begin = end
    return Rows(ids, owner, tokenizer)


def last_exchanges(rows: Rows) -> list[tuple[list[int], list[int]]]:
    """Return for each conversation the ids before its last answer, and those of the answer without <|endoftext|>."""
    found: dict[int, tuple[list[int], list[int]]] = {}
    for ids, owner in zip(rows.ids, rows.owner, strict=True):
        for number in np.unique(owner[owner != NO_OWNER]).tolist():
            places = np.flatnonzero(owner == number)
            end = int(places[-1])
            first = int(places[np.flatnonzero(np.diff(places, prepend=-2) > 1)[-1]])
            is_end = ids == rows.tokenizer.end_of_text
            begin = int(places[0])
            while not (is_end[begin] and (begin == 0 or is_end[begin - 1])):
                begin -= 1
            found[number] = (ids[begin:first].tolist(), ids[first:end].tolist())
    return [found[number] for number in sorted(found)]


def _hash(*texts: str) -> str:
    digest = hashlib.sha256()
    for text in texts:
        content = text.encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()
