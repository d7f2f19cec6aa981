"""Print the command that continues a run or a checkpoint, after checking that it will.

gpt2lab resume-command my_run
gpt2lab resume-command my_run --output slurm --nodes 2 --gpus 8
gpt2lab resume-command my_run --max_lr 3e-4 --allow_change max_lr
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

from gpt2lab import paths
from gpt2lab.commands.command_line import argument, option, run_tyro
from gpt2lab.commands.job_files import (
    Job,
    Output,
    write_command,
    write_k8s,
    write_script,
    write_sky,
    write_slurm,
)
from gpt2lab.config.schema import RecipeName
from gpt2lab.errors import CheckpointError, ConfigError
from gpt2lab.runs.console import say

if TYPE_CHECKING:
    from gpt2lab.training.start import Start

_CPUS_OF_A_GPU = 4  # cores for each process that trains on a GPU


@dataclass(frozen=True)
class Continuation:
    """How a run goes on: what the trainer would do, and the command line that makes it do so."""

    start: "Start"
    job: Job
    resume: str = "latest"  # from which checkpoint


@dataclass(frozen=True)
class ResumeCommand:
    """Print the command that continues a run or a checkpoint; flags of the trainer are passed on."""

    target: Positional[str] = argument("run, or folder of a checkpoint")
    num_gpus: int | None = option(None, "world size; default as before", least=1)
    nodes: int = option(
        1, "with --output slurm, k8s or sky: machines that share the world size", least=1
    )
    gpus: int | None = option(
        None,
        "GPUs of each machine; 0 = train on the CPU; default as before, shared over --nodes",
        least=0,
    )
    output: Output = option(
        "command",
        "what to print; slurm: a batch script; k8s: a TrainJob of Kubeflow Trainer; sky: a managed job of SkyPilot",
    )
    image: str | None = option(
        None, "with --output k8s: built from the Dockerfile; default gpt2lab"
    )
    accelerator: str | None = option(
        None, "with --output sky: SkyPilot's name of the GPU; default H100"
    )
    checkpoint_dir: Path | None = option(None, "folder of the runs; default checkpoints/")


def main(argv: list[str]) -> int:
    """Print the command, and what it would change on stderr."""
    trainer_flags: list[str] = []
    flags = run_tyro(ResumeCommand, argv, passed_on=trainer_flags)
    _check(flags)
    found = plan_continuation(
        flags.target,
        num_gpus=flags.num_gpus,
        argv=trainer_flags,
        checkpoint_dir=flags.checkpoint_dir,
        nodes=flags.nodes,
        gpus=flags.gpus,
    )
    for name, (before, now) in found.start.changes.items():
        say(f"changed: {name} {before} -> {now}")
    if found.start.is_complete:
        hint = "to train on, add --max_steps N --allow_change max_steps"
        say(f"note: all {found.start.plan.max_steps} steps are done; {hint}")
    print(write(found, output=flags.output, image=flags.image, accelerator=flags.accelerator))
    return 0


def _check(flags: ResumeCommand) -> None:
    if flags.num_gpus is not None and flags.gpus is not None:
        raise ConfigError("--num_gpus counts all GPUs, --gpus those of each machine; give one")
    if flags.nodes > 1 and flags.output in ("command", "script"):
        raise ConfigError(f"--nodes {flags.nodes}: goes with --output slurm, k8s or sky")
    for name, output in (("image", "k8s"), ("accelerator", "sky")):
        if getattr(flags, name) is not None and flags.output != output:
            raise ConfigError(f"--{name} goes with --output {output}")


def plan_continuation(
    target: str,
    *,
    num_gpus: int | None,
    argv: list[str],
    checkpoint_dir: Path | None = None,
    nodes: int = 1,
    gpus: int | None = None,
) -> Continuation:
    """Return what continues a run, or one of its checkpoints, with `argv` as changed settings.

    Whatever the trainer would reject is rejected here. Nothing is written.

    Raises: GPT2LabError.
    """
    from gpt2lab.checkpoint import catalog
    from gpt2lab.commands.command_line import parse
    from gpt2lab.commands.train import recipe_named
    from gpt2lab.config.mixture import normal_words, read_sources
    from gpt2lab.runs import history
    from gpt2lab.runs.summary import program_of
    from gpt2lab.training.resolve import resolve

    folder = history.find_run(target, checkpoint_dir=checkpoint_dir)
    chosen, run_dir = "latest", folder
    if folder.name.startswith("step_") and (folder / "manifest.json").exists():
        chosen, run_dir = str(catalog.open_checkpoint(folder).step), folder.parent
    checkpoint, _ = catalog.newest_valid(run_dir, set_aside=False)
    if checkpoint is None:
        raise CheckpointError(f"{run_dir}: no valid checkpoint to continue from")
    environment = checkpoint.manifest["environment"]
    world = num_gpus or environment["world_size"]
    if gpus is not None:
        world = nodes * max(1, gpus)
    if world % nodes:
        raise ConfigError(
            f"--nodes {nodes}: a world size of {world} does not divide by it; give --gpus"
        )
    flags = ["--resume", chosen, "--run_name", run_dir.name]
    if run_dir.parent != paths.runs_folder(None):
        flags += ["--checkpoint_dir", str(run_dir.parent)]
    program = program_of(run_dir)
    name: RecipeName = "finetune" if program == "finetune" else "pretrain"
    request = parse([*flags, *argv], name).request
    start = resolve(request, recipe_named(name), world_size=world, set_aside=False)
    on_gpu = bool(checkpoint.manifest.get("on_gpu")) if gpus is None else gpus > 0
    threads = environment.get("threads")
    each = _CPUS_OF_A_GPU if on_gpu or type(threads) is not int else threads
    places: dict[str, tuple[str, ...]] = {"checkpoint_dir": (str(run_dir.parent.absolute()),)}
    shared, files = [run_dir.parent.absolute()], files_of(start)
    if name != "finetune":
        words = start.config.data.data_dir
        places["data_dir"] = normal_words("data_dir", words, lambda path: path.absolute())
        shared += [one.absolute() for one in read_sources(start.config.data).folders]
    job = Job(
        name=run_dir.name,
        words=(*paths.trainer(program), *flags, *argv),
        folder=Path.cwd(),
        nodes=nodes,
        processes=world // nodes,
        on_gpu=on_gpu,
        cpus=each * (world // nodes),
        shared=(*shared, *files.values()),
        places=places | {name: (str(file),) for name, file in files.items()},
    )
    return Continuation(start, job, request.resume or "latest")


def files_of(start: "Start") -> dict[str, Path]:
    """Return the files that a run reads besides its data, by the flag that names them."""
    files, source = {}, start.config.tuning.instructions
    if start.hellaswag == "on" and start.config.eval.hellaswag_path is not None:
        files["hellaswag_path"] = start.config.eval.hellaswag_path.absolute()
    if source is not None and source != "demo" and not source.startswith("hf:"):
        files["instructions"] = Path(source).absolute()
    return files


def write(
    continuation: Continuation,
    *,
    output: Output,
    image: str | None = None,
    accelerator: str | None = None,
) -> str:
    """Write it as a command line, a shell script, or a job of Slurm, Kubernetes or SkyPilot.

    Raises: ConfigError for what such a job cannot do, or cannot name.
    """
    is_job, resume = output in ("slurm", "k8s", "sky"), continuation.resume
    if is_job and resume not in ("latest", "auto"):
        raise ConfigError(
            f"--output {output}: the job would go back to checkpoint {resume} each time that it is started again; "
            f"resume it once with --output command, then write the job of {continuation.job.name}"
        )
    job = continuation.job
    match output:
        case "command":
            return write_command(job)
        case "script":
            return write_script(job)
        case "slurm":
            return write_slurm(job)
        case "k8s":
            return write_k8s(job, image=image or "gpt2lab")
        case "sky":
            return write_sky(job, accelerator=accelerator or "H100")
