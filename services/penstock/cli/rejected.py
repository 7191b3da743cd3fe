"""`penstock rejected`: messages that could not be understood."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any

import typer

from penstock.cli.common import (
    ApiUrlOption,
    DataDirOption,
    JsonOption,
    connect,
    given,
    print_fields,
    print_json,
    print_page,
    progress,
    say,
    short,
)
from penstock.cli.groups import Commands, add_group

PAGE = 100  # records a call: a retry takes each in a transaction of its own, and progress is to be seen


def add_to(app: typer.Typer) -> None:
    commands: Commands = {"list": list_rejected, "show": show, "retry": retry, "purge": purge}
    add_group(app, "rejected", commands, panel="Tasks", help="Messages that could not be understood, and why.")


class Source(StrEnum):
    inbound = "inbound"
    results = "results"


SourceOption = Annotated[Source | None, typer.Option(show_default=False, help="Only messages of this queue.")]


def list_rejected(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Messages at the most.")] = 50,
    cursor: Annotated[str | None, typer.Option(show_default=False, help="Go on where the last list ended.")] = None,
    source: SourceOption = None,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """List rejected messages with their reasons."""
    params = {"limit": limit, "cursor": cursor, "source": source}
    result = connect(api_url, data_dir).call("rejected.list", given(params))
    if as_json:
        print_json(result)
        return
    rows = [(row["id"], row["source"], row["at"], row["reason"], short(row["body"])) for row in result["rejected"]]
    print_page(("id", "source", "at", "reason", "body"), rows, result["cursor"], right=("id",))


def show(
    rejected_id: Annotated[int, typer.Argument(metavar="ID", help="From `penstock rejected`.")],
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Show one rejected message whole."""
    message = connect(api_url, data_dir).call("rejected.show", {"id": rejected_id})
    if as_json:
        print_json(message)
        return
    body = message.pop("body")
    print_fields(message.items())
    say(f"\n{body}")


def retry(
    ids: Annotated[list[int] | None, typer.Argument(metavar="ID", help="Ids from `penstock rejected`.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    source: SourceOption = None,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Read rejected messages again, as when the reason has been mended."""
    _each("rejected.retry", ids, everything, source, as_json, connect(api_url, data_dir))


def purge(
    ids: Annotated[list[int] | None, typer.Argument(metavar="ID", help="Ids from `penstock rejected`.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    source: SourceOption = None,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Delete rejected messages for good."""
    _each("rejected.purge", ids, everything, source, as_json, connect(api_url, data_dir))


def _each(method: str, ids: list[int] | None, everything: bool, source: str | None, as_json: bool, client: Any) -> None:
    if bool(ids) == everything:
        raise typer.BadParameter("name the ids, or --all")
    if ids and source:
        raise typer.BadParameter("--source goes with --all")
    totals: dict[str, Any] = {}
    with progress(len(ids) if ids else None, method) as advance:
        for answer in _answers(method, ids, source, client):
            for name, count in answer.items():
                if name != "cursor":
                    totals[name] = totals[name] + count if name in totals else count  # numbers, or lists of ids
            advance(
                sum(
                    count if isinstance(count, int) else len(count)
                    for name, count in answer.items()
                    if name != "cursor"
                )
            )
    if as_json:
        print_json(totals)
    elif any(totals.values()):
        print_fields(totals.items())
    else:
        say("there is none")
    if totals.get("unknown") or totals.get("still_rejected"):
        raise typer.Exit(1)


def _answers(method: str, ids: list[int] | None, source: str | None, client: Any) -> Iterator[dict[str, Any]]:
    if ids:
        for start in range(0, len(ids), PAGE):
            yield client.call(method, {"ids": ids[start : start + PAGE]})
        return
    cursor = None
    while True:
        answer = client.call(method, given({"limit": PAGE, "cursor": cursor, "source": source}))
        cursor = answer["cursor"]
        yield answer
        if cursor is None:
            return
