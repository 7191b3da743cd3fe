"""The filter of `bulk.*`, and what a bulk reschedule does."""

from __future__ import annotations

from penstock.protocol.checks import check_labels_sought, check_priority, check_span, read_action, read_id, read_instant
from penstock.protocol.errors import InvalidParams
from penstock.protocol.tenant import read_tenant
from penstock.tasks.commands import PreviewBulk, StartBulk
from penstock.tasks.filters import BulkWork, NewTimes, Operation, Selection
from penstock.tasks.params import BulkCancelParams, BulkRescheduleParams


def read_bulk(operation: Operation, given: BulkCancelParams) -> StartBulk | PreviewBulk:
    how = _new_times(given) if isinstance(given, BulkRescheduleParams) else None
    work = BulkWork(_selection(operation, given), how)
    return PreviewBulk(operation, work) if given.dry_run else StartBulk(operation, work)


def _selection(operation: Operation, given: BulkCancelParams) -> Selection:
    filters = ("action", "states", "labels", "older_than", "newer_than", "ids_from", "ids_to", "tenant")
    used = [name for name in filters if getattr(given, name) is not None]
    if given.all and used:
        raise InvalidParams("all", f"means every task, so it goes without {', '.join(used)}")
    if not given.all and not used:
        raise InvalidParams("all", f"is missing: give at least one filter ({', '.join(filters)}) or set all=true")
    for name in ("states", "labels"):
        if getattr(given, name) is not None and not getattr(given, name):
            raise InvalidParams(name, "is empty; leave it out, or say what must fit")
    for name in ("older_than", "newer_than"):
        check_span(getattr(given, name), name)
    if given.older_than is not None and given.newer_than is not None and given.newer_than <= given.older_than:
        raise InvalidParams("newer_than", f"must be above older_than, {given.older_than}, not {given.newer_than}")
    first = None if given.ids_from is None else read_id(given.ids_from, "ids_from")
    last = None if given.ids_to is None else read_id(given.ids_to, "ids_to")
    if first is not None and last is not None and last < first:
        raise InvalidParams("ids_to", f"must be at least ids_from, {first}, not {last}")
    for place, state in enumerate(given.states or ()):
        if state not in operation.states:
            raise InvalidParams(f"states[{place}]", f"is {state}; {operation} is about {', '.join(operation.states)}")
    check_labels_sought(given.labels)
    return Selection(
        states=operation.states if given.states is None else tuple(dict.fromkeys(given.states)),
        action=None if given.action is None else read_action(given.action),
        labels=given.labels,
        older_than=given.older_than,
        newer_than=given.newer_than,
        ids_from=first,
        ids_to=last,
        tenant=read_tenant(given.tenant),
    )


def _new_times(given: BulkRescheduleParams) -> NewTimes:
    if given.run_at is not None and given.delay is not None:
        raise InvalidParams("delay", "and run_at exclude each other; give one")
    if given.run_at is None and given.delay is None:
        if given.priority is None:
            raise InvalidParams("run_at", "or delay or priority must be given, or nothing would change")
        if given.spread:
            raise InvalidParams("spread", f"needs run_at or delay to begin at, not {given.spread} alone")
    check_span(given.delay, "delay")
    check_span(given.spread, "spread")
    check_priority(given.priority)
    run_at = read_instant(given.run_at)
    if run_at is not None and given.spread and run_at.year > 9000:
        raise InvalidParams("run_at", f"is out of range for a spread: {given.run_at!r}")
    return NewTimes(run_at, given.delay, given.spread, given.priority)
