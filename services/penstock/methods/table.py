"""Every method of JSON-RPC by its name."""

from __future__ import annotations

import msgspec

from penstock.limits import methods as limits
from penstock.protocol.method import Method, declared
from penstock.schedules import methods as schedules
from penstock.tasks.params import (
    AuditListParams,
    BulkCancelParams,
    BulkDeleteParams,
    BulkRescheduleParams,
    BulkRetryParams,
    CancelParams,
    ClaimsCheckParams,
    DiscoverParams,
    DlqListParams,
    DlqPurgeParams,
    DlqReplayParams,
    DlqShowParams,
    DlqStatsParams,
    EnqueueParams,
    JobCancelParams,
    JobGetParams,
    JobListParams,
    KeysCreateParams,
    KeysListParams,
    KeysRevokeParams,
    ListParams,
    OrderingListParams,
    OrderingReleaseParams,
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
    method.name: method for room in (limits, schedules, workflows) for method in declared(room)
}

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
    **{method.name: method.params for method in declared(limits)},
    "bulk.cancel": BulkCancelParams,
    "bulk.retry": BulkRetryParams,
    "bulk.delete": BulkDeleteParams,
    "bulk.reschedule": BulkRescheduleParams,
    "job.get": JobGetParams,
    "job.list": JobListParams,
    "job.cancel": JobCancelParams,
    "audit.list": AuditListParams,
    "ordering.list": OrderingListParams,
    "ordering.release": OrderingReleaseParams,
    "claims.check": ClaimsCheckParams,
    "task.complete": TaskCompleteParams,
    "task.fail": TaskFailParams,
    **{method.name: method.params for method in declared(schedules)},
    **{method.name: method.params for method in declared(workflows)},
    "rpc.discover": DiscoverParams,
}
