"""The files of a source, divided into groups: the unit of work of a preparation.

A group follows from the names and sizes of the files alone. Processes, machines and Ray tasks take
groups, so that the shards do not depend on how many of them there are.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import PurePosixPath

GROUP_BYTES = 1_000_000_000
_MIXING = 16  # shares of a group's size that a shuffled group is made of
# Suffix of a file that is read, to how; the compressions around the first ones.
KINDS = {
    ".jsonl": "jsonl",
    ".json": "jsonl",  # as many public sets name JSON lines
    ".csv": "csv",
    ".txt": "text",
    ".md": "text",
    ".parquet": "parquet",
}
PACKINGS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}


@dataclass(frozen=True)
class File:
    """One file of a source: its name below the source's folder, its bytes as stored, where it is, how it is read."""

    name: str
    size: int
    url: str  # a path of this machine, or hf://...
    kind: str
    pieces: int | None = None  # that it can be divided into, row groups; None: any number

    @property
    def packing(self) -> str | None:
        """How it is compressed; None if it is not."""
        return PACKINGS.get(PurePosixPath(self.name).suffix.lower())

    @property
    def divides(self) -> bool:
        """Whether a reader can begin within it."""
        return self.packing is None and self.kind in ("jsonl", "parquet")


@dataclass(frozen=True)
class Share:
    """The `number`-th (from 0) of `count` shares of a file that are about equally large."""

    file: File
    number: int = 0
    count: int = 1

    @property
    def size(self) -> int:
        """Bytes as stored, up to rounding."""
        return self.file.size // self.count


@dataclass(frozen=True)
class FileGroup:
    """Shares that are read one after the other, and written to shards of their own."""

    number: int
    shares: tuple[Share, ...]

    @property
    def size(self) -> int:
        """Bytes as stored."""
        return sum(share.size for share in self.shares)


def kind_of(name: str) -> str | None:
    """Return how a file of this name is read; None if it is not."""
    path = PurePosixPath(name.lower())
    if path.suffix in PACKINGS:
        path = path.with_suffix("")
        return None if path.suffix == ".parquet" else KINDS.get(path.suffix)
    return KINDS.get(path.suffix)


def deal(files: Sequence[File], *, group_bytes: int, shuffle: bool) -> tuple[FileGroup, ...]:
    """Divide files into groups of about `group_bytes`, in their order or shuffled by their names.

    Large files that a reader can begin within are divided. With `shuffle` they are divided further, so that every group
    is a sample of all.
    """
    largest = group_bytes // _MIXING if shuffle else group_bytes
    shares: list[Share] = []
    for file in files:
        count = max(1, -(-file.size // max(1, largest))) if file.divides else 1
        count = min(count, file.pieces or count)
        shares += [Share(file, number, count) for number in range(count)]
    if shuffle:
        shares.sort(key=lambda s: hash_of(f"{s.file.name} {s.number}"))
    total = sum(share.size for share in shares)
    wanted = max(1, round(total / group_bytes))
    ends = accumulate(share.size for share in shares)
    # Where the middle of a share falls when all are laid end to end over `wanted` equal groups.
    places = [
        min(wanted - 1, int((end - share.size / 2) * wanted / max(1, total)))
        for end, share in zip(ends, shares, strict=True)
    ]
    dealt = groupby(zip(places, shares, strict=True), key=lambda pair: pair[0])
    groups = [tuple(share for _, share in pairs) for _, pairs in dealt]
    return tuple(
        FileGroup(number, some)
        for number, some in enumerate(_join_small(groups, group_bytes // _MIXING))
    )


def _join_small(groups: Sequence[tuple[Share, ...]], least: int) -> list[tuple[Share, ...]]:
    """Join groups below `least` bytes, such as a small file before a large one, to a neighbour."""
    joined: list[tuple[Share, ...]] = []
    held: tuple[Share, ...] = ()
    for group in groups:
        held += group
        if sum(share.size for share in held) >= least:
            joined.append(held)
            held = ()
    if held and joined:
        joined[-1] += held
    elif held:
        joined.append(held)
    return joined


def of_part(groups: Sequence[FileGroup], part: tuple[int, int]) -> tuple[FileGroup, ...]:
    """Return the groups of part i of n: n runs in their order, together all."""
    i, n = part
    return tuple(groups[(i - 1) * len(groups) // n : i * len(groups) // n])


def hash_of(names: str) -> bytes:
    """Hash names of files, also those that are not UTF-8."""
    return hashlib.sha256(names.encode(errors="surrogateescape")).digest()
