"""A task that was enqueued by its action."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from penstock.client import default, records

R = TypeVar("R")


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
        client = await default.async_client()
        return self._read(self.id, await client.result(self.id, timeout=timeout))

    def result_sync(self, *, timeout: float | None = None) -> R:
        """As ``result``."""
        return self._read(self.id, default.client().result(self.id, timeout=timeout))

    async def status(self) -> records.TaskDetail:
        """Return the task as it is now, with its payload and every failed attempt."""
        return await (await default.async_client()).status(self.id, detail=True)

    def status_sync(self) -> records.TaskDetail:
        """As ``status``."""
        return default.client().status(self.id, detail=True)

    async def cancel(self, *, reason: str | None = None) -> records.Changed:
        """Cancel the task unless it has settled. Raises TaskNotFound, StateConflict."""
        return await (await default.async_client()).cancel(self.id, reason=reason)

    def cancel_sync(self, *, reason: str | None = None) -> records.Changed:
        """As ``cancel``."""
        return default.client().cancel(self.id, reason=reason)
