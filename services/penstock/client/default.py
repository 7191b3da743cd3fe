"""The clients of actions and tasks, made when first used: one for all threads, and one for each event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from penstock.client.async_client import AsyncClient
    from penstock.client.client import Client

_arguments: dict[str, Any] = {}
_blocking: list[Client] = []
_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[AsyncClient, AsyncGenerator[AsyncClient, None]]]
_by_loop = WeakKeyDictionary()


def connect(url: str | None = None, *, api_key: str | None = None, timeout: float = 30) -> None:
    """Choose the api for actions and tasks: ``resize.enqueue(...)``, ``task.result()``. Nothing is sent.

    url: None for PENSTOCK_API_URL, else http://127.0.0.1:8080. api_key: None for PENSTOCK_API_KEY, "" to send none.
    timeout: seconds for one call. Without it the environment decides, when the first task is enqueued.
    """
    _arguments.update(url=url, api_key=api_key, timeout=timeout)
    _blocking.clear()
    _by_loop.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_blocking.clear)  # a connection belongs to one process


def client() -> Client:
    """The client of every thread."""
    if not _blocking:
        from penstock.client.client import Client  # httpx takes long to load, and a worker needs none

        _blocking.append(Client(**_arguments))
    return _blocking[0]


async def async_client() -> AsyncClient:
    """The client of the running event loop."""
    loop = asyncio.get_running_loop()
    if loop not in _by_loop:
        opened = _open()
        _by_loop[loop] = await anext(opened), opened
    return _by_loop[loop][0]


async def _open() -> AsyncGenerator[AsyncClient, None]:
    """Yield a client, which is closed with the loop: asyncio.run() and its like close the generators that are open."""
    from penstock.client.async_client import AsyncClient

    loop = asyncio.get_running_loop()
    async with AsyncClient(**_arguments) as opened:
        try:
            yield opened
        finally:  # a generator refers to its loop, so the entry would keep both
            if (kept := _by_loop.get(loop)) is not None and kept[0] is opened:
                del _by_loop[loop]
