"""Whether the Hugging Face Hub can be reached, checked before its libraries retry for most of a minute."""

import contextlib
import os
import socket
import sys
import urllib.request
from collections import Counter
from time import monotonic
from urllib.parse import urlsplit

_SECONDS = 5.0  # to wait for a connection, over all addresses
_VARIABLE = "HF_HUB_OFFLINE"
_YES = {"1", "ON", "YES", "TRUE"}
_PORTS = {"http": 80, "https": 443}
_READ_AT_IMPORT = ("huggingface_hub.constants", "datasets.config")  # the variable

_users_value: str | None = None  # of the variable, while it is ours
_is_ours = False


def is_offline() -> bool:
    """Tell whether the Hub cannot be reached now; its libraries then use only their cache, until it can be reached.

    Without it the libraries would retry for most of a minute.
    """
    if not _is_ours and os.environ.get(_VARIABLE, "").upper() in _YES:
        return True
    offline = not _accepts_connections()
    if offline != _is_ours:
        _tell_libraries(offline)
    return offline


def _tell_libraries(offline: bool) -> None:
    """Set the libraries' variable, or restore the user's value, also in libraries that have read it."""
    global _is_ours, _users_value
    if offline:
        _users_value = os.environ.get(_VARIABLE)
        os.environ[_VARIABLE] = "1"
    elif _users_value is None:
        os.environ.pop(_VARIABLE, None)
    else:
        os.environ[_VARIABLE] = _users_value
    _is_ours = offline
    for name in _READ_AT_IMPORT:
        if (module := sys.modules.get(name)) is not None:
            module.HF_HUB_OFFLINE = offline  # type: ignore[attr-defined]


def _accepts_connections() -> bool:
    """Tell whether the Hub, or the proxy that leads to it, accepts a connection."""
    hub = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    proxies = urllib.request.getproxies()
    proxy = proxies.get(hub.scheme) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(hub.hostname or ""):
        hub = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    try:
        port = hub.port or _PORTS.get(hub.scheme, 1080)  # of SOCKS
    except ValueError:
        return True  # no port: the libraries report what is wrong with the address
    deadline = monotonic() + _SECONDS
    try:
        places = socket.getaddrinfo(hub.hostname, port, type=socket.SOCK_STREAM)
    except OSError:
        return False
    turns: Counter[int] = Counter()
    by_turn = []
    for family, *_, address in places:
        by_turn.append((turns[family], (str(address[0]), port)))
        turns[family] += 1
    for _, address in sorted(by_turn, key=lambda place: place[0]):  # IPv4 and IPv6 in turn
        if (left := deadline - monotonic()) > 0:
            with contextlib.suppress(OSError):
                socket.create_connection(address, timeout=left / 2).close()  # others have the rest
                return True
    return False
