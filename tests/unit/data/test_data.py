"""From shards to batches: which folders are rejected, and what the loader makes of the others."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from corpora import TEXTS, run_prepare, snapshot, write_jsonl
from gpt2lab.config.derived import BatchPlan
from gpt2lab.data.loader import Loader
from gpt2lab.data.order import Order
from gpt2lab.data.shards import TokenData, open_data, open_shard
from gpt2lab.data.windows import WindowReader
from gpt2lab.errors import DataError
from gpt2lab.tokenizers.gpt2 import NUM_TOKENS
from launch import HANG_SECONDS
from tiny import CONTEXT, TRAIN_SHARDS, VOCAB, write_shards

SOURCE_DIR = Path(__file__).resolve().parents[3] / "src"


# -- opening a folder of shards --------------------------------------------------------------------------------------


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "foreign", train=(300, 200), val=(150,))


def _float_shard(folder: Path) -> None:
    np.save(folder / "tiny_train_000001.npy", np.zeros(200, dtype=np.float32))


def _signed_shard(folder: Path) -> None:
    np.save(folder / "tiny_train_000001.npy", np.zeros(200, dtype=np.int16))


def _big_endian_shard(folder: Path) -> None:
    np.save(folder / "tiny_train_000001.npy", np.zeros(200, dtype=">u2"))


def _two_dimensional_shard(folder: Path) -> None:
    np.save(folder / "tiny_train_000001.npy", np.zeros((20, 10), dtype=np.uint16))


def _truncated_shard(folder: Path) -> None:
    path = folder / "tiny_train_000001.npy"
    path.write_bytes(path.read_bytes()[:-7])


def _overlong_shard(folder: Path) -> None:
    path = folder / "tiny_train_000001.npy"
    path.write_bytes(path.read_bytes() + b"\0\0")


def _not_npy(folder: Path) -> None:
    (folder / "tiny_train_000001.npy").write_bytes(b"PK\x03\x04 something else entirely")


def _empty_file(folder: Path) -> None:
    (folder / "tiny_train_000001.npy").write_bytes(b"")


def _large_id(folder: Path) -> None:
    tokens = np.load(folder / "tiny_train_000001.npy")
    tokens[-1] = VOCAB
    np.save(folder / "tiny_train_000001.npy", tokens)


BROKEN_SHARDS: list[tuple[Callable[[Path], None], str]] = [
    (_float_shard, "1-dimensional float32 array; a shard is one-dimensional uint16"),
    (_signed_shard, "1-dimensional int16 array; a shard is one-dimensional uint16"),
    (_big_endian_shard, "1-dimensional >u2 array; a shard is one-dimensional uint16"),
    (_two_dimensional_shard, "2-dimensional uint16 array; a shard is one-dimensional uint16"),
    (_truncated_shard, "bytes, but its header promises .*truncated"),
    (_overlong_shard, "bytes, but its header promises"),
    (_not_npy, r"not a \.npy file"),
    (_empty_file, r"not a \.npy file"),
    (_large_id, f"token id {VOCAB}, but ids must be below .* = {VOCAB}"),
]


@pytest.mark.parametrize(("spoil", "message"), BROKEN_SHARDS)
def test_a_broken_shard_is_rejected_by_name(
    foreign: Path, spoil: Callable[[Path], None], message: str
) -> None:
    open_data(foreign, vocab_size=VOCAB)  # was fine before
    spoil(foreign)
    with pytest.raises(DataError, match=f"tiny_train_000001.npy: .*{message}"):
        open_data(foreign, vocab_size=VOCAB)


def test_a_missing_folder_is_rejected_with_the_command_that_prepares_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such data folder; .*gpt2lab prepare"):
        open_data(tmp_path / "nowhere", vocab_size=VOCAB)
    both = r"gpt2lab data tokenizer train \S+ --vocab_size 512 --out tok512 && gpt2lab prepare .* --tokenizer tok512"
    with pytest.raises(DataError, match=f"no such data folder; .*{both} --out .*nowhere$"):
        open_data(tmp_path / "nowhere", vocab_size=512)


@pytest.mark.parametrize("kept", [None, "train", "val"])
def test_a_folder_without_shards_of_a_split_is_rejected(
    foreign: Path, tmp_path: Path, kept: str | None
) -> None:
    folder = tmp_path / "partial"
    folder.mkdir()
    for path in foreign.iterdir():
        if kept is not None and kept in path.name:
            shutil.copy(path, folder)
    missing = "val" if kept == "train" else "train"
    with pytest.raises(DataError, match=f"partial: no {missing} shards"):
        open_data(folder, vocab_size=VOCAB)


def test_ids_are_below_the_vocabulary_and_never_padding(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "d", train=(300,), val=(150,))
    for largest, vocab_size, is_fine in [
        (NUM_TOKENS - 1, 50304, True),
        (NUM_TOKENS, 50304, False),  # a padding row of the embedding
        (999, 1000, True),
        (1000, 1000, False),
    ]:
        np.save(folder / "tiny_train_000000.npy", np.array([0] * 99 + [largest], dtype=np.uint16))
        if is_fine:
            assert open_data(folder, vocab_size=vocab_size).tokens("train") == 100
        else:
            with pytest.raises(DataError, match=f"token id {largest}"):
                open_data(folder, vocab_size=vocab_size)


def test_a_foreign_folder_is_accepted_with_one_warning(foreign: Path) -> None:
    data = open_data(foreign, vocab_size=VOCAB)
    assert [len(data.splits["train"]), len(data.splits["val"])] == [2, 1]
    assert [data.tokens("train"), data.tokens("val")] == [500, 150]
    assert len(data.warnings) == 1
    assert "shards.json" in data.warnings[0]


def test_a_foreign_fingerprint_covers_names_sizes_and_nothing_of_this_machine(
    foreign: Path, tmp_path: Path
) -> None:
    def fingerprint(folder: Path) -> str:
        return open_data(folder, vocab_size=VOCAB).fingerprint

    original = fingerprint(foreign)
    assert len(original) == 64
    copied = Path(shutil.copytree(foreign, tmp_path / "elsewhere"))
    (copied / "notes.txt").write_text("not a shard")
    assert fingerprint(copied) == original
    np.save(copied / "tiny_train_000002.npy", np.zeros(20, dtype=np.uint16))
    longer = fingerprint(copied)
    np.save(copied / "tiny_train_000002.npy", np.zeros(21, dtype=np.uint16))
    resized = fingerprint(copied)
    os.rename(copied / "tiny_train_000002.npy", copied / "tiny_train_000003.npy")
    assert len({original, longer, resized, fingerprint(copied)}) == 4


def test_an_existing_edufineweb_set_loads_in_the_order_of_its_numbers(tmp_path: Path) -> None:
    for name in ("train_000010", "train_000001", "train_000002", "val_000000", "train_1000000"):
        np.save(tmp_path / f"edufineweb_{name}.npy", np.zeros(50, dtype=np.uint16))
    data = open_data(tmp_path, vocab_size=50304)
    assert [shard.path.name[-11:] for shard in data.splits["train"]] == [
        *("_000001.npy", "_000002.npy", "_000010.npy", "1000000.npy")
    ]


def test_a_prepared_folder_opens_without_a_warning(prepared: Path) -> None:
    data = open_data(prepared, vocab_size=50304)
    assert data.warnings == ()
    assert data.fingerprint == json.loads((prepared / "shards.json").read_text())["fingerprint"]


def _stray(folder: Path) -> None:
    np.save(folder / "tiny_train_000001.npy", np.zeros(50, dtype=np.uint16))


def _edited_manifest(folder: Path) -> None:
    path = folder / "shards.json"
    path.write_text(path.read_text().replace('"documents": 60', '"documents": 61'))


def _cut_manifest(folder: Path) -> None:
    path = folder / "shards.json"
    path.write_text(path.read_text()[:200])


def _other_manifest(folder: Path) -> None:
    (folder / "shards.json").write_text('{"files": []}')


def _missing_file(folder: Path) -> None:
    (folder / "tiny_train_000000.npy").unlink()


def _shorter_file(folder: Path) -> None:
    path = folder / "tiny_train_000000.npy"
    np.save(path, np.load(path)[:-1])


MANIFEST_REFUSALS: list[tuple[Callable[[Path], None], str]] = [
    (_stray, r"tiny_train_000001\.npy: not listed in shards\.json"),
    (_edited_manifest, r"shards\.json: damaged or edited"),
    (_cut_manifest, r"shards\.json: not readable as JSON"),
    (_other_manifest, r"shards\.json: not a shard manifest"),
    (_missing_file, r"tiny_train_000000\.npy: No such file"),
    (_shorter_file, r"tiny_train_000000\.npy: \d+ tokens, shards\.json says \d+"),
]


@pytest.mark.parametrize(("spoil", "message"), MANIFEST_REFUSALS)
def test_a_folder_that_is_not_what_its_manifest_says_is_rejected(
    prepared: Path, spoil: Callable[[Path], None], message: str
) -> None:
    before = snapshot(prepared)
    spoil(prepared)
    assert snapshot(prepared) != before
    with pytest.raises(DataError, match=message):
        open_data(prepared, vocab_size=50304)


def test_a_prepared_set_is_rejected_for_a_vocabulary_that_its_ids_do_not_fit(
    prepared: Path,
) -> None:
    with pytest.raises(DataError, match=r"tiny_train_000000\.npy: token id .* = 256"):
        open_data(prepared, vocab_size=256)


# -- reading ---------------------------------------------------------------------------------------------------------

MEASURE_MEMORY = """
import os, sys
from pathlib import Path
import numpy as np
from gpt2lab.data.shards import (open_shard)
from gpt2lab.data.windows import WindowReader

def resident():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")

shard, T = open_shard(Path(sys.argv[1])), 1024
windows = (shard.tokens - 1) // T
reader = WindowReader((shard,), context_length=T, id_limit=50257)
before = peak = resident()
for first in range(0, windows, 64):
    numbers = np.arange(first, min(first + 64, windows))
    reader.read(np.zeros_like(numbers), numbers * T)
    peak = max(peak, resident())
print(peak - before)
mapped = np.load(shard.path, mmap_mode="r")
mapped.max()
print(resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc/self/statm")
def test_memory_does_not_grow_with_the_size_of_a_shard(tmp_path: Path) -> None:
    path = tmp_path / "big_train_000000.npy"
    np.save(path, (np.arange(20_000_000) % 50257).astype(np.uint16))
    answer = subprocess.run(
        [sys.executable, "-c", MEASURE_MEMORY, str(path)],
        env=os.environ | {"PYTHONPATH": str(SOURCE_DIR)},
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_SECONDS,
    )
    read, mapped = map(int, answer.stdout.split())
    assert mapped > 30e6  # the measurement sees the 40 MB of a memory map
    assert read < 10e6


def test_windows_are_right_with_more_shards_than_files_are_kept_open(tmp_path: Path) -> None:
    count = 150
    folder = write_shards(tmp_path / "many", train=(40,) * count, val=(40,))
    data = open_data(folder, vocab_size=VOCAB)
    reader = WindowReader(data.splits["train"], context_length=CONTEXT, id_limit=VOCAB)
    open_files = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else None
    chosen = np.concatenate([np.arange(count), np.arange(count)[::-1]])
    windows = reader.read(chosen, np.full(len(chosen), CONTEXT))
    for shard, window in zip(chosen, windows, strict=True):
        whole = np.load(folder / f"tiny_train_{shard:06d}.npy")
        assert window.tolist() == whole[CONTEXT : 2 * CONTEXT + 1].tolist()
    if open_files is not None:
        assert len(os.listdir("/proc/self/fd")) - open_files <= 64
    reader.close()


def loader_over(data: TokenData, *, samples: int = 8, id_limit: int = VOCAB) -> Loader:
    order = Order(
        [shard.tokens for shard in data.splits["train"]],
        context_length=CONTEXT,
        shuffle="none",
        seed=1,
    )
    reader = WindowReader(data.splits["train"], context_length=CONTEXT, id_limit=id_limit)
    plan = BatchPlan(samples, samples, 1, 1, CONTEXT)
    return Loader(order, reader, plan, rank=0, device=torch.device("cpu"))


def test_a_shard_damaged_after_it_was_opened_is_named_in_the_step_that_needs_it(
    prepared: Path,
) -> None:
    data = open_data(prepared, vocab_size=50304)
    (shard,) = data.splits["train"]
    with open(shard.path, "r+b") as file:  # as a failing disk would: after the manifest was checked
        file.seek(shard.offset + 2 * (3 * 8 * CONTEXT + 40))  # in the fourth batch of 8 windows
        file.write((60_000).to_bytes(2, "little"))
    batches = loader_over(data, id_limit=NUM_TOKENS).batches(0)
    assert [next(batches).first_sample for _ in range(3)] == [0, 8, 16]
    with pytest.raises(DataError, match=rf"{shard.path.name}: token id 60000 .*below 50257"):
        next(batches)


def new_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread not in before]


@pytest.mark.parametrize("taken", [1, 3])
def test_the_prefetching_thread_ends_when_the_stream_is_closed(tiny_data: Path, taken: int) -> None:
    before = set(threading.enumerate())
    batches = loader_over(open_data(tiny_data, vocab_size=VOCAB)).batches(0)
    for _ in range(taken):
        next(batches)
    (thread,) = new_threads(before)
    assert thread.is_alive()
    batches.close()
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_batches_are_read_ahead_and_never_more_than_asked_for_plus_two(tiny_data: Path) -> None:
    loader = loader_over(open_data(tiny_data, vocab_size=VOCAB))
    fetch, fetched = loader.fetch, []
    loader.fetch = lambda first: (fetched.append(first), fetch(first))[1]  # type: ignore
    batches = loader.batches(0)
    next(batches)
    deadline = time.monotonic() + 60
    while len(fetched) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)  # one is with us, one in the queue, one in the thread's hand: no more
    assert fetched == [0, 8, 16]
    batches.close()


def test_the_order_of_the_tiny_corpus_continues_into_the_next_epoch(tiny_data: Path) -> None:
    windows = sum((size - 1) // CONTEXT for size in TRAIN_SHARDS)
    loader = loader_over(open_data(tiny_data, vocab_size=VOCAB), samples=1)
    assert loader.fetch(0).hash == loader.fetch(windows).hash != loader.fetch(1).hash
    assert [loader.fetch(n).epoch for n in (0, windows - 1, windows)] == [0, 0, 1]


@pytest.mark.parametrize("damage", ["file cut", "file gone"])
def test_a_shard_lost_after_opening_is_named(tmp_path: Path, damage: str) -> None:
    folder = write_shards(tmp_path / "d", train=(2000,), val=(300,))
    data = open_data(folder, vocab_size=VOCAB)
    path = data.splits["train"][0].path
    if damage == "file cut":
        os.truncate(path, 1000)
    else:
        path.unlink()
    batches = loader_over(data).batches(0)
    with pytest.raises(DataError, match=path.name):
        for _ in range(20):
            next(batches)


def test_the_prefetching_thread_ends_even_if_its_last_read_failed(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "d", train=(2000,), val=(300,))
    data = open_data(folder, vocab_size=VOCAB)
    shard = data.splits["train"][0]
    tokens = np.load(shard.path)
    tokens[2 * 8 * CONTEXT + 20] = 999  # in the third batch
    np.save(shard.path, tokens)
    before = set(threading.enumerate())
    batches = loader_over(data).batches(0)
    next(batches)
    time.sleep(0.3)
    (thread,) = set(threading.enumerate()) - before
    batches.close()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("byte", range(10, 70))
def test_a_damaged_shard_header_is_rejected_or_read_as_before(tmp_path: Path, byte: int) -> None:
    folder = write_shards(tmp_path / "d", train=(200,), val=(200,))
    path = folder / "tiny_train_000000.npy"
    whole = path.read_bytes()
    for value in b"\n(0b\\\xd7":
        raw = bytearray(whole)
        raw[byte] = value
        path.write_bytes(raw)
        try:
            data = open_data(folder, vocab_size=VOCAB)
        except DataError as error:
            assert path.name in str(error)
        else:
            assert data.splits["train"][0].tokens == 200


def test_headers_are_read_in_many_threads_at_once(tiny_data: Path) -> None:
    """Python up to 3.11.7 fails when ast, which numpy parses headers with, is in two threads at once."""
    path = next(tiny_data.glob("*.npy"))
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()

    def change_thread(*_: object) -> None:
        time.sleep(0)

    gc.callbacks.append(change_thread)
    try:
        gc.set_threshold(3)
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(8) as pool:
            shards = set(pool.map(open_shard, [path] * 1_000))
    finally:
        gc.callbacks.remove(change_thread)
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)
    assert shards == {open_shard(path)}


def test_a_shard_with_other_content_of_the_same_size_is_named(tmp_path: Path) -> None:
    """Its header, size and ids are fine, and so is the manifest: only its hash tells."""
    write_jsonl(tmp_path / "corpus.jsonl", TEXTS * 20)
    run_prepare(tmp_path / "corpus.jsonl", tmp_path / "out")
    data = open_data(tmp_path / "out", vocab_size=50304)
    path = data.splits["train"][0].path
    np.save(path, np.full(data.splits["train"][0].tokens, 11, dtype=np.uint16))
    data = open_data(tmp_path / "out", vocab_size=50304)
    reader = WindowReader(data.splits["train"], context_length=CONTEXT, id_limit=50257, verify=True)
    reader.read(np.array([0]), np.array([0]))  # the hash is computed meanwhile
    with pytest.raises(DataError, match=f"{path.name}.*sha256"):
        reader.wait_until_verified()
    with pytest.raises(DataError, match=f"{path.name}.*sha256"):
        reader.read(np.array([0]), np.array([0]))
    reader.close()
