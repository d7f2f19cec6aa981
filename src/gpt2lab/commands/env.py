"""Print the versions and the hardware, and a run's facts, to paste into an issue.

gpt2lab env
gpt2lab env gpt2-124m --json

No secret, host name or user name is in it: no environment variable, no argument of a
command, and a path below the home folder begins with ~.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2lab import __version__, paths
from gpt2lab.commands.parser import parse_flags
from gpt2lab.config.flags import argument, option

_PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "tiktoken", "transformers")
_GIB = 2**30


@dataclass(frozen=True)
class Env:
    """Print the versions and the hardware, and a run's facts, to paste into an issue."""

    run: str | None = argument("a run, by name or folder, whose facts to add", default=None)
    json: bool = option(False, "print one JSON object")
    checkpoint_dir: Path | None = option(None, "folder of the runs; default checkpoints/")


def main(argv: list[str]) -> int:
    """Print the facts, one a line, or as one JSON object."""
    flags = parse_flags(Env, argv)
    facts: dict[str, Any] = {"versions": _versions(), "machine": _machine()}
    if flags.run is not None:
        facts["run"] = _run(flags.run, flags.checkpoint_dir)
    facts = _without_names(facts)
    if flags.json:
        print(json.dumps(facts))
        return 0
    for group, found in facts.items():
        print(f"{group}:")
        for name, value in found.items():
            lines = value if isinstance(value, list) else [value]
            for line in lines or ["none"]:
                print(f"  {name:<16} {'n/a' if line is None else line}")
    return 0


def _versions() -> dict[str, Any]:
    """Return what is installed; None for what is not. Nothing of it is imported."""
    from gpt2lab.runs.folder import git_commit

    found: dict[str, Any] = {"gpt2lab": __version__, "git": git_commit()}
    found["python"] = f"{platform.python_implementation()} {platform.python_version()}"
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def _machine() -> dict[str, Any]:
    from gpt2lab.distributed import processor
    from gpt2lab.planner import machine

    gpus = machine.look().gpus
    total, free = machine.total_memory(), machine.available_memory()
    return {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cpu": processor.cpu_name(),
        "cores": processor.cores(),
        "memory_gib": None if total is None else round(total / _GIB, 1),
        "free_gib": None if free is None else round(free / _GIB, 1),
        "driver": gpus[0].driver if gpus else None,
        "gpus": [
            f"{gpu.name}, capability {gpu.capability or 'n/a'}, "
            + ("MIG" if gpu.memory_total is None else f"{gpu.memory_total / _GIB:.1f} GiB")
            for gpu in gpus
        ],
    }


def _run(name: str, checkpoint_dir: Path | None) -> dict[str, Any]:
    """Return what identifies a run: hashes, counts and where it trained; never its text or its command.

    Raises: ConfigError if there is no such run.
    """
    from gpt2lab.config.settings import is_path, to_flat
    from gpt2lab.runs import history, overview

    folder = history.find_run(name, checkpoint_dir=checkpoint_dir)
    settings = to_flat(history.read_config(folder))
    # Two runs with the same settings have the same hash wherever they lie.
    plain = {
        key: value for key, value in settings.items() if not is_path(key) and key != "run_name"
    }
    status = overview.read_run(folder)
    facts = history.read_json(folder / "run.json") or {}
    trained_on = facts.get("environment") or {}
    names = ("torch", "device", "world_size", "dtype", "parallel", "compile")
    return {
        "folder": paths.display_path(folder),
        "model": settings["model"],
        "state": status.state,
        "exit_code": status.exit_code,
        "step": status.step,
        "max_steps": status.last_step,
        "checkpoint_step": status.checkpoint_step,
        "settings_sha256": hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest(),
        "data_fingerprint": facts.get("data_fingerprint"),
        **{f"run_{key}": trained_on.get(key) for key in names if key in trained_on},
    }


def _without_names(facts: Any) -> Any:
    """Return facts with ~ for the home folder, and *** for the user's and the host's name."""
    if isinstance(facts, dict):
        return {key: _without_names(value) for key, value in facts.items()}
    if isinstance(facts, list):
        return [_without_names(value) for value in facts]
    if not isinstance(facts, str):
        return facts
    home = os.path.expanduser("~")
    if home not in ("~", "/"):
        facts = re.sub(rf"{re.escape(home)}(?=/|$)", "~", facts)
    for name in {platform.node(), os.environ.get("USER"), Path(home).name} - {None, "", "root"}:
        facts = re.sub(rf"(?<!\w){re.escape(str(name))}(?!\w)", "***", facts)
    return facts
