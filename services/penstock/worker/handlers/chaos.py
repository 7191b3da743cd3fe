"""Handlers that raise on purpose, before or after they have done their work."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.protocol.errors import InjectedFault
from penstock.runtime.chaos import Faults
from penstock.worker.handlers.actions import Handler, Registry


def with_faults(registry: Registry, faults: Faults) -> Registry:
    """A registry of the same actions, which fail by the chance of the edge ``handler``."""
    faulty = Registry()
    for handler in registry:
        faulty.add(_faulty(handler, faults))
    return faulty


def _faulty(handler: Handler, faults: Faults) -> Handler:
    function = handler.function
    made = copy.copy(handler)
    if handler.is_async:

        @functools.wraps(function)
        async def run(*args: Any, **kwargs: Any) -> Any:
            with _failing(faults):
                return await function(*args, **kwargs)

    else:

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with _failing(faults):
                return function(*args, **kwargs)

    made.function = run
    return made


@contextmanager
def _failing(faults: Faults) -> Iterator[None]:
    fails, is_late = faults.strikes("handler"), faults.is_even()
    if fails and not is_late:
        raise InjectedFault("injected by PENSTOCK_CHAOS_HANDLER, before the work")
    yield
    if fails:
        raise InjectedFault("injected by PENSTOCK_CHAOS_HANDLER, after the work")
