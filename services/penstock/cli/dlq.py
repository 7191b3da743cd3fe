"""`penstock dlq`: dead-letter queues from a shell."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any

import typer

from penstock.cli.common import (
    ApiUrlOption,
    DataDirOption,
    JsonOption,
    connect,
    print_fields,
    print_json,
    print_table,
    progress,
    say,
)
from penstock.cli.groups import add_group
from penstock.protocol.errors import PenstockError

_AT_ONCE = 50  # messages a call, so that progress shows and no call takes long
_MOST_IDS = 1000


class QueueName(StrEnum):
    inbound = "inbound"
    outbound = "outbound"
    results = "results"


QueueArgument = Annotated[QueueName, typer.Argument(metavar="QUEUE", help="inbound, outbound or results.")]
IdsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="ID", help="Ids from `penstock dlq list QUEUE`.", show_default=False)
]
AllOption = Annotated[bool, typer.Option("--all", help="All messages that are there now.")]
MostOption = Annotated[
    int | None, typer.Option("--limit", min=1, show_default=False, help="Any messages, so many at the most.")
]


def add_to(app: typer.Typer) -> None:
    add_group(
        app,
        "dlq",
        {"list": list_messages, "show": show, "replay": replay, "purge": purge},
        panel="Tasks",
        help="Messages that were received too often without being dealt with. docs/operations.md tells what to do.",
    )


def list_messages(
    queue: Annotated[
        QueueName | None,
        typer.Argument(metavar="QUEUE", help="inbound, outbound or results; without it, how many are in each."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Messages at the most.")] = 50,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Count dead messages, or list those of one queue; they stay where they are.

    SQS cannot be browsed: while a message is looked at, for a second or so, nobody else sees it, and its count of
    receives grows. What a look held comes back by itself if the look is cut off.
    """
    client = connect(api_url, data_dir)
    if queue is None:
        result = client.call("dlq.stats", {})
        if as_json:
            print_json(result)
        else:
            rows = [(row["queue"], _known(row["messages"]), _known(row["held"])) for row in result["queues"]]
            print_table(("queue", "messages", "being looked at"), rows, right=("messages", "being looked at"))
        if any(row["messages"] is None for row in result["queues"]):
            raise PenstockError("the api cannot use every dead-letter queue: its log says why")
        return
    result = client.call("dlq.list", {"queue": queue, "limit": limit})
    if as_json:
        print_json(result)
        return
    if result["messages"]:
        columns = ("id", "first sent", "receives", "bytes", "entries", "first entries", _STANDING[queue], "problem")
        listed = [
            (row["id"], row["sent_at"], row["receives"], row["bytes"], row["entries"], ", ".join(row["first"]),
             _standing(row), row["problem"])
            for row in result["messages"]
        ]  # fmt: skip
        print_table(columns, listed, right=("receives", "bytes", "entries"))
    say(_how_far(result, len(result["messages"])), err=True)


def show(
    queue: QueueArgument,
    message_id: Annotated[str, typer.Argument(metavar="ID", help="From `penstock dlq list QUEUE`.")],
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Show one message whole, with what each task in it is now; it stays where it is."""
    message = connect(api_url, data_dir).call("dlq.show", {"queue": queue, "id": message_id})
    if as_json:
        print_json(message)
        return
    body, contents = message.pop("body"), message.pop("contents")
    message.pop("first")
    print_fields(message.items())
    if contents:
        say()
        columns = ("what", "task", "claim", "state now", "claim holds it", "problem")
        rows = [
            (entry["what"], entry["task_id"], entry["claim"], entry["state"],
             None if entry["current"] is None else _yes(entry["current"]), entry["problem"])
            for entry in contents
        ]  # fmt: skip
        print_table(columns, rows, right=("task", "claim"))
    say(f"\n{body}")  # as it came: JSON written anew could lose digits of its numbers


def replay(
    queue: QueueArgument,
    ids: IdsArgument = None,
    everything: AllOption = False,
    limit: MostOption = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Also inbound messages so old that their tasks may have been added before."),
    ] = False,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Send messages again, and take them from the dead-letter queue.

    Doing so twice does nothing twice: an inbound message is known by its first id, and of outbound messages and results
    only what belongs to the claim that holds its task now is sent or counts.
    """
    more = {"force": True} if force else {}
    _each(queue, "dlq.replay", ids, everything, limit, as_json, connect(api_url, data_dir), more)


def purge(
    queue: QueueArgument,
    ids: IdsArgument = None,
    everything: AllOption = False,
    limit: MostOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Delete messages for good. Tasks in Postgres are not touched."""
    _check_choice(ids, everything, limit)
    client = connect(api_url, data_dir)
    if not yes:
        total = len(ids or ()) or min(_messages_in(queue, client), limit or sys.maxsize)
        question = f"Delete {total} message{'' if total == 1 else 's'} of {queue}-dlq for good?"
        if not sys.stdin.isatty():
            raise typer.BadParameter(
                f"refusing to delete {total} messages of {queue}-dlq without confirmation: stdin is not a "
                "terminal. Pass --yes."
            )
        typer.confirm(question, abort=True, err=True)
    _each(queue, "dlq.purge", ids, everything, limit, as_json, client, {})


def _each(
    queue: str,
    method: str,
    ids: list[str] | None,
    everything: bool,
    limit: int | None,
    as_json: bool,
    client: Any,
    more: dict[str, Any],
) -> None:
    """Call the method until all that was asked for is done; totals over the calls."""
    _check_choice(ids, everything, limit)
    totals: dict[str, Any] = {}
    wanted = len(ids) if ids else min(_messages_in(queue, client), limit or sys.maxsize)
    with progress(wanted, f"{method} {queue}") as advance:
        for answer in _answers(queue, method, ids, wanted, client, more):
            for name, value in answer.items():
                if name not in ("seen", "total"):
                    totals[name] = totals[name] + value if name in totals else value  # numbers, or lists
            advance(_gone(answer))
    # What stays is met by more than one call.
    if "left" in totals:
        totals["left"] = list({left["id"]: left for left in totals["left"]}.values())
    if as_json:
        print_json(totals)
    else:
        print_fields((name, len(value) if name == "left" else value) for name, value in totals.items() if value != [])
        for left in totals.get("left", ()):
            say(f"{left['id']}: {left['reason']}", err=True)
    if totals.get("left") or totals.get("unknown"):
        raise typer.Exit(1)


def _answers(
    queue: str, method: str, ids: list[str] | None, wanted: int, client: Any, more: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    if ids:
        for start in range(0, len(ids), _MOST_IDS):
            yield client.call(method, {"queue": queue, "ids": ids[start : start + _MOST_IDS]} | more)
        return
    # No more than there were at the beginning: a message that dies again meanwhile is not sent in a circle.
    gone = 0
    while True:
        answer = client.call(method, {"queue": queue, "limit": max(1, min(_AT_ONCE, wanted - gone))} | more)
        gone += _gone(answer)
        yield answer
        if not _gone(answer) or gone >= wanted:
            return


def _gone(answer: dict[str, Any]) -> int:
    """How many messages left the dead-letter queue."""
    return int(answer.get("purged", 0) + answer.get("replayed", 0) + answer.get("dropped", 0))


def _messages_in(queue: str, client: Any) -> int:
    counted = next(row for row in client.call("dlq.stats", {})["queues"] if row["queue"] == queue)
    if counted["messages"] is None:
        raise PenstockError(f"the api cannot use {queue}-dlq: its log says why")
    return int(counted["messages"])


def _check_choice(ids: list[str] | None, everything: bool, limit: int | None) -> None:
    if bool(ids) + everything + (limit is not None) != 1:
        raise typer.BadParameter("name ids, or --all, or --limit")


_STANDING = {"inbound": "accepted before", "outbound": "claims that hold", "results": "claims that hold"}


def _standing(row: dict[str, Any]) -> str:
    if row["current"] is None:
        return "unknown" if row["accepted"] is None else _yes(row["accepted"])
    return f"{row['current']} of {row['current'] + row['stale']}"


def _how_far(result: dict[str, Any], shown: int) -> str:
    held = f", of which somebody else is looking at {result['held']}" if result["held"] else ""
    return f"{shown} of about {result['total']}{held} (SQS counts are approximate)"


def _known(count: int | None) -> str:
    return "unknown" if count is None else str(count)


def _yes(value: bool) -> str:
    return "yes" if value else "no"
