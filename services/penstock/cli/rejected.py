"""`penstock rejected`: malformed messages."""

from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from penstock.api.params import ListRejected, RejectedShowParams, WhichRejected
from penstock.cli.common import SUMMARIES, Api, calling, listing, print_fields, say, short, summed
from penstock.cli.parameters import Commands, Given, ParamsOf, add_group

PAGE = 100  # records a call, so that progress shows: a retry takes a transaction a record
_CHOSEN = ParamsOf(
    WhichRejected,
    without=["limit", "cursor"],
    ids=typer.Argument(metavar="ID", help="Ids from `penstock rejected`."),
    source="With --all: only messages from this source.",
)


def add_to(app: typer.Typer) -> None:
    commands: Commands = {
        "list": calling("rejected.list", ListRejected, _print_rejected),
        "show": calling("rejected.show", RejectedShowParams, _print_message),
        "retry": _each("rejected.retry"),
        "purge": _each("rejected.purge"),
    }
    add_group(app, "rejected", commands, panel="Tasks", help="Malformed messages, stored with the reason.")


_print_rejected = listing(
    "rejected messages",
    ("id", "source", "at", "reason", ("body", lambda row: short(row["body"]))),
    member="rejected",
    right=("id",),
)


def _print_message(message: dict[str, Any]) -> None:
    body = message.pop("body")
    print_fields(message.items())
    say(f"\n{body}")


def _print_totals(totals: dict[str, Any]) -> None:
    if any(totals.values()):
        print_fields(totals.items())
    else:
        say("No rejected messages.")


def _each(method: str) -> Callable[..., None]:
    """A command that calls the method for all chosen messages, some at once, and prints totals over the calls."""

    def command(
        *,
        given: Annotated[Given, _CHOSEN],
        everything: Annotated[bool, typer.Option("--all", help="All rejected messages.")] = False,
        api: Api,
    ) -> None:
        ids = given.pop("ids", [])
        if bool(ids) == everything:
            raise typer.BadParameter("name the ids, or --all")
        if ids and given:
            raise typer.BadParameter("--source goes with --all")
        totals = summed(method, len(ids) or None, _answers(method, ids, given, api), _handled)
        api.show(totals, _print_totals)
        if totals.get("unknown") or totals.get("still_rejected"):
            raise typer.Exit(1)

    command.__doc__ = SUMMARIES[method]
    return command


def _handled(answer: dict[str, Any]) -> int:
    return sum(count if isinstance(count, int) else len(count) for count in answer.values())


def _answers(method: str, ids: list[int], source: Given, api: Api) -> Iterator[dict[str, Any]]:
    """Answers without their cursor: numbers, and lists of ids."""
    cursor = None
    while True:
        page = {"ids": ids[:PAGE]} if ids else {"limit": PAGE, "cursor": cursor, **source}
        answer = api.call(method, **page)
        cursor, ids = answer.pop("cursor"), ids[PAGE:]
        yield answer
        if cursor is None and not ids:
            return
