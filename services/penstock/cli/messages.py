"""`penstock rejected`: malformed messages; `penstock dlq`: dead-letter queues."""

import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import typer

from penstock.api.params import DlqShowParams, ListRejected, RejectedShowParams, ReplayDead, WhichDead, WhichRejected
from penstock.cli import common
from penstock.cli.common import Api, calling, print_fields, print_table, say
from penstock.cli.parameters import Commands, Given, ParamsOf
from penstock.cli.values import state_label
from penstock.protocol.errors import PenstockError

PAGE = 100  # rejected messages a call, so that progress shows: a retry takes a transaction a message
_DEAD_AT_ONCE = 50  # dead letters a call, for the same, and so that calls stay short
_MOST_IDS = 1000
_REJECTED = ParamsOf(
    WhichRejected,
    without=["limit", "cursor"],
    ids=typer.Argument(metavar="ID", help="Ids from `penstock rejected`."),
    source="With --all: only messages from this source.",
)
_DEAD: dict[str, Any] = {
    "queue": "inbound, outbound or results.",
    "ids": typer.Argument(metavar="ID", help="Ids from `penstock dlq list QUEUE`."),
    "limit": typer.Option(min=1, help="At most this many messages, in any order."),
}
_EveryDead = Annotated[bool, typer.Option("--all", help="As many messages as the queue has now.")]


QueueName = StrEnum("QueueName", ["inbound", "outbound", "results"])

_print_rejected = common.listing(
    "rejected messages",
    ("id", "source", "at", "reason", ("body", lambda row: common.short(row["body"]))),
    member="rejected",
    right=("id",),
)


def _changing(method: str) -> Callable[..., None]:
    """A command that calls the method for all chosen rejected messages."""

    def command(
        *,
        given: Annotated[Given, _REJECTED],
        everything: Annotated[bool, typer.Option("--all", help="All rejected messages.")] = False,
        api: Api,
    ) -> None:
        ids = given.pop("ids", [])
        if bool(ids) == everything:
            raise typer.BadParameter("name the ids, or --all")
        if ids and given:
            raise typer.BadParameter("--source goes with --all")
        totals = common.summed(method, len(ids) or None, _change_rejected(method, ids, given, api))
        _show_totals(totals, _print_rejected_totals, api)

    command.__doc__ = common.SUMMARIES[method]
    return command


def _change_rejected(method: str, ids: list[int], source: Given, api: Api) -> Iterator[tuple[dict[str, Any], int]]:
    """Answers without their cursor, which are numbers and lists of ids, and how many messages each is about."""
    cursor = None
    while True:
        page = {"ids": ids[:PAGE]} if ids else {"limit": PAGE, "cursor": cursor, **source}
        answer = api.call(method, **page)
        cursor, ids = answer.pop("cursor"), ids[PAGE:]
        yield answer, sum(count if isinstance(count, int) else len(count) for count in answer.values())
        if cursor is None and not ids:
            return


def _print_rejected_totals(totals: dict[str, Any]) -> None:
    if any(totals.values()):
        print_fields(totals.items())
    else:
        say("No rejected messages.")


def _show_totals(totals: dict[str, Any], printer: common.Printer, api: Api) -> None:
    """Print totals over the calls, and fail where they leave messages."""
    api.show(totals, printer)
    if any(totals.get(name) for name in ("left", "still_rejected", "unknown")):
        raise typer.Exit(1)


def list_dead(
    *,
    queue: Annotated[QueueName | None, typer.Argument(metavar="QUEUE")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of messages.")] = 50,
    api: Api,
) -> None:
    """Count dead letters, or list those of one queue; they stay in the queue.

    SQS cannot be browsed: reading a message hides it from other readers for about a second and raises its receive
    count. If a listing is interrupted, its messages reappear automatically.

    queue: inbound, outbound or results; without it, the count of each is shown.
    """
    if queue is None:
        result = api.call("dlq.stats")
        api.show(result, _print_counts)
        if any(row["messages"] is None for row in result["queues"]):
            raise PenstockError("the api cannot use every dead-letter queue; its log has the reason")
        return
    api.show(api.call("dlq.list", queue=queue, limit=limit), partial(_print_dead, queue))


def _print_counts(result: dict[str, Any]) -> None:
    columns = {"queue": "queue", "messages": "messages", "in flight": "held"}
    rows = [["unknown" if row[name] is None else row[name] for name in columns.values()] for row in result["queues"]]
    print_table([*columns], rows, right=("messages", "in flight"))


def _print_dead(queue: QueueName, result: dict[str, Any]) -> None:
    def standing(row: dict[str, Any]) -> str:
        known = row["current"]
        return _yes(row["accepted"]) if known is None else f"{known} of {known + row['stale']}"

    if result["messages"]:
        current = "accepted before" if queue == QueueName.inbound else "current claims"
        columns = (
            "id", ("first sent", "sent_at"), "receives", "bytes", "entries",
            ("first entries", lambda row: ", ".join(row["first"])), (current, standing), "problem",
        )  # fmt: skip
        common.listing("messages", columns, right=("receives", "bytes", "entries"))(result)
    held = f", {result['held']} of them in flight to another reader" if result["held"] else ""
    say(f"{len(result['messages'])} of about {result['total']}{held} (SQS counts are approximate)", err=True)


def _print_message(message: dict[str, Any]) -> None:
    """A rejected message, or a dead one with its contents."""
    body, contents = message.pop("body"), message.pop("contents", ())
    message.pop("first", None)
    print_fields(message.items())
    if contents:
        say()
        columns = ("kind", "task", "claim", "state now", "claim is current", "problem")
        rows = [
            (entry["what"], entry["task_id"], entry["claim"], entry["state"] and state_label(entry["state"]),
             None if entry["current"] is None else _yes(entry["current"]), entry["problem"])
            for entry in contents
        ]  # fmt: skip
        print_table(columns, rows, right=("task", "claim"))
    say(f"\n{body}")  # unchanged: reformatted JSON could lose digits of its numbers


def replay(
    *,
    everything: _EveryDead = False,
    given: Annotated[Given, ParamsOf(ReplayDead, **_DEAD)],
    api: Api,
) -> None:
    """Send messages again and remove them from the dead-letter queue.

    Replaying twice is safe: an inbound message is recognised by its first id, and outbound messages and results count
    only while their claim is the task's current one.

    force: Also replay inbound messages so old that their tasks may already exist.
    """
    _change_dead("dlq.replay", given, _count_dead(given, everything, api), api)


def purge(
    *,
    everything: _EveryDead = False,
    given: Annotated[Given, ParamsOf(WhichDead, **_DEAD)],
    yes: common.YesOption = False,
    api: Api,
) -> None:
    """Delete messages permanently. Tasks in Postgres are not touched.

    With --all or --limit, one that comes meanwhile may be among them, since SQS keeps no order; ids name those alone.
    """
    total = _count_dead(given, everything, api)
    if not yes:
        what = f"{total} message{'' if total == 1 else 's'} of {given['queue']}-dlq"
        common.confirm("delete", what, " permanently")
    _change_dead("dlq.purge", given, total, api)


def _count_dead(given: Given, everything: bool, api: Api) -> int:
    """How many messages are chosen, at most. Raises typer.BadParameter unless they are named in one way."""
    if ("ids" in given) + ("limit" in given) + everything != 1:
        raise typer.BadParameter("name ids, or --all, or --limit")
    if "ids" in given:
        return len(given["ids"])
    found = next(row["messages"] for row in api.call("dlq.stats")["queues"] if row["queue"] == given["queue"])
    if found is None:
        raise PenstockError(f"the api cannot use {given['queue']}-dlq; its log has the reason")
    return int(min(found, given.get("limit", sys.maxsize)))


def _change_dead(method: str, given: Given, wanted: int, api: Api) -> None:
    """Call the method until every chosen message is handled; print totals over the calls."""

    def change(**chosen: Any) -> tuple[dict[str, Any], int]:
        answer = api.client.call(method, given | chosen)
        return answer, sum(answer.get(name, 0) for name in ("purged", "replayed", "dropped"))

    def answers() -> Iterator[tuple[dict[str, Any], int]]:
        if "ids" in given:
            for start in range(0, wanted, _MOST_IDS):
                yield change(ids=given["ids"][start : start + _MOST_IDS])
            return
        # At most the messages present at the beginning, so that one that dies again meanwhile is not sent in a loop.
        left = wanted
        while True:
            answer, gone = change(limit=max(1, min(_DEAD_AT_ONCE, left)))
            left -= gone
            yield answer, gone
            if not gone or left <= 0:
                return

    totals = common.summed(f"{method} {given['queue']}", wanted, answers())
    for name in ("seen", "total"):
        totals.pop(name, None)
    if "left" in totals:  # several calls may meet the same message
        totals["left"] = list({left["id"]: left for left in totals["left"]}.values())
    _show_totals(totals, _print_dead_totals, api)


def _print_dead_totals(totals: dict[str, Any]) -> None:
    print_fields((name, len(value) if name == "left" else value) for name, value in totals.items() if value != [])
    for left in totals.get("left", ()):
        say(f"{left['id']}: {left['reason']}", err=True)


def _yes(value: bool | None) -> str:
    return "unknown" if value is None else "yes" if value else "no"


rejected = Commands(
    "Malformed messages, stored with the reason.",
    list=calling("rejected.list", ListRejected, _print_rejected),
    show=calling("rejected.show", RejectedShowParams, _print_message),
    retry=_changing("rejected.retry"),
    purge=_changing("rejected.purge"),
)
dlq = Commands(
    "Dead letters: messages received too often without success. See docs/operations.md.",
    list=list_dead,
    show=calling("dlq.show", DlqShowParams, _print_message),
    replay=replay,
    purge=purge,
)
