"""`penstock rejected`: malformed messages."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import typer

from penstock.cli.common import SUMMARIES, Api, CursorOption, limit_option, listing, print_fields, say, short, summed
from penstock.cli.groups import Commands, add_group

PAGE = 100  # records a call, so that progress shows: a retry takes a transaction a record


class Source(StrEnum):
    inbound = "inbound"
    results = "results"
    kafka_source = "kafka-source"


SourceOption = Annotated[Source | None, typer.Option(help="Only messages from this source.")]


@dataclass(frozen=True)
class Choice:
    """The messages that a command changes."""

    ids: Annotated[list[int] | None, typer.Argument(metavar="ID", help="Ids from `penstock rejected`.")] = None
    everything: Annotated[bool, typer.Option("--all", help="All rejected messages.")] = False
    source: SourceOption = None


def add_to(app: typer.Typer) -> None:
    commands: Commands = {
        "list": list_rejected,
        "show": show,
        "retry": _each("rejected.retry"),
        "purge": _each("rejected.purge"),
    }
    add_group(app, "rejected", commands, panel="Tasks", help="Malformed messages, stored with the reason.")


def list_rejected(
    *,
    limit: Annotated[int, limit_option("messages")] = 50,
    cursor: CursorOption = None,
    source: SourceOption = None,
    api: Api,
) -> None:
    """List rejected messages with their reasons."""
    api.show(api.call("rejected.list", limit=limit, cursor=cursor, source=source), _print_rejected)


def show(
    *, rejected_id: Annotated[int, typer.Argument(metavar="ID", help="From `penstock rejected`.")], api: Api
) -> None:
    """Show one rejected message in full."""
    api.show(api.call("rejected.show", id=rejected_id), _print_message)


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

    def command(choice: Choice, api: Api) -> None:
        if bool(choice.ids) == choice.everything:
            raise typer.BadParameter("name the ids, or --all")
        if choice.ids and choice.source:
            raise typer.BadParameter("--source goes with --all")
        total = len(choice.ids) if choice.ids else None
        totals = summed(method, total, _answers(method, choice, api), _handled)
        api.show(totals, _print_totals)
        if totals.get("unknown") or totals.get("still_rejected"):
            raise typer.Exit(1)

    command.__doc__ = SUMMARIES[method]
    return command


def _handled(answer: dict[str, Any]) -> int:
    return sum(count if isinstance(count, int) else len(count) for count in answer.values())


def _answers(method: str, choice: Choice, api: Api) -> Iterator[dict[str, Any]]:
    """Answers without their cursor: numbers, and lists of ids."""
    ids, cursor = choice.ids or [], None
    while True:
        page = {"ids": ids[:PAGE]} if ids else {"limit": PAGE, "cursor": cursor, "source": choice.source}
        answer = api.call(method, **page)
        cursor, ids = answer.pop("cursor"), ids[PAGE:]
        yield answer
        if cursor is None and not ids:
            return
