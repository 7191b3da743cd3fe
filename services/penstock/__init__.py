"""Penstock: a durable task pipeline on Postgres and SQS.

The public names, loaded when first used, so that a worker loads no database driver.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.async_client import AsyncClient
    from penstock.batching import Batcher
    from penstock.client import Client, InboundClient
    from penstock.errors import (
        NoResult,
        PenstockError,
        ResultGone,
        ResultTimeout,
        RpcError,
        SettingsError,
        TaskCalledOff,
        TaskFailed,
        Unavailable,
    )
    from penstock.handlers import Context, Fail, Retry, action
    from penstock.handlers.batches import Call
    from penstock.handlers.cancellation import TaskCancelled
    from penstock.handlers.waiting import Wait
    from penstock.retry import Backoff
    from penstock.settings import Settings, load_settings
    from penstock.transactional import enqueue, enqueue_many, enqueue_many_sync, enqueue_sync
    from penstock.workflow_client import Workflow

__version__ = "0.1.0"

_HOMES = {
    "AsyncClient": "async_client",
    "Backoff": "retry",
    "Batcher": "batching",
    "Call": "handlers.batches",
    "Client": "client",
    "Context": "handlers",
    "Fail": "handlers",
    "InboundClient": "client",
    "NoResult": "errors",
    "PenstockError": "errors",
    "ResultGone": "errors",
    "ResultTimeout": "errors",
    "Retry": "handlers",
    "RpcError": "errors",
    "Settings": "settings",
    "SettingsError": "errors",
    "TaskCalledOff": "errors",
    "TaskCancelled": "handlers.cancellation",
    "TaskFailed": "errors",
    "Unavailable": "errors",
    "Wait": "handlers.waiting",
    "Workflow": "workflow_client",
    "action": "handlers",
    "enqueue": "transactional",
    "enqueue_many": "transactional",
    "enqueue_many_sync": "transactional",
    "enqueue_sync": "transactional",
    "load_settings": "settings",
}

__all__ = [
    "AsyncClient",
    "Backoff",
    "Batcher",
    "Call",
    "Client",
    "Context",
    "Fail",
    "InboundClient",
    "NoResult",
    "PenstockError",
    "ResultGone",
    "ResultTimeout",
    "Retry",
    "RpcError",
    "Settings",
    "SettingsError",
    "TaskCalledOff",
    "TaskCancelled",
    "TaskFailed",
    "Unavailable",
    "Wait",
    "Workflow",
    "__version__",
    "action",
    "enqueue",
    "enqueue_many",
    "enqueue_many_sync",
    "enqueue_sync",
    "load_settings",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(import_module(f"penstock.{_HOMES[name]}"), name)
