"""The api process: JSON-RPC 2.0 over HTTP, ``POST /rpc``; the dashboard. An enqueue is answered after its commit."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from penstock.api.access import Guard
from penstock.api.budget import ANSWER_BYTES, Budget
from penstock.api.clockwork import Clockwork
from penstock.api.dashboard import Dashboard
from penstock.api.downloads import Downloads
from penstock.api.http import make_app
from penstock.api.keyring import Keyring
from penstock.api.methods import Methods
from penstock.api.rates import Rates
from penstock.api.rpc import Dispatcher
from penstock.api.scaling import Scaling
from penstock.api.scheduler0 import Scheduler0
from penstock.api.server import HttpServer
from penstock.logs import get_logger
from penstock.loop import Service, SideTask
from penstock.notify import ARMED, Notifier
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
        rates = None if rate is None else Rates(rate, settings.api_rate_burst or rate)
        guard = Guard(self._keyring, rates)
        self._scheduler0 = Scheduler0(store, settings, rates, self._methods.audit) if settings.scheduler0 else None
        self._armed = Notifier(store, ARMED)
        clockwork = Clockwork(store=store, notifier=self._armed, guard=guard, settings=settings)
        self._dashboard = Dashboard(self._methods, guard, settings) if settings.dashboard else None
        downloads = Downloads(
            self._methods, guard, may_read=None if self._dashboard is None else self._dashboard.may_read
        )
        app = make_app(
            dispatcher,
            guard,
            scaling=Scaling(store),
            request_limit_bytes=settings.largest_request_bytes,
            request_timeout_seconds=settings.request_timeout_seconds,
            home=None if self._dashboard is None else self._dashboard.home,
            more=(
                *downloads.routes,
                *(self._dashboard.routes if self._dashboard is not None else ()),
                *(self._scheduler0.routes if self._scheduler0 is not None else ()),
                *(clockwork.routes if settings.clockwork_api else ()),
            ),
        )
        self._budget = Budget(max(settings.http_bytes_in_flight, settings.largest_request_bytes + ANSWER_BYTES))
        self._server = _server(self._budget.counting(app), settings, settings.http_port)
        port = settings.clockwork_port
        self._clockwork = (
            None
            if port is None
            else _server(self._budget.counting(clockwork.app()), settings, port, port_setting="CLOCKWORK_PORT")
        )
        self.listening = asyncio.Event()

    @property
    def url(self) -> str:
        """Base URL, with the port that was taken; known from the first ``open`` on."""
        return self._server.url

    @property
    def clockwork_url(self) -> str | None:
        """Base URL of clockwork's API where it has a port of its own."""
        return None if self._clockwork is None else self._clockwork.url

    async def open(self) -> None:
        """Take the port and reach Postgres. Raises SettingsError for a port that cannot be had, Unavailable."""
        for server in self._servers:
            server.bind()
        await self._store.open()
        if self._dashboard is not None:
            await asyncio.to_thread(self._dashboard.warm)
        if self._keyring is not None:
            await self._keyring.refresh()
        for server in self._servers:
            server.listen()
        log.info("api_listening", url=self.url, keys="needed" if self._keyring is not None else "none")
        if self.clockwork_url is not None:
            log.info("clockwork_listening", url=self.clockwork_url)
        self.listening.set()

    @property
    def _servers(self) -> list[HttpServer]:
        return [server for server in (self._server, self._clockwork) if server is not None]

    def side_tasks(self) -> Mapping[str, SideTask]:
        tasks: dict[str, SideTask] = {
            "notify": self._notifier.run,
            "notify-armed": self._armed.run,
            "http": self._server.run,
            "results": self._methods.results.run,
        }
        if self._clockwork is not None:
            tasks["clockwork"] = self._clockwork.run
        return tasks if self._keyring is None else tasks | {"keys": self._keyring.run}

    async def run_once(self) -> int:
        """Ask Postgres whether it is there; readiness is the answer. Raises Unavailable."""
        async with self._store.session() as session:
            await session.fetch("read_clock")
        return 0

    def stop_taking(self) -> None:
        for server in self._servers:
            server.stop()
        if self._dashboard is not None:
            self._dashboard.stop()
        self._methods.results.stop()
        if self._scheduler0 is not None:
            self._scheduler0.stop()

    async def drain(self, seconds: float) -> None:
        ended = await asyncio.gather(*(server.wait_ended(seconds) for server in self._servers))
        if not all(ended):
            log.warning("requests_cut", grace_seconds=seconds)
        await self._methods.drain()

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        await self._store.close()


def _server(app: Any, settings: Settings, port: int, **more: str) -> HttpServer:
    return HttpServer(
        app,
        host=settings.http_host,
        port=port,
        grace_seconds=settings.grace_seconds,
        connections=settings.http_connections,
        request_limit_bytes=settings.largest_request_bytes,
        **more,
    )
