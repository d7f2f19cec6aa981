"""gpt2lab: train GPT-2 from scratch; predict the run, keep every step, prove that nothing was lost."""

import importlib
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
