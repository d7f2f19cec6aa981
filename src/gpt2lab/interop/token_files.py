"""Token files of other programs: what their headers and indices say, checked against the sizes of the files.

Sources of the formats: llm.c dev/data/data_common.py (modded-nanogpt writes the same); datatrove
pipeline/tokens/tokenizer.py, TokenizedFile; Megatron-LM megatron/core/datasets/indexed_dataset.py; nanoGPT
data/openwebtext/prepare.py.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from gpt2lab.errors import DataError
from gpt2lab.files import open_regular

Layout = Literal["npy", "llm.c", "datatrove", "megatron", "raw"]
Place = Literal["before", "after", "none"]  # of the end-of-text id, seen from its document

# Each type of an id: how it is stored (little-endian), and the first value that it cannot have. Numbers with a sign are
# read without one, so a negative id looks like a large one.
DTYPES = {
    "uint16": ("<u2", 2**16),
    "int16": ("<u2", 2**15),
    "uint32": ("<u4", 2**32),
    "int32": ("<u4", 2**31),
}
SUFFIXES = (".npy", ".bin", ".ds")

_LLMC_HEADER_BYTES = 256 * 4
_LLMC_KINDS = {  # magic: version, type of the ids, tokenizer
    20240520: (1, "uint16", "gpt2"),
    20240801: (7, "uint32", "llama-3"),
}
_LLMC_MAGICS = range(20240000, 20250000)  # of its models, evaluations and tokenizers too
_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_OLD_MAGIC = b"TNTIDX\x00\x00"
_MEGATRON_HEADER_BYTES = 34
_MEGATRON_DTYPES = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float64",
    7: "float32",
    8: "uint16",
}
_BLOCK = 1 << 20  # sequences of an index checked at a time
_SAMPLE_BYTES = 1 << 16


@dataclass(frozen=True)
class TokenFile:
    """A file of tokens that passed its checks: `tokens` ids of type `dtype` from byte `offset` on."""

    path: Path
    layout: Layout
    tokens: int
    dtype: str = "uint16"  # a key of DTYPES
    offset: int = 0
    tokenizer: str | None = None  # the name that the file or its format gives
    end_of_text: Place | None = None  # where the format puts it
    index: Path | None = None  # the file that says where documents end


def recognise(path: Path) -> Layout:
    """Tell a token file's format from its name, its neighbour and its first bytes.

    Raises: DataError for what is known to be something else; OSError.
    """
    if path.suffix in (".npy", ".ds"):
        return "npy" if path.suffix == ".npy" else "datatrove"
    if path.with_suffix(".idx").exists():
        return "megatron"
    with open_regular(path) as file:
        head = file.read(8)
    if len(head) < 8:
        return "raw"
    magic, version = struct.unpack("<ii", head)
    if magic in _LLMC_KINDS:
        return "llm.c"
    if struct.unpack(">i", head[:4])[0] in _LLMC_KINDS:
        raise DataError(f"{path}: an llm.c file written on a big-endian machine; write it again")
    if magic in _LLMC_MAGICS and 0 <= version < 100:
        known = " and ".join(map(str, _LLMC_KINDS))
        raise DataError(
            f"{path}: begins with {magic} like a file of llm.c, whose token files begin with {known}; name the token "
            f"files with --train_files and --val_files, or say --format raw"
        )
    return "raw"


def read_llmc(path: Path) -> TokenFile:
    """Read llm.c's header: 256 int32, of which magic, version and number of tokens are used; ids follow.

    Raises: DataError; OSError.
    """
    size = path.stat().st_size
    with open_regular(path) as file:
        head = file.read(12)
    if size < _LLMC_HEADER_BYTES:
        raise DataError(
            f"{path}: {size} bytes, llm.c's header alone has {_LLMC_HEADER_BYTES}; truncated copy?"
        )
    magic, version, tokens = struct.unpack("<iii", head)
    if magic not in _LLMC_KINDS:
        raise DataError(f"{path}: begins with {magic}, which is no token file of llm.c")
    known, dtype, tokenizer = _LLMC_KINDS[magic]
    if version != known:
        raise DataError(f"{path}: version {version} of llm.c's format {magic}; known is {known}")
    found = TokenFile(path, "llm.c", tokens, dtype, _LLMC_HEADER_BYTES, tokenizer, "before")
    return _check_size(found, size, "its header")


def read_datatrove(path: Path, dtype: str | None) -> TokenFile:
    """Read what stands beside a .ds file: .ds.metadata (tokenizer, bytes of an id, tokens) and .ds.index.

    Where neither is there, `dtype` must say what the ids are.

    Raises: DataError; OSError.
    """
    size = path.stat().st_size
    index, metadata = Path(f"{path}.index"), Path(f"{path}.metadata")
    tokens, tokenizer = None, None
    if Path(f"{path}.loss").exists():
        raise DataError(
            f"{path}.loss: marks tokens without loss, but training here counts every token; move it away to do so"
        )
    if metadata.exists():
        tokenizer, width, tokens = _read_metadata(metadata)
        dtype = _agree(path, dtype, width, metadata.name)
    if index.exists():
        ends = _read_datatrove_index(index)
        last = int(ends[-1]) if len(ends) else 0
        if tokens is not None and last != tokens:
            raise DataError(f"{index}: ends at token {last}, {metadata.name} says {tokens}")
        tokens = last
        if dtype is None and tokens:  # nothing but the width of an id is unknown
            dtype = {2: "uint16", 4: "uint32"}.get(size // tokens)
    if dtype is None:
        raise DataError(
            f"{path}: neither .metadata nor .index beside it; say --dtype uint16 or uint32"
        )
    if tokens is None:
        tokens = size // np.dtype(DTYPES[dtype][0]).itemsize
    found = TokenFile(
        path,
        "datatrove",
        tokens,
        dtype,
        tokenizer=tokenizer,
        index=index if index.exists() else None,
    )
    return _check_size(found, size, "what stands beside it")


def read_megatron(path: Path) -> TokenFile:
    """Read the .idx beside a .bin: type of the ids, and the sequences, which must follow each other without gaps.

    Raises: DataError; OSError.
    """
    index = path.with_suffix(".idx")
    dtype, lengths, pointers, _ = _map_megatron(index)
    width = np.dtype(DTYPES[dtype][0]).itemsize
    tokens = 0
    for begin in range(0, len(lengths), _BLOCK):
        some = lengths[begin : begin + _BLOCK].astype(np.int64)
        starts = (tokens + np.cumsum(some) - some) * width
        if (some < 0).any():
            raise DataError(f"{index}: a sequence of negative length; damaged")
        wrong = np.flatnonzero(pointers[begin : begin + _BLOCK] != starts)
        if len(wrong):
            at = begin + int(wrong[0])
            raise DataError(
                f"{index}: sequence {at} begins at byte {pointers[at]}, the one before ends at {starts[wrong[0]]}; "
                f"files whose sequences have gaps or another order are not read; write it again with Megatron's merge"
            )
        tokens += int(some.sum())
    found = TokenFile(path, "megatron", tokens, dtype, index=index)
    return _check_size(found, path.stat().st_size, index.name)


def read_raw(path: Path, dtype: str | None, offset: int) -> TokenFile:
    """Take a file without header for ids from byte `offset` on, uint16 unless `dtype` says otherwise.

    Raises: DataError if the size does not fit, or without `dtype` if the ids are plainly 32 bits wide; OSError.
    """
    size = path.stat().st_size
    if dtype is None and looks_32_bit(path, offset):
        raise DataError(
            f"{path}: every second uint16 is almost 0, so these are 32-bit ids; import them with --dtype uint32"
        )
    width = np.dtype(DTYPES[dtype or "uint16"][0]).itemsize
    if offset > size or (size - offset) % width:
        behind = f" behind offset {offset}" if offset else ""
        kind = dtype or "uint16"
        raise DataError(
            f"{path}: {size - offset} bytes{behind}; raw {kind} tokens are a multiple of {width}"
        )
    return TokenFile(
        path, "raw", (size - offset) // width, dtype or "uint16", offset, end_of_text="after"
    )


def looks_32_bit(path: Path, offset: int = 0) -> bool:
    """Tell whether ids taken for uint16 are 32 bits wide: at every second place nothing above 15, elsewhere larger.

    The upper half of an id is at most 15 in vocabularies of up to a million.
    """
    with open_regular(path) as file:
        file.seek(offset)
        sample = file.read(_SAMPLE_BYTES)
    ids = np.frombuffer(sample[: len(sample) // 4 * 4], "<u2")
    return len(ids) > 0 and int(ids[1::2].max()) < 16 <= int(ids[::2].max())


def document_ends(layout: Layout, index: Path) -> np.ndarray:
    """Return where the documents of a datatrove or Megatron file end, (documents,) int64, in tokens from its beginning.

    Empty documents are left out.

    Raises: DataError; OSError.
    """
    if layout == "datatrove":
        ends = _read_datatrove_index(index)
    else:
        _, lengths, _, documents = _map_megatron(index)
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[documents[1:]]
    return ends[np.diff(ends, prepend=0) > 0]


def _read_metadata(path: Path) -> tuple[str, str, int]:
    """Return tokenizer, type of the ids and number of tokens: `gpt2|2`, `57`, and the number for people."""
    try:
        lines = path.read_text().splitlines()
        tokenizer, _, width = lines[0].rpartition("|")
        dtype = {"2": "uint16", "4": "uint32"}[width]
        return tokenizer, dtype, int(lines[1])
    except (ValueError, IndexError, KeyError) as error:
        raise DataError(
            f"{path}: not datatrove's metadata, a line such as gpt2|2 and one with the number of tokens"
        ) from error


def _read_datatrove_index(path: Path) -> np.ndarray:
    """Return the ends of the documents, (documents,) int64; stored as uint64."""
    size = path.stat().st_size
    if size % 8:
        raise DataError(f"{path}: {size} bytes; an index of 8 bytes a document is cut off")
    ends = np.fromfile(path, "<u8")
    if (ends >= 2**62).any() or (np.diff(ends.astype(np.int64), prepend=0) < 0).any():
        raise DataError(f"{path}: the ends of its documents do not ascend; damaged")
    return ends.astype(np.int64)


def _map_megatron(index: Path) -> tuple[str, np.ndarray, np.ndarray, np.ndarray]:
    """Return type of the ids, and by memory map lengths and byte offsets of the sequences, and bounds of the documents.

    Header: magic (9 bytes), version, code of the type (1 byte), number of sequences, number of bounds; then lengths
    (int32), offsets (int64), bounds (int64, in sequences, from 0).
    """
    size = index.stat().st_size
    with open_regular(index) as file:
        head = file.read(_MEGATRON_HEADER_BYTES)
    if head.startswith(_MEGATRON_OLD_MAGIC):
        raise DataError(
            f"{index}: Megatron's format before MMIDIDX (lazy, cached); write it again as mmap"
        )
    if not head.startswith(_MEGATRON_MAGIC):
        raise DataError(f"{index}: does not begin with MMIDIDX as Megatron's indices do")
    if len(head) < _MEGATRON_HEADER_BYTES:
        raise DataError(f"{index}: {size} bytes; truncated copy?")
    version, code, sequences, bounds = struct.unpack("<QBQQ", head[len(_MEGATRON_MAGIC) :])
    if version != 1:
        raise DataError(f"{index}: version {version} of Megatron's index; known is 1")
    dtype = _MEGATRON_DTYPES.get(code, f"type {code}")
    if dtype not in DTYPES:
        raise DataError(f"{index}: ids of {dtype}; read are {', '.join(DTYPES)}")
    starts = list(
        itertools.accumulate([_MEGATRON_HEADER_BYTES, 4 * sequences, 8 * sequences, 8 * bounds])
    )
    if size == starts[-1] + sequences and sequences:
        raise DataError(f"{index}: has a mode for each sequence, of images perhaps; not only text")
    if size != starts[-1]:
        raise DataError(
            f"{index}: {size} bytes, but its header promises {starts[-1]}; truncated copy?"
        )
    lengths, pointers, documents = (
        np.memmap(index, kind, "r", offset=start, shape=(count,)) if count else np.empty(0, kind)
        for kind, start, count in zip(
            ("<i4", "<i8", "<i8"), starts[:3], (sequences, sequences, bounds), strict=True
        )
    )
    ascends = bounds > 0 and bool((np.diff(documents, prepend=0) >= 0).all())
    if not ascends or documents[0] != 0 or documents[-1] != sequences:
        raise DataError(
            f"{index}: its documents do not begin at sequence 0 and end at {sequences}; damaged"
        )
    return dtype, lengths, pointers, documents


def _agree(path: Path, typed: str | None, found: str, where: str) -> str:
    if typed is not None and DTYPES[typed][0] != DTYPES[found][0]:
        raise DataError(f"{path}: --dtype {typed}, but {where} says {found}")
    return found


def _check_size(found: TokenFile, size: int, where: str) -> TokenFile:
    """Return the file if it is as long as it should be, and not empty."""
    promised = found.offset + found.tokens * np.dtype(DTYPES[found.dtype][0]).itemsize
    if found.tokens < 0 or size != promised:
        raise DataError(
            f"{found.path}: {size} bytes, but {where} promises {promised} ({found.tokens} tokens of {found.dtype}); "
            f"truncated copy?"
        )
    return found
