"""Finished groups, or the folders of parts -> one folder of shards with its manifest."""

import contextlib
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from gpt2lab.checkpoint.faults import faultpoint
from gpt2lab.data.manifest import FORMAT, MANIFEST, SPLITS, read_manifest, write_manifest
from gpt2lab.data.prepare import write
from gpt2lab.data.prepare.work import Finished
from gpt2lab.data.prepare.write import ShardWriter
from gpt2lab.data.shards import open_shard
from gpt2lab.errors import DataError, system_errors_as
from gpt2lab.files import (
    COUNT,
    STRING,
    JsonFile,
    list_of,
    object_with,
    or_null,
    sha256_of,
    staged_folder,
    write_durably,
)
from gpt2lab.tokenizers.interface import Tokenizer
from gpt2lab.tokenizers.opening import of_record

_BLOCK = 1 << 22  # tokens


def assemble(
    groups: Sequence[Finished],
    folder: Path,
    *,
    dataset: str,
    origin: str,
    request: dict[str, Any],
    split: dict[str, Any],
    tokenizer: Tokenizer,
    cut: int | None = None,
) -> dict[str, Any]:
    """Write the new `folder` from groups, in their order, and return its manifest.

    Training shards stay as the groups wrote them; the validation tokens of all groups are joined. With `cut` the last
    so many tokens of training become the validation split.
    """
    folder.mkdir()
    listed = [(group.folder / file["name"], file) for group in groups for file in group.files]
    val: Iterable[np.ndarray] = (np.load(group.folder / "val.npy") for group in groups)
    shards = _Shards(folder, dataset, request["shard_tokens"], tokenizer)
    if cut is not None:
        ids = np.concatenate([np.empty(0, np.uint16), *_blocks(listed)])
        shards.write([ids[:-cut]], "train")
        val = [ids[-cut:]]
    elif request["part"] == [1, 1]:
        shards.link(_joined_with_small(listed, request["shard_tokens"]))
    else:  # merge joins small shards over all parts
        shards.link([[one] for one in listed])
    shards.write(val, "val")
    names = ("number", "val_tokens", "shares")
    return shards.commit(
        {
            "format": FORMAT,
            "dataset": dataset,
            "origin": origin,
            "request": request,
            "tokenizer": tokenizer.record(),
            "left_out": {kind: sum(g.facts[kind] for g in groups) for kind in ("bad", "empty")},
            "split": {**split, "held_back_tokens": sum(g.facts["held_back"] for g in groups)},
            "groups": [{name: group.facts[name] for name in names} for group in groups],
        }
    )


def merge(target: Path, parts: list[Path]) -> dict[str, Any]:
    """Join the parts 1/n ... n/n of one source into the new folder `target`; return its manifest.

    It is that of a preparation on one machine, byte for byte. Each shard is compared with its hash. On one disk
    training shards are hard links: nothing is copied, and the parts can be deleted afterwards.

    Raises: DataError if a part is missing, damaged, given twice, or of another source.
    """
    if os.path.lexists(target):
        raise DataError(f"{target}: exists already; choose another folder")
    by_number = _in_order(parts)
    partial = target.with_name(f"{target.name}.partial")
    if os.path.lexists(partial):
        raise DataError(
            f"{partial}: exists already; finish the preparation of {target.name}, or delete that folder"
        )
    with (
        system_errors_as(DataError, target, what="cannot be written", fix="nothing was kept"),
        staged_folder(target) as staging,
    ):
        manifest = _merge_into(staging, by_number)
        faultpoint("merge.before_rename", 0)
    return manifest


def _merge_into(folder: Path, parts: list[tuple[Path, dict[str, Any]]]) -> dict[str, Any]:
    first = parts[0][1]
    dataset, tokenizer = first["dataset"], of_record(first["tokenizer"], parts[0][0], MANIFEST)
    assert tokenizer is not None  # only imported data may be of an unknown one
    of_split: dict[str, list[tuple[Path, dict[str, Any]]]] = {"train": [], "val": []}
    for part, manifest in parts:
        for file in manifest["files"]:
            of_split[file["split"]].append((part / file["name"], file))
    for path, file in tqdm(
        [*of_split["train"], *of_split["val"]], unit="file", leave=False, disable=None
    ):
        open_shard(path)  # names a missing file
        if sha256_of(path) != file["sha256"]:
            raise DataError(f"{path}: damaged (its sha256 is not the one in {MANIFEST})")
    shards = _Shards(folder, dataset, first["request"]["shard_tokens"], tokenizer)
    shards.link(_joined_with_small(of_split["train"], first["request"]["shard_tokens"]))
    shards.write(_blocks(of_split["val"]), "val")
    for split in SPLITS:
        if sum(file["tokens"] for file in shards.files if file["split"] == split) < 2:
            raise DataError(f"no text for the {split} split; prepare with another --val_tokens")
    manifests = [manifest for _, manifest in parts]
    held_back = sum(manifest["split"]["held_back_tokens"] for manifest in manifests)
    return shards.commit(
        {
            **first,
            "request": {**first["request"], "part": [1, 1]},
            "left_out": {k: sum(m["left_out"][k] for m in manifests) for k in first["left_out"]},
            "split": {**first["split"], "held_back_tokens": held_back},
            "groups": [group for manifest in manifests for group in manifest["groups"]],
        }
    )


def _in_order(parts: list[Path]) -> list[tuple[Path, dict[str, Any]]]:
    """Return the parts with their manifests by number, after checking that together they are complete."""
    found: dict[int, tuple[Path, dict[str, Any]]] = {}
    common, count = None, 0
    for folder in parts:
        manifest = read_manifest(folder)
        request = manifest.get("request", {})
        part = request.get("part", [1, 1]) if isinstance(request, dict) else None
        if not isinstance(part, list) or len(part) != 2:
            raise DataError(f"{folder / MANIFEST}: 'part' is not [i, n]; prepare it again")
        number, count = part
        if count == 1:
            raise DataError(f"{folder}: a full data set, not a part; prepare parts with --part i/n")
        check_prepared(folder, manifest)
        rule = {**manifest["split"], "held_back_tokens": None}
        same = (manifest["origin"], manifest["tokenizer"], rule, {**request, "part": [None, count]})
        if common is not None and same != common:
            raise DataError(f"{folder}: of another source or with other options than {parts[0]}")
        if number in found:
            raise DataError(
                f"{folder}: part {number}/{count} is duplicated: also in {found[number][0]}"
            )
        common, found[number] = same, (folder, manifest)
    missing = [f"{number}/{count}" for number in range(1, count + 1) if number not in found]
    if missing:
        raise DataError(f"part {', '.join(missing)} is missing; give all {count}")
    return [found[number] for number in sorted(found)]


def _is_share(value: Any) -> bool:
    rules = (STRING, COUNT, COUNT, or_null(STRING))
    is_list = isinstance(value, list) and len(value) == len(rules)
    return is_list and all(rule[0](one) for rule, one in zip(rules, value, strict=True))


_SHARES = list_of((_is_share, ""), "")
_GROUP = object_with({"number": COUNT, "val_tokens": COUNT, "shares": _SHARES}, "")
_PREPARED = {  # what preparation alone reads of a manifest
    "dataset": STRING,
    "origin": STRING,
    "request": object_with({"shard_tokens": COUNT}, "the options of a preparation"),
    "left_out": object_with({"bad": COUNT, "empty": COUNT}, "counts of what was left out"),
    "split": object_with({"held_back_tokens": COUNT}, "how documents were held out"),
    "groups": list_of(_GROUP, "a list of groups of source files"),
    "files": list_of(object_with({"documents": COUNT}, ""), "files with counts of documents"),
}


def check_prepared(folder: Path, manifest: dict[str, Any]) -> None:
    """Check what preparation alone reads of a manifest that it wrote: someone may have edited it and its hash.

    Raises: DataError.
    """
    file = JsonFile(folder / MANIFEST, DataError, fix="prepare the data again", follow=True)
    file.check(manifest, _PREPARED)
    file.check(manifest["request"], {}, {"part": list_of(COUNT, "[i, n]")}, where="request: ")


_Listed = tuple[Path, dict[str, Any]]  # a shard and its entry in the manifest


def _joined_with_small(listed: Sequence[_Listed], shard_tokens: int) -> list[list[_Listed]]:
    """Return shards with those that are too small to train on joined to the one before them, the first to the second.

    A group with little text writes such a shard; ShardWriter joins the others itself.
    """
    least = min(shard_tokens, write.SMALLEST_LAST_SHARD)
    runs: list[list[_Listed]] = []
    for one in listed:
        tokens_before = sum(file["tokens"] for _, file in runs[-1]) if runs else 0
        if runs and (one[1]["tokens"] < least or tokens_before < least):
            runs[-1].append(one)
        else:
            runs.append([one])
    return runs


class _Shards:
    """The shards of a new folder, each with its place, its number and its entry of the manifest."""

    def __init__(self, folder: Path, dataset: str, shard_tokens: int, tokenizer: Tokenizer) -> None:
        self.files: list[dict[str, Any]] = []
        self._folder, self._dataset = folder, dataset
        self._shard_tokens, self._tokenizer = shard_tokens, tokenizer

    def link(self, listed: Sequence[Sequence[_Listed]]) -> None:
        """Take training shards as they are; several that belong together are written as one."""
        for number, run in enumerate(listed):
            if len(run) == 1:
                ((path, file),) = run
                name = f"{self._dataset}_train_{number:06d}.npy"
                _link_or_copy(path, self._folder / name)
                self.files.append({**file, "name": name})
            else:
                total = sum(file["tokens"] for _, file in run)
                self.write(_blocks(run), "train", shard_tokens=total, first=number)

    def write(
        self,
        blocks: Iterable[np.ndarray],
        split: str,
        *,
        shard_tokens: int | None = None,
        first: int = 0,
    ) -> None:
        """Write ids as shards of a split."""
        writer = ShardWriter(
            self._folder,
            split,
            shard_tokens=shard_tokens or self._shard_tokens,
            tokenizer=self._tokenizer,
            dataset=self._dataset,
            first=first,
        )
        with contextlib.closing(writer):
            for ids in blocks:
                writer.add(ids)
            writer.finish()
            faultpoint("data.before_manifest", 0)
            self.files += writer.files

    def commit(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Write the tokenizer's files and, last, the manifest, which lists the shards too; return it."""
        for name, content in self._tokenizer.files.items():
            write_durably(self._folder / name, content)
        manifest["documents"] = sum(file["documents"] for file in self.files)
        manifest["files"] = sorted(self.files, key=lambda file: (file["split"], file["name"]))
        write_manifest(self._folder, manifest)
        return manifest


def _link_or_copy(path: Path, target: Path) -> None:
    try:
        os.link(path, target)
    except OSError:  # another disk, or one without links
        shutil.copyfile(path, target)
        with open(target, "rb") as file:  # the original may be deleted next
            os.fsync(file.fileno())


def _blocks(listed: Iterable[_Listed]) -> Iterable[np.ndarray]:
    return (
        np.load(path, mmap_mode="r")[begin : begin + _BLOCK]
        for path, file in listed
        for begin in range(0, file["tokens"], _BLOCK)
    )
