"""The parameters of each method, as they may be given. The field order is the order of positional parameters."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from penstock.protocol.api_key import Permission
from penstock.protocol.checks import TaskId
from penstock.protocol.task import OnDuplicate, State

SUBMIT_PREFIX = "submit:"

QueueName = Literal["inbound", "outbound", "results"]
Source = Literal["inbound", "results", "kafka-source"]


class EnqueueParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    action: str
    payload: msgspec.Raw = msgspec.Raw(b"{}")
    run_at: str | int | None = None
    delay: float | None = None
    priority: int | None = None
    unique_key: str | None = None
    ordering_key: str | None = None
    max_attempts: int | None = None
    timeout: float | None = None
    labels: dict[str, str] | None = None
    expires_at: str | int | None = None
    expires_in: float | None = None
    limit_key: str | None = None
    unique: Literal["retained", "live"] | float = "retained"
    on_duplicate: OnDuplicate = "return"
    tenant: str | None = None
    sealed_payload: str | None = None


class StatusParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: TaskId | None = None
    ids: list[TaskId] | None = None
    detail: bool = False


class ResultParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: TaskId | None = None
    ids: list[TaskId] | None = None
    timeout: float = 20.0
    wait: Literal["all", "any"] = "all"


class CancelParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: TaskId
    reason: str | None = None


class RetryParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: TaskId


class RescheduleParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: TaskId
    run_at: str | int | None = None
    delay: float | None = None
    priority: int | None = None


class ListParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    state: State | None = None
    action: str | None = None
    limit: int = 50
    cursor: str | None = None
    labels: dict[str, str] | None = None
    key: str | None = None
    since: str | int | None = None
    until: str | int | None = None
    tenant: str | None = None


class StatsParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tenant: str | None = None


class RejectedListParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    limit: int = 50
    cursor: str | None = None
    source: Source | None = None


class RejectedShowParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: TaskId


class RejectedRetryParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ids: list[TaskId] | None = None
    limit: int | None = None
    cursor: str | None = None
    source: Source | None = None


class RejectedPurgeParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ids: list[TaskId] | None = None
    limit: int | None = None
    cursor: str | None = None
    source: Source | None = None


class DlqStatsParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class DlqListParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    queue: QueueName
    limit: int = 50


class DlqShowParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    queue: QueueName
    id: str


class DlqReplayParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    queue: QueueName
    ids: list[str] | None = None
    limit: int | None = None
    force: bool = False


class DlqPurgeParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    queue: QueueName
    ids: list[str] | None = None
    limit: int | None = None


class KeysCreateParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    permissions: list[Permission]
    expires_in: float | None = None
    tenant: str | None = None
    actions: list[str] | None = None


class KeysListParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    limit: int = 50
    cursor: str | None = None
    revoked: bool = False


class KeysRevokeParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: TaskId


class AuditListParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    limit: int = 50
    cursor: str | None = None


class TaskCompleteParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token: str
    result: msgspec.Raw = msgspec.Raw(b"null")
    tenant: str | None = None


class TaskFailParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token: str
    error: str | dict[str, Any]
    final: bool = False
    retry_after: float | None = None
    tenant: str | None = None


class DiscoverParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass
