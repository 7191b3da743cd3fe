"""The api process: JSON-RPC 2.0 over HTTP, ``POST /rpc``; the dashboard. An enqueue is answered after its commit."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from starlette.types import ASGIApp

from penstock.api.access import Authenticator, Rates
from penstock.api.audit import Audit
from penstock.api.dashboard.routes import Dashboard
from penstock.api.dispatch import Methods
from penstock.api.http import make_app
from penstock.api.keys import KeyCache
from penstock.api.mcp import McpServer
from penstock.api.rpc import Dispatcher
from penstock.api.scaling import Scaling
from penstock.api.server import HttpServer, Part
from penstock.api.task_routes import TaskRoutes
from penstock.brokers.base import Queue
from penstock.db.notify import Notifier
from penstock.db.pool import Store
from penstock.db.replica import open_replica
from penstock.runtime.budget import ANSWER_BYTES, Budget
from penstock.runtime.logs import log
from penstock.runtime.loop import Service, SideTask
from penstock.settings.model import Settings


class Api(Service):
    """One api process; ``run_once`` asks Postgres for an answer, requests are served beside it.

    listening: set once callers can connect, at ``url``. queues, dead_letters: by label, used by the methods about
    dead-letter queues alone, so the api serves all others without SQS. additions: make APIs of other packages, with
    what these share of this one.
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
        additions: Sequence[Callable[[Store, Settings, Authenticator, Audit], Part]] = (),
    ) -> None:
        self._store = store
        self._replica = open_replica(settings, store)
        self._notifier = Notifier(store)
        self._key_cache = KeyCache(settings.known_keys, store) if settings.needs_keys else None
        self._methods = methods = Methods(
            store,
            self._notifier,
            settings,
            queues=queues or {},
            dead_letters=dead_letters or {},
            replica=self._replica,
            keys_changed=self._key_cache.renew if self._key_cache is not None else None,
        )
        dispatcher = Dispatcher(methods.handlers, batch_limit=settings.batch_limit)
        rate = settings.api_rate_limit
        rates = None if rate is None else Rates(rate, settings.api_rate_burst or rate)
        authenticator = Authenticator(self._key_cache, rates)
        self._dashboard = dashboard = Dashboard(methods, authenticator, settings) if settings.dashboard else None
        self._parts: list[Part] = [] if dashboard is None else [dashboard]
        self._parts.append(TaskRoutes(methods, store, authenticator, dashboard))
        self._parts += [make(store, settings, authenticator, methods.audit) for make in additions]
        app = make_app(
            dispatcher,
            authenticator,
            settings,
            scaling=Scaling(store),
            home=None if dashboard is None else dashboard.home,
            mcp=McpServer(dispatcher, settings).answer if settings.mcp else None,
            more=[route for part in self._parts for route in part.routes],
        )
        self._budget = Budget(max(settings.http_bytes_in_flight, settings.largest_request_bytes + ANSWER_BYTES))
        apps: dict[str, tuple[int, ASGIApp]] = {"http": (settings.http_port, app)}
        for part in self._parts:
            apps |= part.apps
        self._servers = {
            name: HttpServer(self._budget.counting(served), settings, port, name=name)
            for name, (port, served) in apps.items()
        }
        self.listening = asyncio.Event()

    @property
    def url(self) -> str:
        """Base URL, with the port that was taken; known from the first ``open`` on."""
        return self._servers["http"].url

    @property
    def added_urls(self) -> dict[str, str]:
        """Base URLs of added APIs that have a port of their own, by name."""
        return {name: server.url for name, server in self._servers.items() if name != "http"}

    async def open(self) -> None:
        """Take the port and reach Postgres. Raises SettingsError for a port that cannot be had, Unavailable."""
        for server in self._servers.values():
            server.bind()
        await self._store.open()
        if self._dashboard is not None:
            await asyncio.to_thread(self._dashboard.warm)
        if self._key_cache is not None:
            await self._key_cache.refresh()
        for server in self._servers.values():
            server.listen()
        log.info("api_listening", url=self.url, keys="needed" if self._key_cache is not None else "none")
        for name, url in self.added_urls.items():
            log.info(f"{name}_listening", url=url)
        self.listening.set()

    def side_tasks(self) -> Mapping[str, SideTask]:
        tasks: dict[str, SideTask] = {"notify": self._notifier.run, "results": self._methods.long_polls.run}
        tasks |= {name: server.run for name, server in self._servers.items()}
        if self._replica is not None:
            tasks["replica"] = self._replica.run
        if self._key_cache is not None:
            tasks["keys"] = self._key_cache.run
        for part in self._parts:
            tasks |= part.side_tasks
        return tasks

    async def run_once(self) -> int:
        """Ask Postgres for an answer, on which readiness depends. Raises Unavailable."""
        await self._store.ping()
        return 0

    def stop_taking(self) -> None:
        for server in self._servers.values():
            server.stop()
        self._methods.long_polls.stop()
        for part in self._parts:
            part.stop()

    async def drain(self, seconds: float) -> None:
        ended = await asyncio.gather(*(server.wait_ended(seconds) for server in self._servers.values()))
        if not all(ended):
            log.warning("requests_cut", grace_seconds=seconds)
        await self._methods.drain()

    async def close(self) -> None:
        for server in self._servers.values():
            server.close()
        if self._replica is not None:
            await self._replica.close()
        await self._store.close()
