"""A run of a tiny model in this process, a few milliseconds a step, and what its folder tells."""

import json
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import launch
from gpt2lab.checkpoint import catalog, manifest
from gpt2lab.config.schema import Config
from gpt2lab.config.settings import to_flat
from gpt2lab.errors import GPT2LabError
from plain_log import read_events
from tiny import TINY, TRAIN_SHARDS, flags_for, train

T, S, STEP_TOKENS = 16, 8, 128
WINDOWS = [(tokens - 1) // T for tokens in TRAIN_SHARDS]  # 62, 48, 80: an epoch is 23.75 steps
LAST = 26
Usage = namedtuple("Usage", "total used free")  # of a disk, as shutil.disk_usage tells it

# TensorBoard's tag of each number: the event and field it comes from, and the factor between the two.
SCALARS = {
    "Loss/train": ("step", "loss", 1.0),
    "Loss/validation": ("eval", "val_loss", 1.0),
    "Learning_Rate/lr": ("step", "lr", 1.0),
    "Gradient/norm": ("step", "grad_norm", 1.0),
    "Performance/step_time_ms": ("step", "step_seconds", 1000.0),
    "Performance/tokens_per_sec": ("step", "tokens_per_second", 1.0),
    "Training/epoch": ("step", "epoch", 1.0),
    "training/elapsed_hours": ("step", "elapsed_seconds", 1 / 3600),
    "training/remaining_hours": ("step", "remaining_seconds", 1 / 3600),
}


def facts_of(step: int, **more: Any) -> dict[str, Any]:
    """Return what the manifest of a checkpoint says of a run that nobody trained."""
    run = {"config": to_flat(Config()), "data_fingerprint": "0" * 64}
    place = {"step": step, "kind": "rolling", "tokens": 1000 * step, "created": 1.7e9 + step}
    return {**place, **run, "environment": {"world_size": 1}, **more}


def reseal(checkpoint: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit a manifest and give it a hash that holds: what an attacker can do and a disk cannot."""
    path = checkpoint / manifest.MANIFEST
    content = json.loads(path.read_text())
    edit(content)
    content["manifest_sha256"] = manifest._hash_of(content)
    path.write_text(json.dumps(content))


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Return a folder and every path below it with its size and time of change."""
    stats = {str(path): path.stat() for path in [folder, *folder.rglob("*")]}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


class Run:
    """A tiny run and its folder; flags and settings that are given to it hold for all of its starts."""

    def __init__(
        self, data: Path, folder: Path, *always: str, name: str = "tiny", **settings: object
    ) -> None:
        self.path = folder / name
        self.flags = [
            *(*TINY, f"--data_dir={data}", f"--checkpoint_dir={folder}", f"--run_name={name}"),
            *(*always, *flags_for(**settings)),
        ]

    def train(
        self, *more: str, world: int = 1, program: Path = launch.TRAIN, **settings: object
    ) -> str:
        """Train to the end: in this process, or as forks for more of them; return what those said."""
        flags = [*self.flags, *more, *flags_for(**settings)]
        if world == 1 and program == launch.TRAIN:
            train(flags)
            return ""
        done = launch.worked(launch.train_in_forks(flags, world=world, program=program))
        return done.stdout

    def killed(self, fault: str, *more: str, world: int = 1) -> None:
        """Train until a fault point kills it."""
        done = launch.train_in_forks([*self.flags, *more], world=world, FAULT=fault)
        assert done.returncode != 0

    def rejected(self, *more: str, kind: type[GPT2LabError] = GPT2LabError) -> GPT2LabError:
        """Return the rejection, without its traceback: the frames in it would keep the run locked."""
        try:
            self.train(*more)
        except kind as error:
            return error.with_traceback(None)
        pytest.fail("this start should have been rejected")

    def bits(self) -> tuple[dict[int, str], str, str]:
        """Return every loss in hex and the hashes of the newest weights and moments: equal only if every bit is."""
        return launch.losses(self.path), *self.hashes(max(self.checkpoints()))

    def hashes(self, step: int) -> tuple[str, str]:
        """Return the hashes of a checkpoint's weights and moments."""
        files = self.checkpoints()[step].manifest["files"]
        return files["model.safetensors"]["sha256"], files["optim.safetensors"]["sha256"]

    def steps(self) -> dict[int, dict[str, Any]]:
        """Return {step: its event} along the line of steps that the newest weights went through."""
        return launch.current_steps(self.path)

    def assert_same_curve(self, reference: "Run", last: int) -> None:
        """The same batches, and losses, norms and evaluations that differ by the order of fp32 sums at most."""
        found, expected = self.steps(), reference.steps()
        assert sorted(found) == sorted(expected) == list(range(1, last + 1))
        for step, event in expected.items():
            assert found[step]["batch_hash"] == event["batch_hash"], "other tokens"
            assert found[step]["loss"] == pytest.approx(event["loss"], rel=1e-5)
            assert found[step]["grad_norm"] == pytest.approx(event["grad_norm"], rel=1e-4)
        both = (self.events("eval"), reference.events("eval"))
        ours, theirs = ({e["step"]: e["val_loss"] for e in events} for events in both)
        assert ours == pytest.approx(theirs, rel=1e-5)

    def events(self, kind: str, attempt: int | None = None) -> list[dict[str, Any]]:
        of_kind = [event for event in read_events(self.path) if event["event"] == kind]
        return [event for event in of_kind if attempt in (None, event["attempt"])]

    def losses(self, attempt: int | None = None) -> dict[int, float]:
        return {event["step"]: event["loss"] for event in self.events("step", attempt)}

    def checkpoints(self) -> dict[int, catalog.CheckpointInfo]:
        """Return the checkpoints on disk by step, every byte of each verified."""
        infos, damaged = catalog.list_checkpoints(self.path)
        assert not damaged
        for info in infos:
            manifest.verify(info.path)
        return {info.step: info for info in infos}

    def labels(self) -> dict[str, str]:
        return catalog.read_labels(self.path)

    def status(self) -> dict[str, Any]:
        return json.loads((self.path / "status.json").read_text())

    def saved_state(self, step: int) -> dict[str, Any]:
        file = self.path / manifest.folder_name(step) / "state.json"
        return json.loads(file.read_text())["state"]

    def listing(self) -> dict[str, tuple[int, int]]:
        return listing(self.path)
