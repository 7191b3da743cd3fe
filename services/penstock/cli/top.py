"""`penstock top`: the pipeline live in a terminal, or as JSON for scripts."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.common import ApiUrlOption, DataDirOption, connect, print_json
from penstock.cli.values import state_label
from penstock.protocol.errors import AccessDenied, Unavailable
from penstock.protocol.task import State
from penstock.runtime.printable import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from penstock.client.client import Client

_HEALTH_SECONDS = 2.0
_SPARKS = "▁▂▃▄▅▆▇█"
_HISTORY = 60
_WAITING = (State.WAITING, State.SCHEDULED, State.ERROR)
_COLOURS = {
    State.ACQUIRED: "cyan", State.ERROR: "yellow", State.SUCCESS: "green", State.CRITICAL_ERROR: "red",
}  # fmt: skip
_ORDERS = ("in flight", "waiting", "failed", "name")


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel="Tasks")(top)


def top(
    once: Annotated[bool, typer.Option("--once", help="Print once and return.")] = False,
    interval: Annotated[float, typer.Option(min=0.2, max=3600, help="Seconds between refreshes.")] = 2.0,
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            "--metrics",
            metavar="URL",
            show_default=False,
            help="Show the health of a process, by the URL of its /readyz. Repeatable. Processes of the stack in "
            "--data-dir are included.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each refresh as one line of JSON.")] = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Watch rates, states, backlog, actions and the health of processes.

    Keys: q quits, s changes the order of actions, space refreshes. Without a terminal, and with --json, it prints until
    Ctrl-C.
    """
    client = connect(api_url, data_dir)
    processes = _processes(metrics or (), data_dir if api_url is None else None, known=api_url is None)
    watch = Watch(client, processes)
    if once:
        watch.look(must=True)
        if as_json:
            print_json(watch.as_json())
        else:
            _print(watch)
        return
    if as_json or not sys.stdout.isatty():
        _stream(watch, interval, as_json)
    else:
        _show(watch, interval)


@dataclass
class Watch:
    """The last figures and their changes. problem: why the last refresh failed."""

    client: Client
    processes: Sequence[tuple[str, str]]
    stats: dict[str, Any] | None = None
    actions: list[dict[str, Any]] = field(default_factory=list)
    health: list[dict[str, Any]] = field(default_factory=list)
    per_second: dict[str, float] = field(default_factory=dict)
    succeeded: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    problem: str | None = None
    order: int = 0
    _seen_at: float = 0.0

    def look(self, *, must: bool = False) -> None:
        """Refresh the figures. An error is raised if the refresh ``must`` succeed, else kept as ``problem``."""
        before, at = self.stats, time.monotonic()
        with ThreadPoolExecutor(max_workers=8) as pool:
            asked = pool.map(_health_of, self.processes)
            try:
                self.stats = _of_all(self.client.call("stats", {}))
                self.actions = self._limits()
                self.problem = None
            except Unavailable as exc:
                if must:
                    raise
                self.problem = str(exc)
            self.health = list(asked)
        if self.problem is None and before is not None and self.stats is not None:
            elapsed = max(0.001, at - self._seen_at)
            states = self.stats["states"]
            self.per_second = {state: (states[state] - before["states"][state]) / elapsed for state in states}
        if self.problem is None and self.stats is not None:
            self.succeeded.append(self.stats["rates"]["succeeded_per_second"])
            self._seen_at = at

    def _limits(self) -> list[dict[str, Any]]:
        try:
            found: list[dict[str, Any]] = self.client.call("action.list", {})["actions"]
        except AccessDenied:
            return []
        return found

    def rows(self) -> list[dict[str, Any]]:
        """One row for each action that has tasks or limits, in the chosen order."""
        limits = {row["action"]: row for row in self.actions}
        counts: dict[str, dict[str, int]] = self.stats["actions"] if self.stats else {}
        rows = []
        for action in sorted({*counts, *limits}):
            of_action = counts.get(action, {})
            limit = limits.get(action, {})
            rows.append(
                {
                    "action": action,
                    "waiting": sum(of_action.get(state, 0) for state in _WAITING),
                    "retrying": of_action.get(State.ERROR, 0),
                    "in_flight": of_action.get(State.ACQUIRED, 0),
                    "max_in_flight": limit.get("max_in_flight"),
                    "paused": limit.get("paused", False),
                    "succeeded": of_action.get(State.SUCCESS, 0),
                    "failed": of_action.get(State.CRITICAL_ERROR, 0),
                }
            )
        order = _ORDERS[self.order % len(_ORDERS)]
        if order != "name":
            rows.sort(key=lambda row: -int(row[order.replace(" ", "_")]))  # stable: by name among equals
        return rows

    def as_json(self) -> dict[str, Any]:
        """The figures for scripts."""
        if self.stats is None or self.problem is not None:
            return {"problem": self.problem, "processes": self.health}
        return {
            "states": self.stats["states"],
            "rates": self.stats["rates"],
            "lag": self.stats["lag"],
            "actions": self.rows(),
            "processes": self.health,
        }


def _of_all(stats: dict[str, Any]) -> dict[str, Any]:
    """The counts of all tenants. Raises AccessDenied for an API key that is restricted to one tenant."""
    if "tenant" in stats:
        raise AccessDenied(
            403, f"this API key is bound to the tenant {stats['tenant']!r}, and rates and lag are of all tenants; "
            "`penstock stats` shows its counts"
        )  # fmt: skip
    return stats


def _processes(given: Sequence[str], data_dir: Path | None, *, known: bool) -> list[tuple[str, str]]:
    """Names and URLs of processes: the given ones, and those of the local stack if ``known``."""
    from penstock.local.state import DataDir

    found = [(_base(url), _base(url)) for url in given]
    for url, _ in found:
        if not url.startswith(("http://", "https://")):
            raise typer.BadParameter(f"{url!r} is not a URL such as http://127.0.0.1:9464", param_hint="--metrics")
    state = DataDir.of(data_dir).read_state() if known else None
    if state is not None:
        found += [(entry["name"], _base(entry["metrics"])) for entry in state["processes"] if entry["metrics"]]
    return found


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/metrics").removesuffix("/readyz")


def _health_of(process: tuple[str, str]) -> dict[str, Any]:
    import httpx

    name, url = process
    try:
        reply = httpx.get(f"{url}/readyz", timeout=_HEALTH_SECONDS, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        return {"name": name, "ready": False, "reason": f"unavailable: {exc or type(exc).__name__}"}
    ready = reply.status_code == 200
    return {"name": name, "ready": ready, "reason": None if ready else reply.text.strip()[:200]}


def _stream(watch: Watch, interval: float, as_json: bool) -> None:
    while True:
        watch.look()
        if as_json:
            typer.echo(json.dumps(watch.as_json(), ensure_ascii=False))
        else:
            _print(watch)
        sys.stdout.flush()
        time.sleep(interval)


def _print(watch: Watch) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 120)
    console.print(_page(watch, rows=None))


def _show(watch: Watch, interval: float) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    watch.look()
    with _keys() as read, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(_page(watch, rows=console.height), refresh=True)
            key = read(interval)
            if key == "q":
                return
            if key == "s":
                watch.order += 1
            else:
                watch.look()


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """A function that reads one key within a number of seconds, None without one; keys are not echoed."""
    try:
        import termios
        import tty
    except ImportError:  # this system has no such terminals: Ctrl-C ends it
        yield _sleep
        return
    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (OSError, ValueError, termios.error):  # not a terminal
        yield _sleep
        return

    def read(seconds: float) -> str | None:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        typed = os.read(descriptor, 1) if ready else b""
        if ready and not typed:
            time.sleep(seconds)  # end of input
        return typed.decode("ascii", "ignore") or None

    tty.setcbreak(descriptor)
    try:
        yield read
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _sleep(seconds: float) -> None:
    time.sleep(seconds)


def _page(watch: Watch, rows: int | None) -> RenderableType:
    """The whole page. rows: height of the terminal, None if unlimited."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [_head(watch, has_keys=rows is not None)]
    if watch.problem is not None:
        parts.append(Text(printable(f"the api is unavailable: {watch.problem}"), style="bold red"))
    used = 4
    if watch.stats is not None:
        parts += [_states(watch), Text(), _rates(watch), Text()]
        used += 14
    if watch.health:
        parts += [_health(watch), Text()]
        used += 2 + len([process for process in watch.health if not process["ready"]])
    if watch.stats is not None:
        parts.append(_actions(watch, None if rows is None else max(3, rows - used)))
    return Group(*parts)


def _head(watch: Watch, *, has_keys: bool) -> RenderableType:
    from rich.text import Text

    if not has_keys:
        return Text("")
    keys = f"q quit   s sort (by {_ORDERS[watch.order % len(_ORDERS)]})   space refresh"
    return Text.assemble(("penstock top", "bold"), "  ", time.strftime("%H:%M:%S"), "   ", (keys, "dim"), "\n")


def _states(watch: Watch) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("state")
    table.add_column("tasks", justify="right")
    table.add_column("change per second", justify="right")
    assert watch.stats is not None
    for state, count in watch.stats["states"].items():
        change = watch.per_second.get(state)
        text = "" if change is None or abs(change) < 0.05 else f"{change:+,.1f}"
        table.add_row(Text(state_label(state), style=_COLOURS.get(state, "")), f"{count:,}", text)
    return table


def _rates(watch: Watch) -> RenderableType:
    from rich.table import Table

    assert watch.stats is not None
    rates, lag = watch.stats["rates"], watch.stats["lag"]
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row(
        "per second",
        f"{rates['enqueued_per_second']:,.1f} enqueued, {rates['succeeded_per_second']:,.1f} succeeded, "
        f"{rates['failed_per_second']:,.1f} failed attempts (over the last minute)",
    )
    table.add_row("succeeded", _spark(watch.succeeded))
    table.add_row("backlog", f"{lag['due']:,} due, the oldest for {_span(lag['oldest_due_seconds'])}")
    table.add_row("in flight", f"{watch.stats['states'][State.ACQUIRED]:,}")
    return table


def _health(watch: Watch) -> RenderableType:
    from rich.text import Text

    ready = sum(process["ready"] for process in watch.health)
    text = Text.assemble(
        ("processes  ", "bold"),
        (f"{ready} of {len(watch.health)} ready", "green" if ready == len(watch.health) else "red"),
    )
    for process in watch.health:
        if not process["ready"]:
            text.append(f"\n  {process['name']}: {process['reason']}", style="red")
    return text


def _actions(watch: Watch, rows: int | None) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("action", overflow="ellipsis", no_wrap=True)
    for column in ("waiting", "retrying", "in flight", "succeeded", "failed"):
        table.add_column(column, justify="right")
    listed = watch.rows()
    for row in listed[:rows]:
        limit = row["max_in_flight"]
        flight = f"{row['in_flight']:,}" + (f" of {limit:,}" if limit is not None else "")
        name = printable(row["action"]) + (" (paused)" if row["paused"] else "")
        table.add_row(
            Text(name), f"{row['waiting']:,}", f"{row['retrying']:,}",
            flight, f"{row['succeeded']:,}", Text(f"{row['failed']:,}", style="red" if row["failed"] else ""),
        )  # fmt: skip
    if rows is not None and len(listed) > rows:
        table.add_row(Text(f"and {len(listed) - rows} more", style="dim"))
    return table


def _spark(values: Sequence[float]) -> str:
    """A rate over time in one line, newest last."""
    most = max(values, default=0.0)
    if most <= 0:
        return "none"
    bars = (_SPARKS[min(len(_SPARKS) - 1, int(value / most * (len(_SPARKS) - 1) + 0.5))] for value in values)
    return f"{''.join(bars)}  at most {most:,.1f}"


def _span(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s"
