"""TensorBoard files from metrics.jsonl: a mirror that was never asked for, or was lost, made afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from pathlib import Path

from gpt2lab.checkpoint import catalog
from gpt2lab.config.settings import to_flat
from gpt2lab.errors import ConfigError, SaveError
from gpt2lab.runs import history
from gpt2lab.runs.folder import RunFolder
from gpt2lab.runs.logger import mirror, mirror_settings


def rebuild_tensorboard(run_dir: Path) -> tuple[Path, int]:
    """Replace a run's TensorBoard files by what metrics.jsonl says; return their folder and the number of events.

    Only the line of steps that led to the newest weights is shown, each event at the time when it happened.

    Raises: ConfigError if the run is being trained or has no metrics, GPT2LabError if they are damaged, SaveError.
    """
    if not (run_dir / catalog.METRICS).exists():
        raise ConfigError(f"{run_dir}: no {catalog.METRICS}; not the folder of a run")
    config = history.read_config(run_dir)
    with contextlib.closing(RunFolder(run_dir)):  # refused while a trainer writes there
        events = history.read_events(run_dir)
        from torch.utils.tensorboard import SummaryWriter

        folder = run_dir / "tensorboard"
        fresh = run_dir / f".tmp-tensorboard-{uuid.uuid4().hex[:8]}"
        count = 0
        try:
            writer = SummaryWriter(str(fresh))
            mirror_settings(writer, to_flat(config))
            for kind in ("step", "eval", "hellaswag", "sample"):
                for step, event in sorted(history.current(events, kind).items()):
                    mirror(writer, kind, step, event, when=event["time"])
                    count += 1
            writer.close()
            old = run_dir / f".del-tensorboard-{uuid.uuid4().hex[:8]}"
            if folder.exists():
                os.rename(folder, old)
            os.rename(fresh, folder)
            shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            raise SaveError(f"{folder}: {error.strerror}") from error
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return folder, count
