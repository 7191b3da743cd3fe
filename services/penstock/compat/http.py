"""HTTP APIs of older schedulers, as the settings enable them, added to the api process."""

from __future__ import annotations

from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from penstock.api.process import Parts
from penstock.compat.clockwork.http import Clockwork
from penstock.compat.scheduler0.http.routes import Scheduler0
from penstock.db.notify import DELAYED_RECORDS, Notifier
from penstock.runtime.loop import SideTask


class OlderApis:
    """An addition to the api: scheduler0's API, and clockwork's, beside the others or on a port of its own."""

    def __init__(self, parts: Parts) -> None:
        settings = parts.settings
        self._notifier = Notifier(parts.store, DELAYED_RECORDS)
        clockwork = Clockwork(store=parts.store, notifier=self._notifier, guard=parts.guard, settings=settings)
        self._scheduler0 = Scheduler0(parts.store, settings, parts.rates, parts.audit) if settings.scheduler0 else None
        self.routes: list[BaseRoute] = [
            *(self._scheduler0.routes if self._scheduler0 is not None else ()),
            *(clockwork.routes if settings.clockwork_api else ()),
        ]
        port = settings.clockwork_port
        self.apps: dict[str, tuple[int, ASGIApp]] = {} if port is None else {"clockwork": (port, clockwork.app())}

    @property
    def side_tasks(self) -> dict[str, SideTask]:
        return {"notify-delayed-records": self._notifier.run}

    def stop(self) -> None:
        """Answer requests that wait for an async task."""
        if self._scheduler0 is not None:
            self._scheduler0.stop()
