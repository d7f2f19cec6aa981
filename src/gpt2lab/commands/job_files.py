"""A continued run as a job: of Slurm, of Kubernetes with Kubeflow Trainer, of SkyPilot. No torch.

Names and settings stand in a job file as quoted words of its command alone. The two that are YAML are written as JSON,
which is YAML too and quotes every text.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gpt2lab import fmt, paths
from gpt2lab.config.mixture import normal_words
from gpt2lab.errors import ConfigError

Output = Literal["command", "script", "slurm", "k8s", "sky"]
_PORT = 29400  # of torchrun's rendezvous
_STOP_SECONDS = (
    120  # before its end Slurm asks the job to stop; torchrun kills what takes longer than 110
)
_SHUTDOWN = f"--shutdown-timeout={_STOP_SECONDS - 10}"


@dataclass(frozen=True)
class Job:
    """The trainer's command line, and what it runs on."""

    name: str
    words: tuple[str, ...]  # the program and its flags
    folder: Path  # where what was typed means what it means here
    nodes: int = 1
    processes: int = 1  # on each node
    on_gpu: bool = False  # one for each process
    cpus: int = 1  # for each node
    shared: tuple[Path, ...] = ()  # what every node must see: the runs' folder, data, files
    # Flags that name these places, with their words: for machines on which they lie elsewhere.
    places: dict[str, tuple[str, ...]] = field(default_factory=dict)


def launcher(job: Job) -> tuple[str, ...]:
    """Return the words before the program, on one node."""
    if job.processes == 1:
        return (paths.program("python"),)
    return (paths.program("torchrun"), "--standalone", f"--nproc_per_node={job.processes}")


def write_command(job: Job) -> str:
    """Write the command line."""
    return fmt.command_line((*launcher(job), *job.words))


def write_script(job: Job) -> str:
    """Write a script that runs the command where it was made."""
    return (
        "#!/usr/bin/env bash\nset -euo pipefail\n"
        f"cd {fmt.word_of_bash(str(job.folder))}\nexec {write_command(job)}"
    )


def write_slurm(job: Job) -> str:
    """Write a batch script that saves before the time limit and queues itself again."""
    options = [
        f"--job-name={re.sub(r'[^A-Za-z0-9._-]', '_', job.name)}",  # Slurm reads no quotes
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={job.cpus}",
        *([f"--gpus-per-node={job.processes}"] if job.on_gpu else []),
        "--time=12:00:00",
        f"--signal=B:USR1@{_STOP_SECONDS}",
        "--requeue",
        "--open-mode=append",
    ]
    head, start = "", write_command(job)
    if job.nodes > 1:
        head = 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
        program = fmt.word_of_bash(paths.program("torchrun"))
        start = (
            f"{program} --nnodes={job.nodes} --nproc_per_node={job.processes} {_SHUTDOWN} \\\n"
            f'    --rdzv_backend=c10d --rdzv_endpoint="$head:{_PORT}" --rdzv_id="$SLURM_JOB_ID" \\\n'
            f"    {fmt.command_line(job.words)}"
        )
    elif job.processes > 1:
        first, *rest = launcher(job)
        start = fmt.command_line((first, *rest, _SHUTDOWN, *job.words))
    lines = "".join(f"#SBATCH {option}\n" for option in options)
    return (
        f"#!/usr/bin/env bash\n{lines}"
        f"# Slurm sends USR1 {_STOP_SECONDS} s before the end: the trainer saves, and the job queues itself again.\n"
        f"set -uo pipefail\ncd {fmt.word_of_bash(str(job.folder))} || exit\n{head}"
        f"srun --cpus-per-task={job.cpus} --kill-on-bad-exit=1 {start} &\n"
        'child=$! again=""\n'
        # Signalled itself, srun would kill its tasks half a minute later.
        "trap 'again=yes; scancel --signal=TERM \"$SLURM_JOB_ID\"' USR1\n"
        'while wait "$child"; code=$?; kill -0 "$child" 2>/dev/null; do :; done\n'
        '[[ -z $again ]] || scontrol requeue "$SLURM_JOB_ID"\n'
        'exit "$code"'
    )


def write_k8s(job: Job, *, image: str) -> str:
    """Write a TrainJob of Kubeflow Trainer, whose torch-distributed runtime sets torchrun's rendezvous.

    Code, runs and data are on a disk that all nodes mount at the paths of this machine; the image has the packages.
    """
    name = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")[:50].strip("-") or "gpt2lab"
    mounts, volumes = [], []
    folders = dict.fromkeys((paths.REPOSITORY, job.folder, *job.shared))
    for number, folder in enumerate(folders):
        mounts.append({"name": f"shared-{number}", "mountPath": str(folder)})
        kind = "File" if folder.is_file() else "Directory"
        place = {"path": str(folder), "type": kind}
        volumes.append({"name": f"shared-{number}", "hostPath": place})
    limits = {"cpu": str(job.cpus)} | ({"nvidia.com/gpu": str(job.processes)} if job.on_gpu else {})
    script = (
        f"cd {fmt.word_of_bash(str(job.folder))} && "
        f"exec torchrun {_SHUTDOWN} {fmt.command_line(job.words)}"
    )
    pod = {"containers": [{"name": "node", "volumeMounts": mounts}], "volumes": volumes}
    patched = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    return _as_yaml(
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": name if name[0].isalpha() else f"run-{name}"},
            "spec": {
                "runtimeRef": {"name": "torch-distributed"},
                "trainer": {
                    "image": image,
                    "numNodes": job.nodes,
                    "numProcPerNode": job.processes,
                    "command": ["bash", "-c", script],
                    "resourcesPerNode": {"requests": limits, "limits": limits},
                },
                "runtimePatches": [
                    {
                        "manager": "gpt2lab.dev/resume-command",
                        "trainingRuntimeSpec": {
                            "template": {"spec": {"replicatedJobs": [patched]}}
                        },
                    }
                ],
            },
        }
    )


def write_sky(job: Job, *, accelerator: str) -> str:
    """Write a managed job of SkyPilot: a lost machine is replaced, and the run goes on from its bucket.

    Raises: ConfigError where there is no checkout that SkyPilot could copy to its machines.
    """
    if not paths.IS_CHECKOUT:
        raise ConfigError(
            "--output sky: copies a checkout to its machines, and gpt2lab is installed as a package here; "
            "call it in a checkout"
        )
    resources: dict[str, Any] = {
        "cpus": f"{job.cpus}+",
        "job_recovery": {"max_restarts_on_errors": 3},
    }
    if job.on_gpu:
        resources["accelerators"] = f"{accelerator}:{job.processes}"
    runs, *data = job.shared
    bucket = {"name": _bucket(runs), "source": str(runs), "mode": "MOUNT"}
    mounts = {_in_sky(runs): bucket} | {_in_sky(folder): str(folder) for folder in data}
    words = (f"src/{Path(job.words[0]).name}", *_placed_in_sky(job))
    run = (
        f'torchrun --nnodes="$SKYPILOT_NUM_NODES" --nproc_per_node={job.processes} '
        f'--node_rank="$SKYPILOT_NODE_RANK" --master_port={_PORT} '
        f"--master_addr=\"${{SKYPILOT_NODE_IPS%%$'\\n'*}}\" {_SHUTDOWN} "
        f"{fmt.command_line(words)}"
    )
    return _as_yaml(
        {
            "name": re.sub(r"[^A-Za-z0-9]+", "-", job.name).strip("-")[:50] or "gpt2lab",
            "workdir": str(paths.REPOSITORY),
            "num_nodes": job.nodes,
            "resources": resources,
            "file_mounts": mounts,
            "setup": "pip install -r requirements.txt",
            "run": run,
        }
    )


def _in_sky(folder: Path) -> str:
    """Return where a folder lies on SkyPilot's machines, which have the repository as their working directory."""
    try:
        return f"~/sky_workdir/{folder.relative_to(paths.REPOSITORY)}"
    except ValueError:
        return str(folder)


def _placed_in_sky(job: Job) -> list[str]:
    """Return the flags with each folder where it lies on SkyPilot's machines; the trainer expands the ~."""
    found: list[str] = []
    skips = False
    for word in job.words[1:]:
        if word.startswith("--"):
            skips = word[2:].partition("=")[0].replace("-", "_") in job.places
        if not skips:
            found.append(word)
    for name, words in job.places.items():
        # Read as --data_dir is: one place, or several with their weights.
        found += [f"--{name}", *normal_words("data_dir", words, lambda p: Path(_in_sky(p)))]
    return found


def _bucket(runs: Path) -> str:
    """Return the name of the bucket that holds a folder of runs: the same at each call, and nobody else's."""
    place = f"{platform.node()}:{os.getuid()}:{runs}"
    return f"gpt2lab-{hashlib.sha256(os.fsencode(place)).hexdigest()[:20]}"


def _as_yaml(content: dict[str, Any]) -> str:
    """Write JSON that YAML reads as the same: escapes of pairs of surrogates, which JSON has, would be others there.

    Raises: ConfigError for a folder's name of characters that neither shows.
    """
    text = json.dumps(content, indent=2, ensure_ascii=False)
    for line in text.split("\n"):
        if not line.isprintable():
            raise ConfigError(f"{line.strip()!a}: a job file cannot name this; rename it")
    return text
