"""Token files of other programs: their headers and indices, checked against the sizes of the files.

Sources of the formats: llm.c dev/data/data_common.py (modded-nanogpt writes the same); datatrove
pipeline/tokens/tokenizer.py, TokenizedFile; Megatron-LM megatron/core/datasets/indexed_dataset.py; nanoGPT
data/openwebtext/prepare.py.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from gpt2lab.data.shards import looks_wider, map_megatron_index, read_datatrove_index
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
# By Megatron's codes, from 1.
_MEGATRON_DTYPES = ["uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"]
_BLOCK = 1 << 20  # sequences of an index checked at a time


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
    """Tell a token file's format from its name, the files beside it and its first bytes.

    Raises: DataError for a file of llm.c that does not hold tokens; OSError.
    """
    if path.suffix in (".npy", ".ds"):
        return "npy" if path.suffix == ".npy" else "datatrove"
    if os.path.lexists(path.with_suffix(".idx")):
        return "megatron"
    with open_regular(path, follow=True) as file:
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
            f"files with --train_files and --val_files, or give --format raw"
        )
    return "raw"


def read_llmc(path: Path) -> TokenFile:
    """Read llm.c's header: 256 int32, of which magic, version and number of tokens are used; ids follow.

    Raises: DataError; OSError.
    """
    size = path.stat().st_size
    with open_regular(path, follow=True) as file:
        head = file.read(12)
    if size < _LLMC_HEADER_BYTES:
        raise DataError(
            f"{path}: {size} bytes, llm.c's header alone has {_LLMC_HEADER_BYTES}; truncated copy?"
        )
    magic, version, tokens = struct.unpack("<iii", head)
    if magic not in _LLMC_KINDS:
        raise DataError(f"{path}: begins with {magic}; not a token file of llm.c")
    known, dtype, tokenizer = _LLMC_KINDS[magic]
    if version != known:
        raise DataError(
            f"{path}: version {version} of llm.c's format {magic}; supported is {known}"
        )
    found = TokenFile(path, "llm.c", tokens, dtype, _LLMC_HEADER_BYTES, tokenizer, "before")
    return _check_size(found, size, "its header")


def read_datatrove(path: Path, dtype: str | None) -> TokenFile:
    """Read the files beside a .ds file: .ds.metadata (tokenizer, bytes of an id, tokens) and .ds.index.

    Without either, `dtype` must give the type of the ids.

    Raises: DataError; OSError.
    """
    size = path.stat().st_size
    index, metadata = Path(f"{path}.index"), Path(f"{path}.metadata")
    tokens, tokenizer = None, None
    if os.path.lexists(f"{path}.loss"):
        raise DataError(
            f"{path}.loss: excludes tokens from the loss, which is not implemented; move the file away to train "
            f"on every token"
        )
    if os.path.lexists(metadata):
        tokenizer, found, tokens = _read_metadata(metadata)
        if dtype is not None and DTYPES[dtype][0] != DTYPES[found][0]:
            raise DataError(f"{path}: --dtype {dtype}, but {metadata.name} says {found}")
        dtype = found
    if os.path.lexists(index):
        ends = read_datatrove_index(index)
        last = int(ends[-1]) if len(ends) else 0
        if tokens is not None and last != tokens:
            raise DataError(f"{index}: ends at token {last}, {metadata.name} says {tokens}")
        tokens = last
        if dtype is None and tokens:  # nothing but the width of an id is unknown
            dtype = {2: "uint16", 4: "uint32"}.get(size // tokens)
    if dtype is None:
        raise DataError(
            f"{path}: neither .metadata nor .index beside it; give --dtype uint16 or uint32"
        )
    if tokens is None:
        tokens = size // np.dtype(DTYPES[dtype][0]).itemsize
    beside = index if os.path.lexists(index) else None
    file = TokenFile(path, "datatrove", tokens, dtype, tokenizer=tokenizer, index=beside)
    return _check_size(file, size, "the file beside it")


def read_megatron(path: Path) -> TokenFile:
    """Read the .idx beside a .bin: type of the ids, and the sequences, which must follow each other without gaps.

    Raises: DataError; OSError.
    """
    index = path.with_suffix(".idx")
    code, lengths, pointers, _ = map_megatron_index(index)
    dtype = f"type {code}"
    if 0 < code <= len(_MEGATRON_DTYPES):
        dtype = _MEGATRON_DTYPES[code - 1]
    if dtype not in DTYPES:
        raise DataError(f"{index}: ids of {dtype}; supported are {', '.join(DTYPES)}")
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
                f"sequences with gaps or in another order are not supported; rewrite them with Megatron's merge"
            )
        tokens += int(some.sum())
    found = TokenFile(path, "megatron", tokens, dtype, index=index)
    return _check_size(found, path.stat().st_size, index.name)


def read_raw(path: Path, dtype: str | None, offset: int) -> TokenFile:
    """Read a file without header as ids from byte `offset` on, uint16 unless `dtype` is given.

    Raises: DataError if the size does not fit, or if the ids are plainly wider; OSError.
    """
    is_told, dtype = dtype is not None, dtype or "uint16"
    width = np.dtype(DTYPES[dtype][0]).itemsize
    size = path.stat().st_size - offset
    if size < 0 or size % width:
        behind = f" after offset {offset}" if offset else ""
        raise DataError(
            f"{path}: {size} bytes{behind}; raw {dtype} tokens need a multiple of {width}"
        )
    if (width == 4 or not is_told) and looks_wider(path, offset, width=4):
        raise DataError(
            f"{path}: every second uint32 is almost 0, so these are 64-bit ids; write them again as uint32"
        )
    if not is_told and looks_wider(path, offset):
        raise DataError(
            f"{path}: every second uint16 is almost 0, so these are 32-bit ids; import them with --dtype uint32"
        )
    return TokenFile(path, "raw", size // width, dtype, offset, end_of_text="after")


def _read_metadata(path: Path) -> tuple[str, str, int]:
    """Return tokenizer, type of the ids and number of tokens of the lines `gpt2|2`, `57`."""
    try:
        lines = path.read_text().splitlines()
        tokenizer, _, width = lines[0].rpartition("|")
        dtype = {"2": "uint16", "4": "uint32"}[width]
        return tokenizer, dtype, int(lines[1])
    except (ValueError, IndexError, KeyError) as error:
        raise DataError(
            f"{path}: not datatrove's metadata, a line such as gpt2|2 and one with the number of tokens"
        ) from error


def _check_size(found: TokenFile, size: int, where: str) -> TokenFile:
    promised = found.offset + found.tokens * np.dtype(DTYPES[found.dtype][0]).itemsize
    if found.tokens < 0 or size != promised:
        raise DataError(
            f"{found.path}: {size} bytes, but {where} promises {promised} ({found.tokens} tokens of {found.dtype}); "
            f"truncated copy?"
        )
    return found
