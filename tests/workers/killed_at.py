"""Run a script that is killed (SIGKILL) just before its Nth call below $WATCH that makes, names, removes or flushes.

python killed_at.py N script.py FLAGS...

A file that was about to be flushed loses its second half first, as if the kill came within the write.
"""

import os
import runpy
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CALLS = ("fsync", "rename", "replace", "link", "mkdir", "rmdir", "unlink")
_last, _watched, _seen = int(sys.argv[1]), os.environ["WATCH"], 0


def _killing(plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(place: Any, *args: Any, **kwargs: Any) -> Any:
        global _seen
        path = os.readlink(f"/proc/self/fd/{place}") if isinstance(place, int) else str(place)
        _seen += path.startswith(_watched)
        if _seen == _last:
            if isinstance(place, int) and stat.S_ISREG(os.fstat(place).st_mode):
                os.truncate(path, os.fstat(place).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(place, *args, **kwargs)

    return call


for name in _CALLS:
    setattr(os, name, _killing(getattr(os, name)))
sys.argv = sys.argv[2:]
folder = Path(sys.argv[0]).parent
# Of a package, its `tokenizers` would hide the package of that name.
if not (folder / "__init__.py").exists():
    sys.path.insert(0, str(folder))
runpy.run_path(sys.argv[0], run_name="__main__")
