"""`--gpus N`: start the ranks of a run on this machine by torch's elastic launcher, with torchrun's defaults.

torchrun shows some 60 lines around the one that matters, and reports 1 for every end but success.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from gpt2lab import paths
from gpt2lab.config.schema import RecipeName
from gpt2lab.errors import ConfigError
from gpt2lab.paths import LAUNCHED
from gpt2lab.runs.console import doing
from gpt2lab.training.stop import PARENT, STOP_SIGNALS, interruption, is_ignored

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def count_ranks(typed: str | None, *, device: str) -> int:
    """Return how many ranks `--gpus` asks for; `auto`: one for each visible GPU, and one on the CPU without any.

    A rank that they started has the flag too, and takes the number from its launcher.

    Raises: ConfigError if this process is a rank of torchrun.
    """
    if typed is None or LAUNCHED in os.environ:
        ranks = os.environ.get("WORLD_SIZE", "") if "RANK" in os.environ else ""
        return int(ranks) if ranks.isdecimal() else 1  # Runtime rejects any other
    if typed == "auto":
        from gpt2lab.planner.machine import detect_hardware

        typed = str(len(detect_hardware(device=device).gpus) or 1)
    if "RANK" in os.environ:
        raise ConfigError(
            f"--gpus {typed}: torchrun has started the ranks; leave --gpus out, or start without torchrun"
        )
    return int(typed)


def launch(argv: Sequence[str], recipe: RecipeName, ranks: int) -> int:
    """Train with so many ranks, and return the exit code of the first that failed; 0 if all have ended or saved."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable()  # the launcher's account of every process that it ends
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun: losses are the same bits
    os.environ |= {PARENT: str(os.getpid()), LAUNCHED: sys.argv[0]}
    program = paths.trainer("finetune" if recipe == "finetune" else "train")
    with TemporaryDirectory(prefix="gpt2lab_ranks_") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=str(uuid.uuid4()),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # a free port
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            # By default it would handle those too that are ignored, as after `nohup`.
            signals_to_handle=",".join(
                number.name for number in (*STOP_SIGNALS, signal.SIGQUIT) if not is_ignored(number)
            ),
        )
        try:
            with doing(""):  # the ranks print
                elastic_launch(config, sys.executable)("-u", *program, *argv)
            return 0
        except (ChildFailedError, SignalException) as error:
            ended = error
        for number in STOP_SIGNALS:  # the launcher's handlers would raise
            signal.signal(number, signal.SIG_IGN)
        return _report(ended, Path(folder), ranks)


def _report(ended: ChildFailedError | SignalException, folder: Path, ranks: int) -> int:
    """Print what failed, its cause last, and return its exit code; 0 if all ranks were asked to stop and have saved."""
    # What ranks left that ended by themselves: `_tell_launcher` in entry.py.
    reports = {
        int(file.parent.name): json.loads(file.read_text())["message"]["extraInfo"]
        for file in folder.glob("*/attempt_*/*/error.json")
    }
    # The cause is what failed first, and not because another rank was lost.
    ends = [
        (report["is_lost_peer"], int(report["timestamp"]), report["exit_code"], report["said"])
        for report in reports.values()
        if report["exit_code"]
    ]
    said = dict.fromkeys(text for *_, text in sorted(ends, reverse=True))
    for rank, failure in getattr(ended, "failures", {}).items():
        if rank not in reports:
            how = failure.signal_name() if failure.exitcode < 0 else f"code {failure.exitcode}"
            text = f"error: rank {rank} ended with {how}"
            ends.append((False, failure.timestamp, failure.exitcode, text))
    if not ends:
        if len(reports) == ranks:
            return 0
        ends = [(False, 0, 1, interruption(ended.sigval))]  # type: ignore[union-attr]
    _, _, code, cause = min(ends)
    print("\n".join([*(text for text in said if text != cause), cause]), file=sys.stderr)
    return max(1, code)
