"""The commands of README (shrunk) and of getting_started.md (as written) run, in order, in a copy of the project."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ecosystem
from launch import REPOSITORY, TO_ITS_END, environment, events
from tiny import make_tokens

SHRINK = (
    "--n_layer=1 --n_head=1 --n_embd=16 --context_length=32 --total_batch_size=256 --mini_batch_size=2 "
    "--max_steps=2 --val_tokens=256 --sample_tokens=4 --device=cpu --log_freq=1"
)
# Command -> flags that make it small; None: another test or CI runs it, or it needs the network.
COMMANDS: dict[str, str | None] = {
    "make quickstart": None,  # .ci/run
    "make test": None,  # .ci/run
    "make first-card": None,  # tests/unit/benchmarks/test_first_card.py
    "source .venv/bin/activate": None,
    "gpt2lab prepare fineweb-edu": None,  # network
    "torchrun --nproc_per_node=4 src/train.py --model gpt2 --run_name gpt2-124m --use_tensorboard": (
        f"{SHRINK} --stop_after_steps=1"
    ),
    "torchrun --nproc_per_node=4 src/train.py --resume latest": "",
    "gpt2lab train --gpus 4": "--dry_run --device=cpu",
    "python src/train.py --list_checkpoints": "",
    "python scripts/estimate_time.py": "",
    "gpt2lab --help": "",
}


def commands_of_a_newcomer() -> list[str]:
    """Return every command of README's bash blocks and sentences, in order, each once."""
    text = (REPOSITORY / "README.md").read_text()
    found = [line for block in blocks_of(text) for line in block.splitlines() if line]
    sentences = re.sub(r"```.*?```", "", text, flags=re.S)
    found += re.findall(r"`((?:python|make|torchrun|gpt2lab) [^`]+)`", sentences)
    return list(dict.fromkeys(found))


def blocks_of(text: str) -> list[str]:
    """Return the bash blocks of a page."""
    return re.findall(r"```bash\n(.*?)```", text, flags=re.S)


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """Return a copy of the project with a little data where the README's commands look for it."""
    folder = tmp_path_factory.mktemp("clone") / "gpt2lab"
    for name in ("src", "scripts"):
        shutil.copytree(REPOSITORY / name, folder / name)
    shutil.copy(REPOSITORY / "Makefile", folder)
    (folder / "checkpoints").mkdir()
    command = folder / "bin" / "gpt2lab"  # as pip writes it, but for the package of the copy
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m gpt2lab "$@"\n')
    command.chmod(0o755)
    data = folder / "data" / "fineweb_edu"
    data.mkdir(parents=True)
    import numpy as np

    np.save(data / "edufineweb_val_000000.npy", make_tokens(4_000, seed=1))
    np.save(data / "edufineweb_train_000001.npy", make_tokens(600_000, seed=2))
    (log,) = shutil.copytree(REPOSITORY / "docs" / "log", folder / "docs" / "log").iterdir()
    log.write_text(log.read_text()[:50_000])  # a third, which is trained in a third of the time
    return folder


def test_every_command_of_a_newcomer_is_known_here():
    assert set(commands_of_a_newcomer()) == set(COMMANDS)


def test_the_table_of_what_it_works_with_is_what_the_tests_recorded():
    page = (REPOSITORY / "README.md").read_text()
    assert ecosystem.with_table(page) == page, "python tests/ecosystem.py writes it"
    for name, row in ecosystem.read_rows().items():
        file, _, test = row["test"].partition("::")
        body = (REPOSITORY / file).read_text().partition(f"def {test}(")[2].partition("\ndef ")[0]
        assert re.search(rf'works_with\(\s*"{name}"', body), row["test"]


def test_the_front_page_shows_a_picture_and_a_short_transcript():
    text = (REPOSITORY / "README.md").read_text()
    transcript = re.findall(r"```text\n(.*?)```", text, flags=re.S)[0]
    assert len(transcript.splitlines()) == 12
    assert max(len(line) for line in transcript.splitlines()) <= 125
    for picture in re.findall(r"!\[[^]]+\]\(([^)]+)\)", text):
        assert "prefers-color-scheme:dark" in (REPOSITORY / picture).read_text()


@pytest.mark.slow
def test_the_commands_of_a_newcomer_run(clone):
    """In the order of the pages: prepare and train come before what they make possible."""
    for command in commands_of_a_newcomer():
        flags = COMMANDS[command]
        if flags is not None:
            run_in(clone, f"{command} {flags}")
    assert (clone / "checkpoints" / "gpt2-124m" / "step_00000002").is_dir()
    assert (clone / "checkpoints" / "gpt2-124m" / "tensorboard").is_dir()


@pytest.mark.slow
def test_getting_started_runs_as_it_is_written(clone):
    """All after the quickstart, and the command that `prepare` prints; the killed run gets the same bits."""
    first, *blocks = blocks_of((REPOSITORY / "docs" / "getting_started.md").read_text())
    assert first.startswith("make quickstart\n")
    printed, hashes = "", []
    for block in blocks:
        lines = run_in(clone, block).splitlines()
        hashes += [line.split()[0] for line in lines if line.endswith("/model.safetensors")]
        printed = next((line for line in lines if line.startswith("train with: ")), printed)
    assert (len(hashes), len(set(hashes))) == (2, 1)
    steps = events(clone / "checkpoints" / "killed", "step")
    assert {event["attempt"] for event in steps} == {1, 2}
    # A process that keeps what its steps free; it differs from run to run.
    whole = clone / "checkpoints" / "whole"
    forecast = json.loads((whole / "estimate.json").read_text())["memory"]["total"]
    assert max(event["peak_memory_bytes"] for event in events(whole, "step")) < 1.5 * forecast
    run_in(clone, f"{printed.removeprefix('train with: ')} --run_name printed")
    assert events(clone / "checkpoints" / "printed", "done")


def run_in(clone: Path, block: str) -> str:
    """Run lines of bash, each of which must succeed, in the copy of the project; return what they print."""
    places = [str(clone / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    env = environment(PATH=os.pathsep.join(places), PYTHONPATH=str(clone / "src"))
    done = subprocess.run(["bash", "-ec", block], cwd=clone, env=env, **TO_ITS_END)
    assert done.returncode == 0, f"{block}\n{done.stderr}"
    return done.stdout
