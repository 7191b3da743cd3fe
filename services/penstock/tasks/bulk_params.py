"""Parameters of `bulk.*` and `job.*`. The field order is the order of positional parameters."""

from __future__ import annotations

from typing import Annotated

import msgspec

from penstock.protocol.checks import MAX_LIST, TaskId
from penstock.protocol.task import PRIORITY_MAX, PRIORITY_MIN, State
from penstock.protocol.views import CURSOR, about

_Tenant = Annotated[str | None, about("Tasks of this tenant.")]


class BulkParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    action: Annotated[str | None, about("Tasks of this action; `*` stands for any characters.")] = None
    states: Annotated[
        list[State] | None, about("Tasks in one of these states; null for all that the method is about.")
    ] = None
    labels: Annotated[dict[str, str] | None, about("Tasks that have all of these labels.")] = None
    older_than: Annotated[float | None, about("Tasks added at least so many seconds ago.")] = None
    newer_than: Annotated[float | None, about("Tasks added less than so many seconds ago.")] = None
    ids_from: Annotated[TaskId | None, about("Tasks with this id or a higher one.")] = None
    ids_to: Annotated[TaskId | None, about("Tasks with this id or a lower one.")] = None
    all: Annotated[bool, about("Instead of a filter: every task that exists now.")] = False
    dry_run: Annotated[bool, about("Only count the tasks and return some of their ids; nothing is changed.")] = False
    tenant: _Tenant = None


class BulkRescheduleParams(BulkParams, frozen=True, forbid_unknown_fields=True):
    run_at: Annotated[
        str | int | None, about("Not before this instant: RFC 3339 with a zone, or epoch milliseconds.")
    ] = None
    delay: Annotated[float | None, about("Not before so many seconds from now; excludes run_at.")] = None
    spread: Annotated[float, about("Seconds from then on over which the tasks are spread evenly.")] = 0.0
    priority: Annotated[int | None, about(f"Higher first; {PRIORITY_MIN} to {PRIORITY_MAX}, null to leave it.")] = None
    tenant: _Tenant = None  # once more, for the last position is that of what came last


class JobId(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: Annotated[TaskId, about("The job.")]


class JobListParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    limit: Annotated[int, about(f"Maximum number of jobs; 1 to {MAX_LIST}.")] = 50
    cursor: Annotated[str | None, CURSOR] = None
