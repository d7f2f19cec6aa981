"""The loader never holds the step up, whatever the size of the data: what it reads, allocates and waits for."""

import dataclasses
import hashlib
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.lib import format as npy

import launch
from gpt2lab.checkpoint.manifest import folder_name
from gpt2lab.data import windows as verifier_module
from gpt2lab.data.shards import Shard, open_data, open_shard
from gpt2lab.data.windows import Verifier, WindowReader
from gpt2lab.errors import CheckpointError, DataError
from gpt2lab.files import sha256_of
from loading import T, loader_over
from long_logs import peak_bytes
from plain_log import read_events
from tiny import VOCAB, flip_bit, parse, pretrain


@pytest.mark.parametrize("shuffle", ["shards", "windows"])
def test_a_batch_of_gpt2_is_copied_once_and_opens_nothing_again(tmp_path, shuffle, monkeypatch):
    """Its windows, their bytes to hash and one micro-batch are all that is allocated; `benchmark.py data` measures."""
    ids = (np.arange(10_000_000) % 50257).astype(np.uint16)
    for split in ("train", "val"):
        np.save(tmp_path / f"big_{split}_000000.npy", ids)
    shards = open_data(tmp_path, vocab_size=50304).splits["train"]
    loader = loader_over(shards, samples=512, shuffle=shuffle)
    loader.fetch(0)
    monkeypatch.setattr(os, "open", Mock(side_effect=AssertionError("opened a second time")))
    for number in range(1, 4):
        assert peak_bytes(loader.fetch, 512 * number) < 3 * 512 * (T + 1) * 2


def sparse_shards(folder: Path, *, count: int, tokens: int) -> tuple[Shard, ...]:
    """Make shards that are all zeros and take no room on the disk."""
    shards = []
    for index in range(count):
        path = folder / f"sparse_train_{index:06d}.npy"
        npy.open_memmap(path, "w+", "<u2", (tokens,))
        # A hash that nobody has computed yet: verifying 20 GB must not hold the first batch up.
        shards.append(dataclasses.replace(open_shard(path), sha256="0" * 64))
    return tuple(shards)


@pytest.mark.parametrize("shuffle", ["shards", "windows"])
def test_the_first_batch_needs_its_own_windows_of_ten_billion_alone(tmp_path, shuffle, monkeypatch):
    """No hash is waited for, and no order of 9.7 million windows is written down, wherever the run begins."""
    go_on = threading.Event()
    monkeypatch.setattr(Verifier, "_verify", lambda self, shard: go_on.wait(100))
    # What numpy and torch allocate at their first use is not the loader's.
    loader_over(sparse_shards(tmp_path, count=1, tokens=T + 1), samples=16).fetch(0)
    shards = sparse_shards(tmp_path, count=100, tokens=100_000_000)
    windows = 100 * ((100_000_000 - 1) // T)
    for first in (0, windows // 2, windows - 30, 3 * windows + 12_345):
        go_on.clear()
        loader = loader_over(shards, samples=64, shuffle=shuffle, verify=True)
        assert peak_bytes(loader.fetch, first) < 1e6
        batches = loader.batches(first)
        batch = next(batches)
        go_on.set()
        batches.close()
        assert (batch.first_sample, batch.epoch) == (first, first // windows)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc/self/statm")
def test_memory_is_flat_over_three_epochs(tmp_path):
    for split, count in (("train", 4), ("val", 1)):
        for index in range(count):
            ids = (np.arange(4_000_000) % 50257).astype(np.uint16)
            np.save(tmp_path / f"big_{split}_{index:06d}.npy", ids)
    answer = launch.worked(launch.python(launch.WORKERS / "resident_bytes.py", tmp_path))
    first, *later = map(int, answer.stdout.split())
    assert max(later) - first < 8e6  # of 32 MB read per epoch


@pytest.fixture
def flags(prepared, tiny_flags) -> list[str]:
    """Return the command line of a tiny run over prepared data, whose hashes are known."""
    kept = [f for f in tiny_flags if not f.startswith(("--data_dir", "--vocab_size"))]
    return [*kept, f"--data_dir={prepared}", "--eval_freq=0", "--warmup_steps=0"]


def test_no_checkpoint_rests_on_a_damaged_shard(prepared, tmp_path, flags):
    """The damage lies in windows that are not read before the checkpoint: its hash tells all the same."""
    [path] = prepared.glob("*_train_*")
    flip_bit(path, -28)
    with pytest.raises(DataError, match=rf"{path.name}: damaged \(its sha256"):
        pretrain(parse([*flags, "--max_steps=5", "--checkpoint_freq=1"]))
    assert not list((tmp_path / "runs" / "tiny").glob("step_*"))


def test_a_stop_awaits_no_hash_and_its_checkpoint_says_so(prepared, tmp_path, flags, monkeypatch):
    [train] = (path.name for path in prepared.glob("*_train_*"))
    run_dir = tmp_path / "runs" / "tiny"
    verify = Verifier._verify

    def hash_without_end(verifier: Verifier, shard: Shard) -> None:
        if shard.path.name != train:
            return verify(verifier, shard)
        while not any(event["event"] == "step" for event in read_events(run_dir)):
            assert not verifier._is_closed.wait(0.01)
        (run_dir / "STOP").touch()
        verifier._is_closed.wait(launch.HANG_SECONDS)
        return None

    def unverified(step: int) -> list[str]:
        content = json.loads((run_dir / folder_name(step) / "state.json").read_text())
        return content["state"]["unverified"]

    with monkeypatch.context() as patched:
        patched.setattr(Verifier, "_verify", hash_without_end)
        pretrain(parse([*flags, "--max_steps=500"]))
    [stop] = (e for e in read_events(run_dir) if e["event"] == "stop")
    assert stop["step"] < 500
    assert unverified(stop["step"]) == [train]
    again = [*flags, "--resume=latest", "--allow_change=max_steps", "--max_steps"]
    ids = np.load(prepared / train)
    np.save(prepared / train, ids[::-1])
    with pytest.raises(CheckpointError, match="step 1 would read another batch"):
        pretrain(parse([*again, str(stop["step"])]))
    np.save(prepared / train, ids)
    flip_bit(prepared / train, -28)
    with pytest.raises(DataError, match="damaged"):
        pretrain(parse([*again, str(stop["step"])]))
    flip_bit(prepared / train, -28)
    last = stop["step"] + 3
    pretrain(parse([*again, str(last)]))
    assert unverified(last) == []


def test_what_an_earlier_start_left_unverified_is_verified_without_being_read(tmp_path):
    paths = [tmp_path / name for name in ("a.npy", "b.npy")]
    for path in paths:
        path.write_bytes(b"tokens")
    right = hashlib.sha256(b"tokens").hexdigest()
    shards = tuple(Shard(path, 3, 0, sha256=right) for path in paths)
    reader = WindowReader(shards, context_length=1, id_limit=VOCAB, verify=True)
    reader.verifier.touch_named(("b.npy",))
    reader.verifier.wait()
    assert reader.verifier.unverified() == ()
    reader.close()
    paths[1].write_bytes(b"others")
    reader.verifier.touch_named(("b.npy",))
    with pytest.raises(DataError, match=r"b\.npy: damaged"):
        reader.verifier.wait()
    reader.close()


@pytest.mark.parametrize("fails", [False, True])
def test_a_vanished_shard_is_named_and_a_failing_verifier_is_heard(tmp_path, monkeypatch, fails):
    (shard,) = sparse_shards(tmp_path, count=1, tokens=1000)
    shard.path.unlink()
    expected, said = DataError, rf"{shard.path.name}: cannot be read \(No such file"
    if fails:
        expected, said = MemoryError, "no room for a block"
        monkeypatch.setattr(Verifier, "_verify", Mock(side_effect=MemoryError(said)))
    verifier = Verifier((shard,))
    verifier.touch(0)
    with pytest.raises(expected, match=said):
        verifier.wait()
    verifier.close()


def test_a_stop_hashes_no_shard_that_changed_but_says_it_is_unverified(tmp_path, monkeypatch):
    (shard,) = sparse_shards(tmp_path, count=1, tokens=1000)
    verifier = Verifier((dataclasses.replace(shard, sha256=sha256_of(shard.path)),))
    verifier.touch(0)
    verifier.wait()
    os.utime(shard.path, (0, 0))
    hashed = []
    plain = Verifier._verify
    monkeypatch.setattr(Verifier, "_verify", lambda *a: (hashed.append(a[1]), plain(*a))[1])
    assert verifier.unverified() == (shard.path.name,)
    assert not hashed
    verifier.wait()
    assert (len(hashed), verifier.unverified()) == (1, ())
    verifier.close()
    # Nobody knows what was read of one that changed before it was verified.
    go_on = threading.Event()
    monkeypatch.setattr(Verifier, "_verify", lambda *a: (go_on.wait(100), plain(*a))[1])
    verifier.touch(0)
    os.utime(shard.path, (1, 1))
    go_on.set()
    with pytest.raises(DataError, match="changed while training, before what was read"):
        verifier.wait()
    verifier.close()


def test_a_process_verifies_what_others_of_its_machine_read(tmp_path):
    *shards, damaged = sparse_shards(tmp_path, count=4, tokens=2 * T + 1)
    known = [dataclasses.replace(shard, sha256=sha256_of(shard.path)) for shard in shards]
    how = {"samples": 8, "shuffle": "none", "verify": True, "world_size": 4, "rank": 1}
    loader = loader_over((*known, damaged), **how)
    assert loader.fetch(0).micro_batches[0].tokens.shape == (2, T)
    with pytest.raises(DataError, match=rf"{damaged.path.name}: damaged"):
        loader.reader.verifier.wait()
    loader.reader.close()


@pytest.mark.parametrize("verify", [False, True])
def test_a_truncated_shard_is_an_error_and_no_signal(tmp_path, verify):
    """A memory map of it would end the process with SIGBUS, in the pages beyond its end."""
    (shard,) = sparse_shards(tmp_path, count=1, tokens=100_000)
    shard = dataclasses.replace(shard, sha256=sha256_of(shard.path))
    reader = WindowReader((shard,), context_length=T, id_limit=VOCAB, verify=verify)
    first, last = np.array([0]), np.array([90_000])
    assert reader.read(first, last).shape == (1, T + 1)
    reader.verifier.wait()
    for size in (128 + 2 * 90_000 + 2 * T, 10_000):  # bytes: without an id of the window, or all
        os.truncate(shard.path, size)
        assert reader.read(first, first).shape == (1, T + 1)
        with pytest.raises(DataError, match="ends within the window at token 90000"):
            reader.read(first, last)
    if verify:
        said = r"changed while training \(10000 bytes, 200128 before\)"
        with pytest.raises(DataError, match=said):
            reader.verifier.wait()
    reader.close()


def test_closing_hashes_no_further_block_of_twenty_gigabytes(tmp_path, monkeypatch):
    hashed: list[int] = []
    is_hashing, go_on = threading.Event(), threading.Event()

    def update(block: bytes) -> None:
        hashed.append(len(block))
        is_hashing.set()
        go_on.wait(100)

    slow = SimpleNamespace(sha256=lambda: SimpleNamespace(update=update, hexdigest=str))
    monkeypatch.setattr(verifier_module, "hashlib", slow)
    verifier = Verifier(sparse_shards(tmp_path, count=100, tokens=100_000_000))
    for index in range(100):
        verifier.touch(index)
    assert is_hashing.wait(100)
    closing = threading.Thread(target=verifier.close)
    closing.start()
    assert verifier._is_closed.wait(100)
    go_on.set()
    closing.join(100)
    assert not closing.is_alive()
    assert len(hashed) == 1
