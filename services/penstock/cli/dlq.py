"""`penstock dlq`: dead-letter queues."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import typer

from penstock.api.params import DlqShowParams
from penstock.cli.common import Api, YesOption, calling, confirm, print_fields, print_table, say, summed
from penstock.cli.parameters import Commands, add_group
from penstock.cli.values import state_label
from penstock.protocol.errors import PenstockError

_AT_ONCE = 50  # messages a call, so that progress shows and calls stay short
_MOST_IDS = 1000


class QueueName(StrEnum):
    inbound = "inbound"
    outbound = "outbound"
    results = "results"


@dataclass(frozen=True)
class Choice:
    """The messages that a command changes."""

    queue: Annotated[QueueName, typer.Argument(metavar="QUEUE", help="inbound, outbound or results.")]
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Ids from `penstock dlq list QUEUE`.")] = None
    everything: Annotated[bool, typer.Option("--all", help="As many messages as the queue has now.")] = False
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many messages, in any order.")] = None

    def count(self, api: Api) -> int:
        """How many messages that is, at most. Raises typer.BadParameter unless they are named in one way."""
        if bool(self.ids) + self.everything + (self.limit is not None) != 1:
            raise typer.BadParameter("name ids, or --all, or --limit")
        if self.ids:
            return len(self.ids)
        found = next(row["messages"] for row in api.call("dlq.stats")["queues"] if row["queue"] == self.queue)
        if found is None:
            raise PenstockError(f"the api cannot use {self.queue}-dlq; its log has the reason")
        return min(int(found), self.limit or sys.maxsize)


def add_to(app: typer.Typer) -> None:
    commands: Commands = {
        "list": list_messages,
        "show": calling("dlq.show", DlqShowParams, _print_message),
        "replay": replay,
        "purge": purge,
    }
    help = "Dead letters: messages received too often without success. See docs/operations.md."
    add_group(app, "dlq", commands, panel="Tasks", help=help)


def list_messages(
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
    api.show(api.call("dlq.list", queue=queue, limit=limit), partial(_print_messages, queue))


def _print_counts(result: dict[str, Any]) -> None:
    columns = {"queue": "queue", "messages": "messages", "in flight": "held"}
    rows = [["unknown" if row[name] is None else row[name] for name in columns.values()] for row in result["queues"]]
    print_table([*columns], rows, right=("messages", "in flight"))


def _print_messages(queue: QueueName, result: dict[str, Any]) -> None:
    messages = result["messages"]
    if messages:
        current = "accepted before" if queue == QueueName.inbound else "current claims"
        columns = ("id", "first sent", "receives", "bytes", "entries", "first entries", current, "problem")
        listed = []
        for row in messages:
            known = row["current"]
            standing = _yes(row["accepted"]) if known is None else f"{known} of {known + row['stale']}"
            first = ", ".join(row["first"])
            counts = (row["receives"], row["bytes"], row["entries"])
            listed.append((row["id"], row["sent_at"], *counts, first, standing, row["problem"]))
        print_table(columns, listed, right=("receives", "bytes", "entries"))
    held = f", {result['held']} of them in flight to another reader" if result["held"] else ""
    say(f"{len(messages)} of about {result['total']}{held} (SQS counts are approximate)", err=True)


def _print_message(message: dict[str, Any]) -> None:
    body, contents = message.pop("body"), message.pop("contents")
    message.pop("first")
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


def replay(*, choice: Choice, force: bool = False, api: Api) -> None:
    """Send messages again and remove them from the dead-letter queue.

    Replaying twice is safe: an inbound message is recognised by its first id, and outbound messages and results count
    only while their claim is the task's current one.

    force: Also replay inbound messages so old that their tasks may already exist.
    """
    _each("dlq.replay", choice, choice.count(api), api, force=force or None)


def purge(*, choice: Choice, yes: YesOption = False, api: Api) -> None:
    """Delete messages permanently. Tasks in Postgres are not touched.

    With --all or --limit, one that comes meanwhile may be among them, since SQS keeps no order; ids name those alone.
    """
    total = choice.count(api)
    if not yes:
        confirm("delete", f"{total} message{'' if total == 1 else 's'} of {choice.queue}-dlq", " permanently")
    _each("dlq.purge", choice, total, api)


def _each(method: str, choice: Choice, wanted: int, api: Api, **more: Any) -> None:
    """Call the method until every chosen message is handled; print totals over the calls."""

    def answers() -> Iterator[dict[str, Any]]:
        if choice.ids:
            for start in range(0, wanted, _MOST_IDS):
                yield api.call(method, queue=choice.queue, ids=choice.ids[start : start + _MOST_IDS], **more)
            return
        # At most the messages present at the beginning, so that one that dies again meanwhile is not sent in a loop.
        left = wanted
        while True:
            answer = api.call(method, queue=choice.queue, limit=max(1, min(_AT_ONCE, left)), **more)
            left -= _gone(answer)
            yield answer
            if not _gone(answer) or left <= 0:
                return

    totals = summed(f"{method} {choice.queue}", wanted, answers(), _gone)
    for name in ("seen", "total"):
        totals.pop(name, None)
    if "left" in totals:  # several calls may meet the same message
        totals["left"] = list({left["id"]: left for left in totals["left"]}.values())
    api.show(totals, _print_totals)
    if totals.get("left") or totals.get("unknown"):
        raise typer.Exit(1)


def _print_totals(totals: dict[str, Any]) -> None:
    print_fields((name, len(value) if name == "left" else value) for name, value in totals.items() if value != [])
    for left in totals.get("left", ()):
        say(f"{left['id']}: {left['reason']}", err=True)


def _gone(answer: dict[str, Any]) -> int:
    return int(answer.get("purged", 0) + answer.get("replayed", 0) + answer.get("dropped", 0))


def _yes(value: bool | None) -> str:
    return "unknown" if value is None else "yes" if value else "no"
