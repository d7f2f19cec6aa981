"""`--gpus N`: start the ranks of a run on this machine, as torchrun does, and say last and alone what failed.

The ranks are started by torch's elastic launcher, with torchrun's defaults: the same rendezvous, environment, signals
and patience. torchrun itself shows some 60 lines around the one that matters, and reports 1 for every end but success.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from gpt2lab import paths
from gpt2lab.commands.parser import name_of
from gpt2lab.config.schema import RecipeName
from gpt2lab.errors import ConfigError
from gpt2lab.training.stop import LAUNCHED, PARENT, STOP_SIGNALS

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


def count_ranks(typed: str | None, *, device: str) -> int:
    """Return how many ranks `--gpus` asks for; `auto`: one for each visible GPU, and one on the CPU without any.

    Raises: ConfigError if this process is a rank itself.
    """
    if typed is None:
        return int(os.environ.get("WORLD_SIZE", "1"))
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
    os.environ |= {PARENT: str(os.getpid()), LAUNCHED: str(ranks)}
    program = "finetune" if recipe == "finetune" else "train"
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
        )
        failures: Mapping[int, ProcessFailure] = {}
        signal_name = None
        try:
            elastic_launch(config, sys.executable)("-u", *paths.trainer(program), *_of_ranks(argv))
            return 0
        except ChildFailedError as failed:
            failures = failed.failures
        except SignalException as asked:
            signal_name = asked.sigval.name
        for number in STOP_SIGNALS:  # all has ended: the launcher's handlers would raise
            signal.signal(number, signal.SIG_IGN)
        return _report(failures, _reports(Path(folder)), ranks, signal_name)


def _of_ranks(argv: Sequence[str]) -> list[str]:
    """Return a command line without --gpus."""
    kept, words = [], iter(argv)
    for word in words:
        if name_of(word) != "gpus":
            kept.append(word)
        elif "=" not in word:
            next(words)
    return kept


def _reports(folder: Path) -> dict[int, dict[str, Any]]:
    """Return what ranks have left when they ended by themselves (`tell_launcher` in entry.py)."""
    found = {}
    for file in folder.glob("*/attempt_*/*/error.json"):
        found[int(file.parent.name)] = json.loads(file.read_text())["message"]["extraInfo"]
    return found


def _report(
    failures: Mapping[int, ProcessFailure],
    reports: Mapping[int, dict[str, Any]],
    ranks: int,
    signal_name: str | None,
) -> int:
    """Print what failed, its cause last, and return its exit code."""
    codes = {rank: report["exit_code"] for rank, report in reports.items()}
    if signal_name is not None and len(codes) == ranks and not any(codes.values()):
        return 0  # asked to stop, and saved
    # The cause failed first, and not because another rank was lost. Who was ended afterwards has nothing to say.
    ends = {rank: (False, failure.timestamp) for rank, failure in failures.items()}
    for rank, report in reports.items():
        if codes[rank]:
            ends[rank] = report["is_lost_peer"], int(report["timestamp"])
    if not ends:
        by = "" if signal_name in (None, "SIGINT") else f" by {signal_name}"
        print(f"error: interrupted{by}", file=sys.stderr)
        return 1
    first, *others = sorted(ends, key=lambda rank: ends[rank])
    said = [reports[rank]["said"] for rank in reversed(others) if rank in reports]
    if first in reports:
        last, code = reports[first]["said"], codes[first]
    else:
        code = failures[first].exitcode
        how = f"was killed by {failures[first].signal_name()}" if code < 0 else f"ended with {code}"
        last = f"error: rank {first} {how}"
    for text in dict.fromkeys(text for text in (*said, last) if text != last):
        print(text, file=sys.stderr)
    print(last, file=sys.stderr)
    return max(1, code)
