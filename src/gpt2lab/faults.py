"""Named places where a test can make the program die, so that what follows is proved and not hoped for.

`FAULT=checkpoint.before_rename:kill9@10` kills the process there at step 10; `,rank=1` picks one process.
Without the variable a fault point does nothing.
"""

from __future__ import annotations

import errno
import os
import re
import signal

_SYNTAX = re.compile(
    r"(?P<name>[\w.]+):(?P<action>kill9|enospc)@(?P<step>\d+)(,rank=(?P<rank>\d+))?"
)


def faultpoint(name: str, step: int) -> None:
    """Do what the environment variable FAULT asks for at this place and step, if anything.

    Raises: OSError(ENOSPC) for the action `enospc`; ValueError if FAULT is not understood.
    """
    wanted = os.environ.get("FAULT")
    if not wanted:
        return
    match = _SYNTAX.fullmatch(wanted)
    if match is None:
        raise ValueError(f"FAULT={wanted!r} is not NAME:kill9|enospc@STEP[,rank=R]")
    rank = os.environ.get("RANK", "0")
    if (match["name"], int(match["step"])) != (name, step) or match["rank"] not in (None, rank):
        return
    if match["action"] == "kill9":
        os.kill(os.getpid(), signal.SIGKILL)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
