"""HTTP APIs of older schedulers, as the settings enable them, added to the api process."""

from collections.abc import Callable, Mapping

from starlette.applications import Starlette
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from penstock.api.process import Parts
from penstock.compat.clockwork.http import Clockwork
from penstock.compat.scheduler0.http.routes import Scheduler0
from penstock.db.notify import DELAYED_RECORDS, Notifier
from penstock.runtime.loop import SideTask


class OlderApis:
    """scheduler0's API, and clockwork's beside the others or on a port of its own."""

    def __init__(self, parts: Parts) -> None:
        settings = parts.settings
        notifier = Notifier(parts.store, DELAYED_RECORDS)
        clockwork = Clockwork(parts, notifier)
        self.routes: list[BaseRoute] = []
        self.stop: Callable[[], None] = lambda: None
        if settings.scheduler0:
            scheduler0 = Scheduler0(parts)
            self.routes, self.stop = scheduler0.routes, scheduler0.stop
        if settings.clockwork_api:
            self.routes += clockwork.routes
        self.apps: dict[str, tuple[int, ASGIApp]] = {}
        if settings.clockwork_port is not None:
            self.apps["clockwork"] = settings.clockwork_port, Starlette(routes=clockwork.routes)
        self.side_tasks: Mapping[str, SideTask] = {"notify-delayed-records": notifier.run}
