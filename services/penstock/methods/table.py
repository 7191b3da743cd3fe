"""Every method of JSON-RPC by its name, and what each becomes once it is checked."""

from __future__ import annotations

import msgspec

from penstock.limits.model import RULE_PARAMS, RuleCommand
from penstock.limits.tenant_model import TENANT_PARAMS, TenantCommand
from penstock.schedules.model import SCHEDULE_PARAMS, ScheduleCommand
from penstock.tasks.commands import (
    AwaitResults,
    Change,
    CheckClaims,
    DeadCommand,
    Discover,
    Enqueue,
    JobCommand,
    KeyCommand,
    ListAudit,
    ListTasks,
    OrderingCommand,
    RejectedCommand,
    Stats,
    Status,
)
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
from penstock.workflows.commands import WorkflowCommand
from penstock.workflows.params import WORKFLOW_PARAMS

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
    **RULE_PARAMS,
    **TENANT_PARAMS,
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
    **SCHEDULE_PARAMS,
    **WORKFLOW_PARAMS,
    "rpc.discover": DiscoverParams,
}

Command = (
    Enqueue | Status | AwaitResults | Change | ListTasks | Stats | RejectedCommand | DeadCommand | KeyCommand
    | OrderingCommand | ListAudit | CheckClaims | JobCommand | RuleCommand | TenantCommand | ScheduleCommand
    | WorkflowCommand | Discover
)  # fmt: skip
