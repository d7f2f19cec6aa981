"""The Makefile: every target is a thin line over a program that exists, and a slip of the finger starts nothing."""

import os
import re
import shutil
import subprocess

import pytest

from launch import REPOSITORY, TO_ITS_END, worked, write_program

# Target -> what its last line must hold, for GPUS=1 RUN=x. Those of the daily verbs, and the others.
LINES = {
    **{"data": "gpt2lab prepare fineweb-edu", "train": "src/train.py --run_name x"},
    "train-tb": "src/train.py --use_tensorboard --run_name x",
    "resume": "src/train.py --resume latest --run_name x",
    **{"list": "gpt2lab runs list x", "dry-run": "gpt2lab train --dry_run --run_name x"},
    **dict.fromkeys(("check", "preflight"), "src/train.py --preflight --run_name x"),
    **{"estimate": "gpt2lab estimate --gpus 1 --run_name x", "gpu-info": "gpt2lab doctor"},
    **{"memory-check": "gpt2lab doctor --model gpt2 --gpus 1", "status": "gpt2lab status"},
    "eval": "gpt2lab evaluate x",
    "eval-quick": "gpt2lab evaluate x --val_tokens 131072 --hellaswag_limit 200",
    "finetune": "src/finetune.py --init_from y --instructions demo --run_name x",
    **{"chat": "gpt2lab chat x", "sample": "gpt2lab sample x --interactive"},
    "export": "gpt2lab export x --out exports/x",
    **{"plot": "gpt2lab plot x", "report": "gpt2lab report x"},
    "tensorboard": "gpt2lab runs tensorboard --port 6006",
    "tensorboard-stop": "gpt2lab runs tensorboard --stop",
    **{"test": "-m pytest", "test-slow": "-m pytest -m slow"},
    "test-faults": "-m pytest tests/faults -m fault",
    "first-card": "gpt2lab benchmark first-card",
}


ELSEWHERE = (
    "help install quickstart test-fast test-core lint clean faults soak syscall-sweep start-sweep "
    "power-cut-replay wrong-kinds planted-bugs"
)


def make(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Show what make would run, and run nothing."""
    command = ["make", "-n", "--no-print-directory", *words]
    # Not the variables of a make that runs these tests.
    own = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(command, cwd=REPOSITORY, env={**own, **more}, **TO_ITS_END)


@pytest.mark.parametrize("target", LINES)
def test_a_target_is_a_thin_line_over_a_program_that_exists(target):
    shown = worked(make(target, "VENV=/nowhere", "GPUS=1", "RUN=x", "FROM=y"))
    line = shown.stdout.splitlines()[-1]
    assert line.startswith("/nowhere/bin/")
    assert LINES[target] in re.sub(r"\s+", " ", line)
    for program in re.findall(r"(?:src|scripts)/\w+\.py", shown.stdout):
        assert (REPOSITORY / program).is_file()


def test_every_target_is_in_the_help_and_in_this_test_and_the_fast_tests_exist():
    line = make("test-fast", "VENV=/nowhere").stdout.splitlines()[-1]
    paths = re.findall(r"tests/[\w/.]+", line)
    assert len(paths) > 10
    assert all((REPOSITORY / path).exists() for path in paths)
    text = (REPOSITORY / "Makefile").read_text()
    targets = {*" ".join(re.findall(r"^([a-z -]+):.*## ", text, re.M)).split()}
    assert targets == {*LINES, *ELSEWHERE.split()}
    (phony,) = re.findall(r"^\.PHONY: ((?:.*\\\n)*.*)", text, re.M)
    assert targets == set(phony.replace("\\", "").split())


@pytest.mark.parametrize(("seen", "count"), [("1", 1), ("0,1,7", 2), ("", 0), ("-1", 0), (None, 2)])
def test_gpus_are_counted_once_and_only_those_that_are_visible(seen, count, tmp_path):
    fake = f"#!/bin/sh\necho x >> {tmp_path}/calls\nprintf 'GPU 0: A\\nGPU 1: B\\n'\n"
    write_program(tmp_path / "nvidia-smi", fake)
    visible = {} if seen is None else {"CUDA_VISIBLE_DEVICES": seen}
    shown = make("train", PATH=f"{tmp_path}:{os.environ['PATH']}", **visible).stdout
    assert ("--gpus 2" in shown, (tmp_path / "calls").read_text()) == (count == 2, "x\n")


def test_each_target_installs_what_it_needs_and_a_container_the_package():
    plain = {"requirements.txt"}
    needed = {"report": plain, "export": plain, "plot": {*plain, "requirements-plot.txt"}}
    for target, files in needed.items():
        assert set(re.findall(r"-r (\S+)", make(target, "VENV=/nowhere", "RUN=x").stdout)) == files
    assert "--no-deps --editable ." in (REPOSITORY / "Dockerfile").read_text()
    pinned = (REPOSITORY / "requirements-plot.txt").read_text()
    assert {*re.findall(r"^(\w+)==", pinned, re.M)} == {"matplotlib"}
    assert re.search(r"^jinja2==", (REPOSITORY / "requirements.txt").read_text(), re.M)


def test_variables_arrive_and_wrong_ones_are_rejected():
    shown = make("train", "GPUS=4", "MODEL=gpt2-mini", "RUN=x", "ARGS=--mini_batch_size 8").stdout
    assert "src/train.py --gpus 4 --model gpt2-mini --run_name x --mini_batch_size 8" in shown
    of_a_run = ("eval", "chat", "export", "report", "sample")
    for words, message in (
        (("train", "GPU=4"), "unknown variable GPU"),
        (("train", "GPUS=four"), "GPUS=four is not a number"),
        (("tensorboard", "PORT=x"), "PORT=x is not a number"),
        (("sample", "RUN=a b"), "RUN=a b has a space"),
        (("quickstart", "SOURCE=my.txt"), "quickstart trains on SOURCE=shakespeare or"),
        (("finetune",), "which model? FROM=run or FROM=hf:gpt2"),
        *(((one,), "which run? RUN=name") for one in of_a_run),
    ):
        wrong = make(*words, "VENV=/nowhere")
        assert wrong.returncode != 0
        assert message in wrong.stderr
        assert "/nowhere/bin/gpt2lab" not in wrong.stdout


def test_clean_never_touches_data_or_checkpoints(tmp_path):
    shutil.copy(REPOSITORY / "Makefile", tmp_path)
    kept = [
        *("data/mine/x.npy", "data/__pycache__/x", "checkpoints/run/step_00000001/manifest.json"),
        *("checkpoints/__pycache__/x", "exports/run/model.safetensors", "src/gpt2lab/x.py"),
    ]
    gone = ["src/gpt2lab/__pycache__/x.pyc", ".pytest_cache/x", ".venv/bin/python"]
    for name in [*kept, *gone, "scripts/x.py", "tests/x.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    worked(subprocess.run(["make", "clean"], cwd=tmp_path, **TO_ITS_END))
    assert all((tmp_path / name).exists() for name in kept)
    assert not any((tmp_path / name).exists() for name in gone)


def test_ci_runs_what_the_readme_begins_with():
    ci = (REPOSITORY / ".ci" / "run").read_text()
    (parts,) = re.findall(r"\|\| set -- (.+)", ci)
    assert parts.split() == ["lint", "quickstart", "test-core", "test", "test-slow", "test-faults"]
    (made,) = re.findall(r"^    ([\w |-]+)\) make \"\$part\"", ci, re.M)
    assert made.split(" | ") == [part for part in parts.split() if part != "quickstart"]
    assert re.findall(r"^    make (\S+)", ci, re.M) == ["quickstart"]


@pytest.mark.parametrize(
    ("typed", "prepares", "trains"),
    [
        ([], "shakespeare --tokenizer bytes", "--config examples/quickstart.toml"),
        (["SOURCE=python-stdlib"], "python-stdlib", "--model gpt2-micro --run_name"),
    ],
)
def test_the_quickstart_ends_with_the_report_of_its_own_run(typed, prepares, trains):
    lines = make("quickstart", "GPUS=0", *typed).stdout.splitlines()
    prepared, trained, reported = (ln for ln in lines if "bin/gpt2lab" in ln or "src/" in ln)
    assert prepared.endswith(f"gpt2lab prepare {prepares}")
    assert trains in trained
    name = re.search(r"--run_name (quickstart-\d{8}-\d{6}) ", trained)
    assert reported.split()[-2:] == ["report", name[1]]
