"""Row 30: files of a run that are links, pipes, sockets, devices, folders, or terabytes of holes, and every command.

`CASES=all pytest THIS_FILE -m fault -s` tries every command on each of them, else one of them in turn.
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
from collections import Counter
from pathlib import Path

import pytest

from launch import call
from whole_run import Run

pytestmark = [pytest.mark.fault, pytest.mark.timeout(10_800)]

FILES = (
    *("run.lock", "metrics.jsonl", "log.txt", "metrics.cache", "config.json", "run.json"),
    *("status.json", "estimate.json", "labels/best", "labels/new", "labels", "tensorboard"),
    *("evaluations", "heartbeat", "validation", "validation/step_00000004.npz"),
    *(f"step_00000004/{name}" for name in ("manifest.json", "state.json", "model.safetensors")),
)
APPENDED = ("run.lock", "metrics.jsonl", "log.txt")
KINDS = ("link", "dangling", "pipe", "socket", "device", "folder", "holes")
COMMANDS = {
    "resume": ("train", "--resume=latest"),
    **{verb: (verb,) for verb in ("status", "runs list")},
    **{verb: (verb, "bad") for verb in ("runs repair-log", "runs rebuild-tensorboard")},
    **{verb: (verb, "bad", "--out=out") for verb in ("report", "plot", "export")},
    "compare": ("compare", "bad", "good"),
    "evaluate": ("evaluate", "bad", "--device=cpu"),
    "estimate": ("estimate",),
    "runs rm": ("runs rm", "bad", "--yes"),
}


def spoil(path: Path, kind: str, victim: Path) -> None:
    """Put something else in place of a file, or of a folder."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    if kind in ("link", "dangling"):
        inside = "folder" if "." not in path.name and path.parent.name == "bad" else "file"
        path.symlink_to(victim / (inside if kind == "link" else "new"))
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        here = os.open(".", os.O_RDONLY)
        os.chdir(path.parent)  # the address of a socket has 108 bytes
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
        os.fchdir(here)
        os.close(here)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        (path / "inside").mkdir(parents=True)
    else:
        path.touch()
        os.truncate(path, 1 << 40)


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_row_30_no_command_writes_through_a_link_or_waits_for_a_pipe(tiny_data, tmp_path):
    template, work = tmp_path / "template", tmp_path / "work"
    flags = ("--use_tensorboard", "--eval_freq=2", "--checkpoint_freq=2", "--max_steps=5")
    Run(tiny_data, template, *flags, name="bad").train("--stop_after_steps=4")
    shutil.copytree(template / "bad", template / "good")
    chosen = os.environ.get("CASES", "one")
    cases = list(itertools.product(FILES, KINDS))
    ended: Counter[tuple[str, int]] = Counter()
    turn = itertools.cycle(COMMANDS)
    for file, kind in cases:
        for name in COMMANDS if chosen == "all" else (next(turn),):
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(template, work / "runs")
            victim = work / "victim"
            (victim / "folder").mkdir(parents=True)
            (victim / "file").write_bytes(b"a line of the victim\nand an unfinished one")
            before, good = content_of(victim), content_of(work / "runs" / "good")
            spoil(work / "runs" / "bad" / file, kind, victim)
            verb, *words = COMMANDS[name]
            more = [f"--checkpoint_dir={work / 'runs'}"]
            if name == "resume":
                more = [*Run(tiny_data, work / "runs", *flags, name="bad").flags, "--log_freq=1000"]
            done = call(verb, *words, *more, folder=work)
            case = f"{name}, {file}: {kind}: {done}"
            assert content_of(victim) == before, case
            assert done.returncode in (0, 1, 2), case
            assert not any(word in done.stderr for word in ("Traceback", "[Errno")), case
            if name != "compare":
                assert content_of(work / "runs" / "good") == good, case
            if name == "status":
                assert all(run in done.stdout for run in ("good", "bad")), case
            if done.returncode:
                assert (work / "runs" / "bad" / file).exists() or kind in ("dangling", "socket")
                assert done.stderr.strip().splitlines()[-1].count("error: ") == 1, case
            is_folder = file in ("labels", "tensorboard", "evaluations", "heartbeat", "validation")
            is_wrong = (kind != "folder") is is_folder or file in APPENDED
            is_wrong &= not file.startswith(("step_", "validation/", "metrics.cache"))
            if name == "resume":
                assert done.returncode == (2 if is_wrong else 0), case
                assert not is_wrong or f"bad/{file}: " in done.stderr, case
            ended[name, done.returncode] += 1
    print(dict(ended))


if os.name != "posix":
    raise RuntimeError("pipes and sockets are files of POSIX")
