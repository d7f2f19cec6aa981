"""From shards to batches: which folders are rejected, and what the loader makes of the others."""

import gc
import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from corpora import snapshot
from gpt2lab.data.prepare.groups import KINDS, PACKINGS
from gpt2lab.data.shards import open_data, open_shard
from gpt2lab.data.verify import verify
from gpt2lab.data.windows import WindowReader
from gpt2lab.errors import DataError
from gpt2lab.tokenizers.gpt2 import NUM_TOKENS
from loading import loader_over
from tiny import CONTEXT, VOCAB, write_shards


@pytest.fixture
def foreign(tmp_path) -> Path:
    return write_shards(tmp_path / "foreign", train=(300, 200), val=(150,))


SHARD = "tiny_train_000001.npy"


def saved(array: np.ndarray) -> Callable[[Path], None]:
    return lambda path: np.save(path, array)


def changed(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


BROKEN_SHARDS: dict[str, Callable[[Path], object]] = {
    "float32": saved(np.zeros(200, np.float32)),
    "int16": saved(np.zeros(200, np.int16)),
    ">u2": saved(np.zeros(200, ">u2")),
    "2-dimensional": saved(np.zeros((20, 10), np.uint16)),
    "truncated": changed(lambda content: content[:-7]),
    "overlong": changed(lambda content: content + b"\0\0"),
    "zip": changed(lambda content: b"PK\x03\x04 something else entirely"),
    "empty": changed(lambda content: b""),
    "no tokens": lambda path: [saved(np.zeros(0, "<u2"))(one) for one in path.parent.glob("*tr*")],
}


@pytest.mark.parametrize("case", BROKEN_SHARDS)
def test_a_broken_shard_is_rejected_by_name(foreign, case, wording):
    open_data(foreign, vocab_size=VOCAB)  # was fine before
    BROKEN_SHARDS[case](foreign / SHARD)
    with pytest.raises(DataError, match=f"{SHARD}: ", check=wording):
        open_data(foreign, vocab_size=VOCAB)


LEARN = "data tokenizer train python-stdlib --vocab_size 512 --out tok512 && gpt2lab "


# 384 are the rows of a model of bytes.
@pytest.mark.parametrize(
    ("vocab_size", "name", "first"),
    [(257, "bytes", ""), (384, "bytes", ""), (512, "tok512", LEARN)],
)
def test_a_missing_folder_is_rejected_with_the_command_for_one(vocab_size, name, first, tmp_path):
    with pytest.raises(DataError, match="no such data folder; ") as caught:
        open_data(tmp_path / "nowhere", vocab_size=vocab_size)
    words = f"prepare python-stdlib --tokenizer {name} --out {tmp_path / 'nowhere'}"
    assert str(caught.value).endswith(f": gpt2lab {first}{words}")


TEXT_NAMES = [f"a{kind}{packing}" for kind in KINDS for packing in ("", *PACKINGS)]


@pytest.mark.parametrize("name", [name for name in TEXT_NAMES if not name.startswith("a.parquet.")])
def test_text_in_place_of_shards_is_answered_with_the_command_that_prepares_it(tmp_path, name):
    file = tmp_path / "my texts" / "inner" / name
    file.parent.mkdir(parents=True)
    file.write_text("To be, or not to be")
    for path in (file, tmp_path / "my texts"):
        for check in (partial(open_data, vocab_size=VOCAB), verify):
            with pytest.raises(DataError) as caught:
                check(path)
            assert shlex.split(str(caught.value))[-2:] == ["prepare", str(path)]
    (file.parent / SHARD).touch()  # a folder of something else beside a readme
    with pytest.raises(DataError, match="no train shards"):
        open_data(tmp_path / "my texts", vocab_size=VOCAB)


@pytest.mark.parametrize("kept", [None, "train", "val"])
def test_a_folder_without_shards_of_a_split_is_rejected(foreign, tmp_path, kept):
    folder = tmp_path / "partial"
    folder.mkdir()
    for path in foreign.iterdir():
        if kept is not None and kept in path.name:
            shutil.copy(path, folder)
    missing = "val" if kept == "train" else "train"
    with pytest.raises(DataError, match=f"partial: no {missing} shards"):
        open_data(folder, vocab_size=VOCAB)


def test_ids_are_below_the_vocabulary_and_never_padding(tmp_path):
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


def test_a_foreign_fingerprint_covers_names_sizes_and_nothing_of_this_machine(foreign, tmp_path):
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


def test_an_existing_edufineweb_set_loads_in_the_order_of_its_numbers(tmp_path):
    train = [f"train_{number}" for number in ("000001", "000002", "000010", "999999", "1000000")]
    for name in ("val_000000", *reversed(train)):
        np.save(tmp_path / f"edufineweb_{name}.npy", np.zeros(50, dtype=np.uint16))
    data = open_data(tmp_path, vocab_size=50304)
    assert [shard.path.stem for shard in data.splits["train"]] == [f"edufineweb_{n}" for n in train]


# The file of a prepared folder that the error names, and what is done to it.
FIRST, LISTED = "tiny_train_000000.npy", "shards.json"
MANIFEST_REFUSALS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a stray file": (SHARD, saved(np.zeros(50, np.uint16))),
    "edited": (LISTED, changed(lambda b: b.replace(b'"documents": 60', b'"documents": 61'))),
    "cut": (LISTED, changed(lambda content: content[:200])),
    "another format": (LISTED, changed(lambda content: b'{"files": []}')),
    "a file gone": (FIRST, Path.unlink),
    "a shorter file": (FIRST, lambda path: np.save(path, np.load(path)[:-1])),
}


@pytest.mark.parametrize("case", MANIFEST_REFUSALS)
def test_a_folder_that_is_not_what_its_manifest_says_is_rejected(prepared, case, wording):
    name, spoil = MANIFEST_REFUSALS[case]
    before = snapshot(prepared)
    spoil(prepared / name)
    assert snapshot(prepared) != before
    with pytest.raises(DataError, match=f"/{name}: ", check=wording):
        open_data(prepared, vocab_size=50304)


def test_windows_are_right_with_more_shards_than_files_are_kept_open(tmp_path):
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


by_eight = partial(loader_over, samples=8, shuffle="none", context_length=CONTEXT)


def test_a_shard_damaged_or_lost_after_it_was_opened_is_named_in_the_step_that_needs_it(prepared):
    data = open_data(prepared, vocab_size=50304)
    (shard,) = data.splits["train"]
    with open(shard.path, "r+b") as file:  # as a failing disk would: after the manifest was checked
        file.seek(shard.offset + 2 * (3 * 8 * CONTEXT + 40))  # in the fourth batch of 8 windows
        file.write((60_000).to_bytes(2, "little"))
    batches = by_eight((shard,)).batches(0)
    assert [next(batches).first_sample for _ in range(3)] == [0, 8, 16]
    with pytest.raises(DataError, match=rf"{shard.path.name}: token id 60000 .*below 50257"):
        next(batches)
    shard.path.unlink()
    with pytest.raises(DataError, match=shard.path.name):
        for _ in by_eight((shard,)).batches(0):
            pass


@pytest.mark.parametrize(("taken", "last_read_fails"), [(1, False), (3, False), (1, True)])
def test_the_prefetching_thread_ends_when_the_stream_is_closed(tmp_path, taken, last_read_fails):
    folder = write_shards(tmp_path / "d", train=(2000,), val=(300,))
    data = open_data(folder, vocab_size=VOCAB)
    path = data.splits["train"][0].path
    if last_read_fails:
        tokens = np.load(path)
        tokens[2 * 8 * CONTEXT + 20] = 999  # in the third batch
        np.save(path, tokens)
    before = set(threading.enumerate())
    batches = by_eight(data.splits["train"], id_limit=VOCAB).batches(0)
    for _ in range(taken):
        next(batches)
    (thread,) = set(threading.enumerate()) - before
    assert thread.is_alive()
    if last_read_fails:
        time.sleep(0.3)
    batches.close()
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_batches_are_read_ahead_and_never_more_than_asked_for_plus_two(tiny_data):
    loader = by_eight(open_data(tiny_data, vocab_size=VOCAB).splits["train"])
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


@pytest.mark.parametrize("byte", range(10, 70))
def test_a_damaged_shard_header_is_rejected_or_read_as_before(tmp_path, byte):
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


def test_headers_are_read_in_many_threads_at_once(tiny_data):
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
