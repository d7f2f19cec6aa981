"""`--import_checkpoint FILE.pt`: a foreign file becomes the first checkpoint of a run that `--resume` goes on from."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from gpt2lab import paths
from gpt2lab.checkpoint import store
from gpt2lab.checkpoint.foreign import Foreign, read_foreign
from gpt2lab.checkpoint.state import TrainState
from gpt2lab.config.command_line import Command
from gpt2lab.config.settings import ARCHITECTURE
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.errors import ConfigError
from gpt2lab.model import rng
from gpt2lab.model.gpt import GPT, build_model
from gpt2lab.optim.optimizers import build_optimizers
from gpt2lab.runs import summary
from gpt2lab.runs.folder import RunFolder
from gpt2lab.training.facts import facts_of
from gpt2lab.training.parts import fit_to_hardware
from gpt2lab.training.start import Start, decide


def import_checkpoint(command: Command, path: Path) -> int:
    """Convert the file, commit it, and say what it was and how to go on.

    Raises: CheckpointError for the file, ConfigError and DataError for the run it begins; nothing is written then.
    """
    runtime = Runtime()
    if runtime.world_size > 1:
        raise ConfigError("--import_checkpoint needs one process; resume with as many as you like")
    path = paths.from_working_directory(path)
    foreign = read_foreign(path, trust=command.verbs.trust)
    shape = {name: getattr(foreign.model, name) for name in ARCHITECTURE}
    typed = command.fresh().model
    if command.fresh().optim.optimizer != "adamw":
        raise ConfigError(f"{path.name} holds AdamW's moments; import it with --optimizer adamw")
    for name, value in shape.items():
        if name in command.typed and getattr(typed, name) != value:
            raise ConfigError(f"--{name} {getattr(typed, name)}: {path.name} has {value}")
    flags = [f"--{name}={value}" for name, value in shape.items() if name not in command.typed]
    start = decide(command.with_flags(*flags), world_size=1, set_aside=False)
    if foreign.step >= start.plan.max_steps:
        raise ConfigError(
            f"{path.name} is of step {foreign.step}, the run would have {start.plan.max_steps}: "
            f"say how long it shall be in all with --max_steps"
        )
    start = fit_to_hardware(start, runtime)
    folder = _commit(start, foreign, path, runtime)
    for warning in (*foreign.notes, *start.warnings):
        print(f"note: {warning}")
    moments = "as in the file" if foreign.moments else "none in the file: its moments begin at zero"
    print(
        f"imported {path.name}: {start.plan.parameters:,} parameters, step {foreign.step} of {start.plan.max_steps}\n"
        f"optimizer {moments}\n"
        f"data begins at sample 0: the file does not say which windows it was trained on\n"
        f"saved as {paths.for_people(folder)}; go on with: "
        f"{summary.command_to_resume(start.run_dir, world_size=1)}"
    )
    return 0


def _commit(start: Start, foreign: Foreign, path: Path, runtime: Runtime) -> Path:
    """Write the run's folder with this one checkpoint."""
    config = start.config
    rng.seed_everything(config.data.seed)
    model = build_model(config.model, seed=config.data.seed, device=torch.device("cpu"))
    optimizers = build_optimizers(model, config.optim, device=torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(foreign.weights[name])
    _fill(model, optimizers, foreign)
    origin = {"step": foreign.step, "imported": path.name, "sha256": _sha256(path), "samples": 0}
    state = TrainState(step=foreign.step, history=(origin,))
    facts = facts_of(start, runtime)
    folder = RunFolder(start.run_dir)
    try:
        folder.write_config(config, facts)
        saved = store.save(
            start.run_dir,
            kind="rolling",
            content=store.collect(model, optimizers, keep=True),
            state=state,
            rng_states=[rng.capture(runtime.device)],
            facts=facts,
        )
        folder.write_status("stopped", step=state.step, reason="imported", exit_code=0)
    finally:
        folder.close()
    return saved


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _fill(model: GPT, optimizers: list[torch.optim.Optimizer], foreign: Foreign) -> None:
    """Give AdamW the file's moments, or those that it has before its first update."""
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = named[id(parameter)]
                values = foreign.moments[name] if foreign.moments else None
                optimizer.state[parameter] = values or {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
