"""uvicorn's connections, bounded: who is slow or silent loses the place that somebody else needs."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

_OF_OTHERS = 100  # places that one address leaves to the others
_HEADER_SECONDS = 10.0
_LAST_SECONDS = 5  # for the token that is being computed at the end


def server_of(app: Any, max_waiting: int) -> uvicorn.Server:
    """Return the server of an application in which `max_waiting` requests may wait."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=Connection,
            log_level="warning",
            lifespan="off",
            ws="none",
            server_header=False,
            limit_concurrency=max_waiting + 2 * _OF_OTHERS,
            timeout_graceful_shutdown=_LAST_SECONDS,
        )
    )


class Connection(H11Protocol):  # type: ignore[misc]
    """A connection; `limit_concurrency` bounds those of all clients, less _OF_OTHERS those of one address.

    Where a place is missing, the idle connection that has waited longest is closed: at its address's own limit one of
    that address, else one of the address that has most. A connection with an accepted request is never idle.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Make room for it."""
        super().connection_made(transport)
        self._await_headers()
        idle = [one for one in self.connections if one.is_idle]
        crowd, held = self.address, Counter(one.address for one in self.connections)
        if held[crowd] <= self.limit_concurrency - _OF_OTHERS:
            if len(self.connections) < self.limit_concurrency:
                return
            [(crowd, _)] = Counter(one.address for one in idle).most_common(1)
        oldest = min((o for o in idle if o.address == crowd), key=lambda one: one.idle_since)
        self.connections.discard(oldest)
        oldest.transport.abort()

    @property
    def address(self) -> Any:
        """The client's, without its port."""
        return self.client and self.client[0]

    @property
    def is_idle(self) -> bool:
        """Tell whether no request is being answered that was checked and read in full."""
        cycle = self.cycle
        return not cycle or cycle.response_complete or not cycle.scope["state"].get("is_accepted")

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._await_headers()
        super().on_response_complete()

    def _await_headers(self) -> None:
        self.idle_since = time.monotonic()  # finer than the loop's clock
        self.loop.call_later(_HEADER_SECONDS, self._end_unless_asked, self.cycle)

    def _end_unless_asked(self, last: Any) -> None:
        if self.cycle is last:
            self.transport.abort()
