"""shards.json edited by hand, with its hash made anew: one line that says what is wrong, or data that opens."""

from __future__ import annotations

import copy
import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corpora import TEXTS, run_prepare, write_jsonl
from gpt2lab.data.manifest import fingerprint_of, read_manifest
from gpt2lab.data.prepare.assemble import merge
from gpt2lab.data.shards import open_data
from gpt2lab.data.verify import measure, verify
from gpt2lab.errors import DataError
from gpt2lab.interop.import_shards import ImportOptions, import_folder

Manifest = dict[str, Any]


def write(folder: Path, manifest: Manifest) -> None:
    rehashed = manifest | {"fingerprint": fingerprint_of(manifest)}
    (folder / "shards.json").write_text(json.dumps(rehashed))


def edit(folder: Path, change: Callable[[Manifest], object]) -> None:
    manifest = json.loads((folder / "shards.json").read_text())
    change(manifest)
    write(folder, manifest)


def _first(manifest: Manifest) -> Manifest:
    return manifest["files"][0]  # type: ignore[no-any-return]


EDITS: dict[str, Callable[[Manifest], object]] = {
    "no tokenizer": lambda m: m.pop("tokenizer"),
    "no files": lambda m: m.pop("files"),
    "files by name": lambda m: m.update(files={}),
    "a file without a name": lambda m: _first(m).pop("name"),
    "a file without a hash": lambda m: _first(m).pop("sha256"),
    "a short hash": lambda m: _first(m).update(sha256="00"),
    "tokens as text": lambda m: _first(m).update(tokens="10"),
    "tokens true": lambda m: _first(m).update(tokens=True),
    "another split": lambda m: _first(m).update(split="test"),
    "a folder above": lambda m: _first(m).update(name="../a.npy"),
    "a path": lambda m: _first(m).update(name="/etc/passwd"),
    "a file twice": lambda m: m["files"].append(_first(m)),
    "half a place": lambda m: _first(m).update(offset=128),
    "another type": lambda m: _first(m).update(dtype="<f4", offset=0),
    "an end of text without a place": lambda m: m.update(end_of_text={"id": 1}),
    "no name of the tokenizer": lambda m: m.update(tokenizer={}),
    "a folder that is none": lambda m: m.update(folder="nowhere"),
    "a number for a folder": lambda m: m.update(folder=3),
}


@pytest.mark.parametrize("case", EDITS)
def test_a_manifest_edited_by_hand_is_rejected_with_what_is_wrong(prepared, case, wording):
    edit(prepared, EDITS[case])
    for read in (lambda: open_data(prepared, vocab_size=50304), lambda: verify(prepared)):
        with pytest.raises(DataError, match=r"/shards\.json: ") as caught:
            read()
        wording(caught.value)


# -- any edit at all -------------------------------------------------------------------------------------------------

JUNK = [
    *(None, True, False, -1, 0, 1, 7.5, 10**30, "", "x", "..", ".", "../x", "/etc", "a\0b"),
    *("\ud800", "x" * 5000, "none", "<u4", "megatron", "0" * 64),
    *([], [1], ["x"], {}, {"name": "x"}, [[[]]]),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value within a manifest."""
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in inside:
        yield (*path, key)
        if isinstance(one, dict | list):
            yield from places(one, (*path, key))


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


def _ours(folder: Path) -> None:
    run_prepare(write_jsonl(folder.with_suffix(".jsonl"), TEXTS), folder, val_tokens=100)


def _llmc_elsewhere(folder: Path) -> None:
    files = folder.with_name("files")
    files.mkdir()
    for split in ("train", "val"):
        head = struct.pack("<256i", 20240520, 1, 300, *[0] * 253)
        (files / f"x_{split}.bin").write_bytes(head + np.arange(300, dtype="<u2").tobytes())
    import_folder(files, out=folder)


def _datatrove(folder: Path) -> None:
    folder.mkdir()
    for split in ("train", "val"):
        (folder / f"{split}.ds").write_bytes(np.arange(300, dtype="<u4").tobytes())
        (folder / f"{split}.ds.index").write_bytes(struct.pack("<3Q", 90, 100, 300))
    import_folder(folder, ImportOptions(tokenizer="gpt2"))


@pytest.mark.parametrize("make", [_ours, _llmc_elsewhere, _datatrove])
def test_no_edit_of_a_manifest_raises_anything_but_one_line(tmp_path, make):
    folder = tmp_path / "data"
    make(folder)
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


def test_no_edit_of_a_parts_manifest_breaks_a_merge_or_a_repetition(tmp_path):
    source = write_jsonl(tmp_path / "corpus.jsonl", TEXTS)
    parts = [tmp_path / f"part{i}" for i in (1, 2)]

    def prepare(number: int) -> None:
        out = parts[number - 1]
        run_prepare(source, out, part=(number, 2), group_bytes=2_000, val_tokens=200)

    prepare(1), prepare(2)
    original = read_manifest(parts[0])
    outcomes = set()

    for number in range(60):
        write(parts[0], edited(original, random.Random(number)))
        for act in (lambda: merge(tmp_path / "out", parts), lambda: prepare(1)):
            try:
                act()
                outcomes.add("done")
            except DataError as error:
                assert "\n" not in str(error)
                outcomes.add("rejected")
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert outcomes == {"done", "rejected"}
