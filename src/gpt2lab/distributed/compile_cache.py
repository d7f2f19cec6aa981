"""Where compiled steps are kept between starts, and what compiling cost this one.

torch keeps them anyway, by default in the temporary folder: gone after a reboot, and on a shared machine in a place
where anyone may put files that torch would load. Ours is in the user's own cache.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from torch._dynamo.utils import calculate_time_spent, counters
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from gpt2lab import paths

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def use_cache_folder() -> None:
    """Have torch keep compiled code in ~/.cache/gpt2lab/compiled, unless the environment names another place.

    Where that cannot be written to, torch's own default stays.
    """
    # torch writes its default there when it is imported: that is nobody's choice.
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
    """Name the processor's instructions: code is made for those of one machine, and others may share its home."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{os.uname().machine}-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Compiled:
    """What this process has compiled so far."""

    compile_seconds: float
    graphs: int  # as Inductor makes them: a forward pass is one, its backward another
    from_cache: int  # of them: found as an earlier start left them
    folder: str | None

    def describe(self) -> str:
        """Write it for people."""
        return (
            f"compiled in {self.compile_seconds:.1f} s, {self.from_cache} of {self.graphs} graphs from the cache "
            f"({self.folder})"
        )


def compiled_so_far() -> Compiled:
    """Return the seconds and graphs so far, as torch counts them."""
    known = {end: counters["inductor"][f"fxgraph_cache_{end}"] for end in ("hit", "miss", "bypass")}
    return Compiled(
        compile_seconds=calculate_time_spent()["total_wall_time"],
        graphs=sum(known.values()),
        from_cache=known["hit"],
        folder=os.environ.get(_VARIABLE),
    )
