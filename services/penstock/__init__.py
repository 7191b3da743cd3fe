"""Penstock: a durable task pipeline on Postgres and SQS.

The public names, loaded when first used, so that a worker loads no database driver.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.client.async_client import AsyncClient as AsyncClient
    from penstock.client.client import Client as Client
    from penstock.client.default import Task as Task
    from penstock.client.default import connect as connect
    from penstock.client.exchanges import Unfinished as Unfinished
    from penstock.client.inbound import InboundClient as InboundClient
    from penstock.client.inbound import SyncInboundClient as SyncInboundClient
    from penstock.client.workflows import Workflow as Workflow
    from penstock.protocol.errors import DuplicateTask as DuplicateTask
    from penstock.protocol.errors import InvalidParams as InvalidParams
    from penstock.protocol.errors import JobNotFound as JobNotFound
    from penstock.protocol.errors import NoResult as NoResult
    from penstock.protocol.errors import PayloadLost as PayloadLost
    from penstock.protocol.errors import PayloadUnavailable as PayloadUnavailable
    from penstock.protocol.errors import PenstockError as PenstockError
    from penstock.protocol.errors import RateLimited as RateLimited
    from penstock.protocol.errors import ResultCancelled as ResultCancelled
    from penstock.protocol.errors import ResultGone as ResultGone
    from penstock.protocol.errors import ResultTimeout as ResultTimeout
    from penstock.protocol.errors import RpcError as RpcError
    from penstock.protocol.errors import ScheduleNotFound as ScheduleNotFound
    from penstock.protocol.errors import SettingsError as SettingsError
    from penstock.protocol.errors import StateConflict as StateConflict
    from penstock.protocol.errors import TaskFailed as TaskFailed
    from penstock.protocol.errors import TaskNotFound as TaskNotFound
    from penstock.protocol.errors import TooLarge as TooLarge
    from penstock.protocol.errors import TooManyWaits as TooManyWaits
    from penstock.protocol.errors import Unavailable as Unavailable
    from penstock.protocol.errors import UnexpectedResult as UnexpectedResult
    from penstock.protocol.errors import WorkflowConflict as WorkflowConflict
    from penstock.protocol.errors import WorkflowNotFound as WorkflowNotFound
    from penstock.protocol.options import EnqueueOptions as EnqueueOptions
    from penstock.protocol.retry import Backoff as Backoff
    from penstock.protocol.version import __version__ as __version__
    from penstock.runtime.batcher import Batcher as Batcher
    from penstock.runtime.logs import TaskLogFilter as TaskLogFilter
    from penstock.settings.model import Settings as Settings
    from penstock.settings.model import load_settings as load_settings
    from penstock.tasks.transactional import enqueue as enqueue
    from penstock.tasks.transactional import enqueue_many as enqueue_many
    from penstock.tasks.transactional import enqueue_many_sync as enqueue_many_sync
    from penstock.tasks.transactional import enqueue_sync as enqueue_sync
    from penstock.tasks.transactional import settle as settle
    from penstock.tasks.transactional import settle_sync as settle_sync
    from penstock.worker.handlers.actions import action as action
    from penstock.worker.handlers.context import Call as Call
    from penstock.worker.handlers.context import Context as Context
    from penstock.worker.handlers.context import TaskCancelled as TaskCancelled
    from penstock.worker.handlers.context import Wait as Wait
    from penstock.worker.handlers.enqueueing import Action as Action
    from penstock.worker.handlers.enqueueing import Bound as Bound
    from penstock.worker.handlers.lifespan import around_attempt as around_attempt
    from penstock.worker.handlers.lifespan import inject as inject
    from penstock.worker.handlers.lifespan import lifespan as lifespan
    from penstock.worker.handlers.outcomes import Fail as Fail
    from penstock.worker.handlers.outcomes import Retry as Retry
    from penstock.worker.handlers.outcomes import Snooze as Snooze
    from penstock.worker.handlers.steps import EventTimeout as EventTimeout
    from penstock.worker.handlers.steps import Step as Step
    from penstock.worker.handlers.steps import StepChanged as StepChanged
    from penstock.worker.handlers.steps import StepFailed as StepFailed
    from penstock.worker.lambda_handler import lambda_handler as lambda_handler

# Where each public name is defined.
_HOMES = {
    "client.async_client": ("AsyncClient",),
    "client.client": ("Client",),
    "client.default": ("Task", "connect"),
    "client.inbound": ("InboundClient", "SyncInboundClient"),
    "client.exchanges": ("Unfinished",),
    "client.workflows": ("Workflow",),
    "protocol.errors": (
        "DuplicateTask", "InvalidParams", "JobNotFound", "NoResult", "PayloadLost", "PayloadUnavailable",
        "PenstockError", "RateLimited", "ResultCancelled", "ResultGone", "ResultTimeout", "RpcError",
        "ScheduleNotFound", "SettingsError", "StateConflict", "TaskFailed", "TaskNotFound", "TooLarge",
        "TooManyWaits", "Unavailable", "UnexpectedResult", "WorkflowConflict", "WorkflowNotFound",
    ),
    "protocol.options": ("EnqueueOptions",),
    "protocol.retry": ("Backoff",),
    "protocol.version": ("__version__",),
    "runtime.batcher": ("Batcher",),
    "runtime.logs": ("TaskLogFilter",),
    "settings.model": ("Settings", "load_settings"),
    "tasks.transactional": ("enqueue", "enqueue_many", "enqueue_many_sync", "enqueue_sync", "settle", "settle_sync"),
    "worker.handlers.actions": ("action",),
    "worker.handlers.context": ("Call", "Context", "TaskCancelled", "Wait"),
    "worker.handlers.enqueueing": ("Action", "Bound"),
    "worker.handlers.lifespan": ("around_attempt", "inject", "lifespan"),
    "worker.handlers.outcomes": ("Fail", "Retry", "Snooze"),
    "worker.handlers.steps": ("EventTimeout", "Step", "StepChanged", "StepFailed"),
    "worker.lambda_handler": ("lambda_handler",),
}  # fmt: skip

__all__ = [name for names in _HOMES.values() for name in names]


if not TYPE_CHECKING:  # a type checker that sees it believes every name

    def __getattr__(name: str) -> Any:
        for home, names in _HOMES.items():
            if name in names:
                return getattr(import_module(f"penstock.{home}"), name)
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
