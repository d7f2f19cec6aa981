"""What every door shares: a refusal is one line and an exit code, never a traceback."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable

from gpt2lab.errors import GPT2LabError


def run(main: Callable[[list[str]], int]) -> int:
    """Call a door's main with the command line and turn refusals into exit codes.

    Of many processes with the same refusal, the first prints it. An error that nobody foresaw keeps its traceback:
    it is a bug, and the traceback is the report.
    """
    try:
        return main(sys.argv[1:])
    except GPT2LabError as refusal:
        rank = os.environ.get("RANK", "0")
        if rank == "0":
            print(f"error: {refusal}", file=sys.stderr)
        elif refusal.is_local:
            print(f"error: process {rank}: {refusal}", file=sys.stderr)
        return _leave(refusal.exit_code)
    except BrokenPipeError:  # `... | head` closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("error: interrupted; nothing half-written was kept", file=sys.stderr)
        return 1
    except Exception as error:
        traceback.print_exc()
        _tell_launcher(error)
        return _leave(1)


def _tell_launcher(error: Exception) -> None:
    """Have torchrun end its report with this error: among many processes it is the first cause that matters."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    with contextlib.suppress(OSError), open(path, "w") as file:
        json.dump({"message": message}, file)


def _leave(code: int) -> int:
    """Return the exit code; with a process group, end at once: no farewell to peers that may never come."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
