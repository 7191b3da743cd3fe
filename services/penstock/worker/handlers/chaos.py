"""Handlers that raise on purpose, before or after they have done their work."""

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from penstock.protocol.errors import InjectedFault
from penstock.runtime.chaos import Faults
from penstock.worker.handlers.actions import Handler, Registry


def with_faults(registry: Registry, faults: Faults) -> Registry:
    """A registry of the same actions, which fail by the chance of the edge ``handler``."""
    faulty = Registry()
    for handler in registry.values():
        made = copy.copy(handler)
        made.function = _faulty(handler, faults)
        faulty.add(made)
    return faulty


def _faulty(handler: Handler, faults: Faults) -> Callable[..., Any]:
    function = handler.function
    if not handler.is_async:
        return _failing(faults)(function)

    @functools.wraps(function)
    async def run(*args: Any, **kwargs: Any) -> Any:
        with _failing(faults):
            return await function(*args, **kwargs)

    return run


@contextmanager
def _failing(faults: Faults) -> Iterator[None]:
    fails, is_late = faults.strikes("handler"), faults.is_even()
    if fails and not is_late:
        raise InjectedFault("injected by PENSTOCK_CHAOS_HANDLER, before the work")
    yield
    if fails:
        raise InjectedFault("injected by PENSTOCK_CHAOS_HANDLER, after the work")
