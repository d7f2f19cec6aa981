"""gpt2lab runs tensorboard: one server, for this machine only, that ends by its own pid file and nothing else."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil

from launch import HANG_SECONDS, rejected, script, worked
from loopback import free_port


def show(folder: Path, *words: object) -> tuple[int, str, str]:
    return script("runs tensorboard", "--checkpoint_dir", folder, *words)


def test_a_server_is_started_once_and_ended_alone(tmp_path):
    port = free_port()
    try:
        said = worked(show(tmp_path, "--port", port)).stdout
        assert f"http://localhost:{port}/" in said
        process = psutil.Process(json.loads((tmp_path / ".tensorboard.pid").read_text())["pid"])
        address = f"http://localhost:{port}/data/logdir"
        with urllib.request.urlopen(address, timeout=HANG_SECONDS) as answer:
            assert json.loads(answer.read())["logdir"] == str(tmp_path)
        listens = [c.laddr.ip for c in process.net_connections() if c.status == psutil.CONN_LISTEN]
        assert listens
        assert set(listens) <= {"127.0.0.1", "::1"}
        assert show(tmp_path, "--port", free_port())[:2] == (0, said)  # it runs already

        (tmp_path / "other").mkdir()
        error = rejected(show(tmp_path / "other", "--port", port))
        assert f"port {port} of localhost cannot be used (Address already in use)" in error
        assert list((tmp_path / "other").iterdir()) == []
    finally:
        stopped = show(tmp_path, "--stop")
    assert stopped == (0, f"stopped http://localhost:{port}/\n", "")
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    assert show(tmp_path, "--stop")[1] == "no TensorBoard of this folder is running\n"


def test_a_pid_file_left_behind_ends_nobody(tmp_path):
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        content = {"pid": bystander.pid, "port": 6006}
        (tmp_path / ".tensorboard.pid").write_text(json.dumps(content))
        assert show(tmp_path, "--stop")[:2] == (0, "no TensorBoard of this folder is running\n")
        time.sleep(0.2)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_what_cannot_be_shown_is_rejected_in_one_line(tmp_path):
    for folder, words, message in (
        (tmp_path / "nowhere", [], "no such folder"),
        (tmp_path, ["--port", 0], "must be from 1 to 65535"),
        (tmp_path, ["--port", "x"], "port"),
        *([(tmp_path, ["--port", 80], "cannot be used")] if os.getuid() else []),
    ):
        assert message in rejected(show(folder, *words))
    assert list(tmp_path.iterdir()) == []
