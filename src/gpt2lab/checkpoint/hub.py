"""Whether the Hugging Face Hub can be reached, asked before its libraries retry for most of a minute."""

from __future__ import annotations

import os
import socket
import urllib.request
from urllib.parse import urlsplit

_SECONDS = 5.0  # to wait for a connection
_YES = {"1", "ON", "YES", "TRUE"}


def is_offline() -> bool:
    """Tell whether the Hub is out of reach; its libraries, imported after this, then look into their cache alone."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in _YES:
        return True
    if _accepts_connections():
        return False
    os.environ["HF_HUB_OFFLINE"] = "1"
    return True


def _accepts_connections() -> bool:
    """Tell whether the Hub, or the proxy that leads to it, accepts a connection."""
    hub = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    proxy = urllib.request.getproxies().get(hub.scheme)
    if proxy and not urllib.request.proxy_bypass(hub.hostname or ""):
        hub = urlsplit(proxy)
    port = hub.port or (80 if hub.scheme == "http" else 443)
    try:
        socket.create_connection((hub.hostname, port), timeout=_SECONDS).close()
    except OSError:
        return False
    return True
