"""Token files of other programs, written from their specifications and not by the code that reads them."""

import pickle
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gpt2lab.interop.import_shards import ImportOptions
from gpt2lab.interop.token_files import Layout, Place
from gpt2lab.tokenizers.gpt2 import END_OF_TEXT

Documents = list[list[int]]


def documents(count: int, seed: int, *, largest: int = 5_000, place: Place = "before") -> Documents:
    """Return documents of awkward lengths, with the end-of-text id where `place` says."""
    draw = np.random.RandomState(seed)
    made = [draw.randint(0, largest, 5 + 7 * i % 40).tolist() for i in range(count)]
    before, after = [END_OF_TEXT] * (place == "before"), [END_OF_TEXT] * (place == "after")
    return [[*before, *document, *after] for document in made]


def joined(parts: list[Documents]) -> Documents:
    return [document for part in parts for document in part]


def flat(made: Documents) -> list[int]:
    return [id for document in made for id in document]


def write_llmc(path: Path, made: Documents, *, magic: int = 20240520, version: int = 1) -> None:
    """Write as llm.c's dev/data/data_common.py: 256 int32 of header, then the ids."""
    ids = flat(made)
    header = [magic, version, len(ids)] + [0] * 253
    kind = "I" if magic == 20240801 else "H"
    path.write_bytes(struct.pack("<256i", *header) + struct.pack(f"<{len(ids)}{kind}", *ids))


def write_datatrove(
    path: Path, made: Documents, *, width: int = 2, name: str | None = "gpt2", index: bool = True
) -> None:
    """Write as datatrove's TokenizedFile: ids alone; ends as uint64 in .index; three lines in .metadata."""
    ids = flat(made)
    path.write_bytes(struct.pack(f"<{len(ids)}{'H' if width == 2 else 'I'}", *ids))
    ends = np.cumsum([len(document) for document in made]).tolist()
    if index:
        Path(f"{path}.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    if name is not None:
        Path(f"{path}.metadata").write_text(f"{name}|{width}\n{len(ids)}\n{len(ids) / 1000:.1f} kT")


def write_megatron(path: Path, made: Documents, *, code: int = 8, per_sequence: int = 1) -> None:
    """Write as Megatron's IndexedDatasetBuilder: .bin of ids, .idx of sequences and of documents' bounds."""
    kind, width = {3: ("h", 2), 4: ("i", 4), 5: ("q", 8), 8: ("H", 2)}[code]
    ids = flat(made)
    path.write_bytes(struct.pack(f"<{len(ids)}{kind}", *ids))
    lengths, bounds = [], [0]
    for document in made:
        cut = [len(part) for part in np.array_split(document, per_sequence)]
        lengths += cut
        bounds.append(len(lengths))
    pointers = (np.cumsum([0, *lengths[:-1]]) * width).tolist()
    path.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, len(lengths), len(bounds))
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(pointers)}q", *pointers)
        + struct.pack(f"<{len(bounds)}q", *bounds)
    )


def write_raw(path: Path, made: Documents, *, kind: str = "H", head: bytes = b"") -> None:
    """Write as nanoGPT's prepare.py: ids, and nothing else."""
    ids = flat(made)
    path.write_bytes(head + struct.pack(f"<{len(ids)}{kind}", *ids))


SPEECH = "First Citizen:\nBefore we proceed any further, hear me speak.\n" * 60


def write_characters(folder: Path) -> Path:
    """Write SPEECH as nanoGPT's prepare.py of characters: both splits, and meta.pkl."""
    characters = sorted(set(SPEECH))
    ids = {one: id for id, one in enumerate(characters)}
    folder.mkdir()
    for name in ("train", "val"):
        np.array([ids[one] for one in SPEECH], "<u2").tofile(folder / f"{name}.bin")
    meta = {"vocab_size": len(ids), "itos": dict(enumerate(characters)), "stoi": ids}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return folder


GPT2 = ImportOptions(tokenizer="gpt2")
UNKNOWN = ImportOptions(tokenizer="unknown")
PLAIN = ImportOptions()
Writer = Callable[[Path, dict[str, list[Documents]]], ImportOptions]


def write_npy(path: Path, made: Documents, *, dtype: str = "<u2") -> None:
    np.save(path, np.array(flat(made), dtype))


def shards(
    name: str,
    write: Callable[..., None],
    options: ImportOptions = PLAIN,
    *,
    first: int = 0,
    **how: Any,
) -> Writer:
    """Return what writes each part of each split to a file of its own."""

    def write_all(folder: Path, splits: dict[str, list[Documents]]) -> ImportOptions:
        for split, parts in splits.items():
            for number, made in enumerate(parts, first):
                write(folder / name.format(split, number), made, **how)
        return options

    return write_all


def one_file(
    name: str, write: Callable[..., None], options: ImportOptions = PLAIN, **how: Any
) -> Writer:
    """Return what writes each split to one file."""
    write_all = shards(name, write, options, **how)
    return lambda folder, made: write_all(folder, {split: [joined(made[split])] for split in made})


def datatrove(options: ImportOptions = PLAIN, **how: Any) -> Writer:
    """Return what writes the validation files first, then more than nine for training: 2 goes before 10."""

    def write(folder: Path, splits: dict[str, list[Documents]]) -> ImportOptions:
        for number, made in enumerate([*splits["val"], *splits["train"]]):
            write_datatrove(folder / f"{number}_shuffled.ds", made, **how)
        return replace(options, val_files=("0_*.ds",))

    return write


llmc_shards = shards("fineweb_{}_{:06d}.bin", write_llmc, first=1)
datatrove_files = datatrove()
npy_shards = shards("edufineweb_{}_{:06d}.npy", write_npy)
_LLAMA = {"magic": 20240801, "version": 7}
_BARE = ImportOptions(tokenizer="gpt2", dtype="uint16", end_of_text="after")
_PLACES = {"train_files": ("train.tokens",), "val_files": ("val.*",)}
_RAW = ImportOptions(format="raw", offset=16, dtype="uint32", **_PLACES)
_HEAD = {"kind": "I", "head": b"made up header 6"}
FORMATS: dict[str, tuple[Writer, Layout, str]] = {
    "llm.c": (llmc_shards, "llm.c", "<u2"),
    "llm.c in two files": (one_file("TinyStories_{}.bin", write_llmc), "llm.c", "<u2"),
    "llm.c of Llama 3": (
        shards("edu_fineweb_{}_{:06d}.bin", write_llmc, UNKNOWN, **_LLAMA),
        *("llm.c", "<u4"),
    ),
    "datatrove": (datatrove_files, "datatrove", "<u2"),
    "datatrove without metadata": (datatrove(GPT2, name=None), "datatrove", "<u2"),
    "datatrove uint32": (datatrove(UNKNOWN, width=4, name="meta/Llama-3"), "datatrove", "<u4"),
    "datatrove ids alone": (datatrove(_BARE, name=None, index=False), "datatrove", "<u2"),
    "Megatron": (one_file("{}_text_document.bin", write_megatron, GPT2), "megatron", "<u2"),
    "Megatron int32, sequences within documents": (
        one_file("{}_text.bin", write_megatron, GPT2, code=4, per_sequence=3),
        *("megatron", "<u4"),
    ),
    "nanoGPT": (one_file("{}.bin", write_raw), "raw", "<u2"),
    "raw uint32": (one_file("{}.tokens", write_raw, _RAW, **_HEAD), "raw", "<u4"),
    "edufineweb npy": (npy_shards, "npy", "<u2"),
    "npy uint32": (one_file("{}.npy", write_npy, dtype="<u4"), "npy", "<u4"),
}


def made_splits(place: Place = "before") -> dict[str, list[Documents]]:
    train = [documents(30, seed, place=place) for seed in range(11)]
    return {"train": train, "val": [documents(25, 99, place=place)]}
