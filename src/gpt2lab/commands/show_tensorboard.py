"""Show the runs in TensorBoard: start it in the background for this machine only, or stop the one that was started.

python scripts/show_tensorboard.py --port 6006
python scripts/show_tensorboard.py --stop
"""

from dataclasses import dataclass
from pathlib import Path

from gpt2lab.config.command_line import option, run_tyro
from gpt2lab.errors import ConfigError


@dataclass(frozen=True)
class ShowTensorBoard:
    """Start TensorBoard in the background for this machine only, or stop the one that was started."""

    port: int = option(6006, "where a browser finds it: http://localhost:PORT")
    stop: bool = option(False, "end it, and nothing else")
    checkpoint_dir: Path | None = option(None, "folder of the runs; default checkpoints/")


def main(argv: list[str]) -> int:
    """Start or stop, and say so."""
    flags = run_tyro(ShowTensorBoard, argv)
    from gpt2lab import paths
    from gpt2lab.runs import tensorboard_server

    folder = paths.from_repository(Path("checkpoints"))
    if flags.checkpoint_dir:
        folder = paths.from_working_directory(flags.checkpoint_dir)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder")
    if flags.stop:
        stopped = tensorboard_server.stop(folder)
        print(f"stopped {stopped.address}" if stopped else "no TensorBoard of ours is running")
        return 0
    server = tensorboard_server.running(folder)
    server = server or tensorboard_server.start(folder, flags.port)
    print(tensorboard_server.describe(server, folder))
    return 0
