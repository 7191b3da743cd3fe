"""The deliveries of a worker; the package's docstring says how to write one."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import cached_property
from typing import TYPE_CHECKING, Any

from penstock.protocol.errors import SettingsError, needing
from penstock.protocol.spelling import did_you_mean
from penstock.protocol.task import BUILT_IN_ACTIONS
from penstock.settings.model import Settings
from penstock.settings.values import PREFIX
from penstock.worker.handlers.actions import Registry, action

if TYPE_CHECKING:
    from penstock.worker.deliveries.http_client import HttpClient

# Action -> extra of the package that brings what it needs beyond a plain worker's libraries.
EXTRAS: dict[str, str] = {"amqp.publish": "rabbitmq", "kafka.publish": "kafka"}


class Deliveries:
    """What PENSTOCK_DELIVERIES names, added to the registry. modules: of other packages. Raises SettingsError."""

    def __init__(self, settings: Settings, registry: Registry, modules: Mapping[str, str] | None = None) -> None:
        self.settings = settings
        self.registry = registry
        self._opens: list[Callable[[], None]] = []
        self._stack = AsyncExitStack()
        for name in dict.fromkeys(settings.deliveries):
            if name not in BUILT_IN_ACTIONS:
                hint = did_you_mean(name, BUILT_IN_ACTIONS) or f"; there are {', '.join(sorted(BUILT_IN_ACTIONS))}"
                raise SettingsError(f"{PREFIX}DELIVERIES: there is no delivery {name!r}{hint}")
            if name in self.registry:
                raise SettingsError(
                    f"{PREFIX}DELIVERIES names {name}, but a module of --app registers an action of that name: "
                    "rename that one, or take the name out of the setting"
                )
            home = (modules or {}).get(name) or f"penstock.worker.deliveries.{name.partition('.')[0]}"
            with needing(f"{PREFIX}DELIVERIES={name}", EXTRAS.get(name, "worker")):
                module = importlib.import_module(home)  # its add_to() registers it
            module.add_to(self)

    def action(self, name: str, function: Callable[..., Any], **options: Any) -> None:
        """Register a handler; options: those of ``penstock.action``, timeout, max_attempts, backoff, batch, linger."""
        action(name, registry=self.registry, **options)(function)

    def at_open(self, open_: Callable[[], None]) -> None:
        """Begin a connection before the first task, on the running loop, without waiting for it."""
        self._opens.append(open_)

    def at_close(self, close: Callable[[], Awaitable[None]]) -> None:
        """Close something when the worker has drained, the newest first."""
        self._stack.push_async_callback(close)

    @cached_property
    def http(self) -> HttpClient:
        """The worker's one guarded HTTP client; its sockets are opened with the first request."""
        from penstock.worker.deliveries.http_client import HttpClient

        client = HttpClient(self.settings)
        self.at_close(client.close)
        return client

    def open(self) -> None:
        """Begin to connect. Raises SettingsError for unusable settings."""
        for open_ in self._opens:
            open_()

    async def close(self) -> None:
        """Close everything; an error is raised once all is closed."""
        await self._stack.aclose()
