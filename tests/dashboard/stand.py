"""A running api with the sample in its database, in a thread of its own, for a browser to look at."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import asyncpg

from penstock.api.process import Api
from penstock.compat.clockwork.http import Clockwork
from penstock.compat.scheduler0.http.routes import Scheduler0
from penstock.db.pool import Store
from penstock.runtime.loop import Loop
from penstock.settings.model import Settings
from tests.dashboard.sample import caller_of, fill
from tests.integration.apis import queues_of


class Stand:
    """The api at ``url``; ``ids`` of the sample; ``run`` does something on its loop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ready = threading.Event()
        self._done: asyncio.Event
        self._loop = asyncio.new_event_loop()
        self._failed: BaseException | None = None
        self.url = ""
        self.ids: dict[str, int] = {}
        self.call: Callable[..., Awaitable[Any]]
        self.sql: Any
        self._thread = threading.Thread(target=self._serve, name="stand", daemon=True)

    def __enter__(self) -> Stand:
        self._thread.start()
        self._ready.wait(120)
        if self._failed is not None or not self.url:
            raise RuntimeError("the stand did not come up") from self._failed
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(60)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._live())
        except BaseException as exc:
            self._failed = exc
        finally:
            self._ready.set()
            self._loop.close()

    async def _live(self) -> None:
        self._done = asyncio.Event()
        settings = self._settings
        store = Store(settings.require_database_url, application_name="penstock-api@demo:4711")
        transport, queues, dead_letters = queues_of(settings)
        api = Api(
            store=store, settings=settings, queues=queues, dead_letters=dead_letters, additions=[Scheduler0, Clockwork]
        )
        self.sql = await asyncpg.connect(settings.require_database_url)
        self.call = caller_of(api._methods)
        self.ids = await fill(self.sql, self.call)
        loop = Loop(api, passes=1, grace_seconds=5)
        running = asyncio.create_task(loop.run())
        await asyncio.wait_for(api.listening.wait(), 60)
        self.url = api.url
        self._ready.set()
        await self._done.wait()
        loop.stop()
        await running
        await self.sql.close()
        await transport.close()
