"""Print the command that continues a run or a checkpoint, after checking that it will.

gpt2lab runs resume-command latest
gpt2lab runs resume-command latest --output slurm --nodes 2 --gpus 8
gpt2lab runs resume-command latest --max_steps 40000 --allow_change max_steps
gpt2lab runs resume-command checkpoints/rates --output slurm --array --gpus 1
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gpt2lab import fmt, paths
from gpt2lab.commands.parser import AmongRuns, parse_flags
from gpt2lab.config.flags import RUN, argument, option
from gpt2lab.config.request import describe_change
from gpt2lab.config.schema import RecipeName
from gpt2lab.errors import CheckpointError, ConfigError
from gpt2lab.runs.console import say

if TYPE_CHECKING:
    from gpt2lab.training.start import Start

Output = Literal["command", "script", "slurm"]
_CPUS_OF_A_GPU = 4  # cores for each process that trains on a GPU
_SLURM = Path(__file__).with_name("slurm.jinja")
_PORT = 29400  # of torchrun's rendezvous
# Before its end Slurm asks the job to stop; torchrun kills what takes longer than ten seconds less.
_STOP_SECONDS = 120
_SHUTDOWN = f"--shutdown-timeout={_STOP_SECONDS - 10}"


@dataclass(frozen=True)
class Job:
    """The trainer's command line, and what it runs on."""

    name: str
    words: tuple[str, ...]  # the program and its flags
    resume: str = "latest"  # from which checkpoint
    nodes: int = 1
    processes: int = 1  # on each node
    on_gpu: bool = False  # one for each process
    cpus: int = 1  # for each node


@dataclass(frozen=True)
class ResumeCommand(AmongRuns):
    """Print the command that continues a run or a checkpoint, after checking that it will.

    Flags of the trainer are passed on. Jobs of Kubernetes and of SkyPilot: examples/kubernetes.yaml and
    examples/skypilot.yaml are files to fill in.
    """

    target: str = argument(f"{RUN}, or folder of a checkpoint")
    num_gpus: int | None = option(None, "world size; default as before", least=1)
    nodes: int = option(1, "with --output slurm: machines that share the world size", least=1)
    gpus: int | None = option(
        None,
        "GPUs of each machine; 0 = train on the CPU; default as before, shared over --nodes",
        least=0,
    )
    output: Output = option("command", "what to print; slurm: a batch script")
    array: bool = option(
        False,
        "with --output slurm: a job array of the runs that are not complete; TARGET is the folder of an ablation or a "
        "ladder",
    )


def main(argv: list[str]) -> int:
    """Print the command, and what it would change on stderr."""
    trainer_flags: list[str] = []
    flags = parse_flags(
        ResumeCommand, argv, name="gpt2lab runs resume-command", passed_on=trainer_flags
    )
    if flags.num_gpus is not None and flags.gpus is not None:
        raise ConfigError("--num_gpus counts all GPUs, --gpus those of each machine; give one")
    if flags.nodes > 1 and flags.output != "slurm":
        raise ConfigError(f"--nodes {flags.nodes}: goes with --output slurm")
    if flags.array:
        print(write_array(flags, trainer_flags))
        return 0
    start, job = plan_continuation(flags, trainer_flags)
    for name, change in start.changes.items():
        say(f"changed: {name} {describe_change(name, change)}")
    if start.is_complete:
        hint = "to train on, add --max_steps N --allow_change max_steps"
        say(f"note: the run is complete; {hint}")
    print(write(job, output=flags.output))
    return 0


def plan_continuation(flags: ResumeCommand, argv: Sequence[str] = ()) -> tuple["Start", Job]:
    """Return what the trainer would do to continue a run, or a checkpoint, and the job that makes it do so.

    `argv` are changed settings. Whatever the trainer would reject is rejected here. Nothing is written.

    Raises: GPT2LabError.
    """
    from gpt2lab.checkpoint import catalog
    from gpt2lab.commands.command_line import parse
    from gpt2lab.commands.train import recipe_named
    from gpt2lab.runs.summary import program_of
    from gpt2lab.runs.target import find_run
    from gpt2lab.training.resolve import resolve

    nodes, gpus = flags.nodes, flags.gpus
    folder = find_run(flags.target, flags.checkpoint_dir, or_checkpoint=True)
    chosen, run_dir = "latest", folder
    if folder.name.startswith("step_") and (folder / "manifest.json").exists():
        chosen, run_dir = str(catalog.open_checkpoint(folder).step), folder.parent
    checkpoint, _ = catalog.newest_valid(run_dir, set_aside=False)
    if checkpoint is None:
        raise CheckpointError(f"{run_dir}: no valid checkpoint to continue from")
    environment = checkpoint.manifest["environment"]
    world = flags.num_gpus or environment["world_size"]
    if gpus is not None:
        world = nodes * max(1, gpus)
    if world % nodes:
        raise ConfigError(
            f"--nodes {nodes}: a world size of {world} does not divide by it; give --gpus"
        )
    words = ["--resume", chosen, "--run_name", run_dir.name]
    if run_dir.parent != paths.runs_folder(None):
        words += ["--checkpoint_dir", str(run_dir.parent)]
    program = program_of(run_dir)
    name: RecipeName = "finetune" if program == "finetune" else "pretrain"
    words += argv
    request = parse(words, name).request
    start = resolve(request, recipe_named(name), world_size=world, set_aside=False)
    is_cpu = start.config.system.device == "cpu"
    if gpus and is_cpu:
        raise ConfigError(f"--gpus {gpus}: the device is cpu; add --device auto, or --gpus 0")
    was_on_gpu = bool(checkpoint.manifest.get("on_gpu")) and not is_cpu
    on_gpu = was_on_gpu if gpus is None else gpus > 0
    threads = environment.get("threads")
    each = _CPUS_OF_A_GPU if on_gpu or type(threads) is not int else threads
    job = Job(
        name=run_dir.name,
        words=(*paths.trainer(program), *words),
        resume=request.resume or "latest",
        nodes=nodes,
        processes=world // nodes,
        on_gpu=on_gpu,
        cpus=each * (world // nodes),
    )
    return start, job


def write(job: Job, *, output: Output) -> str:
    """Write a job as a command line, a shell script, or a job of Slurm.

    Raises: ConfigError for a job that would resume the same step each time that it is started again.
    """
    if output == "slurm":
        if job.resume not in ("latest", "auto"):
            raise ConfigError(
                f"--output slurm: the job would go back to checkpoint {job.resume} each time that it is started "
                f"again; resume it once with --output command, then write the job of {job.name}"
            )
        return write_slurm(job)
    command = _command(job, anywhere=output == "script")
    script = f"#!/usr/bin/env bash\nset -euo pipefail\ncd {_here()}\nexec {command}"
    return script if output == "script" else command


def write_array(flags: ResumeCommand, argv: Sequence[str] = ()) -> str:
    """Write a batch script whose tasks start or continue the runs of an ablation or a ladder, one each.

    Raises: ConfigError if TARGET holds none that can be trained so; whatever the trainer would reject.
    """
    from gpt2lab.commands.command_line import parse
    from gpt2lab.runs import history
    from gpt2lab.training.recipe import PRETRAINING
    from gpt2lab.training.resolve import resolve

    if (
        flags.output != "slurm"
        or flags.num_gpus
        or flags.nodes > 1
        or (flags.gpus or 0) > 1
        or argv
    ):
        raise ConfigError(
            "--array goes with --output slurm, and --gpus 0 or 1: each task trains one run with its own settings"
        )
    out = paths.from_working_directory(Path(flags.target))
    files = sorted((out / "settings").glob("*.json"))
    if not files or (out / "code.json").exists():
        raise ConfigError(
            f"{out}: no runs that a job array can train; give the --out of an ablation of settings, or of a ladder, "
            f"that was started once"
        )
    tasks = []
    on_gpu = flags.gpus != 0
    for file in files:
        more = file.with_suffix(".flags")
        words = ["--config", str(file), "--resume=auto"]
        words += more.read_text().split("\n") if more.exists() else []
        if any(word.startswith("--stop_after_steps=") for word in words):
            raise ConfigError(
                f"{out}: {file.stem} stops early (--stop_after_steps), so no job array completes it; a ladder with "
                f"trunks is continued by gpt2lab ladder run FILE --trunks --out {paths.display_path(out)}"
            )
        start = resolve(
            parse(words, "pretrain").request, PRETRAINING, world_size=1, set_aside=False
        )
        on_gpu &= start.config.system.device != "cpu"
        if not start.is_complete and not history.has_diverged(start.run_dir):
            tasks.append(words)
    if not tasks:
        raise ConfigError(f"{out}: all {len(files)} runs that were planned are complete")
    program = tuple(paths.trainer("train"))
    return write_slurm(Job(out.name, program, on_gpu=on_gpu, cpus=_CPUS_OF_A_GPU), tasks)


def _here() -> str:
    """Return the folder in which what was typed means what it means now."""
    return fmt.word_of_bash(str(Path.cwd()))


def _command(job: Job, *of_torchrun: str, anywhere: bool) -> str:
    """Write the command line of one node; `of_torchrun`: more flags of torchrun, for several processes."""
    launcher = [paths.program("python", anywhere=anywhere)]
    if job.processes > 1:
        each = f"--nproc_per_node={job.processes}"
        torchrun = paths.program("torchrun", anywhere=anywhere)
        launcher = [torchrun, "--standalone", each, *of_torchrun]
    return fmt.command_line((*launcher, *job.words))


def write_slurm(job: Job, tasks: Sequence[Sequence[str]] = ()) -> str:
    """Write a batch script that saves before the time limit and queues itself again.

    `tasks`: more words for each task of a job array.
    """
    import jinja2

    start = _command(job, _SHUTDOWN, anywhere=True)
    if job.nodes > 1:
        program = fmt.word_of_bash(paths.program("torchrun", anywhere=True))
        start = (
            f"{program} --nnodes={job.nodes} --nproc_per_node={job.processes} {_SHUTDOWN} \\\n"
            f'    --rdzv_backend=c10d --rdzv_endpoint="$head:{_PORT}" --rdzv_id="$SLURM_JOB_ID" \\\n'
            f"    {fmt.command_line(job.words)}"
        )
    return (
        jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        .from_string(_SLURM.read_text())
        .render(
            job=job,
            name=re.sub(r"[^A-Za-z0-9._-]", "_", job.name),  # Slurm reads no quotes
            folder=_here(),
            start=start,
            stop_seconds=_STOP_SECONDS,
            tasks=[fmt.command_line(own) for own in tasks],
        )
    )
