"""Penstock: a durable task pipeline on Postgres and SQS.

The public names, loaded when first used, so that a worker loads no database driver.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.client.async_client import AsyncClient
    from penstock.client.client import Client
    from penstock.client.inbound import InboundClient
    from penstock.client.requests import Unfinished
    from penstock.client.workflows import Workflow
    from penstock.protocol.errors import (
        DuplicateTask,
        InvalidParams,
        JobNotFound,
        NoResult,
        PayloadLost,
        PayloadUnavailable,
        PenstockError,
        RateLimited,
        ResultCancelled,
        ResultGone,
        ResultTimeout,
        RpcError,
        ScheduleNotFound,
        SettingsError,
        StateConflict,
        TaskFailed,
        TaskNotFound,
        TooLarge,
        TooManyWaits,
        Unavailable,
        WorkflowConflict,
        WorkflowNotFound,
    )
    from penstock.protocol.retry import Backoff
    from penstock.protocol.version import __version__
    from penstock.runtime.batcher import Batcher
    from penstock.runtime.logs import TaskLogFilter
    from penstock.settings.loading import load_settings
    from penstock.settings.model import Settings
    from penstock.tasks.transactional import enqueue, enqueue_many, enqueue_many_sync, enqueue_sync
    from penstock.worker.handlers.actions import action
    from penstock.worker.handlers.batches import Call
    from penstock.worker.handlers.context import Context, TaskCancelled
    from penstock.worker.handlers.outcomes import Fail, Retry, Wait

_HOMES = {
    "AsyncClient": "client.async_client",
    "Backoff": "protocol.retry",
    "Batcher": "runtime.batcher",
    "Call": "worker.handlers.batches",
    "Client": "client.client",
    "Context": "worker.handlers.context",
    "DuplicateTask": "protocol.errors",
    "Fail": "worker.handlers.outcomes",
    "InboundClient": "client.inbound",
    "InvalidParams": "protocol.errors",
    "JobNotFound": "protocol.errors",
    "NoResult": "protocol.errors",
    "PayloadLost": "protocol.errors",
    "PayloadUnavailable": "protocol.errors",
    "PenstockError": "protocol.errors",
    "RateLimited": "protocol.errors",
    "ResultCancelled": "protocol.errors",
    "ResultGone": "protocol.errors",
    "ResultTimeout": "protocol.errors",
    "Retry": "worker.handlers.outcomes",
    "RpcError": "protocol.errors",
    "ScheduleNotFound": "protocol.errors",
    "Settings": "settings.model",
    "SettingsError": "protocol.errors",
    "StateConflict": "protocol.errors",
    "TaskCancelled": "worker.handlers.context",
    "TaskFailed": "protocol.errors",
    "TaskLogFilter": "runtime.logs",
    "TaskNotFound": "protocol.errors",
    "TooLarge": "protocol.errors",
    "TooManyWaits": "protocol.errors",
    "Unavailable": "protocol.errors",
    "Unfinished": "client.requests",
    "Wait": "worker.handlers.outcomes",
    "Workflow": "client.workflows",
    "WorkflowConflict": "protocol.errors",
    "WorkflowNotFound": "protocol.errors",
    "__version__": "protocol.version",
    "action": "worker.handlers.actions",
    "enqueue": "tasks.transactional",
    "enqueue_many": "tasks.transactional",
    "enqueue_many_sync": "tasks.transactional",
    "enqueue_sync": "tasks.transactional",
    "load_settings": "settings.loading",
}

__all__ = [
    "AsyncClient",
    "Backoff",
    "Batcher",
    "Call",
    "Client",
    "Context",
    "DuplicateTask",
    "Fail",
    "InboundClient",
    "InvalidParams",
    "JobNotFound",
    "NoResult",
    "PayloadLost",
    "PayloadUnavailable",
    "PenstockError",
    "RateLimited",
    "ResultCancelled",
    "ResultGone",
    "ResultTimeout",
    "Retry",
    "RpcError",
    "ScheduleNotFound",
    "Settings",
    "SettingsError",
    "StateConflict",
    "TaskCancelled",
    "TaskFailed",
    "TaskLogFilter",
    "TaskNotFound",
    "TooLarge",
    "TooManyWaits",
    "Unavailable",
    "Unfinished",
    "Wait",
    "Workflow",
    "WorkflowConflict",
    "WorkflowNotFound",
    "__version__",
    "action",
    "enqueue",
    "enqueue_many",
    "enqueue_many_sync",
    "enqueue_sync",
    "load_settings",
]


if not TYPE_CHECKING:  # a type checker that sees it believes every name

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'penstock' has no attribute {name!r}")
        return getattr(import_module(f"penstock.{_HOMES[name]}"), name)
