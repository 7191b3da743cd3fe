"""What the methods of this package are carried out with."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from penstock.brokers.base import Queue
from penstock.db.context import ServingContext
from penstock.db.pool import Store


@dataclass(frozen=True, slots=True)
class ApiContext(ServingContext):
    store: Store  # for transactions of one record each, begun while one of ``turns`` is held, or that must not wait
    turns: asyncio.Semaphore
    queues: Mapping[str, Queue]  # by label, dead-letter queues too
    keys_changed: Callable[[], Awaitable[None]] | None  # called after a key was made or revoked
