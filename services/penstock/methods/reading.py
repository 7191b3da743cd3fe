"""A method and its raw parameters to a checked command."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.methods.operators import (
    read_message_id,
    read_new_key,
    read_which_dead,
    read_which_rejected,
)
from penstock.methods.table import METHODS, PARAMS
from penstock.protocol.checks import read_cursor, read_id, read_limit, read_reason
from penstock.protocol.errors import MethodNotFound
from penstock.protocol.params import decode
from penstock.protocol.tenant import read_tenant
from penstock.results.reading import read_completion, read_failure
from penstock.settings.model import Settings
from penstock.tasks.commands import (
    Cancel,
    CountDead,
    Discover,
    Enqueue,
    ListAudit,
    ListDead,
    ListKeys,
    ListRejected,
    PurgeDead,
    PurgeRejected,
    ReplayDead,
    Restart,
    RetryRejected,
    RevokeKey,
    ShowDead,
    ShowRejected,
    Stats,
)
from penstock.tasks.new_task import new_task, submitted_task
from penstock.tasks.params import (
    SUBMIT_PREFIX,
    AuditListParams,
    CancelParams,
    DlqListParams,
    DlqPurgeParams,
    DlqReplayParams,
    DlqShowParams,
    DlqStatsParams,
    EnqueueParams,
    KeysCreateParams,
    KeysListParams,
    KeysRevokeParams,
    ListParams,
    RejectedListParams,
    RejectedPurgeParams,
    RejectedRetryParams,
    RejectedShowParams,
    RescheduleParams,
    ResultParams,
    RetryParams,
    StatsParams,
    StatusParams,
    TaskCompleteParams,
    TaskFailParams,
)
from penstock.tasks.reading import read_list, read_reschedule, read_result, read_status


def read_command(method: str, params: msgspec.Raw | bytes, settings: Settings) -> Any:
    """Check a method and its raw parameters. Raises MethodNotFound, InvalidParams, TooLarge."""
    raw = bytes(params)
    if method.startswith(SUBMIT_PREFIX):
        return Enqueue(submitted_task(method.removeprefix(SUBMIT_PREFIX), raw or b"{}", settings))
    kind = PARAMS.get(method)
    if kind is None:
        raise MethodNotFound("Method not found", {"method": method[:200]})
    values: Any = decode(kind, raw or b"{}")
    if method in METHODS:
        return METHODS[method].read(values, settings)
    match values:
        case EnqueueParams():
            return Enqueue(new_task(values, settings, large=True))
        case StatusParams():
            return read_status(values)
        case ResultParams():
            return read_result(values)
        case CancelParams():
            return Cancel(read_id(values.id, "id"), read_reason(values.reason))
        case RetryParams():
            return Restart(read_id(values.id, "id"))
        case RescheduleParams():
            return read_reschedule(values)
        case ListParams():
            return read_list(values)
        case AuditListParams():
            return ListAudit(read_limit(values.limit), read_cursor(values.cursor))
        case RejectedListParams():
            return ListRejected(read_limit(values.limit), read_cursor(values.cursor), values.source)
        case RejectedShowParams():
            return ShowRejected(read_id(values.id, "id"))
        case RejectedRetryParams():
            return RetryRejected(read_which_rejected(values))
        case RejectedPurgeParams():
            return PurgeRejected(read_which_rejected(values))
        case DlqStatsParams():
            return CountDead()
        case DlqListParams():
            return ListDead(values.queue, read_limit(values.limit))
        case DlqShowParams():
            return ShowDead(values.queue, read_message_id(values.id, "id"))
        case DlqReplayParams():
            return ReplayDead(values.queue, read_which_dead(values), values.force)
        case DlqPurgeParams():
            return PurgeDead(values.queue, read_which_dead(values))
        case KeysCreateParams():
            return read_new_key(values)
        case KeysListParams():
            return ListKeys(read_limit(values.limit), read_cursor(values.cursor), values.revoked)
        case KeysRevokeParams():
            return RevokeKey(read_id(values.id, "id"))
        case TaskCompleteParams():
            return read_completion(values, settings)
        case TaskFailParams():
            return read_failure(values, settings)
        case StatsParams():
            return Stats(read_tenant(values.tenant))
    return Discover()
