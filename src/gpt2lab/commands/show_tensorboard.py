"""Start TensorBoard in the background for this machine only, or stop the one that was started.

gpt2lab runs tensorboard --port 6006
gpt2lab runs tensorboard --stop
"""

# The server holds a lock on its pid file as long as it lives, so a file that a dead server left behind never ends
# another program that has its number now.

import contextlib
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

from gpt2lab import fmt, paths
from gpt2lab.commands.parser import AmongRuns, parse_flags
from gpt2lab.commands.serve import listen
from gpt2lab.config.flags import option
from gpt2lab.errors import ConfigError, system_errors_as
from gpt2lab.files import regular

_HOST = "localhost"
_START_SECONDS, _STOP_SECONDS = 120.0, 10.0


@dataclass(frozen=True)
class ShowTensorBoard(AmongRuns):
    """Start TensorBoard in the background for this machine only, or stop the one that was started."""

    port: int = option(6006, "where a browser finds it: http://localhost:PORT")
    stop: bool = option(False, "stop it and do nothing else")


def main(argv: list[str]) -> int:
    """Start or stop the server and print where it is."""
    flags = parse_flags(ShowTensorBoard, argv, name="gpt2lab runs tensorboard")
    folder = paths.runs_folder(flags.checkpoint_dir)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder")
    pid_file = folder / ".tensorboard.pid"
    found = _running(pid_file)
    if flags.stop:
        if found:
            deadline = time.monotonic() + _STOP_SECONDS
            os.killpg(found["pid"], signal.SIGTERM)
            while _running(pid_file):
                if time.monotonic() > deadline:
                    os.killpg(found["pid"], signal.SIGKILL)
                time.sleep(0.05)
            pid_file.unlink(missing_ok=True)
        address = f"stopped http://{_HOST}:{found['port']}/" if found else ""
        print(address or "no TensorBoard of this folder is running")
        return 0
    found = found or _start(folder, pid_file, flags.port)
    place = [f"--checkpoint_dir={flags.checkpoint_dir}"] * (flags.checkpoint_dir is not None)
    stop = fmt.command_line([*paths.command_words("runs tensorboard"), "--stop", *place])
    print(
        f"http://{_HOST}:{found['port']}/ shows {paths.display_path(folder)} (process {found['pid']}); "
        f"end it with: {stop}"
    )
    return 0


def _running(pid_file: Path) -> dict[str, int] | None:
    """Return pid and port of the server that holds the lock, None if there is none."""
    try:
        with open(pid_file, opener=regular) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        try:
            return dict(json.loads(pid_file.read_text()))
        except ValueError:
            raise ConfigError(f"{pid_file}: TensorBoard is being started; try again") from None
    except OSError:
        pass
    return None


def _start(folder: Path, pid_file: Path, port: int) -> dict[str, int]:
    if not 0 < port < 65536:
        raise ConfigError(f"port {port} must be from 1 to 65535")
    listen(_HOST, port).close()
    log = folder / ".tensorboard.log"
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder)]
    with (
        system_errors_as(ConfigError, folder, what="cannot write there"),
        open(pid_file, "a", opener=regular) as file,
        open(log, "w", opener=regular) as output,
    ):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate(0)
        process = subprocess.Popen(
            [*command, "--host", _HOST, "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl+C in this terminal must not end it
            pass_fds=[file.fileno()],  # with the descriptor the server inherits the lock
        )
        found = {"pid": process.pid, "port": port}
        json.dump(found, file)
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
            raise ConfigError(f"TensorBoard ended at once: {lines[-1]} (full output in {log})")
        with contextlib.suppress(OSError), socket.create_connection((_HOST, port), timeout=1):
            return found
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    raise ConfigError(f"TensorBoard did not answer within {_START_SECONDS:.0f} s; see {log}")
