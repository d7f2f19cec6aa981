"""A run of a tiny model in this process, a few milliseconds a step, and what its folder tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpt2lab.checkpoint import catalog, manifest
from gpt2lab.errors import GPT2LabError
from gpt2lab.runs import history
from tiny import TRAIN_SHARDS, parse, pretrain

T, S, STEP_TOKENS = 16, 8, 128
WINDOWS = [(tokens - 1) // T for tokens in TRAIN_SHARDS]  # 62, 48, 80: an epoch is 23.75 steps
LAST = 26

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


class Run:
    """A run named `tiny` and its folder."""

    def __init__(self, data: Path, folder: Path, *always: str) -> None:
        self.path = folder / "tiny"
        self.flags = [
            *("--n_layer=2", "--n_head=2", "--n_embd=32", "--context_length=16"),
            *("--vocab_size=256", "--total_batch_size=128", "--mini_batch_size=2"),
            *("--device=cpu", "--dtype=fp32", "--compile=off", "--val_tokens=320"),
            *(f"--data_dir={data}", f"--checkpoint_dir={folder}", "--run_name=tiny", *always),
        ]

    def train(self, *more: str) -> None:
        pretrain(parse([*self.flags, *more]))

    def rejected(self, *more: str) -> GPT2LabError:
        """Return the rejection, without its traceback: the frames in it would keep the run locked."""
        try:
            self.train(*more)
        except GPT2LabError as error:
            return error.with_traceback(None)
        pytest.fail("this start should have been rejected")

    def events(self, kind: str, attempt: int | None = None) -> list[dict[str, Any]]:
        return [
            event
            for event in history.read_events(self.path)
            if event["event"] == kind and attempt in (None, event["attempt"])
        ]

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
        """Return every path below the run with its size and time of change."""
        found = [self.path, *self.path.rglob("*")]
        stats = {str(path): path.stat() for path in found}
        return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}
