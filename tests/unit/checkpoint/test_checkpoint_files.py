"""Rows 4, 13 to 16, 30 and 34: the disk fills up, flips, loses and lies; what is used was checked, or rejected.

`CORRUPTIONS=1000 SEED=7 pytest THIS_FILE -k corruption` repeats the count in docs/reliability.md.
"""

import errno
import hashlib
import json
import os
import random
import re
import shutil
import struct
from io import FileIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import launch
from gpt2lab.checkpoint import catalog, manifest, store
from gpt2lab.checkpoint.store import TrainState
from gpt2lab.commands.checkpoints import List
from gpt2lab.config.schema import ModelConfig, OptimConfig
from gpt2lab.errors import CheckpointError
from gpt2lab.model.gpt import build_model
from gpt2lab.optim.optimizers import build_optimizers
from gpt2lab.runs import logger
from gpt2lab.training import control
from tiny import VOCAB, flip_bit
from whole_run import Usage, reseal

CORRUPTIONS = int(os.environ.get("CORRUPTIONS", "60"))
SEED = int(os.environ.get("SEED", "1337"))
RUN = ("--checkpoint_freq=2", "--eval_freq=0")


@pytest.fixture(scope="module")
def two(tiny_run) -> Path:
    """Return a run with checkpoints of steps 2 and 4; copy before use."""
    return tiny_run(*RUN, max_steps=6, stop_after_steps=4).path


@pytest.fixture
def folder(two, tmp_path) -> Path:
    """Return its newest checkpoint, to spoil."""
    return Path(shutil.copytree(two, tmp_path / "runs" / "run")) / "step_00000004"


def corrupt(folder: Path, dice: random.Random) -> str:
    """Damage one file of a checkpoint at random, and say how."""
    path = dice.choice(sorted(folder.iterdir()))
    content = path.read_bytes()
    kind = dice.choice(("bit", "truncated", "hole", "missing", "swapped", "longer"))
    if kind == "bit":
        flipped = bytearray(content)
        flipped[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        path.write_bytes(flipped)
    elif kind == "truncated":
        path.write_bytes(content[: dice.randrange(len(content))])
    elif kind == "hole":
        length = min(len(content), dice.choice((16, 512, 4096)))
        place = dice.randrange(len(content) - length + 1)
        zeros = bytes(length)
        if content[place : place + length] == zeros:  # was zeros before: no damage
            return corrupt(folder, dice)
        path.write_bytes(content[:place] + zeros + content[place + length :])
    elif kind == "missing":
        path.unlink()
    elif kind == "swapped":  # the same file of the checkpoint before
        shutil.copy(folder.with_name("step_00000002") / path.name, path)
    else:
        path.write_bytes(content + bytes(dice.randrange(1, 99)))
    return f"{kind} {path.name}"


def test_random_corruption_is_always_found_and_the_one_before_used(folder, tmp_path):
    dice, run = random.Random(SEED), folder.parent
    kept = shutil.copytree(folder, tmp_path / "kept")
    for number in range(CORRUPTIONS):
        how = corrupt(folder, dice)
        chosen, warnings = catalog.newest_valid(run, set_aside=False)
        assert chosen is not None, f"{number} {how}"
        assert chosen.step == 2, f"undetected: number {number} of seed {SEED}, {how}"
        assert len(warnings) == 1
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
    assert catalog.newest_valid(run, set_aside=False)[0].step == 4  # type: ignore[union-attr]


def test_list_with_verify_finds_what_the_manifest_alone_does_not(folder, capsys):
    def listed(**how: bool) -> tuple[int, str]:
        code = List(checkpoint_dir=folder.parents[1], **how).execute()
        return code, capsys.readouterr().out

    code, told = listed(verify=True)
    assert (code, "every byte of 2 checkpoints read" in told) == (0, True)
    flip_bit(folder / "optim.safetensors", -9)
    assert listed()[0] == 0
    code, told = listed(verify=True, json=True)
    assert code == 1
    [run] = json.loads(told)["runs"]
    assert [row["step"] for row in run["checkpoints"]] == [2]
    assert "optim.safetensors: damaged" in run["damaged"][0]


def test_a_full_disk_is_seen_before_the_save_and_training_goes_on(run, monkeypatch):
    """At step 2, once more because SAVE asks for it, and not at each step from there on."""
    # The start; step 2, before and after tidying, twice; steps 4 and 6.
    left = [10**12, 10**12, 1000, 1000, 1000, 1000, 10**12]

    def disk_usage(path: Path) -> Usage:
        if len(left) == 5:
            (run.path / "SAVE").touch()
        return Usage(10**12, 0, left.pop())

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    monkeypatch.setattr(control, "_LOOK_EVERY", 0.0)
    run.train("--max_steps=6")
    assert list(run.checkpoints()) == [4, 6]
    warnings = [e["message"] for e in run.events("warning") if "not saved" in e["message"]]
    assert len(warnings) == 2
    assert all("step 2" in one and "1 kB free on its disk" in one for one in warnings)


class FullDisk(FileIO):
    """A file on a disk that has some bytes left, and is emptied once enough writes have failed."""

    code, most = errno.ENOSPC, 4

    def __init__(self, path: Path, mode: str, **how: Any) -> None:
        super().__init__(path, mode, **how)
        self.left, self.failures = 3000, self.most

    def write(self, content: Any) -> int:
        if self.failures and len(content) > self.left:
            if self.left:
                written, self.left = super().write(memoryview(content)[: self.left]), 0
                return written
            self.failures -= 1
            raise OSError(self.code, os.strerror(self.code))
        self.left -= len(content)
        return super().write(content)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_disk_too_full_for_a_line_of_the_metrics_ends_no_run(run, monkeypatch, capsys, code):
    """The same of one that the kernel made read-only for a while."""
    monkeypatch.setattr(logger, "FileIO", FullDisk)
    monkeypatch.setattr(FullDisk, "code", code)
    run.train("--max_steps=10", "--checkpoint_freq=1", "--sample_freq=0")
    said = capsys.readouterr().out
    assert said.count(f"{os.strerror(code)}; training continues and keeps") == 1
    assert "metrics.jsonl: written again, nothing is missing" in said
    assert list(run.losses()) == list(range(1, 11))
    [skipped] = [e["step"] for e in run.events("warning") if "not saved" in e["message"]]
    assert {*range(1, 11)} - {e["step"] for e in run.events("checkpoint")} == {skipped}
    assert run.status()["state"] == "completed"


def test_what_the_metrics_never_took_is_counted(run, monkeypatch, capsys):
    monkeypatch.setattr(logger, "FileIO", FullDisk)
    monkeypatch.setattr(FullDisk, "most", 10**9)
    rejection = run.rejected("--max_steps=10", "--checkpoint_freq=0", "--eval_freq=0")
    assert rejection.exit_code == 75
    assert "metrics.jsonl: No space left on device" in str(rejection)
    assert re.search(r"the last \d+ events are not in metrics.jsonl", capsys.readouterr().out)
    assert run.checkpoints() == {}
    monkeypatch.undo()
    run.train("--max_steps=10")
    assert list(run.losses(attempt=2)) == list(range(1, 11))


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("failures", [1, 2, 3])
def test_metrics_that_cannot_be_flushed_are_written_again_before_a_checkpoint_rests_on_them(
    run, monkeypatch, capsys, code, failures
):
    """The kernel reports an error of writing once, and takes what it did not write for written."""
    flushes: list[bool] = []
    again: list[bytes] = []
    real_fsync, real_pread = os.fsync, os.pread

    def fsync(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("/metrics.jsonl"):
            flushes.append(2 <= len(flushes) < 2 + failures)  # not those of the first two steps
            if flushes[-1]:
                raise OSError(code, os.strerror(code))
        real_fsync(descriptor)

    def pread(descriptor: int, length: int, offset: int) -> bytes:
        again.append(real_pread(descriptor, length, offset))
        return again[-1]

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "pread", pread)
    run.train("--max_steps=5", "--checkpoint_freq=1", "--eval_freq=0", "--sample_freq=0")
    assert sum(flushes) == failures
    said = capsys.readouterr().out
    assert said.count(f"{os.strerror(code)}; its last events are written again") == 1
    saved = [1, 2, 3, 4, 5] if failures == 1 else [1, 2, 4, 5]  # a flush is tried twice
    assert (list(run.checkpoints()), list(run.losses())) == (saved, [1, 2, 3, 4, 5])
    rewritten = [json.loads(line) for line in again[0].splitlines()]
    assert [event["step"] for event in rewritten if event["event"] == "step"] == [3]
    assert run.status()["state"] == "completed"


def test_room_is_made_by_retiring_early_but_never_the_newest(run, monkeypatch):

    def disk_usage(path: Path) -> Usage:
        is_full = len(list(run.path.glob("step_*"))) >= 3
        return Usage(10**9, 0, 449_999 if is_full else 10**9)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    run.train("--max_steps=10", "--keep_checkpoints=3")
    assert [event["step"] for event in run.events("checkpoint")] == [2, 4, 6, 8, 10]
    assert list(run.checkpoints()) == [6, 8, 10]


def test_the_only_checkpoint_left_must_be_sound_before_others_go_and_no_link(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "elsewhere")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="damaged"):
        catalog.retain(folder.parent, keep=1, keep_emergency=1)
    assert len(list(folder.parent.glob("step_*"))) == 2
    shutil.rmtree(folder)
    folder.symlink_to(tmp_path / "elsewhere")
    assert catalog.newest_valid(folder.parent, set_aside=False)[0].step == 2  # type: ignore[union-attr]


def test_a_checkpoint_that_may_not_be_read_is_an_error_and_not_set_aside(folder, monkeypatch):
    denied = Mock(side_effect=PermissionError(errno.EACCES, "Permission denied"))
    monkeypatch.setattr(manifest, "open_regular", denied)
    with pytest.raises(CheckpointError, match="Permission denied"):
        catalog.newest_valid(folder.parent, set_aside=True)
    assert folder.exists()


def test_retention_never_removes_what_is_labelled_foreign_or_unreadable(run):
    run.train("--max_steps=12", "--stop_after_steps=8")
    for _ in range(2):  # set again by a resume, it is not the one before itself
        catalog.set_label(run.path, "best", 2)
    assert "best_prev" not in run.labels()
    (run.path / "step_²").mkdir()
    (run.path / "step_00000099").mkdir()
    (run.path / "model.pt").write_bytes(b"foreign")
    (run.path / "notes.txt").write_text("mine")
    assert catalog.retain(run.path, keep=2, keep_emergency=1) == [4]
    left = {path.name for path in run.path.glob("*")}
    assert {"step_00000002", "step_00000006", "step_00000008"} < left
    assert {"step_²", "step_00000099", "model.pt", "notes.txt"} < left
    run.train("--max_steps=12", "--resume=latest")
    assert run.status()["state"] == "completed"


def test_the_checkpoint_resumed_from_stays_until_two_newer_ones_exist(run):
    run.train("--max_steps=12", "--keep_checkpoints=1", "--stop_after_steps=4")
    assert list(run.checkpoints()) == [4]
    run.train("--max_steps=12", "--resume=latest", "--stop_after_steps=6")
    assert list(run.checkpoints()) == [4, 6]
    run.train("--max_steps=12", "--resume=4", "--stop_after_steps=8")
    assert list(run.checkpoints()) == [8], "two newer ones: 6 (taken again) and 8"


def test_row_04_everything_is_on_the_disk_before_the_name_is(run, listen):
    logged: list[int] = []  # the last step in metrics.jsonl at each of its flushes

    def hear(name: str, path: Path) -> None:
        if (name, path.name) == ("fsync", "metrics.jsonl"):
            logged.append(max(run.losses()))

    calls = listen(hear)
    run.train("--max_steps=4", "--stop_after_steps=2")
    commit = calls.index(("rename", run.path / "step_00000002"))
    before = [f"{name} {path.name}" for name, path in calls[:commit]]
    files = ("metrics.jsonl", "model.safetensors", "optim.safetensors", "state.json")
    assert before[-6:-1] == [f"fsync {name}" for name in (*files, "manifest.json")]
    assert logged[before.count("fsync metrics.jsonl") - 1] == 2, "with the step's own line"
    assert before[-1].startswith("fsync .tmp-00000002")
    assert calls[commit + 1] == ("fsync", run.path), "and then the folder that holds the new name"


def test_an_interrupted_commit_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "sync_folder", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        manifest.commit(tmp_path, manifest.Draft(1, {"a": [b"x"]}, {}))
    with pytest.raises(FileNotFoundError):  # a run that was moved is not made anew
        manifest.commit(tmp_path / "moved", manifest.Draft(1, {}, {}))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "..", ".hidden", "a/b", ""])
def test_names_that_leave_the_folder_are_rejected(name, folder):
    files = {name: {"bytes": 1, "sha256": "0" * 64}}
    reseal(folder, lambda content: content.update(files=files))
    with pytest.raises(CheckpointError, match="not a plain name"):
        manifest.verify(folder)


HEADERS = {
    "claims 100 GB": struct.pack("<Q", 10**11),
    "negative offsets": b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
    "beyond its bytes": b'{"w": {"dtype": "F32", "shape": [1000000000], "data_offsets": [0, 4]}}',
    "deep nesting": b"[" * 100_000,
}


def test_hostile_tensor_files_are_rejected_in_one_line_and_little_memory(two, tmp_path):
    """Their hashes hold: only the reader stands between the header and the memory."""
    folders = []
    for case, header in HEADERS.items():
        copy = shutil.copytree(two / "step_00000004", tmp_path / case.replace(" ", "_"))
        folder = Path(copy)
        length = struct.pack("<Q", len(header))
        data = header if case == "claims 100 GB" else length + header + bytes(4)
        (folder / "model.safetensors").write_bytes(data)
        file = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        reseal(folder, lambda content, file=file: content["files"].update({store.MODEL: file}))
        folders.append(str(folder))
    code = (
        "import sys\nfrom pathlib import Path\nfrom gpt2lab.checkpoint import store\n"
        "from gpt2lab.distributed.runtime import Runtime\nfrom gpt2lab.errors import CheckpointError\n"
        "runtime = Runtime()\nbefore = runtime.peak_memory()\n"
        "for folder in sys.argv[1:]:\n"
        "    try:\n        store._read(Path(folder) / 'model.safetensors')\n"
        "    except CheckpointError as error:\n        print('rejected', '\\n' in str(error))\n"
        "    grown = runtime.peak_memory() - before\n"
        "    assert grown < 200 * 2**20, (folder, grown)"
    )
    done = launch.python("-c", code, *folders)
    assert (done.returncode, done.stdout) == (0, "rejected False\n" * len(HEADERS)), done.stderr


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(("bytes", "sha256", "x", "..")), inner, max_size=4)
    ),
    max_leaves=8,
)


@settings(max_examples=int(os.environ.get("FUZZ", "100")), deadline=None)
@given(data=st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_read_or_rejected_as_manifest_and_as_state(data, two):
    copy = two.parent / "fuzz_bytes" / "step_00000004"
    copy.mkdir(parents=True, exist_ok=True)
    (copy / "manifest.json").write_bytes(data)
    (copy / "state.json").write_bytes(data)
    with pytest.raises(CheckpointError):
        manifest.read_manifest(copy)
    with pytest.raises(CheckpointError):
        store._load_state(copy / "state.json")


def test_a_checkpoint_of_other_tensors_is_rejected_before_anything_is_copied(folder):
    config = ModelConfig(n_layer=1, n_head=2, n_embd=32, context_length=16, vocab_size=VOCAB)
    model = build_model(config, seed=1, device=torch.device("cpu"))
    optimizers = build_optimizers(model, OptimConfig())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="another architecture"):
        store.load(folder, model=model, optimizers=optimizers)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


DTYPES = (torch.uint8, torch.float16, torch.bfloat16, torch.int32)
DTYPES += (torch.float32, torch.float64, torch.int64)
NAMED = (("b", 15, (3, 5)), ("é", 1, ()), ('"', 7, (7,)), ("z", 0, (0, 4)))


def test_files_are_those_of_safetensors_own_library(tmp_path):
    """Of every type and of awkward names and shapes, and of a tensor that is hashed beside its writing."""
    tensors = {
        f"{name}{dtype}": torch.arange(count).reshape(shape).to(dtype)
        for dtype in DTYPES
        for name, count, shape in NAMED
    }
    tensors["large"] = torch.randn(3, 2**20)
    what = {"content": store.Content(tensors, {}), "state": TrainState(), "rng_states": []}
    drafted = store.draft(tmp_path, kind="rolling", **what, facts={})
    folder = manifest.commit(tmp_path, drafted)
    files = json.loads((folder / "manifest.json").read_text())["files"]
    for name, expected in (("model", tensors), ("optim", {})):
        bytes_ = safetensors.torch.save(expected)
        assert (folder / f"{name}.safetensors").read_bytes() == bytes_
        listed = {"bytes": len(bytes_), "sha256": hashlib.sha256(bytes_).hexdigest()}
        assert files[f"{name}.safetensors"] == listed
