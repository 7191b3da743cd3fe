"""Penstock: a durable task pipeline on Postgres and SQS.

The public names, loaded when first used, so that a worker loads no database driver.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.batching import Batcher
    from penstock.client import Client, InboundClient
    from penstock.errors import PenstockError, RpcError, SettingsError, Unavailable
    from penstock.handlers import Context, Fail, Retry, action
    from penstock.handlers.batches import Call
    from penstock.handlers.cancellation import TaskCancelled
    from penstock.handlers.waiting import Wait
    from penstock.retry import Backoff
    from penstock.settings import Settings, load_settings

__version__ = "0.1.0"

_HOMES = {
    "Backoff": "retry",
    "Batcher": "batching",
    "Call": "handlers.batches",
    "Client": "client",
    "Context": "handlers",
    "Fail": "handlers",
    "InboundClient": "client",
    "PenstockError": "errors",
    "Retry": "handlers",
    "RpcError": "errors",
    "Settings": "settings",
    "SettingsError": "errors",
    "TaskCancelled": "handlers.cancellation",
    "Unavailable": "errors",
    "Wait": "handlers.waiting",
    "action": "handlers",
    "load_settings": "settings",
}

__all__ = [
    "Backoff",
    "Batcher",
    "Call",
    "Client",
    "Context",
    "Fail",
    "InboundClient",
    "PenstockError",
    "Retry",
    "RpcError",
    "Settings",
    "SettingsError",
    "TaskCancelled",
    "Unavailable",
    "Wait",
    "__version__",
    "action",
    "load_settings",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(import_module(f"penstock.{_HOMES[name]}"), name)
