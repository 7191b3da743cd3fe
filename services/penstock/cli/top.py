"""`penstock stats`: counts, rates and lag; `penstock top`: the same live in a terminal, or as JSON for scripts."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import common
from penstock.cli.values import STATE_STYLES, state_label
from penstock.protocol.errors import AccessDenied, RateLimited, Unavailable
from penstock.protocol.task import State
from penstock.protocol.views import span
from penstock.runtime.logs import printable
from penstock.tasks.params import StatsParams

if TYPE_CHECKING:
    from rich.console import RenderableType

    from penstock.client.client import Client

_SPARKS = "▁▂▃▄▅▆▇█"
_WAITING = (State.WAITING, State.SCHEDULED, State.ERROR)


def _print_stats(result: dict[str, Any]) -> None:
    for name, value in result.items():
        if not isinstance(value, dict) or not value:
            common.print_fields([(name, value or "none")])
            continue
        typer.echo(f"{name}:")
        if all(isinstance(inner, dict) for inner in value.values()):
            columns = sorted({column for inner in value.values() for column in inner})
            rows = [[key, *(inner.get(column) for column in columns)] for key, inner in value.items()]
            shown = [state_label(column) for column in columns]
            common.print_table([name, *shown], rows, right=shown)
        else:
            common.print_fields((f"  {state_label(key)}", inner) for key, inner in value.items())


stats = common.calling("stats", StatsParams, _print_stats)


def top(
    once: Annotated[bool, typer.Option("--once", help="Print once and return.")] = False,
    interval: Annotated[float, typer.Option(min=0.2, max=3600, help="Seconds between refreshes.")] = 2.0,
    metrics: Annotated[list[str] | None, typer.Option(metavar="URL")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each refresh as one line of JSON.")] = False,
    api_url: common.ApiUrlOption = None,
    data_dir: common.DataDirOption = None,
) -> None:
    """Watch rates, states, backlog, actions and the health of processes.

    Keys: q quits, s changes the order of actions, space refreshes. Without a terminal, and with --json, it prints until
    Ctrl-C.

    metrics: Show the health of a process, by the URL of its /readyz. Repeatable. Processes of the stack in --data-dir
        are included.
    """
    client = common.connect(api_url, data_dir)
    stack = common.folder_of(data_dir).read_state() if api_url is None else None
    watch = Watch(client, _processes(metrics or (), client.url, stack))
    if sys.stdout.isatty() and not (once or as_json):
        _show(watch, interval)
        return
    while True:
        watch.look(must=once)
        if as_json:
            common.print_json(watch.as_json(), indent=2 if once else None)
        else:
            common.wide_console(120).print(_page(watch, rows=None))
        if once:
            return
        sys.stdout.flush()
        time.sleep(interval)


@dataclass
class Watch:
    """The last figures and their changes. problem: why the last refresh failed. orders: the first is in use."""

    client: Client
    processes: Sequence[tuple[str, str]]
    stats: dict[str, Any] | None = None
    actions: list[dict[str, Any]] = field(default_factory=list)
    health: list[dict[str, Any]] = field(default_factory=list)
    per_second: dict[str, float] = field(default_factory=dict)
    succeeded: deque[float] = field(default_factory=lambda: deque(maxlen=60))
    problem: str | None = None
    orders: deque[str] = field(default_factory=lambda: deque(("in flight", "waiting", "failed", "name")))
    _seen_at: float = 0.0

    def look(self, *, must: bool = False) -> None:
        """Refresh the figures. An error is raised if the refresh ``must`` succeed, or if the API key is restricted to a
        tenant, else kept as ``problem``."""
        at = time.monotonic()
        with ThreadPoolExecutor(max_workers=8) as pool:
            asked = pool.map(_health_of, self.processes)
            try:
                stats = self.client.call("stats", {})
                if "tenant" in stats:
                    raise AccessDenied(
                        403, f"this API key is bound to the tenant {stats['tenant']!r}, and rates and lag are of all "
                        "tenants; `penstock stats` shows its counts"
                    )  # fmt: skip
                self.actions = self.client.call("action.list", {})["actions"]
            except (Unavailable, RateLimited) as exc:
                if must:
                    raise
                self.problem = str(exc)
                return
            finally:
                self.health = list(asked)
        if self.stats is not None:
            elapsed, before = max(0.001, at - self._seen_at), self.stats["states"]
            self.per_second = {state: (count - before[state]) / elapsed for state, count in stats["states"].items()}
        self.succeeded.append(stats["rates"]["succeeded_per_second"])
        self.stats, self.problem, self._seen_at = stats, None, at

    def rows(self) -> list[dict[str, Any]]:
        """One row for each action that has tasks or limits, in the chosen order."""
        limits = {row["action"]: row for row in self.actions}
        counts: dict[str, dict[str, int]] = self.stats["actions"] if self.stats else {}
        rows = []
        for action in sorted({*counts, *limits}):
            tasks = Counter(counts.get(action))
            limit = limits.get(action, {})
            rows.append(
                {
                    "action": action, "waiting": sum(tasks[state] for state in _WAITING),
                    "retrying": tasks[State.ERROR], "in_flight": tasks[State.ACQUIRED],
                    "max_in_flight": limit.get("max_in_flight"), "paused": limit.get("paused", False),
                    "succeeded": tasks[State.SUCCESS], "failed": tasks[State.CRITICAL_ERROR],
                }
            )  # fmt: skip
        if self.orders[0] != "name":
            rows.sort(key=lambda row: -int(row[self.orders[0].replace(" ", "_")]))  # stable: by name among equals
        return rows

    def as_json(self) -> dict[str, Any]:
        """The figures for scripts."""
        if self.stats is None or self.problem is not None:
            return {"problem": self.problem, "processes": self.health}
        figures = {name: self.stats[name] for name in ("states", "rates", "lag")}
        return figures | {"actions": self.rows(), "processes": self.health}


def _processes(given: Sequence[str], api_url: str, stack: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Names and URLs of processes: the given ones, and those of a stack, if it is its api that is watched."""
    found = []
    for url in map(_base, given):
        if not url.startswith(("http://", "https://")):
            raise typer.BadParameter(f"{url!r} is not a URL such as http://127.0.0.1:9464", param_hint="--metrics")
        found.append((url, url))
    if stack is not None and stack["api"] == api_url:
        found += [(entry["name"], _base(entry["metrics"])) for entry in stack["processes"] if entry["metrics"]]
    return found


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/metrics").removesuffix("/readyz")


def _health_of(process: tuple[str, str]) -> dict[str, Any]:
    import httpx

    name, url = process
    try:
        reply = httpx.get(f"{url}/readyz", timeout=2.0, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        return {"name": name, "ready": False, "reason": f"unavailable: {exc or type(exc).__name__}"}
    ready = reply.status_code == 200
    return {"name": name, "ready": ready, "reason": None if ready else reply.text.strip()[:200]}


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
                watch.orders.rotate(-1)
            else:
                watch.look()


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """A function that reads one key within a number of seconds, None without one; keys are not echoed."""
    import termios
    import tty

    if not sys.stdin.isatty():
        yield time.sleep
        return
    descriptor = sys.stdin.fileno()

    def read(seconds: float) -> str | None:
        if not select.select([descriptor], [], [], seconds)[0]:
            return None
        if not (typed := os.read(descriptor, 1)):
            time.sleep(seconds)  # end of input
        return typed.decode("ascii", "ignore")

    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield read
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _page(watch: Watch, rows: int | None) -> RenderableType:
    """The whole page. rows: height of the terminal, None if unlimited."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text()]
    if rows is not None:
        keys = f"q quit   s sort (by {watch.orders[0]})   space refresh"
        parts = [Text.assemble(("penstock top", "bold"), "  ", time.strftime("%H:%M:%S"), "   ", (keys, "dim"), "\n")]
    if watch.problem is not None:
        parts.append(Text(printable(f"the api is unavailable: {watch.problem}"), style="bold red"))
    used = 4
    if watch.stats is not None:
        states, rates = _states(watch.stats["states"], watch.per_second), _rates(watch.stats, watch.succeeded)
        parts += [states, Text(), rates, Text()]
        used += 14
    if watch.health:
        away = [process for process in watch.health if not process["ready"]]
        ready = f"{len(watch.health) - len(away)} of {len(watch.health)} ready"
        parts.append(Text.assemble(("processes  ", "bold"), (ready, "red" if away else "green")))
        parts += [Text(printable(f"  {process['name']}: {process['reason']}"), style="red") for process in away]
        parts.append(Text())
        used += 2 + len(away)
    if watch.stats is not None:
        parts.append(_actions(watch.rows(), None if rows is None else max(3, rows - used)))
    return Group(*parts)


def _states(counts: dict[str, int], per_second: dict[str, float]) -> RenderableType:
    from rich.text import Text

    rows = []
    for state, count in counts.items():
        change = per_second.get(state, 0.0)
        name = Text(state_label(state), style=STATE_STYLES.get(state, ""))
        rows.append((name, f"{count:,}", f"{change:+,.1f}" if abs(change) >= 0.05 else ""))
    return common.table_of(("state", "tasks", "change per second"), rows, right=("tasks", "change per second"))


def _rates(stats: dict[str, Any], succeeded: Sequence[float]) -> RenderableType:
    from rich.table import Column, Table

    rates, lag = stats["rates"], stats["lag"]
    table = Table(Column(style="bold"), Column(), box=None, pad_edge=False, show_header=False)
    table.add_row(
        "per second",
        f"{rates['enqueued_per_second']:,.1f} enqueued, {rates['succeeded_per_second']:,.1f} succeeded, "
        f"{rates['failed_per_second']:,.1f} failed attempts (over the last minute)",
    )
    table.add_row("succeeded", _spark(succeeded))
    table.add_row("backlog", f"{lag['due']:,} due, the oldest for {span(lag['oldest_due_seconds'])}")
    table.add_row("in flight", f"{stats['states'][State.ACQUIRED]:,}")
    return table


def _actions(actions: list[dict[str, Any]], rows: int | None) -> RenderableType:
    from rich.text import Text

    counts = ("waiting", "retrying", "in flight", "succeeded", "failed")
    shown = []
    for row in actions[:rows]:
        limit = row["max_in_flight"]
        shown.append(
            (row["action"] + (" (paused)" if row["paused"] else ""), f"{row['waiting']:,}", f"{row['retrying']:,}",
             f"{row['in_flight']:,}" + (f" of {limit:,}" if limit is not None else ""), f"{row['succeeded']:,}",
             Text(f"{row['failed']:,}", style="red" if row["failed"] else ""))
        )  # fmt: skip
    table = common.table_of(("action", *counts), shown, right=counts)
    table.columns[0].overflow, table.columns[0].no_wrap = "ellipsis", True
    if rows is not None and len(actions) > rows:
        table.add_row(Text(f"and {len(actions) - rows} more", style="dim"))
    return table


def _spark(values: Sequence[float]) -> str:
    """A rate over time in one line, newest last."""
    most = max(values, default=0.0)
    if most <= 0:
        return "none"
    bars = (_SPARKS[min(len(_SPARKS) - 1, int(value / most * (len(_SPARKS) - 1) + 0.5))] for value in values)
    return f"{''.join(bars)}  at most {most:,.1f}"
