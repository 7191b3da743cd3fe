"""Tasks that were enqueued by their action, and the clients that they ask: one of all threads, one of each loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from penstock.protocol import answers

if TYPE_CHECKING:
    from penstock.client.async_client import AsyncClient
    from penstock.client.client import Client

R = TypeVar("R")
_arguments: dict[str, Any] = {}
_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[AsyncClient, AsyncGenerator[AsyncClient, None]]]
_by_loop = WeakKeyDictionary()


def connect(url: str | None = None, *, api_key: str | None = None, timeout: float = 30) -> None:
    """Choose the api for actions and tasks: ``resize.enqueue(...)``, ``task.result()``. Nothing is sent.

    url: None for PENSTOCK_API_URL, else http://127.0.0.1:8080. api_key: None for PENSTOCK_API_KEY, "" to send none.
    timeout: seconds for one call. Without it the environment decides, when the first task is enqueued.
    """
    _arguments.update(url=url, api_key=api_key, timeout=timeout)
    client.cache_clear()
    _by_loop.clear()


@cache
def client() -> Client:
    """The client of every thread."""
    from penstock.client.client import Client  # httpx takes long to load, and a worker needs none

    return Client(**_arguments)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=client.cache_clear)  # a connection belongs to one process


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


@dataclass(frozen=True, slots=True)
class Task(Generic[R]):
    """An enqueued task, whose result is an ``R``. The methods ask the api that `penstock.connect` or the environment
    names, and raise what those of `Client` raise; those that end in ``_sync`` block.

    duplicate: another task had its unique key, and ``id`` is that one's. replaced: with on_duplicate "replace",
    whether that one took the new payload.
    """

    id: int
    duplicate: bool = False
    replaced: bool | None = None
    _read: Callable[[int, Any], R] = field(default=lambda _, value: value, repr=False, compare=False, kw_only=True)

    async def result(self, *, timeout: float | None = None) -> R:
        """Wait until the task has settled and return its result, converted to the annotated type of the handler.

        timeout: seconds; None: unlimited. Raises TaskFailed, ResultCancelled, ResultTimeout and the like, and
        UnexpectedResult for a result of another type.
        """
        asked = await async_client()
        return self._read(self.id, await asked.result(self.id, timeout=timeout))

    def result_sync(self, *, timeout: float | None = None) -> R:
        """As ``result``."""
        return self._read(self.id, client().result(self.id, timeout=timeout))

    async def status(self) -> answers.TaskDetail:
        """Return the task as it is now, with its payload and every failed attempt."""
        return await (await async_client()).status(self.id, detail=True)

    def status_sync(self) -> answers.TaskDetail:
        """As ``status``."""
        return client().status(self.id, detail=True)

    async def cancel(self, *, reason: str | None = None) -> answers.Changed:
        """Cancel the task unless it has settled. Raises TaskNotFound, StateConflict."""
        return await (await async_client()).cancel(self.id, reason=reason)

    def cancel_sync(self, *, reason: str | None = None) -> answers.Changed:
        """As ``cancel``."""
        return client().cancel(self.id, reason=reason)
