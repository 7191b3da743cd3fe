"""Whether the sender of the request in hand still waits for its answer, known within the request's own tasks."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

from starlette.requests import Request


class Peer:
    """The sender of a request whose body was read. ``waited``: its answer was put off, to wait for something."""

    __slots__ = ("_request", "waited")

    def __init__(self, request: Request) -> None:
        self._request = request
        self.waited = False

    async def gone(self) -> None:
        """Until the connection is closed; one at a time."""
        self.waited = True
        while (await self._request.receive())["type"] != "http.disconnect":
            pass


_peer: ContextVar[Peer | None] = ContextVar("peer", default=None)


def watch(request: Request) -> Peer:
    """Remember a request as the one in hand."""
    peer = Peer(request)
    _peer.set(peer)
    return peer


async def wait_gone() -> None:
    """Until the connection of the request in hand is closed; for ever where it came over none."""
    peer = _peer.get()
    await (asyncio.Event().wait() if peer is None else peer.gone())
