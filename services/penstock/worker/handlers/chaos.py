"""Handlers that raise on purpose, before or after they have done their work."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.protocol.errors import InjectedFault
from penstock.runtime.chaos import Faults
from penstock.worker.handlers.actions import Registry


def with_faults(registry: Registry, faults: Faults) -> Registry:
    """A registry of the same actions, which fail by the chance of the edge ``handler``."""

    @contextmanager
    def failing(*_: Any, **__: Any) -> Iterator[None]:
        fails, is_late = faults.strikes("handler"), faults.is_even()
        if fails and not is_late:
            raise InjectedFault("injected by PENSTOCK_CHAOS_HANDLER, before the work")
        yield
        if fails:
            raise InjectedFault("injected by PENSTOCK_CHAOS_HANDLER, after the work")

    return Registry({action: handler.inside(failing) for action, handler in registry.items()})
