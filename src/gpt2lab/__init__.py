"""gpt2lab: train GPT-2 from scratch; predict the run, keep every step, prove that nothing was lost."""

import importlib
import os
import sys
import time
from typing import TYPE_CHECKING, Any

if sys.version_info < (3, 10):  # noqa: UP036 - here, because nothing below loads in an older Python
    version = "{}.{}".format(*sys.version_info)
    print(
        f"error: {sys.executable} is Python {version}, gpt2lab needs 3.10 or newer; "
        "use .venv/bin/python after `make install PYTHON=python3.12`",
        file=sys.stderr,
    )
    sys.exit(2)

# How OpenMP's threads wait for the next loop, decided before torch is loaded. libgomp's own way, to spin for long, is
# best on an idle machine (a small model loses a third without), but 3 to 5 times slower beside one busy program.
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # each decides it, if it is set
SPIN_COUNT_BUSY = "100"


def is_crowded(threads: int) -> bool:
    """Tell whether `threads` threads and what else runs now are more than the processors; False where it is unknown."""
    try:
        with open("/proc/loadavg") as file:
            running = int(file.read().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):  # no Linux
        return False
    return running - 1 + threads > (os.cpu_count() or 1)


def _stays_crowded() -> bool:
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    for _ in range(8):
        if not is_crowded(threads):
            return False
        time.sleep(0.001)
    return True


if not any(name in os.environ for name in WAITING) and _stays_crowded():
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT_BUSY

if TYPE_CHECKING:
    from gpt2lab.commands.api import LanguageModel, Run, estimate, load, open_run, prepare, train

__version__ = "0.1.0"
__all__ = ["LanguageModel", "Run", "estimate", "load", "open_run", "prepare", "train"]


def __getattr__(name: str) -> Any:
    """Import a name of the API when it is first used: `import gpt2lab` alone costs nothing."""
    if name in __all__:
        return getattr(importlib.import_module("gpt2lab.commands.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
