"""Penstock: a durable task pipeline on Postgres and SQS.

The public names, loaded when first used, so that a worker loads no database driver.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.async_client import AsyncClient
    from penstock.batching import Batcher
    from penstock.calls import Unfinished
    from penstock.client import Client, InboundClient
    from penstock.errors import (
        DuplicateTask,
        InvalidParams,
        JobNotFound,
        NoResult,
        PayloadLost,
        PayloadUnavailable,
        PenstockError,
        RateLimited,
        ResultGone,
        ResultTimeout,
        RpcError,
        ScheduleNotFound,
        SettingsError,
        StateConflict,
        TaskCalledOff,
        TaskFailed,
        TaskNotFound,
        TooLarge,
        TooManyWaits,
        Unavailable,
        WorkflowConflict,
        WorkflowNotFound,
    )
    from penstock.handlers import Context, Fail, Retry, action
    from penstock.handlers.batches import Call
    from penstock.handlers.cancellation import TaskCancelled
    from penstock.handlers.waiting import Wait
    from penstock.logs import TaskLogFilter
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
    "DuplicateTask": "errors",
    "Fail": "handlers",
    "InboundClient": "client",
    "InvalidParams": "errors",
    "JobNotFound": "errors",
    "NoResult": "errors",
    "PayloadLost": "errors",
    "PayloadUnavailable": "errors",
    "PenstockError": "errors",
    "RateLimited": "errors",
    "ResultGone": "errors",
    "ResultTimeout": "errors",
    "Retry": "handlers",
    "RpcError": "errors",
    "ScheduleNotFound": "errors",
    "Settings": "settings",
    "SettingsError": "errors",
    "StateConflict": "errors",
    "TaskCalledOff": "errors",
    "TaskCancelled": "handlers.cancellation",
    "TaskFailed": "errors",
    "TaskLogFilter": "logs",
    "TaskNotFound": "errors",
    "TooLarge": "errors",
    "TooManyWaits": "errors",
    "Unavailable": "errors",
    "Unfinished": "calls",
    "Wait": "handlers.waiting",
    "Workflow": "workflow_client",
    "WorkflowConflict": "errors",
    "WorkflowNotFound": "errors",
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
    "ResultGone",
    "ResultTimeout",
    "Retry",
    "RpcError",
    "ScheduleNotFound",
    "Settings",
    "SettingsError",
    "StateConflict",
    "TaskCalledOff",
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
