"""The commands as people use them: from any folder, in an instant, without torch."""

import errno
import importlib.metadata
import json
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import launch
from gpt2lab import __version__
from gpt2lab.checkpoint import catalog
from gpt2lab.checkpoint.manifest import Draft, commit
from gpt2lab.commands import verbs
from gpt2lab.commands.checkpoints import List
from gpt2lab.commands.command_line import Actions
from gpt2lab.commands.doctor import without_names
from gpt2lab.commands.entry import run as run_command
from gpt2lab.config.schema import TuningConfig
from gpt2lab.config.settings import LEAVES
from gpt2lab.data.shards import open_data
from gpt2lab.errors import ConfigError, OutOfMemoryError, PeerError
from launch import SCRIPTS, TRAIN, call
from tiny import CONTEXT, TINY, TRAIN_SHARDS, edit_json, write_shards
from whole_run import LAST, facts_of, listing


def write_checkpoint(run_dir: Path, step: int, *, kind: str = "rolling") -> None:
    """Commit a checkpoint of a few bytes, as the trainer does."""
    files = {"model.safetensors": b"w" * 100, "optim.safetensors": b"m" * 200, "state.json": b"{}"}
    facts = facts_of(step, kind=kind, val_loss=10 / step)
    run_dir.mkdir(parents=True, exist_ok=True)
    commit(run_dir, Draft(step, {name: [data] for name, data in files.items()}, facts))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Return a folder with two runs of 100 checkpoints; treat as read-only."""
    folder = tmp_path_factory.mktemp("listing") / "runs"
    for name in ("alpha", "beta"):
        for step in range(1, 101):
            write_checkpoint(folder / name, step)
        catalog.set_label(folder / name, "best", 100)
    (folder / "notes").mkdir()  # not a run
    return folder


@pytest.fixture
def workplace(tmp_path) -> Path:
    """Return a working directory far from the repository, with tiny data in `d`."""
    write_shards(tmp_path / "d", train=TRAIN_SHARDS, val=(650,))
    return tmp_path


NAMED = [*TINY, "--run_name=t"]
QUICK = {
    "help": ["--help"],
    "list": ["--list_checkpoints", "--checkpoint_dir=runs"],
    "list json": ["--list_checkpoints", "--json", "--checkpoint_dir=runs"],
    "dry run": ["--dry_run", *NAMED, "--data_dir=d", "--checkpoint_dir=runs"],
    "dry run json": ["--dry_run", "--json", *NAMED, "--data_dir=d", "--checkpoint_dir=runs"],
    "rejected flag": ["--num_layers=3"],
    "rejected setting": ["--max_lr=nan"],
    "rejected plan": ["--dry_run", *NAMED, "--data_dir=nowhere"],
    "rejected start": [*NAMED, "--data_dir=nowhere"],
    "rejected search": [*NAMED, "--data_dir=d", "--max_lr=nan", "--mini_batch_size=auto"],
    "rejected width": [*NAMED, "--data_dir=d", "--n_embd=1000000"],
    "rejected run": [*NAMED, "--data_dir=d", "--checkpoint_dir=runs", "--resume=latest"],
    "rejected file": [*NAMED, "--data_dir=d", "--import_checkpoint=nosuch.pt"],
    "rejected device": [*NAMED, "--data_dir=d", "--checkpoint_dir=runs", "--device=cuda"],
}


# Verbs that answer or reject at once.
AT_ONCE = (
    *("--help", "train --help", "status --checkpoint_dir=runs", "runs list --checkpoint_dir=runs"),
    *("serve --help", "doctor --help", "doctor", "list x", "serve x --port=-1", "trian"),
    *("train --max_lr=nan", "train --data_dir=nosuch", "train --preflight --n_layr=1"),
    *("evaluate --batch_size=0 x", "sample 'nosuch run' --prompt=a", "chat hf:nosuch/nosuch"),
    *("sample hf:nosuch/nosuch --prompt=a", "evaluate hf:nosuch/nosuch", "sample --qqq"),
    "export hf:nosuch/nosuch --out=y",
)
ANSWERS = re.compile(r"(help|list|dry run)( json)?$|.*--help$|(status|runs list) --|doctor$")


@pytest.mark.parametrize("cause", [RuntimeError("at step 15"), OutOfMemoryError("no room")])
@pytest.mark.parametrize(
    "consequence",
    [PeerError("another process died"), RuntimeError("[gloo] Connection closed by peer")],
)
def test_torchrun_names_the_first_cause_of_one_second(cause, consequence, tmp_path, monkeypatch):
    """Torchrun compares whole seconds and takes the lowest rank of equals; here the cause is rank 1."""
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.5)
    failures = {}
    for rank, error in enumerate((consequence, cause)):
        file = tmp_path / f"{rank}.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        assert run_command(Mock(side_effect=error)) == 1
        failures[rank] = ProcessFailure(rank, pid=rank, exitcode=1, error_file=str(file))
    assert str(cause) in str(ChildFailedError("train.py", failures)).split("Root Cause")[1]


def test_a_report_to_torchrun_is_complete_or_not_there(tmp_path, monkeypatch):
    """Torchrun ends the other ranks while they write theirs, and fails itself on half a report."""
    report = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    monkeypatch.setattr(os, "fsync", Mock(side_effect=SystemExit))  # ended in the middle
    with pytest.raises(SystemExit):
        run_command(Mock(side_effect=PeerError("another process died")))
    assert not report.exists()


def test_a_python_without_the_packages_is_told_so_in_one_line(monkeypatch, capsys):
    words = {"prepare_data.py": ["x"], "estimate_time.py": [], "evaluate.py": ["x"]}
    words |= {"export_hf.py": ["x", "--out=y"], "sample.py": ["x", "--prompt=a"]}
    programs: list[list[str]] = [[str(SCRIPTS / name), *more] for name, more in words.items()]
    programs += [[str(TRAIN)], ["-m", "gpt2lab", "train"], ["-m", "gpt2lab.train"]]
    for program in programs:
        done = launch.python("-S", *program, folder=TRAIN.parent)
        line = r"error: \S+ has no package \w+; use .*requirements\.txt.*\n"
        assert re.fullmatch(line, done.stderr), program
        assert done.returncode == 2, program
    # So is an old one, before anything is loaded.
    monkeypatch.setattr(sys, "version_info", (3, 8))
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(TRAIN.parent / "gpt2lab" / "__init__.py"))
    assert end.value.code == 2
    line = r"error: \S+ is Python 3\.8, gpt2lab needs 3\.10 or newer; .*\n"
    assert re.fullmatch(line, capsys.readouterr().err)


# On a machine with a GPU, --device cuda is no mistake.
@pytest.mark.parametrize(
    "typed",
    [*(c for c in QUICK if c != "rejected device" or not torch.cuda.is_available()), *AT_ONCE],
)
def test_what_answers_or_rejects_at_once_never_imports_torch_and_writes_nothing(workplace, typed):
    write_checkpoint(workplace / "runs" / "other", 5)
    before = listing(workplace)
    words, extra = ("-m", "gpt2lab", *shlex.split(typed)), {}
    if typed in QUICK:
        words, extra = (TRAIN, *QUICK[typed]), {"PYTHONPATH": ""}
    done = launch.python("-X", "importtime", *words, folder=workplace, COLUMNS="100", **extra)
    assert listing(workplace) == before
    told = re.sub(r"working: \d+ s so far\n?", "", done.stderr)  # on a slow machine
    said = [line for line in told.splitlines() if line and not line.startswith("import time:")]
    assert (done.returncode, len(said)) == ((0, 0) if ANSWERS.match(typed) else (2, 1)), said
    imported = set(re.findall(r"^import time:.*\| +([\w.]+)$", told, re.MULTILINE))
    assert "gpt2lab.errors" in imported  # the list is really what was imported
    assert not {name for name in imported if name.split(".")[0] == "torch"}


def test_help_names_every_flag(tmp_path):
    answer = call(TRAIN, "--help-all", folder=tmp_path)
    assert (answer.returncode, answer.stderr) == (0, "")
    shown = set(re.findall(r"--([a-z_0-9]+)", answer.stdout))
    of_tuning = set(TuningConfig.__dataclass_fields__)
    assert (set(LEAVES) - of_tuning - {"num_tokens"}) | set(Actions.__dataclass_fields__) <= shown
    assert not of_tuning & shown
    answer = call(TRAIN.with_name("finetune.py"), "--help-all", folder=tmp_path)
    assert of_tuning <= set(re.findall(r"--([a-z_0-9]+)", answer.stdout))


def test_a_foreign_folder_shows_what_is_there_and_a_dry_run_the_plan_in_words_and_json(workplace):
    write_checkpoint(workplace / "runs" / "first", 5)
    write_checkpoint(workplace / "runs" / "first", 10, kind="final")
    answer = call(TRAIN, "--list_checkpoints", "--checkpoint_dir=runs", folder=workplace)
    assert (answer.returncode, answer.stderr) == (0, "")
    title, header, *rows = answer.stdout.strip().splitlines()
    assert (title, header.split()[:2]) == ("runs/first: 2 checkpoints, 604 B", ["step", "kind"])
    wanted = ["5 rolling 2.0000 5,000", "10 final 1.0000 10,000"]
    assert [" ".join(row.split()[:4]) for row in rows] == wanted
    answer = call(TRAIN, *QUICK["dry run"], folder=workplace)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "runs/t" in answer.stdout
    assert f"{sum(TRAIN_SHARDS):,} training tokens" in answer.stdout
    steps = sum((size - 1) // CONTEXT for size in TRAIN_SHARDS) // 8
    assert f"{steps} ({steps * 128:,} tokens" in answer.stdout
    assert "shards.json" in answer.stdout  # the warning about foreign data
    answer = call(TRAIN, *QUICK["dry run json"], folder=workplace)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.count("\n") == 1
    plan = json.loads(answer.stdout)
    assert (plan["run_dir"], plan["tokens_per_step"]) == (str(workplace / "runs" / "t"), 128)
    assert plan["mini_batch_size"] * plan["accumulation"] * plan["world_size"] * CONTEXT == 128
    assert plan["tokens"] == plan["max_steps"] * 128
    assert plan["checkpoint_bytes"] == 12 * plan["parameters"]
    assert plan["resumes_from"] is None
    assert plan["data_fingerprint"] == open_data(workplace / "d", vocab_size=256).fingerprint
    assert set(plan["config"]) == set(LEAVES)


def test_200_checkpoints_are_listed_from_200_manifests_and_nothing_is_created(runs, capsys):
    """Each is read once, and no tensor file at all: that is why it takes less than half a second."""
    before, seen = listing(runs), [runs]

    def note(event: str, args: tuple[Any, ...]) -> None:
        is_below = event == "open" and str(args[0]).startswith(f"{runs}/")
        # Without a mode it is the `opener` of the call before.
        if is_below and (args[1] is not None or seen[-1] != Path(args[0])):
            seen.append(Path(args[0]))

    sys.addaudithook(note)
    assert List(checkpoint_dir=runs).execute() == 0
    opened = [path for path in seen if path.is_file()]
    assert listing(runs) == before
    manifests = [path for path in opened if path.name == "manifest.json"]
    assert len(manifests) == len(set(manifests)) == 200
    assert {path.name for path in opened} <= {"manifest.json", "best", "config.json"}
    lines = capsys.readouterr().out.splitlines()
    assert sum("100 checkpoints, 30.2 kB" in line for line in lines) == 2
    assert sum(line.split()[1:2] == ["rolling"] for line in lines) == 198
    assert sum(line.split()[1:3] == ["rolling,", "best"] for line in lines) == 2
    # As JSON they are exactly one object.
    assert List(checkpoint_dir=runs, json=True).execute() == 0
    out, err = capsys.readouterr()
    assert (err, out.count("\n")) == ("", 1)
    listed = json.loads(out)
    assert listed["checkpoint_dir"] == str(runs)
    assert [run["run_name"] for run in listed["runs"]] == ["alpha", "beta"]
    for entry in listed["runs"]:
        assert [checkpoint["step"] for checkpoint in entry["checkpoints"]] == list(range(1, 101))
        assert entry["damaged"] == []
        newest = entry["checkpoints"][-1]
        assert newest["path"] == str(runs / entry["run_name"] / "step_00000100")
        assert (newest["kind"], newest["labels"]) == ("rolling", ["best"])
        assert (newest["tokens"], newest["bytes"]) == (100_000, 302)
        assert newest["val_loss"] == pytest.approx(0.1)
    List("beta", checkpoint_dir=runs, json=True).execute()
    (only,) = json.loads(capsys.readouterr().out)["runs"]
    assert only["run_name"] == "beta"


@pytest.mark.parametrize("place", ["missing", "empty", "a file"])
def test_a_folder_without_runs_is_listed_as_such_and_not_created(tmp_path, capsys, place):
    folder = tmp_path / place
    (tmp_path / "empty").mkdir()
    (tmp_path / "a file").write_text("in the way")
    before = listing(tmp_path)
    assert (List().show(folder), capsys.readouterr().out) == (0, f"no checkpoints in {folder}\n")
    assert List(json=True).show(folder) == 0
    assert json.loads(capsys.readouterr().out) == {"checkpoint_dir": str(folder), "runs": []}
    assert listing(tmp_path) == before


def test_a_damaged_manifest_is_shown_and_half_written_checkpoints_are_not(tmp_path, capsys):
    for step in (5, 10):
        write_checkpoint(tmp_path / "r", step)
    with pytest.raises(FileNotFoundError):  # the second write fails
        commit(tmp_path / "r", Draft(20, {"model.safetensors": [b"w"], "no/folder": [b"w"]}, {}))
    assert not list((tmp_path / "r").glob(".tmp-*"))
    (tmp_path / "r" / ".tmp-00000015-abcdef01").mkdir()  # of a killed process
    (tmp_path / "r" / "step_final").mkdir()  # somebody's own
    path = tmp_path / "r" / "step_00000010" / "manifest.json"
    path.write_text(path.read_text().replace('"tokens": 10000', '"tokens": 90000'))
    List(checkpoint_dir=tmp_path).execute()
    out = capsys.readouterr().out
    assert "r: 1 checkpoint," in out
    assert f"damaged, not counted: {path}: damaged" in out
    List(checkpoint_dir=tmp_path, json=True).execute()
    (entry,) = json.loads(capsys.readouterr().out)["runs"]
    assert [checkpoint["step"] for checkpoint in entry["checkpoints"]] == [5]
    (damaged,) = entry["damaged"]
    assert str(path) in damaged


def test_a_terminal_that_lacks_a_character_is_no_error(runs, tmp_path):
    (tmp_path / "läufe").symlink_to(runs)
    words = (TRAIN, "--list_checkpoints", "--checkpoint_dir", "läufe")
    answer = launch.python(*words, folder=tmp_path, PYTHONIOENCODING="ascii")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.startswith("l\\xe4ufe/")
    # Nor is a closed pipe.
    command = f"'{sys.executable}' '{TRAIN}' --list_checkpoints --checkpoint_dir '{runs}'"
    words = ["bash", "-o", "pipefail", "-c", f"{command} | head -n 1"]
    answer = subprocess.run(words, cwd=tmp_path, **launch.TO_ITS_END)
    assert answer.stdout.endswith("100 checkpoints, 30.2 kB\n")
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        (errno.ENOSPC, 75, "error: /data/x: No space left on device; free space and start again\n"),
        (errno.EACCES, 2, "error: /data/x: Permission denied; give this user the right to it, "),
        (errno.ENAMETOOLONG, 2, "error: /data/x: File name too long; choose a shorter name\n"),
        (errno.EBADF, 1, "Traceback"),
    ],
)
def test_what_the_system_rejects_is_one_line_and_a_bug_is_not(capsys, number, code, line):
    assert run_command(Mock(side_effect=OSError(number, os.strerror(number), "/data/x"))) == code
    assert capsys.readouterr().err.startswith(line)


@pytest.mark.parametrize("name", ["chat", "evaluate", "export", "sample", "serve"])
def test_help_of_a_target_names_the_hub(name):
    assert "hf:NAME" in call(name, "--help").stdout


TRAIN_ONE = "data tokenizer train TEXT --out new"


@pytest.mark.parametrize(
    "line",
    [
        *("status --watch inf", f"{TRAIN_ONE} --vocab_size 1e15", f"{TRAIN_ONE} --max_bytes 0"),
        *(f"{TRAIN_ONE} --max_tokens 0", f"{TRAIN_ONE} --val_tokens -1"),
    ],
)
def test_a_number_that_cannot_be_is_rejected_before_any_work(tmp_path, monkeypatch, line, wording):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, check=wording):
        verbs.main(line.split())
    assert not list(tmp_path.iterdir())


# gpt2lab doctor: what helps with an issue is in it, and what belongs to its writer is not.
def test_doctor_prints_versions_and_hardware():
    code, said, error = launch.call("doctor")
    assert (code, error) == (0, "")
    for name in ("torch", "numpy", "safetensors"):
        assert f"  {name:<16} {importlib.metadata.version(name)}\n" in said
    assert f"  gpt2lab          {__version__}\n" in said
    assert f"python           CPython {platform.python_version()}\n" in said
    assert said.startswith("versions:\n")
    assert ("\nmachine:\n" in said, "run:" in said) == (True, False)
    found = json.loads(launch.call("doctor", "--json").stdout)
    assert set(found) == {"versions", "machine", "gpus", "topology"}
    assert found["machine"]["cores"] >= 1
    assert set(map(str, found["versions"])) >= {"gpt2lab", "git", "python", "torch", "triton"}


def test_a_run_s_facts_identify_it_and_hide_its_owner(straight, tmp_path, monkeypatch):
    home = tmp_path / "home" / "somebody"
    shutil.copytree(straight.path, home / "runs" / "tiny")
    for name in ("HF_TOKEN", "WANDB_API_KEY", "MY_SECRET", "DB_PASSWORD"):
        monkeypatch.setenv(name, f"value-of-{name}")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USER", "somebody")
    monkeypatch.setattr(platform, "node", lambda: "tiny-host")
    monkeypatch.setattr(platform, "release", lambda: "6.1.0-tiny-host-somebody")
    code, said, error = launch.call("doctor", home / "runs" / "tiny", "--json")
    assert (code, error) == (0, "")
    run = json.loads(said)["run"]
    assert (run["folder"], run["state"], run["step"]) == ("~/runs/tiny", "completed", LAST)
    facts = json.loads((straight.path / "run.json").read_text())
    assert run["data_fingerprint"] == facts["data_fingerprint"]
    assert run["run_torch"] == facts["environment"]["torch"]
    for private in ("somebody", "tiny-host", "value-of", str(tmp_path)):
        assert private not in said
    # The same settings in another place have the same hash, other settings another one.
    for change, same in (({"checkpoint_dir": "/else"}, True), ({"seed": 5}, False)):
        edit_json(home / "runs" / "tiny" / "config.json", **change)
        other = json.loads(launch.call("doctor", home / "runs" / "tiny", "--json").stdout)["run"]
        assert (other["settings_sha256"] == run["settings_sha256"]) == same


def test_a_host_is_hidden_with_its_domain(monkeypatch):
    said = "rank 0 on gpu7.cs.uni.edu: timeout; my-gpu7 too, not gpu70."
    for node in ("gpu7", "gpu7.cs.uni.edu"):
        monkeypatch.setattr(platform, "node", lambda node=node: node)
        assert without_names([said]) == ["rank 0 on ***: timeout; my-*** too, not gpu70."]
