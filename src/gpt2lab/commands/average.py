"""Average the weights of a run's newest checkpoints into a new run, whose one checkpoint says so.

Without --last they are the mean that --average_tail keeps in the newest checkpoint.

gpt2lab runs average latest
gpt2lab runs average latest --last 5
gpt2lab runs average my_run --last 3 --run_name my_average
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2lab import fmt, paths
from gpt2lab.checkpoint import catalog
from gpt2lab.checkpoint.catalog import CheckpointInfo
from gpt2lab.checkpoint.manifest import Draft, commit, verify
from gpt2lab.commands.parser import AmongRuns, WithJson, parse_flags
from gpt2lab.config.flags import RUN, argument, option
from gpt2lab.config.schema import Config
from gpt2lab.config.settings import find_problems, override
from gpt2lab.errors import ConfigError, SaveError, raise_problems, system_errors_as
from gpt2lab.runs import history
from gpt2lab.runs.console import doing
from gpt2lab.runs.events import METRICS
from gpt2lab.runs.folder import RunFolder
from gpt2lab.runs.target import find_run

_OF_FILES = ("format", "files", "manifest_sha256")  # of a manifest: what `commit` writes itself
_MODEL, _OPTIM, _STATE = "model.safetensors", "optim.safetensors", "state.json"
_MEAN = "/average"  # of a weight in _OPTIM


@dataclass(frozen=True)
class Average(WithJson, AmongRuns):
    """Average the weights of a run's newest checkpoints; optimizer and counts are those of the newest."""

    run: str = argument(RUN)
    last: int | None = option(
        None,
        "so many of the newest checkpoints, at least 2; default the mean that --average_tail keeps in the newest",
    )
    run_name: str | None = option(
        None, "name of the new run, beside the other; default RUN_averageN"
    )


def main(argv: list[str]) -> int:
    """Average, commit and print."""
    flags = parse_flags(Average, argv, name="gpt2lab runs average")
    run_dir = find_run(flags.run, flags.checkpoint_dir).resolve()
    infos, damaged = catalog.list_checkpoints(run_dir)
    if damaged:
        raise damaged[0]
    if flags.last is not None and not 2 <= flags.last <= len(infos):
        steps = ", ".join(str(info.step) for info in infos) or "none"
        raise ConfigError(
            f"--last {flags.last}: the checkpoints of {run_dir.name} are {steps}; an average takes 2 or more of them"
        )
    infos = infos[-(flags.last or 1) :]
    begin = infos[-1].manifest.get("average_from") if infos else None
    if flags.last is None and (begin is None or infos[-1].step <= begin):
        raise ConfigError(
            f"{run_dir.name}: its newest checkpoint holds no mean of --average_tail; give --last N checkpoints"
        )
    name = flags.run_name or f"{run_dir.name}_average{flags.last or ''}"
    raise_problems(find_problems(override(Config(), {"run_name": name})))
    if (run_dir.parent / name).exists():
        raise ConfigError(f"{run_dir.parent / name}: is there already; choose another --run_name")
    if infos[-1].config().tuning.lora_r:
        raise ConfigError(
            f"{run_dir.name}: trained with --lora_r; the average of factors is not that of their products"
        )
    of: dict[str, object] = {"run": run_dir.name, "steps": [info.step for info in infos]}
    steps = ", ".join(str(info.step) for info in infos)
    if flags.last is None:
        assert begin is not None
        of = {"run": run_dir.name, "tail": [begin + 1, infos[-1].step]}
        steps = f"{begin + 1} to {infos[-1].step}"
    folder = _write(run_dir.parent / name, infos, of)
    found = {"run_name": name, "folder": str(folder), "average_of": of}
    next_ = fmt.command_line(
        [*paths.command_words("evaluate"), name]
        + [f"--checkpoint_dir={flags.checkpoint_dir}"] * (flags.checkpoint_dir is not None)
    )
    text = f"{paths.display_path(folder)}: the average of steps {steps} of {run_dir.name}; measure it with: {next_}"
    print(json.dumps(found) if flags.json else text)
    return 0


def _write(run_dir: Path, infos: list[CheckpointInfo], of: Mapping[str, object]) -> Path:
    """Commit the average as the only checkpoint of a new run and return its folder.

    Raises: CheckpointError naming a damaged file; SaveError. Nothing is written before every byte is verified.
    """
    import safetensors.torch

    with doing("averaging the weights"):
        for info in infos:
            verify(info.path)
        file, ending = (_OPTIM, _MEAN) if "tail" in of else (_MODEL, "")
        total: dict[str, Any] = {}
        for info in infos:
            for key, tensor in safetensors.torch.load_file(info.path / file).items():
                if key.endswith(ending):
                    name = key.removesuffix(ending)
                    total[name] = tensor.double() + total.get(name, 0)
        mean = {key: (tensor / len(infos)).float() for key, tensor in total.items()}
    newest = infos[-1]
    content = json.loads((newest.path / _STATE).read_bytes())
    # The losses are of other weights.
    content["state"] |= dict.fromkeys(("val_loss", "best_val_loss", "best_step"))
    facts = {key: value for key, value in newest.manifest.items() if key not in _OF_FILES}
    facts["config"] = {**facts["config"], "run_name": run_dir.name}
    facts |= {"run": run_dir.name, "kind": "average", "average_of": of, "created": time.time()}
    facts |= {"val_loss": None, "best_val_loss": None}
    kept = {key: (newest.path / key).read_bytes() for key in newest.manifest["files"]}
    replaced = {_MODEL: safetensors.torch.save(mean), _STATE: json.dumps(content).encode()}
    files = {key: [data] for key, data in (kept | replaced).items()}
    tokenizer = {k: v for k, v in kept.items() if not k.endswith(".safetensors") and k != _STATE}
    start = history.read_json(newest.path.parent / "run.json") or {}
    with (
        ExitStack() as undo,
        closing(RunFolder(run_dir)) as folder,
        system_errors_as(SaveError, run_dir),
    ):
        undo.callback(shutil.rmtree, run_dir, ignore_errors=True)
        folder.write_config(
            facts["config"], {**start, "run": run_dir.name, "average_of": of}, tokenizer
        )
        (run_dir / METRICS).touch()  # which `runs verify` reads
        commit(run_dir, Draft(newest.step, files, facts))
        folder.write_status("stopped", step=newest.step, reason="average", exit_code=0)
        undo.pop_all()
    return run_dir
