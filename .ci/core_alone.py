"""Check that the core works without what surrounds it.

Copies the package without its satellites, and without the commands that import one, and in that copy: trains 20 steps,
is killed and resumes to the same bits, scores HellaSwag, and runs the core's own tests.

python .ci/core_alone.py [--keep FOLDER] [PYTEST ARGUMENTS]
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = {
    *("config", "tokenizers", "model", "optim", "distributed", "checkpoint"),
    *("data", "runs", "evaluation", "training"),
}
# `src/train.py` of the core alone; the real one imports what surrounds a run.
_DOOR = """
import sys
from gpt2lab.commands.command_line import parse
from gpt2lab.commands.entry import run
from gpt2lab.runs.console import never_wait_for_stderr
from gpt2lab.training.pretrain import pretrain

def main(argv):
    never_wait_for_stderr()
    pretrain(parse(argv).request)
    return 0

if __name__ == "__main__":
    sys.exit(run(main))
"""
_TRAIN = """
import sys
from pathlib import Path
from gpt2lab.config.settings_file import make_request
from gpt2lab.training.pretrain import pretrain

root, name, resume, steps = sys.argv[1:]
settings = dict(
    n_layer=2, n_head=2, n_embd=32, context_length=16, vocab_size=256, total_batch_size=128, mini_batch_size=2,
    data_dir=f"{root}/data", checkpoint_dir=Path(root, "runs"), run_name=name, max_steps=20, checkpoint_freq=5,
    device="cpu", dtype="fp32", compile="off", eval_freq=10, val_tokens=320, sample_freq=0,
)
if int(steps):
    settings["stop_after_steps"] = int(steps)
pretrain(make_request(settings, resume=resume or None))
"""
_HELLASWAG = """
import sys
from pathlib import Path
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.config.schema import SystemConfig
from gpt2lab.evaluation.hellaswag import HellaSwag, summarize
from gpt2lab.evaluation.hellaswag_items import load_questions
from gpt2lab.model.gpt import build_model
from gpt2lab.config.schema import ModelConfig
from gpt2lab.tokenizers.gpt2 import GPT2
import torch

runtime = Runtime()
system = SystemConfig(device="cpu", dtype="fp32", compile="off")
runtime.use(system)
model = build_model(ModelConfig(n_layer=1, n_head=2, n_embd=32, context_length=128), seed=1, device=runtime.device)
items = HellaSwag(
    load_questions(Path(sys.argv[1]), GPT2), context_length=128, strategy=Strategy(runtime, system)
)
results = items.measure(model)
print(summarize(results))
"""


def imports(path: Path) -> set[str]:
    """Return the rooms and modules of the package that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.removeprefix("gpt2lab.") for name in names if name.startswith("gpt2lab.")}


def copy_core(to: Path) -> None:
    """Copy what is left when every satellite is deleted, and every command that imports one."""
    package = to / "src" / "gpt2lab"
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src" / "gpt2lab", package, ignore=skip)
    for folder in ("tests", "scripts", "benchmarks"):
        shutil.copytree(ROOT / folder, to / folder, ignore=skip)
    (to / "src" / "train.py").write_text(_DOOR)
    shutil.copy(ROOT / "pyproject.toml", to)
    (to / "data").mkdir()
    (to / "checkpoints").mkdir()
    gone = set()
    for room in package.iterdir():
        if room.is_dir() and room.name not in CORE | {"commands"}:
            shutil.rmtree(room)
            gone.add(room.name)
    commands = {f"commands.{path.stem}": path for path in (package / "commands").glob("*.py")}
    needs = {name: imports(path) for name, path in commands.items()}
    while doomed := {
        name for name in needs if any(n.split(".")[0] in gone or n in gone for n in needs[name])
    }:
        for name in doomed:
            commands[name].unlink()
            del needs[name]
        gone |= doomed
    for room in (to / "tests" / "unit").iterdir():
        if room.is_dir() and room.name not in CORE:
            shutil.rmtree(room)


def run(code: str, *argv: object, folder: Path, kill_at: str = "") -> int:
    """Run a program over the copied package and return its exit code."""
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}
    if kill_at:
        environment["FAULT"] = kill_at
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, argv)], cwd=folder, env=environment
    ).returncode


def main(argv: list[str]) -> int:
    """Check it all and return the exit code."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_core(folder)
        sys.path[:0] = [str(folder / "src"), str(folder / "tests")]
        from tiny import TRAIN_SHARDS, VAL_SHARDS, write_items, write_shards

        write_shards(folder / "data", train=TRAIN_SHARDS, val=VAL_SHARDS)
        items = write_items(folder / "items.jsonl")
        assert run(_TRAIN, folder, "straight", "", 0, folder=folder) == 0
        killed = run(_TRAIN, folder, "killed", "", 0, folder=folder, kill_at="step:kill9@13")
        assert killed == -signal.SIGKILL, killed
        assert run(_TRAIN, folder, "killed", "latest", 0, folder=folder) == 0
        hashes = [
            json.loads((folder / "runs" / run / "step_00000020" / "manifest.json").read_text())[
                "files"
            ]
            for run in ("straight", "killed")
        ]
        for file in ("model.safetensors", "optim.safetensors"):
            assert hashes[0][file]["sha256"] == hashes[1][file]["sha256"], file
        assert run(_HELLASWAG, items, folder=folder) == 0
        print(
            "core alone: 20 steps, killed at 13, resumed to the same bits; HellaSwag scored",
            flush=True,
        )
        rooms = [
            f"tests/unit/{room}" for room in sorted(CORE) if (folder / "tests/unit" / room).is_dir()
        ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(("src", "tests"))}
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *argv, *rooms], cwd=folder, env=environment
        ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
