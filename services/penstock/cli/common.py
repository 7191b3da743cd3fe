"""What commands share: options, the connection to the api or the database, how errors and answers are printed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer

from penstock.cli.parameters import Given, ParamsOf
from penstock.protocol.errors import PenstockError, RateLimited, RpcError, SettingsError, Unavailable
from penstock.protocol.requests import given
from penstock.runtime.logs import printable, printable_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from penstock.client.client import Client
    from penstock.db.session import Session
    from penstock.local.state import DataDir
    from penstock.settings.model import Settings

Result = TypeVar("Result")

DEFAULT_API_URL = "http://127.0.0.1:8080"
# What each method does: `make reference` writes it from the methods, which would load the database's driver.
SUMMARIES: dict[str, str] = json.loads(Path(__file__).with_name("summaries.json").read_text("utf-8"))

DataDirOption = Annotated[
    Path | None, typer.Option("--data-dir", help="Folder of the local stack.", show_default=".penstock")
]
_API_URL = (
    "URL of the api. Default: the stack running in --data-dir, if that is given, else PENSTOCK_API_URL, else the stack "
    f"running in .penstock, else {DEFAULT_API_URL}"
)
ApiUrlOption = Annotated[str | None, typer.Option("--api-url", help=_API_URL)]
DatabaseUrlOption = Annotated[
    str | None, typer.Option("--database-url", help="Postgres to use; default PENSTOCK_DATABASE_URL.")
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def error_text(exc: PenstockError) -> str:
    """An error for a person: the message, and the data of an api error that the message leaves out."""
    if not isinstance(exc, RpcError):
        return str(exc)
    said = not isinstance(exc.data, dict) or all(str(value) in exc.message for value in exc.data.values())
    return exc.message if said else f"{exc.message}: {json.dumps(exc.data, ensure_ascii=False)}"


def load_settings(**overrides: Any) -> Settings:
    """The settings, read where they are needed, since pydantic takes long to load. None overrides nothing."""
    from penstock.settings.model import load_settings as load

    return load(**given(**overrides))


def folder_of(data_dir: Path | None) -> DataDir:
    """The folder of a stack; its module, too, takes long to load."""
    from penstock.local.state import DataDir

    return DataDir(data_dir)


def running(data_dir: Path | None) -> dict[str, Any] | None:
    """What runs in a folder; None if nothing runs in the usual one. Raises StackError where one is named."""
    folder = folder_of(data_dir)
    return folder.read_state() if data_dir is None else folder.running_state()


def settings_here(data_dir: Path | None) -> Settings:
    """The settings of the stack in a folder; if none is named, those of this process, or where they name no database,
    those of the stack running in the current folder."""
    settings = load_settings()
    is_set = data_dir is None and settings.database_url is not None
    if is_set or (state := running(data_dir)) is None:
        return settings
    prefix = "PENSTOCK_"
    variables = {**state["env"], **state.get("database_env", {})}
    own = {name.removeprefix(prefix).lower(): text for name, text in variables.items() if name.startswith(prefix)}
    return load_settings(**own, database_url=state["database_url"])


def connect(api_url: str | None, data_dir: Path | None) -> Client:
    """A client of the api; :data:`ApiUrlOption` says which."""
    from penstock.client.client import Client

    settings = load_settings()
    if api_url is None and (data_dir is not None or (api_url := settings.api_url) is None):
        state = running(data_dir)
        api_url = state["api"] if state else DEFAULT_API_URL
    key = settings.api_key
    return Client(api_url, api_key=key.get_secret_value() if key else None)


@dataclass(frozen=True)
class Shown:
    """How a command prints its answer."""

    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False

    def show(self, answer: Any, printer: Printer | None = None) -> None:
        """Print an answer: as JSON if asked to, else by the printer, or field by field."""
        if self.as_json:
            print_json(answer)
        elif printer is None:
            print_fields(answer.items())
        else:
            printer(answer)


@dataclass(frozen=True)
class Api(Shown):
    """The api that a command calls, and how its answers are printed."""

    as_json: Annotated[bool, typer.Option("--json", help="Print the api's result as JSON.")] = False
    api_url: ApiUrlOption = None
    data_dir: DataDirOption = None

    @cached_property
    def client(self) -> Client:
        return connect(self.api_url, self.data_dir)

    def call(self, method: str, **params: Any) -> Any:
        """Call a method; parameters that are None are left out."""
        return self.client.call(method, given(**params))


@dataclass(frozen=True)
class Database(Shown):
    """The database that a command works on, and how its answer is printed."""

    database_url: DatabaseUrlOption = None
    data_dir: DataDirOption = None

    @cached_property
    def settings(self) -> Settings:
        """Settings whose database is that of --database-url, else as of ``settings_here``. Raises SettingsError."""
        if self.database_url is not None:
            return load_settings(database_url=self.database_url)
        settings = settings_here(self.data_dir)
        if settings.database_url is None:
            raise SettingsError(
                "no database is set: set PENSTOCK_DATABASE_URL, pass --database-url, or start `penstock up` in this "
                "folder"
            )
        return settings

    def run(self, work: Callable[[Session], Awaitable[Result]]) -> Result:
        """The result of work in a session of its own."""
        import asyncio

        from penstock.db.pool import open_store

        async def run() -> Result:
            async with open_store(self.settings, "penstock-cli", pool_size=1) as store, store.session() as session:
                return await work(session)

        return asyncio.run(run())


def outlasting(ask: Callable[[], Result]) -> Result:
    """The answer of an api, through its restarts and its limit of the rate, for what goes on meanwhile."""
    is_away = False
    while True:
        try:
            return ask()
        except (Unavailable, RateLimited) as exc:
            if not is_away:
                say(f"penstock: {exc}; still trying", err=True)
            is_away = True
            time.sleep(0.5)


def calling(
    method: str, params: ParamsOf | type[msgspec.Struct], printer: Printer | None = None
) -> Callable[..., None]:
    """A command that calls a method with the parameters that are given, and prints the answer."""
    shown = params if isinstance(params, ParamsOf) else ParamsOf(params)

    def command(*, given: Given, api: Api) -> None:
        api.show(api.client.call(method, given), printer)

    command.__doc__ = SUMMARIES[method]
    command.__annotations__ |= {"given": Annotated[Given, shown]}
    return command


def say(text: str = "", *, err: bool = False) -> None:
    """Print text of any origin; control characters are escaped."""
    typer.echo(printable(text), err=err)


def print_json(value: Any, *, indent: int | None = 2) -> None:
    in_ascii = (getattr(sys.stdout, "encoding", None) or "utf-8").lower() != "utf-8"
    typer.echo(printable_json(json.dumps(value, indent=indent, ensure_ascii=in_ascii)))


def wide_console(width: int) -> Console:
    """Standard output; at least so wide when it is not a terminal."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, width)
    return console


def table_of(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Collection[str] = ()) -> Table:
    """A table; cells that are Text keep their style."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        cells = ("" if cell is None else cell for cell in row)
        # Text, so that [x] in data is not read as markup
        table.add_row(*(cell if isinstance(cell, Text) else Text(printable(str(cell))) for cell in cells))
    return table


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Collection[str] = ()) -> None:
    """A table on standard output; wide enough for every cell when that is not a terminal."""
    wide_console(400).print(table_of(columns, rows, right=right))


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int | None], None]]:
    """A progress bar on standard error if that is a terminal: a function of what is done, and the total if known."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    console = Console(stderr=True)
    with Progress(
        *Progress.get_default_columns(), MofNCompleteColumn(), console=console, transient=True,
        disable=not console.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def summed(label: str, total: int | None, answers: Iterable[tuple[dict[str, Any], int]]) -> dict[str, Any]:
    """The sums of the numbers and lists in the answers of several calls, with a bar of this total, None if it is not
    known. answers: each with by how many it advances the bar."""
    sums: dict[str, Any] = {}
    done = 0
    with progress(label) as show:
        show(0, total)
        for answer, steps in answers:
            for name, value in answer.items():
                sums[name] = sums[name] + value if name in sums else value
            done += steps
            show(done, total)
    return sums


def confirm(verb: str, what: str, more: str = "") -> None:
    """Ask before a change. Raises typer.BadParameter without a terminal, typer.Abort for a no."""
    if not sys.stdin.isatty():
        raise typer.BadParameter(
            f"refusing to {verb} {what} without confirmation: stdin is not a terminal. Pass --yes."
        )
    typer.confirm(f"{verb.capitalize()} {what}{more}?", abort=True, err=True)


def print_fields(fields: Iterable[tuple[str, Any]]) -> None:
    """Names and values, one pair a line; None values are left out."""
    pairs = [(name, value) for name, value in fields if value is not None]
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        say(f"{name:<{width}}  {shown}")


Printer = Callable[[Any], None]
Column = str | tuple[str, str | Callable[[dict[str, Any]], Any]]


def listing(what: str, columns: Sequence[Column], *, member: str | None = None, right: Collection[str] = ()) -> Printer:
    """A printer of pages: a table of the records in a member, of the name ``what`` if none is given, or `No WHAT.`; and
    the cursor of the next page. columns: titles, each with the field or the function of a record that it shows; a plain
    title shows the field of its name. right: columns aligned to the right."""
    shown = dict((column, column) if isinstance(column, str) else column for column in columns)

    def show(page: dict[str, Any]) -> None:
        rows = [
            [record[column] if isinstance(column, str) else column(record) for column in shown.values()]
            for record in page[member or what]
        ]
        if rows:
            print_table([*shown], rows, right=right)
        else:
            typer.echo(f"No {what}.")
        print_cursor(page.get("cursor"))

    return show


def print_cursor(cursor: str | None) -> None:
    """How to list the next page, on standard error."""
    if cursor is not None:
        say(f"more: add --cursor {cursor}", err=True)


def short(text: str) -> str:
    """A text cut to one line of a table."""
    line = " ".join(text.split())
    return line if len(line) <= 80 else line[:79] + "…"
