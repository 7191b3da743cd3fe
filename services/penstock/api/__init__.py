"""The api process: JSON-RPC 2.0 over HTTP, ``POST /rpc``. An enqueue is answered after its commit."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from penstock.api.access import Guard
from penstock.api.http import make_app
from penstock.api.methods import Methods
from penstock.api.rpc import Dispatcher
from penstock.api.server import HttpServer
from penstock.logs import get_logger
from penstock.loop import Service, SideTask
from penstock.notify import Notifier
from penstock.settings import Settings
from penstock.store import Store

__all__ = ["Api"]

log = get_logger()


class Api(Service):
    """One api process; ``run_once`` asks Postgres for a sign of life, requests are served beside it.

    listening: set once callers can connect, at ``url``.
    """

    name = "api"
    idle_seconds = 1.0

    def __init__(self, *, store: Store, settings: Settings) -> None:
        self._store = store
        self._notifier = Notifier(store)
        self._methods = Methods(store, self._notifier, settings)
        dispatcher = Dispatcher(
            self._methods.handlers, prefixes=self._methods.prefixes, batch_limit=settings.batch_limit
        )
        app = make_app(dispatcher, Guard(settings.api_keys), request_limit_bytes=settings.request_limit_bytes)
        self._server = HttpServer(
            app, host=settings.http_host, port=settings.http_port, grace_seconds=settings.grace_seconds
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
        self._server.listen()
        log.info("api_listening", url=self.url)
        self.listening.set()

    def side_tasks(self) -> Mapping[str, SideTask]:
        return {"notify": self._notifier.run, "http": self._server.run}

    async def run_once(self) -> int:
        """Ask Postgres whether it is there; readiness is the answer. Raises Unavailable."""
        async with self._store.session() as session:
            await session.fetch("read_clock")
        return 0

    def stop_taking(self) -> None:
        self._server.stop()

    async def drain(self, seconds: float) -> None:
        if not await self._server.wait_ended(seconds):
            log.warning("requests_cut", grace_seconds=seconds)
        await self._methods.drain()

    async def close(self) -> None:
        self._server.close()
        await self._store.close()
