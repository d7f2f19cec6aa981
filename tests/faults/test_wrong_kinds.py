"""Row 30: files of a run that are links, pipes, sockets, devices, folders, or terabytes of holes, and every command.

`CASES=all pytest THIS_FILE -m fault -s` tries every command on each of them, else one of them in turn.
"""

import itertools
import os
import shutil
import socket
from collections import Counter
from pathlib import Path

import pytest

from corpora import snapshot
from launch import call
from whole_run import Run

pytestmark = [pytest.mark.fault, pytest.mark.timeout(10_800)]

APPENDED = ("run.lock", "metrics.jsonl", "log.txt")
FOLDERS = ("labels", "tensorboard", "evaluations", "validation")
FILES = (
    *(*APPENDED, *FOLDERS, "config.json", "run.json", "status.json"),
    *("estimate.json", "labels/best", "validation/step_00000004.npz"),
    *(f"step_00000004/{name}" for name in ("manifest.json", "state.json", "model.safetensors")),
)
KINDS = ("link", "dangling", "pipe", "socket", "device", "folder", "holes")
OUTPUTS = {"report": ".html", "plot": ".png", "export": ""}
COMMANDS = {
    "resume": ("train", "--resume=latest"),
    **{verb: (verb,) for verb in ("status", "runs list")},
    **{verb: (verb, "bad") for verb in ("runs repair-log", "runs rebuild-tensorboard")},
    "runs resume-command": ("runs resume-command", "bad"),
    **{verb: (verb, "bad", f"--out=out{end}") for verb, end in OUTPUTS.items()},
    "compare": ("compare", "bad", "good"),
    "evaluate": ("evaluate", "bad", "--device=cpu"),
    "estimate": ("estimate",),
    "runs rm": ("runs rm", "bad", "--yes"),
}


def spoil(path: Path, kind: str, victim: Path) -> None:
    """Put something else in place of a file, or of a folder."""
    is_folder = path.is_dir()
    shutil.rmtree(path) if is_folder else path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    links = {"link": victim / ("folder" if is_folder else "file"), "dangling": victim / "new"}
    if target := (links | {"device": Path("/dev/zero")}).get(kind):
        path.symlink_to(target)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(os.path.relpath(path))  # an address has at most 108 bytes
    elif kind == "folder":
        (path / "inside").mkdir(parents=True)
    else:
        path.touch()
        os.truncate(path, 1 << 40)


def test_row_30_no_command_writes_through_a_link_or_awaits_a_pipe(tiny_data, tmp_path, monkeypatch):
    work = tmp_path / "work"
    flags = ("--use_tensorboard", "--eval_freq=2", "--checkpoint_freq=2", "--max_steps=5")
    Run(tiny_data, tmp_path / "runs", *flags, name="bad").train("--stop_after_steps=4")
    (tmp_path / "runs" / "bad" / "evaluations").mkdir()
    shutil.copytree(tmp_path / "runs" / "bad", tmp_path / "runs" / "good")
    ended: Counter[tuple[str, int]] = Counter()
    wrong: list[str] = []
    turn = itertools.cycle(COMMANDS)
    monkeypatch.chdir(tmp_path)
    for file, kind in itertools.product(FILES, KINDS):
        for name in COMMANDS if os.environ.get("CASES") == "all" else (next(turn),):
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(tmp_path / "runs", work / "runs")
            (work / "victim" / "folder").mkdir(parents=True)
            (work / "victim" / "file").write_bytes(b"a line\nand an unfinished one")
            kept = [work / "victim", *([work / "runs" / "good"] if name != "compare" else [])]
            before = [snapshot(folder) for folder in kept]
            spoil(work / "runs" / "bad" / file, kind, work / "victim")
            more = [f"--checkpoint_dir={work / 'runs'}"]
            if name == "resume":
                more = [*Run(tiny_data, work / "runs", *flags, name="bad").flags, "--log_freq=1000"]
            done = call(*COMMANDS[name], *more, folder=work)
            is_wrong = (kind != "folder") if file in FOLDERS else kind == "folder"
            is_wrong &= not file.startswith(("step_", "validation/"))
            is_wrong |= file in APPENDED
            is_fine = {
                "outside": [snapshot(folder) for folder in kept] == before,
                "code": done.returncode in (0, 1, 2),
                "one line": not any(word in done.stderr for word in ("Traceback", "[Errno")),
                "others": name != "status" or all(r in done.stdout for r in ("good", "bad")),
                "resume": name != "resume" or done.returncode == 2 * is_wrong,
                "name": name != "resume" or not is_wrong or file in done.stderr,
            }
            broken = [what for what, fine in is_fine.items() if not fine]
            wrong += [f"{name}, {file}: {kind}: {broken}: {done}"] if broken else []
            ended[name, done.returncode] += 1
    print(dict(ended))
    assert not wrong, "\n".join(wrong)
