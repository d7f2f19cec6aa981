"""Manifests of data in which anything was edited, with their hash made anew."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpt2lab.data.manifest import fingerprint_of, read_manifest
from gpt2lab.data.shards import open_data
from gpt2lab.data.verify import measure, verify
from gpt2lab.errors import DataError

Manifest = dict[str, Any]


def write(folder: Path, manifest: Manifest) -> None:
    rehashed = manifest | {"fingerprint": fingerprint_of(manifest)}
    (folder / "shards.json").write_text(json.dumps(rehashed))


def edit(folder: Path, change: Callable[[Manifest], object]) -> None:
    """Edit a folder's manifest by hand, and make its hash anew."""
    manifest = json.loads((folder / "shards.json").read_text())
    change(manifest)
    write(folder, manifest)


JUNK = [
    *(None, True, False, -1, 0, 1, 7.5, 10**30, "", "x", "..", ".", "../x", "/etc", "a\0b"),
    *("\ud800", "x" * 5000, "none", "<u4", "megatron", "0" * 64),
    *([], [1], ["x"], {}, {"name": "x"}, [[[]]]),
]


def places(
    value: Any, path: tuple[Any, ...] = (), *, most: int | None = None
) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value within a manifest; of the entries of a list at most so many."""
    for key, one in value.items() if isinstance(value, dict) else enumerate(value[:most]):
        yield (*path, key)
        if isinstance(one, dict | list):
            yield from places(one, (*path, key), most=most)


def edited(manifest: Manifest, draw: random.Random) -> Manifest:
    """Return a manifest with up to three of its values deleted, replaced, or put under another key."""
    manifest = copy.deepcopy(manifest)
    for _ in range(draw.randint(1, 3)):
        *parents, key = draw.choice([path for path in places(manifest) if path != ("format",)])
        inside: Any = manifest
        for parent in parents:
            inside = inside[parent]
        kind = draw.randrange(3)
        if kind == 0:
            del inside[key]
        elif kind == 1:
            inside[key] = copy.deepcopy(draw.choice(JUNK))
        elif isinstance(inside, dict):
            inside[f"{key}_"] = inside.pop(key)
    return manifest


def assert_edits_are_one_line_or_open(folder: Path) -> None:
    """Edit a folder's manifest in 200 ways: each is an error of one line, or data that can be read."""
    original = read_manifest(folder)
    seen = {"rejected": 0, "opened": 0}
    for number in range(200):
        write(folder, edited(original, random.Random(number)))
        for read in (lambda: open_data(folder, vocab_size=50304), lambda: measure(folder)):
            try:
                read()
                verify(folder)
                seen["opened"] += 1
            except DataError as error:
                assert "\n" not in str(error)
                seen["rejected"] += 1
    assert min(seen.values()) > 20, seen
