"""Check this machine: versions, processor, GPUs; with flags of a run to come, whether its memory fits.

gpt2lab doctor
gpt2lab doctor latest --json
gpt2lab doctor --model gpt2 --mini_batch_size 32
gpt2lab doctor --model gpt2-xl --gpu H100

What it prints can be pasted into an issue: it has no secret, host name or user name, no environment variable and no
argument of a command, and a path below the home folder begins with ~. Flags that describe a run are those of gpt2lab
estimate; the exit code is 3 if the run does not fit.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2lab import __version__, fmt, paths
from gpt2lab.commands.parser import parse_flags
from gpt2lab.config.flags import argument
from gpt2lab.distributed import processor
from gpt2lab.planner import hardware, machine, reports
from gpt2lab.planner.machine import GpuState
from gpt2lab.planner.reports import GIB
from gpt2lab.planner.request import JobFlags, Predictor, check_job, given_flags

_PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "tiktoken", "transformers")
_NOT_THROTTLED = (None, "0x0000000000000000", "0x0000000000000001")  # no event, or idle
_OF_DOCTOR = {"run", "json", "checkpoint_dir"}  # flags that say nothing of a run to come
_COMMON = (  # flags of the short help
    *("run", "model", "gpu", "gpus", "mini_batch_size", "context_length", "parallel"),
    *("activation_checkpointing", "data_dir", "checkpoint_dir", "json"),
)


@dataclass(frozen=True)
class Doctor(JobFlags):
    """Check this machine, and whether a run to come fits its memory."""

    run: str | None = argument("a run, by name or folder, whose facts to add", default=None)


def main(argv: list[str]) -> int:
    """Print what was found, or one JSON object; return 2 if torch cannot use the GPUs, 3 if a run does not fit.

    Raises: ConfigError for settings that cannot work, or a run that does not exist.
    """
    flags = parse_flags(Doctor, argv, common=_COMMON)
    gpus = machine.detect_hardware().gpus
    facts: dict[str, Any] = {"versions": _versions(), "machine": _machine(gpus)}
    unseen = processor.unseen_gpus() if gpus else None
    facts["machine"]["unusable_gpus"] = unseen
    if flags.run is not None:
        facts["run"] = _run(flags.run, flags.checkpoint_dir)
    needs = None
    if set(given_flags(flags)) - _OF_DOCTOR:
        check_job(flags)
        predictor = Predictor(flags, hardware.load())
        needs = predictor.predict(predictor.job())
    if flags.json:
        facts |= {"gpus": [_as_json(gpu) for gpu in gpus], "topology": _topology(gpus) or None}
        facts = without_names(facts)
        if needs is not None:
            profile = predictor.profile.name
            facts["memory"] = reports.estimate_as_json(needs, profile_name=profile, window=None)
        print(json.dumps(facts, allow_nan=False))
    else:
        words = {"None": "n/a", "True": "yes", "False": "no"}
        for group, found in without_names(facts).items():
            print(f"{group}:")
            for name, value in found.items():
                print(f"  {name:<16} {words.get(str(value), value)}")
        print(without_names(_about_gpus(gpus)))
        if needs is not None:
            print(f"{reports.describe_job(needs)}, micro-batch {needs.job.micro_batch}")
            print("\n".join(reports.describe_memory(needs)))
    if unseen:
        return 2
    return 3 if needs is not None and needs.memory.fits is False else 0


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


def _machine(gpus: tuple[GpuState, ...]) -> dict[str, Any]:
    total, free = machine.total_memory(), machine.available_memory()
    return {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cpu": processor.cpu_name(),
        "cores": processor.cores(),
        "bf16": processor.has_bf16(),
        "memory_gib": None if total is None else round(total / GIB, 1),
        "free_gib": None if free is None else round(free / GIB, 1),
        "load_average": round(machine.load_average(), 2),
        "driver": gpus[0].driver if gpus else None,
    }


def _run(name: str, checkpoint_dir: Path | None) -> dict[str, Any]:
    """Return what identifies a run: hashes, counts and where it trained; never its text or its command.

    Raises: ConfigError if there is no such run.
    """
    from gpt2lab.config.settings import is_path, to_flat
    from gpt2lab.runs import history, overview
    from gpt2lab.runs.target import find_run

    folder = find_run(name, checkpoint_dir)
    settings = to_flat(history.read_config(folder))
    # Two runs with the same settings have the same hash wherever they lie.
    plain = {n: value for n, value in settings.items() if not is_path(n) and n != "run_name"}
    status = overview.read_run(folder)
    facts = history.read_json(folder / "run.json") or {}
    environment = facts.get("environment") or {}
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
        **{f"run_{name}": environment[name] for name in names if name in environment},
    }


def without_names(facts: Any) -> Any:
    """Return facts with ~ for the home folder, and *** for the user's and the host's name."""
    if isinstance(facts, dict):
        return {key: without_names(value) for key, value in facts.items()}
    if isinstance(facts, list):
        return [without_names(value) for value in facts]
    if not isinstance(facts, str):
        return facts
    home = os.path.expanduser("~")
    if home not in ("~", "/"):
        facts = re.sub(rf"{re.escape(home)}(?=/|$)", "~", facts)
    host = platform.node().partition(".")[0]
    for name in {host, os.environ.get("USER"), Path(home).name} - {None, "", "root"}:
        domain = r"(\.[\w-]+)*" if name == host else ""  # a site may be found by its domain alone
        facts = re.sub(rf"(?<!\w){re.escape(str(name))}{domain}(?!\w)", "***", facts)
    return facts


# -- GPUs ------------------------------------------------------------------------------------------------------------


def _about_gpus(gpus: tuple[GpuState, ...]) -> str:
    """Return a table of the GPUs with the peak used for MFU, or why there is none."""
    if not gpus:
        has_tool = shutil.which("nvidia-smi")
        why = "nvidia-smi names none" if has_tool else "nvidia-smi is not on the PATH"
        if has_tool and "CUDA_VISIBLE_DEVICES" in os.environ:
            why += f" that CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']} leaves visible"
        return f"no GPU: {why}; training would use the processor"
    header = ["GPU", "name", "capability", "bf16", "free GiB", "of", "busy", "clock"]
    lines = [fmt.table([*header, "peak TFLOP/s"], [_cells(gpu) for gpu in gpus])]
    lines.append("peak = dense bf16, else fp16, of hardware.json, used for MFU")
    for gpu in gpus:
        if gpu.throttle not in _NOT_THROTTLED:
            why = f"event reasons {gpu.throttle} (nvidia-smi -q -d PERFORMANCE)"
            lines.append(f"GPU {gpu.index} is throttled: {why}")
    return "\n".join(filter(None, [*lines, _topology(gpus)]))


def _cells(gpu: GpuState) -> list[str]:
    peak = hardware.peak_flops(gpu.name)
    sizes = (gpu.memory_free, gpu.memory_total)
    return [
        *(str(gpu.index), gpu.name, gpu.capability or "n/a", _bf16(gpu)),
        *("n/a" if size is None else f"{size / GIB:.1f}" for size in sizes),
        "n/a" if gpu.utilization is None else f"{gpu.utilization:.0f} %",
        "n/a" if gpu.clock is None else f"{gpu.clock} MHz",
        "n/a" if peak is None else f"{peak / 1e12:,.0f}",
    ]


def _as_json(gpu: GpuState) -> dict[str, object]:
    names = ("index", "name", "memory_total", "memory_free", "utilization", "driver", "capability")
    found = {name: getattr(gpu, name) for name in names}
    return found | {"bf16": _bf16(gpu), "peak_flops": hardware.peak_flops(gpu.name)}


def _bf16(gpu: GpuState) -> str:
    if gpu.capability is None:
        return "n/a"
    return "yes" if float(gpu.capability) >= 8.0 else "no"


def _topology(gpus: tuple[GpuState, ...]) -> str:
    return processor.smi("topo", "-m").rstrip() if len(gpus) > 1 else ""
