"""What a worker loads: ``penstock worker --app penstock.contrib.django.worker_app``, with DJANGO_SETTINGS_MODULE set.

Imported, it sets Django up and imports the module ``tasks`` of each installed app, whose tasks and actions register.
"""

import functools
from collections.abc import Callable
from typing import Any

import django
from asgiref.sync import sync_to_async
from django.apps import apps
from django.db import close_old_connections
from django.utils.module_loading import autodiscover_modules

from penstock.protocol.task import BUILT_IN_ACTIONS
from penstock.worker.handlers.actions import REGISTRY, Handler, Registry


def _closing(handler: Handler) -> Callable[..., Any]:
    """The handler's function; before and after it old connections of its thread are closed, as around a request."""
    function, close_from_coroutine = handler.function, sync_to_async(close_old_connections)

    @functools.wraps(function)
    async def run_async(*args: Any, **kwargs: Any) -> Any:
        await close_from_coroutine()
        try:
            return await function(*args, **kwargs)
        finally:
            await close_from_coroutine()

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        close_old_connections()
        try:
            return function(*args, **kwargs)
        finally:
            close_old_connections()

    return run_async if handler.is_async else run


def _add(handler: Handler) -> None:
    """Register a handler of a module that is loaded behind this one, by another --app."""
    Registry.add(REGISTRY, handler)
    if handler.name not in BUILT_IN_ACTIONS:
        handler.function = _closing(handler)


if not apps.ready:
    django.setup()
autodiscover_modules("tasks")
for _handler in REGISTRY.values():
    _handler.function = _closing(_handler)
REGISTRY.add = _add  # type: ignore[method-assign]
