"""The api process: JSON-RPC 2.0 over HTTP, ``POST /rpc``. An enqueue is answered after its commit."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from penstock.api.access import Guard
from penstock.api.http import make_app
from penstock.api.keyring import Keyring
from penstock.api.methods import Methods
from penstock.api.rates import Rates
from penstock.api.rpc import Dispatcher
from penstock.api.scaling import Scaling
from penstock.api.server import HttpServer
from penstock.logs import get_logger
from penstock.loop import Service, SideTask
from penstock.notify import Notifier
from penstock.settings import Settings
from penstock.store import Store
from penstock.transports import Queue

__all__ = ["Api"]

log = get_logger()


class Api(Service):
    """One api process; ``run_once`` asks Postgres for a sign of life, requests are served beside it.

    listening: set once callers can connect, at ``url``. queues, dead_letters: by label, used by the methods about
    dead-letter queues alone, so the api serves all others without SQS.
    """

    name = "api"
    idle_seconds = 1.0

    def __init__(
        self,
        *,
        store: Store,
        settings: Settings,
        queues: Mapping[str, Queue] | None = None,
        dead_letters: Mapping[str, Queue] | None = None,
    ) -> None:
        self._store = store
        self._notifier = Notifier(store)
        self._keyring = Keyring(settings.known_keys, store) if settings.needs_keys else None
        self._methods = Methods(
            store,
            self._notifier,
            settings,
            queues=queues or {},
            dead_letters=dead_letters or {},
            keys_changed=self._keyring.refresh if self._keyring is not None else None,
        )
        dispatcher = Dispatcher(
            self._methods.handlers, prefixes=self._methods.prefixes, batch_limit=settings.batch_limit
        )
        rate = settings.api_rate_limit
        app = make_app(
            dispatcher,
            Guard(self._keyring, None if rate is None else Rates(rate, settings.api_rate_burst or rate)),
            scaling=Scaling(store),
            request_limit_bytes=settings.request_limit_bytes,
            request_timeout_seconds=settings.request_timeout_seconds,
        )
        self._server = HttpServer(
            app,
            host=settings.http_host,
            port=settings.http_port,
            grace_seconds=settings.grace_seconds,
            connections=settings.http_connections,
            request_limit_bytes=settings.request_limit_bytes,
        )
        self.listening = asyncio.Event()

    @property
    def url(self) -> str:
        """Base URL, with the port that was taken; known from the first ``open`` on."""
        return self._server.url

    async def open(self) -> None:
        """Take the port and reach Postgres. Raises SettingsError for a port that cannot be had, Unavailable."""
        self._server.bind()
        await self._store.open()
        if self._keyring is not None:
            await self._keyring.refresh()
        self._server.listen()
        log.info("api_listening", url=self.url, keys="needed" if self._keyring is not None else "none")
        self.listening.set()

    def side_tasks(self) -> Mapping[str, SideTask]:
        tasks: dict[str, SideTask] = {
            "notify": self._notifier.run,
            "http": self._server.run,
            "results": self._methods.results.run,
        }
        return tasks if self._keyring is None else tasks | {"keys": self._keyring.run}

    async def run_once(self) -> int:
        """Ask Postgres whether it is there; readiness is the answer. Raises Unavailable."""
        async with self._store.session() as session:
            await session.fetch("read_clock")
        return 0

    def stop_taking(self) -> None:
        self._server.stop()
        self._methods.results.stop()

    async def drain(self, seconds: float) -> None:
        if not await self._server.wait_ended(seconds):
            log.warning("requests_cut", grace_seconds=seconds)
        await self._methods.drain()

    async def close(self) -> None:
        self._server.close()
        await self._store.close()
