"""What files hold never reaches the terminal as it is: an escape sequence is shown, not done."""

import json
import os
import pty
import re
import shlex
import subprocess
from pathlib import Path

import pytest

import launch
from gpt2lab.checkpoint.manifest import Draft, commit
from gpt2lab.errors import ConfigError, printable
from launch import TRAIN
from whole_run import facts_of

EVIL = "a\x1b]0;owned\x07\x1b[2J\x9b31m\rb\x7f"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@pytest.fixture
def runs(tmp_path) -> Path:
    """Return runs whose names, labels and files hold escape sequences wherever one can be."""
    folder = tmp_path / "runs" / EVIL
    folder.mkdir(parents=True)
    commit(folder, Draft(2, {}, facts_of(2)))
    (folder / "labels").mkdir()
    (folder / "labels" / EVIL).write_text("step_00000002")
    (folder / "config.json").write_text(json.dumps({"model": EVIL}))
    (folder / "status.json").write_text(json.dumps({"state": "failed", "step": 1, "reason": EVIL}))
    event = {"event": "step", "time": 1.0, "attempt": 1, "step": 1}
    (folder / "metrics.jsonl").write_text(json.dumps(event)[:-1] + EVIL + "\n")
    (folder / "step_00000004").mkdir()
    (folder / "step_00000004" / "manifest.json").write_text(json.dumps({"format": EVIL}))
    return folder.parent


@pytest.mark.parametrize(
    ("program", "words"),
    [
        *((TRAIN, ["--list_checkpoints"]), (TRAIN, ["--list_checkpoints", "--verify"])),
        *((TRAIN, ["--resume=latest"]), (TRAIN, [f"--run_name={EVIL}", "--resume=latest"])),
        *((TRAIN, [f"--{EVIL}"]), ("status", []), ("runs resume-command", [EVIL])),
        *(("runs resume-command", ["nowhere" + EVIL]), ("report", [EVIL])),
    ],
)
def test_no_command_prints_a_control_character(runs, program, words):
    done = launch.call(program, *words, f"--checkpoint_dir={runs}")
    assert done.stdout + done.stderr
    for said in (done.stdout, done.stderr):
        assert CONTROL.search(said) is None, ascii(said)
    if done.returncode == 2:
        assert done.stderr.count("\n") == 1


def test_an_error_is_one_line_whatever_a_file_brings_into_it():
    assert str(ConfigError("a\nb\x1b")) == r"a\nb\x1b"
    assert printable("é\n\x00", keep="\n") == "é\n\\x00"


def test_help_and_watch_still_work_in_a_terminal(tmp_path):
    """Our own sequences are not escaped: `--watch` clears the screen; help is plain text."""
    for words, seen, unseen in (
        (["status", "--help"], b"--watch", b"\\x1b"),
        (["status", "--watch=60", f"--checkpoint_dir={tmp_path}"], b"\x1b[H\x1b[2J", b"\\x1b"),
    ):
        ours, theirs = pty.openpty()
        command = [*launch.words_of(words[0]), *words[1:]]
        environment = {**os.environ, "TERM": "xterm"}
        with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as process:
            os.close(theirs)
            said = b""
            while seen not in said:
                said += os.read(ours, 4096)
            process.kill()
        os.close(ours)
        assert unseen not in said


def test_a_closed_output_is_no_error(runs):
    command = shlex.join([*launch.words_of("status"), f"--checkpoint_dir={runs}"])
    for closed in (">&-", "<&- >&- 2>&-"):
        assert subprocess.run(f"{command} {closed}", shell=True).returncode == 0
