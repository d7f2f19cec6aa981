"""Named places where a test can make the program fail.

`FAULT=checkpoint.before_rename:kill9@10` kills the process there at step 10. `@*` means at every step, `,rank=1` picks
one rank, `;` separates several. Without the variable a fault point does nothing.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import time

_SYNTAX = re.compile(
    r"(?P<name>[\w.]+):(?P<action>kill9|term|freeze|raise|enospc|sleep(?P<seconds>[\d.]+))"
    r"@(?P<step>\d+|\*)(,rank=(?P<rank>\d+))?"
)


def faultpoint(name: str, step: int) -> None:
    """Do what the environment variable FAULT asks for at this place and step, if anything.

    `kill9` and `freeze` end and stop the process, `term` asks it to stop, `sleep0.5` delays it, `raise` and `enospc`
    are errors.

    Raises: RuntimeError for `raise`; OSError(ENOSPC) for `enospc`; ValueError if FAULT is not understood.
    """
    for wanted in filter(None, os.environ.get("FAULT", "").split(";")):
        match = _SYNTAX.fullmatch(wanted)
        if match is None:
            raise ValueError(
                f"FAULT={wanted!r} is not NAME:kill9|term|freeze|raise|enospc|sleepSECONDS@STEP[,rank=R]"
            )
        if match["rank"] not in (None, os.environ.get("RANK", "0")):
            continue
        if match["name"] == name and match["step"] in ("*", str(step)):
            _fail(match["action"], match["seconds"], f"fault point {name} at step {step}")


def _fail(action: str, seconds: str | None, place: str) -> None:
    if action == "kill9":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "term":
        # To this thread, so that it is handled before the next line.
        signal.raise_signal(signal.SIGTERM)
    elif action == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "raise":
        raise RuntimeError(place)
    elif action == "enospc":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    else:
        time.sleep(float(seconds or 0))
