"""Every command of README and getting_started.md runs, in order, in a copy of the project, shrunk where it is large."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ecosystem
from launch import HANG_SECONDS, REPOSITORY, environment
from tiny import make_tokens

SHRINK = (
    "--n_layer=1 --n_head=1 --n_embd=16 --context_length=32 --total_batch_size=256 --mini_batch_size=2 "
    "--max_steps=2 --val_tokens=256 --sample_tokens=4 --device=cpu --log_freq=1"
)
# Command -> flags that make it small; None: another test or CI runs it, or it needs the network.
COMMANDS: dict[str, str | None] = {
    "make quickstart": None,  # .ci/run
    "make test": None,  # .ci/run
    "make install": None,  # .ci/run
    "make tensorboard": None,  # tests/unit/commands/test_make.py, tests/unit/runs/test_tensorboard_server.py
    "make tensorboard-stop": None,  # the same
    "source .venv/bin/activate": None,
    "gpt2lab prepare fineweb-edu": None,  # network
    "gpt2lab prepare hf:roneneldan/TinyStories": None,  # network
    "gpt2lab data verify data/my_texts": "",
    "torchrun --nproc_per_node=4 src/train.py --model gpt2 --run_name gpt2-124m --use_tensorboard": (
        f"{SHRINK} --stop_after_steps=1"
    ),
    "torchrun --nproc_per_node=4 src/train.py --resume latest": "",
    "gpt2lab train --model gpt2 --dry_run": "",
    "gpt2lab train --gpus 4": "--dry_run --device=cpu",
    "gpt2lab train --model gpt2 --preflight": SHRINK,
    "python src/train.py --list_checkpoints": "",
    "gpt2lab runs list": "",
    "python scripts/estimate_time.py": "",
    "gpt2lab estimate --gpu H100 --gpus 8 --model gpt2 --tokens 10B": "",
    "gpt2lab status": "",
    # tests/unit/commands/test_first_mistakes.py
    "gpt2lab runs rm old_run": None,
    "gpt2lab runs rm old_run/step_00000250": None,
    "gpt2lab runs archive old_run": None,
    # tests/unit/tracking/test_rebuild.py
    "gpt2lab runs rebuild-tensorboard RUN": None,
    "gpt2lab runs resume-command gpt2-124m --output slurm": "--num_gpus 1",
    "gpt2lab plot gpt2-124m": "",
    "gpt2lab report gpt2-124m": "",
    # tests/unit/runs/test_looking_at_runs.py and tests/unit/report/test_report.py
    "gpt2lab plot run_a run_b --x tokens --log xy --out compare.png": None,
    "gpt2lab report run_a run_b --out compare.html": None,
    "gpt2lab evaluate gpt2-124m": "--device=cpu",
    "gpt2lab compare run_a run_b": None,  # tests/unit/evaluation/test_evaluate.py
    'gpt2lab sample gpt2-124m --prompt "Once upon a time"': "--max_new_tokens=4",
    "gpt2lab export gpt2-124m --out exports/gpt2-124m": "",
    "gpt2lab prepare my_texts/": "",
    "gpt2lab finetune --init_from gpt2-124m --instructions demo --run_name tuned": (
        "--max_steps=2 --sample_tokens=4 --device=cpu"
    ),
    "gpt2lab chat tuned": "--max_new_tokens=4",
    "gpt2lab train --model gpt2-mini --data_dir data/my_texts --max_steps 2000": SHRINK,
    "gpt2lab train --model gpt2-mini --max_steps 2000 --save_config mini.toml": "",
    "gpt2lab train --config mini.toml --seed 2": f"{SHRINK} --data_dir=data/fineweb_edu",
    "gpt2lab train --help": "",
    "gpt2lab --help": "",
    "make help": "",
}


def commands_of_a_newcomer() -> list[str]:
    """Return every command of both pages' bash blocks and sentences, in order, each once."""
    found: list[str] = []
    for page in ("README.md", "docs/getting_started.md"):
        text = (REPOSITORY / page).read_text()
        blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.S)
        found += [line for block in blocks for line in block.splitlines() if line]
        sentences = re.sub(r"```.*?```", "", text, flags=re.S)
        found += re.findall(r"`((?:python|make|torchrun|gpt2lab) [^`]+)`", sentences)
        found += re.findall(r"\*\*((?:python|make|torchrun) [^*]+)\*\*", sentences)
    return list(dict.fromkeys(found))


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
    (folder / "my_texts").mkdir()
    (folder / "my_texts" / "one.txt").write_text(
        "To be, or not to be, that is the question.\n" * 400
    )
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


def test_another_major_version_than_the_recorded_one_fails(monkeypatch):
    monkeypatch.delenv("UPDATE_GOLDEN", raising=False)
    row = ecosystem.read_rows()["peft"]
    monkeypatch.setenv("PYTEST_CURRENT_TEST", f"{row['test']}[case] (call)")
    major = int(row["version"].split(".")[0])
    ecosystem.works_with("peft", f"{major}.999", row["what"])
    ecosystem.works_with("peft", f"{major + 1}.0", row["what"], compare="name")
    for name, version, what in (
        ("peft", f"{major + 1}.0", row["what"]),
        ("peft", row["version"], "more than that"),
        ("nobody", "1.0", "anything"),
    ):
        with pytest.raises(AssertionError):
            ecosystem.works_with(name, version, what)


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
    tools = Path(sys.executable).parent
    path = os.pathsep.join([str(clone / "bin"), str(tools), os.environ["PATH"]])
    for command in commands_of_a_newcomer():
        flags = COMMANDS[command]
        if flags is None:
            continue
        done = subprocess.run(
            f"{command} {flags}",
            shell=True,
            cwd=clone,
            env=environment(PATH=path, PYTHONPATH=str(clone / "src")),
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
        )
        assert done.returncode == 0, f"{command} {flags}\n{done.stderr}"
    assert (clone / "checkpoints" / "gpt2-124m" / "step_00000002").is_dir()
    assert (clone / "checkpoints" / "gpt2-124m" / "tensorboard").is_dir()
