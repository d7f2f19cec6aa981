"""What every command shares: an error is one line and an exit code, never a traceback."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import NoReturn, TextIO

from gpt2lab.errors import (
    ConfigError,
    GPT2LabError,
    InUseError,
    OutOfMemoryError,
    SavedInterrupt,
    UnreachableError,
    first_line,
    is_lost_peer,
    is_out_of_memory,
    printable,
    system_errors_as,
    to_gpt2lab_error,
)
from gpt2lab.files import replace_durably
from gpt2lab.paths import LAUNCHED
from gpt2lab.runs import console
from gpt2lab.training.stop import end_at_once

_CODE_FILE = "GPT2LAB_EXIT_CODE_FILE"
_LOOK_SECONDS = 0.5  # between two looks whether a command has been silent
_LAST = {"printed": 0.0, "shown": 0}  # moment of the last output; width of the line on a terminal


def run(main: Callable[[list[str]], int]) -> int:
    """Call a command's main with the command line and turn errors into exit codes.

    Rank 0 prints an error that all ranks share. An unexpected error keeps its traceback: it is a bug, and the traceback
    is the report. Characters that a terminal cannot show, or that would move its cursor, are escaped: names and texts
    of files are printed as they are everywhere else.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        # Closed by `>&-`: the next file that is opened would get its number, and with it what libraries print.
        if getattr(sys, name) is None and os.open(os.devnull, os.O_RDWR) == number:
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))
    for stream, errors in (
        (sys.stdin, "replace"),
        (sys.stdout, "backslashreplace"),
        (sys.stderr, "backslashreplace"),
    ):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
            if stream is not sys.stdin:
                _escape_controls(stream)
                if "JPY_PARENT_PID" in os.environ:  # a notebook's, which keeps each rewritten line
                    setattr(stream, "isatty", lambda: False)  # noqa: B010 - as below
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, _interrupt)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and (
        path := os.environ.get(_CODE_FILE)
    ):
        # torchrun began again: what ended the workers before counts no more.
        with contextlib.suppress(OSError):
            os.truncate(path, 0)
    try:
        with system_errors_as(ConfigError, "the working directory", fix="change to another"):
            os.getcwd()  # in a deleted one oneMKL, for one, would end the process later
        with never_silent():
            code = main(sys.argv[1:])
        _tell_launcher(code)
        return code
    except BrokenPipeError:  # `... | head` closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt as interrupt:
        kept = f"; {interrupt}" if str(interrupt) else ""
        is_saved = isinstance(interrupt, SavedInterrupt)
        print(f"{'' if is_saved else 'error: '}interrupted{kept}", file=sys.stderr)
        return 0 if is_saved else 1
    except ModuleNotFoundError as missing:
        if not missing.name or missing.name.partition(".")[0] == "gpt2lab":
            raise
        print(
            f"error: {sys.executable} has no package {missing.name}; use the Python in which requirements.txt is "
            "installed (.venv/bin/python after `make install`)",
            file=sys.stderr,
        )
        return _leave(2)
    except Exception as error:
        expected = to_gpt2lab_error(error)
        if expected is None and is_out_of_memory(error):
            expected = OutOfMemoryError(
                f"out of memory: {first_line(error).rstrip('.')}; this command needs more than is free, or than "
                f"`ulimit -v` and the machine's other limits leave it"
            )
        if expected is not None:
            return _reject(expected)
        report = traceback.format_exc()
        if LAUNCHED not in os.environ:
            print(report, end="", file=sys.stderr)
        _tell_launcher(1, error, report=report)
        return _leave(1)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Raise KeyboardInterrupt, but end at once within an import: C++ code that torch runs there aborts on an error."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            end_at_once(number)
        frame = frame.f_back
    raise KeyboardInterrupt


def note_output(covered: int = 0) -> None:
    """Note that something is about to be printed; it replaces the line that `never_silent` shows on a terminal.

    `covered`: characters of that line that what is printed covers by itself.
    """
    _LAST["printed"] = monotonic()
    shown, _LAST["shown"] = int(_LAST["shown"]), 0
    if shown > covered:
        for text in ("\r" + " " * shown, "\r"):
            print(text, end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def never_silent() -> Iterator[None]:
    """On rank 0, say on standard error what is being done, whenever nothing was printed for 4 seconds.

    On a terminal it is one line that is replaced.
    """

    def look(_: float) -> None:
        task, now = console.TASKS[-1], monotonic()
        is_quiet = not all(task.what for task in console.TASKS)
        if is_quiet or (now - _LAST["printed"] < console.BEAT_SECONDS and not _LAST["shown"]):
            return
        if getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False):
            task = console.Task("loading PyTorch", began=task.began)
        text = task.line(now - task.began)
        if not sys.stderr.isatty():
            console.say(text)
            return
        text = text[: shutil.get_terminal_size().columns - 1]
        print("\r" + text.ljust(int(_LAST["shown"])), end="", file=sys.stderr, flush=True)
        _LAST["shown"] = len(text)

    if os.environ.get("RANK", "0") != "0":
        yield
        return
    note_output()
    with console.doing("working"), console.beats(look, every=_LOOK_SECONDS):
        yield
    note_output()


def _escape_controls(stream: TextIO) -> None:
    plain = stream.write

    def write(text: str) -> int:
        bar = text.startswith("\r")  # a progress bar goes back to the beginning of its line
        note_output(len(text) - 1 if bar else 0)
        plain("\r" * bar + printable(text[bar:], keep="\n\t"))
        return len(text)

    setattr(stream, "write", write)  # noqa: B010 - to type checkers a method is no variable


def _reject(error: GPT2LabError) -> int:
    rank = os.environ.get("RANK", "0")
    line = f"error: {f'rank {rank}: ' if error.is_local and rank != '0' else ''}{error}"
    if LAUNCHED not in os.environ and (rank == "0" or error.is_local):
        with contextlib.suppress(OSError):  # its file's disk is full: the exit code still tells
            print(line, file=sys.stderr)
    _tell_launcher(error.exit_code, error, report=str(error), said=line)
    _tell_script(error)
    return _leave(error.exit_code)


def _tell_script(error: GPT2LabError) -> None:
    """Tell run_until_done.sh an exit code that torchrun hides, when no status.json can: the folder may be gone.

    1 makes it start again. Only a folder in use and a store that does not answer say so: a rank with 1 may have a peer
    with a reason of its own.
    """
    may_pass = isinstance(error, InUseError | UnreachableError)
    code = 1 if may_pass else error.exit_code
    if (code != 1 or may_pass) and (path := os.environ.get(_CODE_FILE)):
        with contextlib.suppress(OSError):
            replace_durably(Path(path), f"{code}\n")


def _tell_launcher(
    code: int, error: Exception | None = None, report: str = "", said: str | None = None
) -> None:
    """Have torchrun end its output with the first cause: the earliest of the ranks' reports, by full seconds.

    A process that fails because another one did is often as fast as a second allows; it dates itself a second later.
    Our own launcher (launch.py) prints what the cause `said`, by default its report.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    is_lost = error is not None and is_lost_peer(error)
    extra = {"py_callstack": report, "timestamp": str(int(time.time()) + is_lost)}
    ours = {"exit_code": code, "is_lost_peer": is_lost, "said": said or report.rstrip()}
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra | ours}
    # In one step: torchrun sends SIGTERM to what is left, and fails itself on a report that is cut short.
    with contextlib.suppress(OSError):
        replace_durably(Path(path), json.dumps({"message": message}))


def _leave(code: int) -> int:
    """Return the exit code; with a process group, end at once: no farewell to peers that may never come."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        sys.stdout.flush()
        console.finish_stderr()
        os._exit(code)
    return code
