"""The cache of compiled code, and what compilation cost this start.

By default torch caches in the temporary folder, which a reboot empties and where, on a shared machine, anyone may put
files that torch would load. This cache lies in the user's own folder.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from gpt2lab import paths

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def use_cache_folder() -> None:
    """Make torch cache compiled code in ~/.cache/gpt2lab/compiled, unless the environment names another folder.

    If that folder cannot be written, torch's default stays.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # slow

    # torch sets the variable to its default when it is imported: that is not the user's choice.
    if os.environ.get(_VARIABLE, default_cache_dir()) != default_cache_dir():
        return
    folder = paths.of_user("XDG_CACHE_HOME", ".cache") / "gpt2lab" / "compiled" / _processor()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        usable = os.access(folder, os.W_OK)
    except OSError:
        return
    if usable:
        os.environ[_VARIABLE] = str(folder)


def _processor() -> str:
    """Name the processor's instruction set: machines with different ones may share a home folder."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{os.uname().machine}-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"


def compiled_so_far() -> dict[str, Any]:
    """Return the seconds and graphs so far, as torch counts them: the fields of a run's `compile` event."""
    # Slow to import; only compiled runs need it.
    from torch._dynamo.utils import calculate_time_spent, counters

    hits, *others = (counters["inductor"][f"fxgraph_cache_{e}"] for e in ("hit", "miss", "bypass"))
    return {
        "compile_seconds": calculate_time_spent()["total_wall_time"],
        "graphs": hits + sum(others),  # Inductor's: one for a forward pass, one for its backward
        "from_cache": hits,
        "folder": os.environ.get(_VARIABLE),
    }
