"""No test reaches beyond this machine: a connection elsewhere, or a question to a name server, fails its test."""

import ipaddress
import socket
import sys
from typing import Any

refused: list[str] = []  # what was tried since the list was cleared last


class BeyondLoopbackError(Exception):
    """A connection, or a question to a name server, that would leave this machine."""


def is_local(host: object) -> bool:
    """Tell whether a host is this machine; a name other than its own would be asked for outside."""
    text = host.decode() if isinstance(host, bytes) else host
    if text in (None, "", "localhost", socket.gethostname()):
        return True
    try:
        address = ipaddress.ip_address(str(text).partition("%")[0])
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event == "socket.connect":
        connection, address = args
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or is_local(address[0]):
            return
        where = str(address[0])
    elif event == "socket.getaddrinfo" and not is_local(args[0]):
        where = str(args[0])
        if where.replace(".", "").isdigit() or ":" in where:  # an address: nobody is asked
            return
    else:
        return
    refused.append(where)
    raise BeyondLoopbackError(f"a test would leave this machine: {where}")


def guard() -> None:
    """Watch this process from here on; an audit hook cannot be taken away again."""
    sys.addaudithook(_hook)
