"""`--import_checkpoint FILE.pt`: a foreign file becomes the first checkpoint of a run that `--resume` goes on from."""

from __future__ import annotations

import dataclasses
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
from gpt2lab.files import sha256_of
from gpt2lab.model import rng
from gpt2lab.model.gpt import build_model
from gpt2lab.optim.optimizers import build_optimizers
from gpt2lab.runs import summary
from gpt2lab.runs.folder import RunFolder
from gpt2lab.training.pretrain import choose_hardware
from gpt2lab.training.resolve import resolve
from gpt2lab.training.resume_check import facts_of
from gpt2lab.training.start import Start


def import_checkpoint(command: Command, path: Path) -> int:
    """Convert the file, commit it, and say what it was and how to go on.

    Raises: CheckpointError for the file, ConfigError and DataError for the run it begins; nothing is written then.
    """
    runtime = Runtime()
    if runtime.world_size > 1:
        raise ConfigError("--import_checkpoint needs one process; resume with as many as you like")
    path = paths.from_working_directory(path)
    foreign = read_foreign(path, trust=command.verbs.trust)
    shape = {name: getattr(foreign.model, name) for name in ARCHITECTURE if name != "num_tokens"}
    typed = command.fresh()
    if typed.optim.optimizer != "adamw":
        raise ConfigError(f"{path.name} holds AdamW's moments; import it with --optimizer adamw")
    for name, value in shape.items():
        if name in command.typed and (other := getattr(typed.model, name)) != value:
            raise ConfigError(f"--{name} {other}: {path.name} has {value}")
    command = dataclasses.replace(command, values=shape | command.values)
    start = resolve(command, world_size=1, set_aside=False)
    if foreign.step >= start.plan.max_steps:
        raise ConfigError(
            f"{path.name} is of step {foreign.step}, the run would have {start.plan.max_steps}: "
            f"say how long it shall be in all with --max_steps"
        )
    start = choose_hardware(start, runtime)
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
    config, cpu = start.config, torch.device("cpu")
    rng.seed_everything(config.data.seed)
    model = build_model(config.model, seed=config.data.seed, device=cpu)
    optimizers = build_optimizers(model, config.optim, device=cpu)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(foreign.weights[name])
    for optimizer in optimizers:
        for name, parameter in store.parameters_of(optimizer, model):
            fresh = {"step": torch.zeros(())}  # AdamW's before its first update
            fresh |= {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = foreign.moments[name] if foreign.moments else fresh
    origin = {"step": foreign.step, "imported": path.name, "sha256": sha256_of(path), "samples": 0}
    state = TrainState(step=foreign.step, history=(origin,))
    facts = facts_of(start, runtime)
    folder = RunFolder(start.run_dir)
    try:
        folder.write_config(config, facts, start.tokenizer_files)
        saved = store.save(
            start.run_dir,
            kind="rolling",
            content=store.collect(model, optimizers, keep=True),
            state=state,
            rng_states=[rng.capture(runtime.device)],
            facts=facts,
            files=start.tokenizer_files,
        )
        folder.write_status("stopped", step=state.step, reason="imported", exit_code=0)
    finally:
        folder.close()
    return saved
