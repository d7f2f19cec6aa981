"""shards.json edited by hand, with its hash made anew: one line that says what is wrong, or data that opens."""

import random
import shutil
from collections.abc import Callable
from functools import partial

import pytest

from corpora import TEXTS, prepare_parts, run_prepare, write_jsonl
from edited_manifests import Manifest, assert_edits_are_one_line_or_open, edit, edited, write
from gpt2lab.data.manifest import fingerprint_of, read_manifest
from gpt2lab.data.prepare.assemble import merge
from gpt2lab.data.shards import open_data
from gpt2lab.data.verify import verify
from gpt2lab.errors import DataError


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
        with pytest.raises(DataError, match=r"/shards\.json: ", check=wording):
            read()


@pytest.mark.parametrize("wrong", ["tokens", "bytes"])
def test_a_size_that_contradicts_the_file_is_rejected(prepared, wrong):
    place = {"dtype": "<u2", "offset": 128}
    edit(prepared, lambda m: _first(m).update({**place, wrong: _first(m)[wrong] - 2}))
    with pytest.raises(DataError):
        open_data(prepared, vocab_size=50304)
    assert fingerprint_of({"a": 1, "folder": "moved"}) == fingerprint_of({"a": 1})


def test_no_edit_of_a_manifest_raises_anything_but_one_line(prepared):
    assert_edits_are_one_line_or_open(prepared)


def test_no_edit_of_a_parts_manifest_breaks_a_merge_or_a_repetition(tmp_path):
    source = write_jsonl(tmp_path / "corpus.jsonl", TEXTS)
    sizes = {"group_bytes": 2_000, "val_tokens": 200}
    parts = prepare_parts(source, tmp_path, 2, **sizes)
    again = partial(run_prepare, source, parts[0], part=(1, 2), **sizes)
    original = read_manifest(parts[0])
    outcomes = set()
    for number in range(60):
        write(parts[0], edited(original, random.Random(number)))
        for act in (partial(merge, tmp_path / "out", parts), again):
            try:
                act()
                outcomes.add("done")
            except DataError as error:
                assert "\n" not in str(error)
                outcomes.add("rejected")
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert outcomes == {"done", "rejected"}
