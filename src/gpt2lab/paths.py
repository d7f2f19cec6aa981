"""Paths: defaults relative to the checkout, or to the working directory where gpt2lab is installed; typed ones
relative to the working directory.
"""

from __future__ import annotations

import os
import shutil
import sys
from functools import partial
from pathlib import Path

from gpt2lab.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
IS_CHECKOUT = (REPOSITORY / "src" / "train.py").is_file()  # else in some site-packages
LAUNCHED = "GPT2LAB_LAUNCHED"  # for the ranks of --gpus, whose errors the parent prints: how the parent was called


def from_repository(path: Path) -> Path:
    """Resolve a default path against the checkout, or the working directory where gpt2lab is installed."""
    return path if path.is_absolute() else (REPOSITORY if IS_CHECKOUT else Path.cwd()) / path


def from_working_directory(path: Path) -> Path:
    """Resolve a typed path against the working directory.

    Raises: ConfigError as `expand_user` does.
    """
    return expand_user(path).absolute()


def expand_user(path: str | Path) -> Path:
    """Replace `~` or `~name` at the beginning of a typed path by that user's home folder.

    Raises: ConfigError if there is no such user or folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        user = Path(path).parts[0]
        raise ConfigError(
            f"{path}: no home folder is known for {user}; type the full path"
        ) from error


def runs_folder(typed: Path | None) -> Path:
    """Return the folder of the runs: the typed one, default checkpoints/ in the checkout or working directory."""
    return from_working_directory(typed) if typed else from_repository(Path("checkpoints"))


def command_words(verb: str, processes: int = 1, *, anywhere: bool = False) -> list[str]:
    """Return the words that call a verb from the working directory, whether or not the environment is activated.

    They have the form in which this program was called, where the verb has it: `gpt2lab`, `python -m gpt2lab`, a
    script, or `torchrun`; several processes are the flag --gpus of the others. `anywhere`: with full paths, which hold
    in other folders and shells too.
    """
    call, show = partial(program, anywhere=anywhere), str if anywhere else display_path
    called = Path(os.environ.get(LAUNCHED, sys.argv[0]))
    is_installed = (Path(sys.executable).parent / "gpt2lab").exists()
    by_module = called.parts[-2:] == ("gpt2lab", "__main__.py")
    by_script = called.suffix == ".py" and called.name != "__main__.py"
    gpus = ["--gpus", str(processes)] * (processes > 1)
    # For an environment without the package; bash alone takes no quoted assignment.
    source = ["env", f"PYTHONPATH={show(Path(__file__).resolve().parents[1])}"]
    if verb in ("train", "finetune") and (by_script or not (is_installed or by_module)):
        launcher = [call("python")]
        if processes > 1 and "RANK" in os.environ and LAUNCHED not in os.environ:
            launcher, gpus = [call("torchrun"), f"--nproc_per_node={processes}"], []
        found = [] if IS_CHECKOUT or is_installed else source
        return [*found, *launcher, *(show(Path(word)) for word in trainer(verb)), *gpus]
    if by_module or not is_installed:
        is_found = is_installed or (by_module and not anywhere)
        found = [] if is_found else source
        return [*found, call("python"), "-m", "gpt2lab", *verb.split(), *gpus]
    return [call("gpt2lab"), *verb.split(), *gpus]


def child_environment() -> dict[str, str]:
    """Return the environment in which a child process finds this package, for `python -m gpt2lab.MODULE`."""
    source = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def trainer(name: str) -> list[str]:
    """Return what follows `python` or `torchrun` to start `train` or `finetune` from any folder."""
    if not IS_CHECKOUT:
        return ["-m", f"gpt2lab.{name}"]
    return [str(REPOSITORY / "src" / f"{name}.py")]


def of_user(variable: str, below_home: str) -> Path:
    """Return a folder of the user's: the one that an XDG variable names, else one below the home folder.

    For a user without a home folder, as in some containers, it is a folder that cannot be created.
    """
    if named := os.environ.get(variable):
        return Path(named)
    try:
        return Path.home() / below_home
    except RuntimeError:
        return Path("/nonexistent") / below_home


def display_path(path: Path) -> str:
    """Show a path relative to the working directory where that is shorter."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def program(name: str, *, anywhere: bool = False) -> str:
    """Return how to call a program of this environment: by name, by path if not activated, by full path `anywhere`."""
    ours = Path(sys.executable).parent / name
    if not ours.exists() or (not anywhere and shutil.which(name) == str(ours)):
        return name
    return str(ours) if anywhere else display_path(ours)
