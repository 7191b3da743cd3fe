"""Why a task does not run, in one sentence."""

from collections.abc import Mapping
from typing import Any

from penstock.db.session import Session
from penstock.protocol.answers import Cause, Explanation
from penstock.protocol.api_key import seen
from penstock.protocol.errors import TaskNotFound
from penstock.protocol.task import ANNOUNCED_SECONDS, SHOWN_STATES, State
from penstock.protocol.tenant import own_key
from penstock.protocol.views import span, timestamp

COUNTED = 10_000  # tasks before this one, and in flight
_LIMITS = "max_in_flight", "rate", "key_max_in_flight", "key_rate", "tenant_max_in_flight", "tenant_rate"
_SOON_SECONDS = 10.0  # in which a scheduler claims a task, and a worker takes it, if nothing is in the way


async def explain(session: Session, task_id: int) -> Explanation:
    """Explain a task's state. Raises TaskNotFound."""
    rows = seen(await session.fetch("explain_task", task_id, COUNTED))
    if not rows:
        raise TaskNotFound(task_id)
    row = rows[0]
    match State(row["state"]):
        case _ if row["expired_at"] is not None:
            ago = _span(row, "expired_at")
            reason = f"Expired {ago} ago, so it is not started any more; the supervisor cancels it."
            return _found(row, Cause.EXPIRED, reason)
        case State.WAITING:
            return _waiting(row)
        case State.ACQUIRED:
            return _in_flight(row)
        case State.SCHEDULED | State.ERROR:
            return _held_back(row) or await _in_line(session, row)
        case state:
            return _found(row, Cause.SETTLED, f"Settled as {_shown(state)} {_span(row, 'finished_at')} ago.")


def _found(row: Mapping[str, Any], cause: Cause, reason: str, tenant: str | None = None) -> Explanation:
    """tenant: whose pause or limit is the cause."""
    head = row["head"] if cause is Cause.ORDERING_KEY else None
    head_state = None if head is None or row["head_state"] is None else State(row["head_state"])
    workflow = row["workflow"] if cause is Cause.STEPS else None
    return Explanation(
        id=row["id"],
        state=State(row["state"]),
        cause=cause,
        reason=reason,
        task=head,
        workflow=workflow,
        task_state=head_state,
        tenant=tenant,
    )


def _shown(state: str) -> str:
    return SHOWN_STATES.get(state, state.lower())


def _span(row: Mapping[str, Any], since: str) -> str:
    return span(abs((row["at"] - row[since]).total_seconds()))


def _waiting(row: Mapping[str, Any]) -> Explanation:
    if row["token"] is not None:
        token = own_key(row["token"])
        return _found(row, Cause.EVENT, f"Waits for the event of token {token}, until {timestamp(row['deadline'])}.")
    if row["workflow"] is not None and row["steps_before"]:
        reason = f"Waits for earlier steps of workflow {row['workflow']}: {row['steps_before']}."
        return _found(row, Cause.STEPS, reason)
    if row["workflow"] is not None and row["ordering_key"] is None:  # a step has its key from its start on
        return _found(row, Cause.STEPS, f"Waits for the supervisor to release this step of workflow {row['workflow']}.")
    key = own_key(row["ordering_key"])
    if row["held"]:
        reason = f"Task {row['head']} failed and holds ordering key {key}: retry it, or release the key"
        return _found(row, Cause.ORDERING_KEY, f"{reason} (`penstock ordering release`).")
    if row["head"] is None:
        return _found(row, Cause.ORDERING_KEY, f"Next of ordering key {key}; a scheduler takes it up now.")
    reason = f"Task {row['head']} of ordering key {key} goes first; it is {_shown(row['head_state'])}."
    return _found(row, Cause.ORDERING_KEY, reason)


def _in_flight(row: Mapping[str, Any]) -> Explanation:
    to = f"queue of route {row['route']}" if row["route"] else "outbound queue"
    claimed = _span(row, "claimed_at")
    if row["heartbeat_at"] is not None:
        by = f" on {row['worker']}" if row["worker"] else ""
        return _found(row, Cause.RUNNING, f"Runs{by} since {claimed}; last heartbeat {_span(row, 'heartbeat_at')} ago.")
    if row["is_unsent"]:
        return _found(row, Cause.SENT, f"Claimed {claimed} ago; a scheduler is sending it to the {to}.")
    late = (row["at"] - row["claimed_at"]).total_seconds() > _SOON_SECONDS
    hint = f": check that workers receive from the {to}" if late else ""
    return _found(row, Cause.SENT, f"Sent to the {to} {claimed} ago; no worker has reported on it yet{hint}.")


def _held_back(row: Mapping[str, Any]) -> Explanation | None:
    """What keeps the task from being claimed at all; None: nothing but its place in line."""
    action, tenant = row["action"], row["tenant"]
    if row["unknown_since"] is not None:
        return _found(row, Cause.UNKNOWN_ACTION, _unknown(row))
    if row["run_at"] > row["at"]:
        after = f"attempt {row['attempts']} of {row['max_attempts']} failed; " if row["attempts"] else ""
        reason = f"Not due for {_span(row, 'run_at')}: {after}it runs at {timestamp(row['run_at'])}."
        return _found(row, Cause.NOT_DUE, reason)
    if row["paused"]:
        return _found(row, Cause.PAUSED, f"Action {action} is paused (`penstock actions resume {action}`).")
    if row["tenant_paused"]:
        return _found(row, Cause.PAUSED, f"Tenant {tenant} is paused (`penstock tenants resume {tenant}`).", tenant)
    if row["held_until"] is not None and row["held_until"] > row["at"]:
        is_whole = row["limit_key"] is None or row["action_held_until"] == row["held_until"]
        of = f"action {action}" if is_whole else f"limit key {row['limit_key']} of action {action}"
        reason = f"A handler met a rate limit, which holds {of} for {_span(row, 'held_until')}"
        return _found(row, Cause.LIMIT, f"{reason} (`penstock actions resume {action}` ends it).")
    for most, count, what, whose in (
        (row["max_in_flight"], row["in_flight"], f"Action {action}", None),
        (row["key_max_in_flight"], row["key_in_flight"], f"Limit key {row['limit_key']} of action {action}", None),
        (row["tenant_max_in_flight"], row["tenant_in_flight"], f"Tenant {tenant}", tenant),
    ):
        if most is not None and count is not None and count >= most:
            return _found(row, Cause.LIMIT, f"{what} is limited to {most} tasks in flight, and {count} are.", whose)
    if row["is_gated"] and any(row[name] is not None for name in _LIMITS):
        given = {
            f"action {action}": row["rate"],
            "each limit key": row["key_rate"],
            f"tenant {tenant}": row["tenant_rate"],
        }
        rates = [f"{what} to {rate:g} a second" for what, rate in given.items() if rate is not None]
        limited = f" ({'; '.join(rates)})" if rates else ""
        whose = tenant if row["tenant_rate"] is not None and row["rate"] is None and row["key_rate"] is None else None
        return _found(row, Cause.LIMIT, f"Waits behind other tasks of limited action {action}{limited}.", whose)
    return None


def _unknown(row: Mapping[str, Any]) -> str:
    seen = "none was ever seen" if row["announced_at"] is None else f"last seen {_span(row, 'announced_at')} ago"
    if row["announced_at"] is not None and (row["at"] - row["announced_at"]).total_seconds() < ANNOUNCED_SECONDS:
        who = f"Workers without action {row['action']} received it, though others run it"
    else:
        who = f"No worker runs {row['action']}; {seen}"
    due = f"again in {_span(row, 'run_at')}" if row["run_at"] > row["at"] else "again now"
    return f"{who}. It waits since {_span(row, 'unknown_since')}, and is sent {due}, or once a worker announces it."


async def _in_line(session: Session, row: Mapping[str, Any]) -> Explanation:
    place = row["route"], row["priority"], row["run_at"], row["id"]
    ((before, in_flight),) = await session.fetch("count_before", *place, COUNTED)
    due = f"Due since {_span(row, 'run_at')}"
    if not before and not in_flight:
        if (row["at"] - max(row["run_at"], row["updated_at"])).total_seconds() < _SOON_SECONDS:
            return _found(row, Cause.BACKLOG, f"{due}; a scheduler claims it next.")
        hint = "check that a scheduler runs (`penstock doctor`)"
        return _found(row, Cause.NO_SCHEDULER, f"{due}, and nothing is in flight: {hint}.")
    by = f" by route {row['route']}" if row["route"] else ""
    ahead = f"{_counted(before)} due tasks go first{by}, and {_counted(in_flight)} are in flight"
    return _found(row, Cause.BACKLOG, f"{due}; {ahead}: more are sent as these settle.")


def _counted(count: int) -> str:
    return f"{count:,}" if count < COUNTED else f"{COUNTED:,} or more"
