"""gpt2lab: train GPT-2 from scratch; predict the run, keep every step, prove that nothing was lost."""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if sys.version_info < (3, 10):  # noqa: UP036 - here, because nothing below loads in an older Python
    version = "{}.{}".format(*sys.version_info)
    print(
        f"error: {sys.executable} is Python {version}, gpt2lab needs 3.10 or newer; "
        "use .venv/bin/python after `make install PYTHON=python3.12`",
        file=sys.stderr,
    )
    sys.exit(2)

# How OpenMP's threads wait for the next loop; read when torch is loaded, which every program does after this package.
# By default they spin for ever: a CPU run beside one busy program is then 4 times slower. Without spinning a small
# model loses a third. This many turns (microseconds) bridge the gaps within a step.
SPIN_COUNT = "1000"
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # each decides it, if it is set
if not any(name in os.environ for name in WAITING):
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT

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
