"""Every method of JSON-RPC by its name."""

from __future__ import annotations

from types import ModuleType

import msgspec

from penstock.limits import methods as limits
from penstock.protocol.method import Method, declared
from penstock.schedules import methods as schedules
from penstock.tasks import bulk_methods as bulk
from penstock.tasks import methods as tasks
from penstock.tasks.params import (
    AuditListParams,
    CancelParams,
    DiscoverParams,
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
from penstock.workflows import methods as workflows

METHODS: dict[str, Method] = {
    method.name: method for room in (limits, bulk, tasks, schedules, workflows) for method in declared(room)
}


def _params(room: ModuleType) -> dict[str, type[msgspec.Struct]]:
    return {method.name: method.params for method in declared(room)}


PARAMS: dict[str, type[msgspec.Struct]] = {
    "enqueue": EnqueueParams,
    "status": StatusParams,
    "result": ResultParams,
    "cancel": CancelParams,
    "retry": RetryParams,
    "reschedule": RescheduleParams,
    "list": ListParams,
    "stats": StatsParams,
    "rejected.list": RejectedListParams,
    "rejected.show": RejectedShowParams,
    "rejected.retry": RejectedRetryParams,
    "rejected.purge": RejectedPurgeParams,
    "dlq.stats": DlqStatsParams,
    "dlq.list": DlqListParams,
    "dlq.show": DlqShowParams,
    "dlq.replay": DlqReplayParams,
    "dlq.purge": DlqPurgeParams,
    "keys.create": KeysCreateParams,
    "keys.list": KeysListParams,
    "keys.revoke": KeysRevokeParams,
    **_params(limits),
    **_params(bulk),
    "audit.list": AuditListParams,
    **_params(tasks),
    "task.complete": TaskCompleteParams,
    "task.fail": TaskFailParams,
    **_params(schedules),
    **_params(workflows),
    "rpc.discover": DiscoverParams,
}
