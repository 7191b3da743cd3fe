"""Executions, as newer servers list them: runs of jobs with their outcomes."""

from __future__ import annotations

import re
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.compat.scheduler0.http.messages import Problem, answer, optional_instant, optional_number, page
from penstock.compat.scheduler0.jobs import NEVER, execution_id
from penstock.db.pool import Store
from penstock.protocol.task import State
from penstock.schedules.cron import CronError, timing
from penstock.schedules.policy import run_name

_COUNTED = 10_000  # a larger total is given as this
_LIVE = tuple(state.value for state in (State.WAITING, State.SCHEDULED, State.ACQUIRED, State.ERROR))
_FAILED = (State.CRITICAL_ERROR.value, State.CANCELLED.value)
_STATES = {"scheduled": _LIVE, "success": (State.SUCCESS.value,), "failed": _FAILED}  # of executions -> of tasks


async def list_executions(store: Store, request: Request, body: bytes) -> Response:
    query = request.query_params
    limit, offset = page(query)
    state = query.get("state", "")
    if state and state not in _STATES:
        raise Problem(400, f"state must be {', '.join(_STATES)}, not {state[:60]!r}")
    wanted = (
        optional_instant(query, "startDate"), optional_instant(query, "endDate"),
        optional_number(query, "projectId"), _STATES.get(state),
    )  # fmt: skip
    job_id = optional_number(query, "jobId")
    select, count, of_job = "list_executions", "count_executions", []
    if job_id is not None:
        select, count, of_job = "list_executions_of_job", "count_executions_of_job", [job_id]
    async with store.session() as session:
        rows = await session.fetch(select, *wanted, limit, offset, *of_job)
        total = offset + len(rows) if rows else 0
        if len(rows) == limit or (offset and not rows):  # not the last page
            total = max(total, await session.value(count, *wanted, _COUNTED, *of_job))
    # A newer client names its account, which is sent back; there is one account here.
    account = request.headers.get("x-account-id", "")
    account_id = int(account) if re.fullmatch(r"[0-9]{1,18}", account, re.ASCII) else 0
    runs = [{"accountId": account_id, **_execution(row)} for row in rows]
    return answer({"total": total, "offset": offset, "limit": limit, "executions": runs})


def _execution(row: Any) -> dict[str, Any]:
    """A run of a job. id: of its task. state: 0 for a live task, 1 for success, 2 for failure."""
    scheduled_at, is_live = row["scheduled_at"], row["state"] in _LIVE
    try:
        following = timing(row["expression"], row["timezone"], row["anchor"]).next_after(scheduled_at)
    except CronError:  # a time zone that is unknown by now
        following = None
    return {
        "id": row["task_id"],
        "uniqueId": execution_id(run_name(row["schedule_id"], scheduled_at)),
        "state": 0 if is_live else 2 if row["state"] in _FAILED else 1,
        "nodeId": 1,
        "jobId": row["job_id"],
        "lastExecutionDatetime": scheduled_at,
        "nextExecutionDatetime": following or NEVER,
        "jobQueueVersion": 1,
        "executionVersion": int(scheduled_at.timestamp()),  # grows with each run
        "dateCreated": row["fired_at"],
        "dateModified": None if is_live else row["updated_at"],
    }
