"""The methods about tasks that there are: parameters of `status`, `result`, `reschedule` and `list`."""

from __future__ import annotations

from datetime import datetime

from penstock.protocol.checks import (
    check_labels_sought,
    check_priority,
    check_span,
    read_cursor,
    read_id,
    read_ids,
    read_instant,
    read_key,
    read_limit,
)
from penstock.protocol.errors import InvalidParams
from penstock.protocol.tenant import read_tenant
from penstock.tasks.commands import AwaitResults, ListTasks, Reschedule, Status
from penstock.tasks.params import EnqueueParams, ListParams, RescheduleParams, ResultParams, StatusParams

LONGEST_WAIT_SECONDS = 60.0  # load balancers close a connection that is silent for longer


def read_status(given: StatusParams) -> Status:
    return Status(_id_or_ids(given), given.ids is not None, given.detail)


def read_result(given: ResultParams) -> AwaitResults:
    if not 0 <= given.timeout <= LONGEST_WAIT_SECONDS:
        raise InvalidParams("timeout", f"must be between 0 and {LONGEST_WAIT_SECONDS:.0f} seconds, not {given.timeout}")
    return AwaitResults(_id_or_ids(given), given.ids is not None, given.timeout, given.wait == "any")


def _id_or_ids(given: StatusParams | ResultParams) -> list[int]:
    if (given.id is None) == (given.ids is None):
        raise InvalidParams("id", "or ids must be given, not both")
    if given.ids is not None:
        return read_ids(given.ids)
    assert given.id is not None
    return [read_id(given.id, "id")]


def read_reschedule(given: RescheduleParams) -> Reschedule:
    run_at = read_start(given)
    if run_at is None and given.delay is None and given.priority is None:
        raise InvalidParams("run_at", "or delay or priority must be given")
    return Reschedule(read_id(given.id, "id"), run_at, given.delay, given.priority)


def read_list(given: ListParams) -> ListTasks:
    check_labels_sought(given.labels)
    since, until = read_instant(given.since, "since"), read_instant(given.until, "until")
    if since is not None and until is not None and until <= since:
        raise InvalidParams("until", f"must be later than since, {since.isoformat()}, not {until.isoformat()}")
    return ListTasks(
        given.state, given.action, read_limit(given.limit), read_cursor(given.cursor), given.labels or None,
        read_key(given.key, "key"), since, until, read_tenant(given.tenant),
    )  # fmt: skip


def read_start(given: EnqueueParams | RescheduleParams) -> datetime | None:
    """Check run_at, delay and priority; returns the first of them."""
    if given.run_at is not None and given.delay is not None:
        raise InvalidParams("delay", "and run_at exclude each other; give one")
    check_span(given.delay, "delay")
    check_priority(given.priority)
    return read_instant(given.run_at)
