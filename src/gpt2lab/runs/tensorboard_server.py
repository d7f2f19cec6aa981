"""A TensorBoard of our own in the background: started once, ended by its own pid file, for this machine only. No torch.

The server holds a lock on the pid file for as long as it lives. So a file that a dead server left behind never ends
another program that has its number now.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from gpt2lab import paths
from gpt2lab.errors import ConfigError

_PID_FILE, _LOG = ".tensorboard.pid", ".tensorboard.log"
_HOST = "localhost"
_START_SECONDS, _STOP_SECONDS = 120.0, 10.0


@dataclass(frozen=True)
class Server:
    """A TensorBoard that we started."""

    pid: int
    port: int

    @property
    def address(self) -> str:
        """Where a browser of this machine finds it."""
        return f"http://{_HOST}:{self.port}/"


def running(checkpoint_dir: Path) -> Server | None:
    """Return the server that shows a folder of runs, None if none of ours lives.

    Raises: ConfigError in the moment in which another process starts one.
    """
    path = checkpoint_dir / _PID_FILE
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        try:
            return Server(**json.loads(path.read_text()))
        except (ValueError, TypeError):
            raise ConfigError(f"{path}: TensorBoard is being started; try again") from None
    except OSError:
        pass
    return None


def start(checkpoint_dir: Path, port: int) -> Server:
    """Start a server and return once it answers.

    Raises: ConfigError if the port is taken, the folder cannot be written or TensorBoard ends at once.
    """
    _refuse_taken(port)
    log = checkpoint_dir / _LOG
    try:
        with open(checkpoint_dir / _PID_FILE, "a") as file, open(log, "w") as said:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.truncate(0)
            command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(checkpoint_dir)]
            process = subprocess.Popen(
                [*command, "--host", _HOST, "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,  # Ctrl+C in this terminal is not meant for it
                pass_fds=[file.fileno()],  # and with it the lock
            )
            json.dump({"pid": process.pid, "port": port}, file)
    except OSError as error:
        raise ConfigError(f"{checkpoint_dir}: cannot write there ({error.strerror})") from error
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            lines = log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
            raise ConfigError(f"TensorBoard ended at once: {lines[-1]} (all of it in {log})")
        if _answers(port):
            return Server(process.pid, port)
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    raise ConfigError(
        f"TensorBoard did not answer on port {port} within {_START_SECONDS:.0f} s; see {log}"
    )


def stop(checkpoint_dir: Path) -> Server | None:
    """End the server that shows a folder of runs and return it, None if none of ours lives."""
    server = running(checkpoint_dir)
    if server is None:
        return None
    deadline = time.monotonic() + _STOP_SECONDS
    os.killpg(server.pid, signal.SIGTERM)
    while running(checkpoint_dir) is not None:
        if time.monotonic() > deadline:
            os.killpg(server.pid, signal.SIGKILL)
        time.sleep(0.05)
    (checkpoint_dir / _PID_FILE).unlink(missing_ok=True)
    return server


def _refuse_taken(port: int) -> None:
    if not 0 < port < 65536:
        raise ConfigError(f"port {port} must be from 1 to 65535")
    if _answers(port):
        raise ConfigError(
            f"port {port} is in use by another program; choose another: make tensorboard PORT={port % 65535 + 1}"
        )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError as error:
            raise ConfigError(f"port {port} cannot be used ({error.strerror})") from error


def _answers(port: int) -> bool:
    try:
        socket.create_connection((_HOST, port), timeout=1).close()
    except OSError:
        return False
    return True


def describe(server: Server, checkpoint_dir: Path) -> str:
    """Say where it is and how it ends."""
    shown = paths.for_people(checkpoint_dir)
    return f"{server.address} shows {shown} (process {server.pid}); make tensorboard-stop ends it"
