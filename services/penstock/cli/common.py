"""What commands share: options, where the api is, how errors and results are printed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from penstock.cli.values import duration_option
from penstock.protocol.errors import PenstockError, RpcError
from penstock.runtime.printable import printable, printable_json

if TYPE_CHECKING:
    from penstock.client.client import Client

EPILOG = (
    "Exit codes: 0 done; 1 the operation failed, the reason is on standard error; "
    "2 wrong usage or settings; 3 a task that was waited for did not succeed; 4 it has not settled in time; "
    "130 interrupted. Settings come from PENSTOCK_* variables and penstock.toml."
)
DEFAULT_API_URL = "http://127.0.0.1:8080"
_SHOWN_CHARS = 80

DataDirOption = Annotated[
    Path | None, typer.Option("--data-dir", help="Folder of the local stack.", show_default=".penstock")
]
ApiUrlOption = Annotated[
    str | None,
    typer.Option(
        "--api-url",
        help="The api. Default: PENSTOCK_API_URL, else the stack that runs in --data-dir, else " + DEFAULT_API_URL,
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the api's result as JSON.")]

RunAtOption = Annotated[
    str | None, typer.Option(show_default=False, help="Not before: RFC 3339 with a zone, or epoch milliseconds.")
]
DelayOption = Annotated[float | None, duration_option(help="Not before so long from now.")]
PriorityOption = Annotated[int | None, typer.Option(show_default=False, help="-32768 to 32767, higher first.")]


def error_text(exc: PenstockError) -> str:
    """An error for a person: the message, and of an answer of the api what the message leaves out."""
    if not isinstance(exc, RpcError):
        return str(exc)
    text = exc.message
    said = not isinstance(exc.data, dict) or all(str(value) in exc.message for value in exc.data.values())
    return text if said else f"{text}: {json.dumps(exc.data, ensure_ascii=False)}"


def connect(api_url: str | None, data_dir: Path | None) -> Client:
    """A client of the api that is meant; see :data:`ApiUrlOption` for which one."""
    from penstock.client.client import Client
    from penstock.local.state import DataDir
    from penstock.settings.loading import load_settings

    settings = load_settings()
    if api_url is None and data_dir is None:
        api_url = settings.api_url
    if api_url is None:
        state = DataDir.of(data_dir).read_state()
        api_url = state["api"] if state else DEFAULT_API_URL
    key = settings.api_key
    return Client(api_url, api_key=key.get_secret_value() if key else None)


def say(text: str = "", *, err: bool = False) -> None:
    """Print lines for a person, of whatever text: none of it reaches the terminal as a command to it."""
    typer.echo(printable(text), err=err)


def print_json(value: Any, *, indent: int | None = 2) -> None:
    typer.echo(printable_json(json.dumps(value, indent=indent, ensure_ascii=False)))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Sequence[str] = ()) -> None:
    """A table on standard output; as wide as it needs to be when that is no terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        # Text: [x] in data is no markup
        table.add_row(*("" if cell is None else Text(printable(str(cell))) for cell in row))
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 400)
    console.print(table)


class Advance(Protocol):
    """Moves a bar on; ``total``: how long it is, where that is only known now."""

    def __call__(self, steps: int, total: int | None = None) -> None: ...


@contextmanager
def progress(total: int | None, label: str) -> Iterator[Advance]:
    """A bar on standard error, where that is a terminal; yields what moves it on. ``total``: None when not known."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    console = Console(stderr=True)
    with Progress(
        *Progress.get_default_columns(), MofNCompleteColumn(), console=console, transient=True,
        disable=not console.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task(label, total=total)
        yield lambda steps, total=None: bar.update(task, advance=steps, total=total)


def print_fields(fields: Iterable[tuple[str, Any]]) -> None:
    """Names and values, one pair a line, what is None left out."""
    pairs = [(name, value) for name, value in fields if value is not None]
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        say(f"{name:<{width}}  {shown}")


def print_answer(answer: dict[str, Any], as_json: bool) -> None:
    """What the api answered, as JSON or field by field."""
    if as_json:
        print_json(answer)
    else:
        print_fields(answer.items())


def print_page(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], cursor: str | None = None, *, right: Sequence[str] = ()
) -> None:
    """What a list shows: a table, or that there is none, and how to see more."""
    if rows:
        print_table(columns, rows, right=right)
    else:
        typer.echo("there is none")
    print_cursor(cursor)


def print_cursor(cursor: str | None) -> None:
    """How to see more of a list, on standard error."""
    if cursor is not None:
        typer.echo(f"more: add --cursor {cursor}", err=True)


def given(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters without those that were not given."""
    return {name: value for name, value in params.items() if value is not None}


def short(text: str) -> str:
    """A text in one line of a table."""
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARS else line[: _SHOWN_CHARS - 1] + "…"
