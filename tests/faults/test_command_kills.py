"""Row 40: every command that writes is killed in the middle, at each of its calls, and repeated."""

import fcntl
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import SHAPE, FaultRun

import launch
from corpora import TEXTS, run_prepare, write_jsonl
from gpt2lab.model.gpt import build_model
from gpt2lab.runs.folder import RunFolder
from gpt2lab.tokenizers.bpe import train_bpe
from launch import call
from ranks import run_ranks
from tiny import parse, write_shards

pytestmark = pytest.mark.fault

KILLED_AT = launch.WORKERS / "killed_at.py"
KILLED = -signal.SIGKILL
DONE_BEFORE = ("is there already", "exists already", "holds checkpoints already")

CPU = torch.device("cpu")


def content(folder: Path) -> dict[str, bytes]:
    """Return {name: bytes} of all files below a folder, hidden ones too."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def kill(script: Path | str, words: list[str], *, at: int, below: Path) -> int:
    """Run a script in a fork that dies before its call number `at` below a folder; return its exit code."""
    environment = launch.environment(WATCH=str(below))
    typed = [str(at), *launch.words_of(script)[1:], *words]
    how = {"environment": environment, "seconds": launch.HANG_SECONDS}
    done = run_ranks(KILLED_AT, typed, world=1, **how)
    assert done.returncode in (0, KILLED), done.stderr
    return done.returncode


def kill_everywhere(
    script: str, words: list[str], tmp_path: Path, *, every: int = 1, shards: tuple[int, ...] = ()
) -> int:
    """Kill a script at each call, repeat it, and compare with one that was not killed; return the calls.

    All that it writes lies in FOLDER, a new one every time, which has shards in `data` if there are sizes of any.
    """
    folder = tmp_path / "here"  # the same path every time: it is in what is written
    words = [word.replace("FOLDER", str(folder)) for word in words]

    def begin() -> None:
        if folder.exists():
            folder.rename(tmp_path / f"before_{len(list(tmp_path.iterdir()))}")
        folder.mkdir()
        if shards:
            write_shards(folder / "data", train=shards, val=(650,))

    begin()
    launch.worked(call(script, *words))
    straight = content(folder)
    for at in range(1, 1000, every):
        begin()
        if kill(script, words, at=at, below=folder) == 0:
            return at - 1
        again = call(script, *words)
        if again.returncode:  # what was killed after its last step is there
            assert any(said in again.stderr for said in DONE_BEFORE), again.stderr
        assert content(folder) == straight, f"killed at call {at}"
    raise AssertionError("a command of a thousand calls")


def test_import_of_shards(tmp_path):
    words = ["import", "FOLDER/data", "--tokenizer=unknown"]
    assert kill_everywhere("data", words, tmp_path, shards=(1003, 777)) >= 3


def test_import_into_another_folder_with_a_tokenizer(tmp_path):
    tokenizer = tmp_path / "learned"
    texts = write_jsonl(tmp_path / "a.jsonl", TEXTS * 20)
    launch.worked(call("data tokenizer", "train", texts, f"--out={tokenizer}", "--vocab_size=300"))

    words = ["import", "FOLDER/data", "--out=FOLDER/named", f"--tokenizer={tokenizer}"]
    assert kill_everywhere("data", words, tmp_path, shards=(1003,)) >= 8


def test_merge_of_parts(tmp_path):
    texts = write_jsonl(tmp_path / "text" / "a.jsonl", TEXTS * 40)
    write_jsonl(tmp_path / "text" / "b.jsonl", TEXTS * 30)
    parts = [tmp_path / f"part{number}" for number in (1, 2)]
    for number, part in enumerate(parts, start=1):
        words = [texts.parent, f"--out={part}", f"--part={number}/2", "--tokenizer=bytes"]
        launch.worked(call("prepare_data.py", *words, "--val_tokens=2000", "--group_bytes=10k"))

    words = ["merge", "FOLDER/full", *map(str, parts)]
    assert kill_everywhere("data", words, tmp_path) >= 8


def test_preparation(tmp_path):
    texts = write_jsonl(tmp_path / "a.jsonl", TEXTS * 40)

    words = [str(texts), "--out=FOLDER/data", "--tokenizer=bytes"]
    words += ["--val_tokens=2000", "--num_workers=1"]
    assert kill_everywhere("prepare_data.py", words, tmp_path, every=2) >= 10


def test_learning_a_tokenizer(tmp_path):
    texts = write_jsonl(tmp_path / "a.jsonl", TEXTS * 20)
    words = ["train", str(texts), "--out=FOLDER/learned", "--vocab_size=300"]
    assert kill_everywhere("data tokenizer", words, tmp_path) >= 5


def test_import_of_a_checkpoint(tiny_data, tmp_path):
    """A run that is there after the kill is the imported one; one that is not is begun again by the same line."""
    model = build_model(parse([*SHAPE, "--max_steps=8"]).config.model, seed=1, device=CPU)
    weights = {name.replace("blocks.", "h."): value for name, value in model.state_dict().items()}
    names = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16, "vocab_size": 256}
    file = tmp_path / "nano.pt"
    state = {f"transformer.{name}": value for name, value in weights.items()}
    torch.save({"model": state, "model_args": {**names, "bias": True}, "iter_num": 4}, file)

    def words(folder: Path) -> list[str]:
        run = FaultRun(tiny_data, folder, flags=("--max_steps=8",))
        return [*run.argv(), f"--import_checkpoint={file}"]

    straight = FaultRun(tiny_data, tmp_path / "straight")
    assert call(launch.TRAIN, *words(straight.folder)).returncode == 0
    for at in range(1, 1000, 2):
        run = FaultRun(tiny_data, tmp_path / f"at{at}")
        if kill(launch.TRAIN, words(run.folder), at=at, below=run.folder) == 0:
            break
        committed = bool(run.saved())
        again = call(launch.TRAIN, *words(run.folder))
        said = "holds checkpoints already" in again.stderr
        assert (again.returncode, said) == ((2, True) if committed else (0, False))
        assert launch.parameter_hash(run.path, 4) == launch.parameter_hash(straight.path, 4)
        if committed:
            RunFolder(run.path).close()  # as the resume does that it was told to do
        assert [path.name for path in run.path.glob(".*")] == []
    assert at > 10


def killed_export(words: list[str], *, at: str) -> None:
    """Export until a fault point kills it."""
    program, fault = launch.SCRIPTS / "export_hf.py", f"{at}:kill9@0"
    done = launch.train_in_forks(words, program=program, FAULT=fault)
    assert done.returncode == KILLED, done.stderr


@pytest.mark.parametrize("at", ["export.weights", "export.before_rename"])
def test_export(at, tiny_data, tmp_path):
    run = FaultRun(tiny_data, tmp_path / "runs", flags=("--max_steps=2", "--eval_freq=0"))
    launch.worked(launch.train_in_forks(run.argv()))
    words = ["run", f"--checkpoint_dir={run.folder}"]
    out = tmp_path / "exports" / "run"
    killed_export([*words, f"--out={out}"], at=at)
    [leftover] = out.parent.iterdir()
    (working := out.with_name(".run.0123abcd")).mkdir()  # of an export that still works
    descriptor = os.open(working, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert call("export_hf.py", *words, f"--out={out}").returncode == 0
    os.close(descriptor)
    assert not leftover.exists()
    assert {path.name for path in out.parent.iterdir()} == {"run", working.name}
    straight = tmp_path / "elsewhere" / "run"
    assert call("export_hf.py", *words, f"--out={straight}").returncode == 0
    assert content(out) == content(straight)


def test_export_for_llama_cpp(tmp_path):
    texts = [f"text {n} of some: {n * n}" for n in range(200)]
    write_jsonl(tmp_path / "corpus" / "a.jsonl", texts)
    run_prepare(tmp_path / "corpus", tmp_path / "data", tokenizer=train_bpe(texts, 300))
    run = FaultRun(tmp_path / "data", tmp_path / "runs", flags=("--max_steps=2", "--eval_freq=0"))
    words = [word for word in run.argv() if not word.startswith("--vocab_size")]
    launch.worked(launch.train_in_forks(words))
    words = ["run", f"--checkpoint_dir={run.folder}", "--format=gguf"]
    out, straight = tmp_path / "exports" / "x.gguf", tmp_path / "elsewhere" / "x.gguf"
    killed_export([*words, f"--out={out}"], at="export.before_rename")
    [leftover] = out.parent.iterdir()
    assert leftover != out
    for path in (out, straight):
        assert call("export_hf.py", *words, f"--out={path}").returncode == 0
    assert ([*out.parent.iterdir()], out.read_bytes()) == ([out], straight.read_bytes())


@pytest.fixture
def shared(tiny_data) -> list[str]:
    """Return the flags of all runs of an ablation."""
    shape = [word for word in SHAPE if not word.startswith("--run_name")]
    return [*shape, f"--data_dir={tiny_data}", "--max_steps=12"]


def ablation(folder: Path, *more: str) -> tuple[list[str], subprocess.Popen[str]]:
    """Start an ablation of a cold and a hot rate into `out`; return its words after three steps of the cold one."""
    settings = folder / "settings.txt"
    settings.write_text("cold: --max_lr=0.0001\nhot: --max_lr=0.01\n")
    out = f"--out={folder / 'out'}"
    command = [*launch.words_of("ablate"), str(settings), out, "--seeds=1", *more]
    how: dict[str, Any] = {"env": launch.environment(FAULT="step:sleep0.2@*"), "text": True}
    how |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    process = subprocess.Popen(command, **how)
    launch.wait_for_step(process, folder / "out" / "cold_seed1", 3)
    return command, process


def test_an_ablation_takes_its_run_along_and_goes_on_with_it(shared, tmp_path):
    shared = [*shared, "--eval_freq=6"]
    out, cold = tmp_path / "out", tmp_path / "out" / "cold_seed1"
    command, process = ablation(tmp_path, *shared)
    process.kill()
    process.communicate()  # its pipe ends when nobody holds it
    trainer = int(json.loads((cold / "status.json").read_text())["pid"])
    while Path(f"/proc/{trainer}").exists():
        time.sleep(0.05)
    told = json.loads((cold / "status.json").read_text())
    assert (told["state"], told["reason"]) == ("stopped", "SIGTERM")
    assert 3 <= told["step"] < 12
    launch.worked(subprocess.run(command, env=launch.environment(), capture_output=True, text=True))
    straight = tmp_path / "straight"
    flags = ["--max_lr=0.0001", "--seed=1", f"--checkpoint_dir={straight}", "--run_name=cold"]
    assert launch.train_in_forks([*shared, *flags]).returncode == 0
    assert launch.parameter_hash(cold, 12) == launch.parameter_hash(straight / "cold", 12)
    assert [path for path in out.rglob(".*")] == []


@pytest.mark.parametrize(("jobs", "whole_group"), [(1, True), (2, False)])
def test_an_ablation_that_is_interrupted_lets_its_runs_save(jobs, whole_group, shared, tmp_path):
    """Ctrl+C in a terminal reaches the trainers too; `kill -INT` only the ablation."""
    out = tmp_path / "out"
    _, process = ablation(tmp_path, f"--jobs={jobs}", *shared)
    (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate()
    stderr = launch.without_progress(stderr)
    assert (process.returncode, stdout) == (0, "")
    line = "interrupted; what was trained is saved; start again to continue"
    assert stderr.splitlines()[jobs:] == [line]
    told = json.loads((out / "cold_seed1" / "status.json").read_text())
    assert (told["state"], told["exit_code"]) == ("stopped", 0)
    assert told["checkpoint"] == str(out / "cold_seed1" / f"step_{told['step']:08d}")
    assert 3 <= told["step"] < 12
    assert not (out / "ablation.md").exists()
