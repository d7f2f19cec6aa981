"""Token files of other programs, written from their specifications and not by the code that reads them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

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


def write_megatron(
    path: Path, made: Documents, *, code: int = 8, per_sequence: int = 1, modes: bool = False
) -> None:
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
        + (struct.pack(f"<{len(lengths)}b", *[0] * len(lengths)) if modes else b"")
    )


def write_raw(path: Path, made: Documents, *, kind: str = "H", head: bytes = b"") -> None:
    """Write as nanoGPT's prepare.py: ids, and nothing else."""
    ids = flat(made)
    path.write_bytes(head + struct.pack(f"<{len(ids)}{kind}", *ids))


GPT2 = ImportOptions(tokenizer="gpt2")
UNKNOWN = ImportOptions(tokenizer="unknown")


def llmc_shards(folder: Path, splits: dict[str, list[Documents]]) -> ImportOptions:
    for split, parts in splits.items():
        for number, made in enumerate(parts, 1):
            write_llmc(folder / f"fineweb_{split}_{number:06d}.bin", made)
    return ImportOptions()


def _llmc_two_files(folder: Path, splits: dict[str, list[Documents]]) -> ImportOptions:
    for split, parts in splits.items():
        write_llmc(folder / f"TinyStories_{split}.bin", joined(parts))
    return ImportOptions()


def _llmc_wide(folder: Path, splits: dict[str, list[Documents]]) -> ImportOptions:
    for split, parts in splits.items():
        for number, made in enumerate(parts):
            path = folder / f"edu_fineweb_{split}_{number:06d}.bin"
            write_llmc(path, made, magic=20240801, version=7)
    return UNKNOWN


def _in_numbered_files(
    folder: Path,
    splits: dict[str, list[Documents]],
    suffix: str,
    write: Callable[[Path, Documents], None],
) -> None:
    """Write the validation files first, then more than nine for training: 2 goes before 10."""
    for number, made in enumerate([*splits["val"], *splits["train"]]):
        write(folder / f"{number}_shuffled{suffix}", made)


def datatrove_files(folder: Path, splits: dict[str, list[Documents]]) -> ImportOptions:
    _in_numbered_files(folder, splits, ".ds", write_datatrove)
    return ImportOptions(val_files=("0_*.ds",))


def _datatrove_index_only(folder: Path, splits: dict[str, list[Documents]]) -> ImportOptions:
    _in_numbered_files(folder, splits, ".ds", lambda p, m: write_datatrove(p, m, name=None))
    return ImportOptions(tokenizer="gpt2", val_files=("0_*.ds",))


def _datatrove_wide(folder: Path, splits: dict[str, list[Documents]]) -> ImportOptions:
    _in_numbered_files(
        folder, splits, ".ds", lambda p, m: write_datatrove(p, m, width=4, name="meta/Llama-3")
    )
    return ImportOptions(tokenizer="unknown", val_files=("0_*.ds",))


def _datatrove_bare(folder: Path, splits: dict[str, list[Documents]]) -> ImportOptions:
    _in_numbered_files(
        folder, splits, ".ds", lambda p, m: write_datatrove(p, m, name=None, index=False)
    )
    return ImportOptions(
        tokenizer="gpt2", dtype="uint16", end_of_text="after", val_files=("0_*.ds",)
    )


def _megatron(folder: Path, splits: dict[str, list[Documents]]) -> ImportOptions:
    for split, parts in splits.items():
        write_megatron(folder / f"{split}_text_document.bin", joined(parts))
    return GPT2


def _megatron_int32(folder: Path, splits: dict[str, list[Documents]]) -> ImportOptions:
    for split, parts in splits.items():
        write_megatron(folder / f"{split}_text.bin", joined(parts), code=4, per_sequence=3)
    return GPT2


def _raw(folder: Path, splits: dict[str, list[Documents]]) -> ImportOptions:
    for split, parts in splits.items():
        write_raw(folder / f"{split}.bin", joined(parts))
    return ImportOptions()


def _raw_wide_behind_a_header(folder: Path, splits: dict[str, list[Documents]]) -> ImportOptions:
    for split, parts in splits.items():
        write_raw(folder / f"{split}.tokens", joined(parts), kind="I", head=b"made up header 6")
    return ImportOptions(
        format="raw", offset=16, dtype="uint32", train_files=("train.tokens",), val_files=("val.*",)
    )


def npy_shards(folder: Path, splits: dict[str, list[Documents]]) -> ImportOptions:
    for split, parts in splits.items():
        for number, made in enumerate(parts):
            np.save(folder / f"edufineweb_{split}_{number:06d}.npy", np.array(flat(made), "<u2"))
    return ImportOptions()


def _npy_wide(folder: Path, splits: dict[str, list[Documents]]) -> ImportOptions:
    for split, parts in splits.items():
        np.save(folder / f"{split}.npy", np.array(flat(joined(parts)), "<u4"))
    return ImportOptions()


Writer = Callable[[Path, dict[str, list[Documents]]], ImportOptions]
FORMATS: dict[str, tuple[Writer, Layout, str]] = {
    "llm.c": (llmc_shards, "llm.c", "<u2"),
    "llm.c in two files": (_llmc_two_files, "llm.c", "<u2"),
    "llm.c of Llama 3": (_llmc_wide, "llm.c", "<u4"),
    "datatrove": (datatrove_files, "datatrove", "<u2"),
    "datatrove without metadata": (_datatrove_index_only, "datatrove", "<u2"),
    "datatrove uint32": (_datatrove_wide, "datatrove", "<u4"),
    "datatrove ids alone": (_datatrove_bare, "datatrove", "<u2"),
    "Megatron": (_megatron, "megatron", "<u2"),
    "Megatron int32, sequences within documents": (_megatron_int32, "megatron", "<u4"),
    "nanoGPT": (_raw, "raw", "<u2"),
    "raw uint32": (_raw_wide_behind_a_header, "raw", "<u4"),
    "edufineweb npy": (npy_shards, "npy", "<u2"),
    "npy uint32": (_npy_wide, "npy", "<u4"),
}


def made_splits(place: Place = "before") -> dict[str, list[Documents]]:
    train = [documents(30, seed, place=place) for seed in range(11)]
    return {"train": train, "val": [documents(25, 99, place=place)]}
