"""Whoever sent the request in hand: whether they still wait for its answer. Known within the request's own tasks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar

from starlette.requests import Request

_gone: ContextVar[Callable[[], Awaitable[None]] | None] = ContextVar("gone", default=None)


def is_asking(request: Request) -> None:
    """Remember a request whose body was read."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    _gone.set(gone)


async def wait_gone() -> None:
    """Until the connection of the request in hand is closed; one at a time. Without a request at once."""
    gone = _gone.get()
    if gone is not None:
        await gone()
