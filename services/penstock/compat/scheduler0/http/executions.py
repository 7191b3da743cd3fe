"""Executions, as newer servers list them: runs of jobs, with what came of them."""

from __future__ import annotations

from datetime import datetime

from starlette.requests import Request
from starlette.responses import Response

from penstock.compat.scheduler0 import store as stored
from penstock.compat.scheduler0.http.answers import ExecutionPage, Problem, answer, execution
from penstock.compat.scheduler0.http.requests import account_of, optional_instant, optional_number, page
from penstock.compat.scheduler0.jobs import NEVER
from penstock.compat.scheduler0.store import EXECUTION_STATES, Execution, Wanted
from penstock.db.pool import Store
from penstock.schedules.cron import CronError, timing


class Executions:
    def __init__(self, store: Store) -> None:
        self._store = store

    async def list(self, request: Request, body: bytes) -> Response:
        query = request.query_params
        limit, offset = page(query)
        state = query.get("state", "")
        if state and state not in EXECUTION_STATES:
            raise Problem(400, f"state must be {', '.join(EXECUTION_STATES)}, not {state[:60]!r}")
        wanted = Wanted(
            optional_instant(query, "startDate"),
            optional_instant(query, "endDate"),
            optional_number(query, "projectId"),
            optional_number(query, "jobId"),
            EXECUTION_STATES.get(state),
        )
        async with self._store.session() as session:
            total, found = await stored.list_executions(session, wanted, limit=limit, offset=offset)
        account_id = account_of(request)
        rows = [execution(one, account_id, _following(one)) for one in found]
        return answer(ExecutionPage(total, offset, limit, rows))


def _following(run: Execution) -> datetime:
    try:
        return timing(run.expression, run.timezone, run.anchor).next_after(run.scheduled_at) or NEVER
    except CronError:  # a zone that is gone
        return NEVER
