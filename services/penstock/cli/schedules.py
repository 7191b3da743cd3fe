"""`penstock schedules`: cron schedules."""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.common import Api, Printer, calling, listing, outlasting, print_fields, progress, say
from penstock.cli.parameters import PAYLOAD, Commands, Given, ParamsOf
from penstock.cli.values import read_json
from penstock.protocol.errors import PenstockError
from penstock.protocol.requests import pack
from penstock.schedules import model

_ZONE = typer.Option("--timezone", "--tz", show_default=False, help="IANA zone; default UTC.")
_STANDING = typer.Option("--paused/--running", help="Only paused, or only running schedules.")
_PAUSED = typer.Option("--paused", help="Create it paused, until `penstock schedules resume`.")
_CREATED = ParamsOf(model.ScheduleCreateParams, payload=PAYLOAD, timezone=_ZONE, paused=_PAUSED)


def update(
    *,
    schedule: Annotated[
        Given,
        ParamsOf(model.ScheduleUpdateParams, payload="As of create; - reads standard input.", timezone=_ZONE),
    ],
    clear: list[str] | None = None,
    api: Api,
) -> None:
    """Change the given fields of a schedule. --label replaces all labels.

    clear: A field to unset: start_at, end_at, max_lateness, max_attempts, timeout or ordering_key. Repeatable.
    """
    unset = dict.fromkeys((field.replace("-", "_") for field in clear or ()), None)
    api.show(api.client.call("schedule.update", schedule | unset), _print_schedule)


def import_schedules(
    *, path: Annotated[Path, typer.Argument(metavar="FILE", allow_dash=True)], replace: bool = False, api: Api
) -> None:
    """Create many schedules, wait until all are read, and fail if any was refused.

    path: A JSON array of schedules, or one schedule a line, each with the parameters of schedule.create. - reads
        standard input.
    replace: Replace schedules of the same names.
    """
    entries = _entries(path)
    # Well below the largest request that the api accepts.
    calls = pack([len(json.dumps(entry)) for entry in entries], max_bytes=4 * 1024 * 1024, max_items=20_000)
    statuses = []
    with progress("schedules") as show:
        for start, end in calls:
            started = api.client.schedules.create_many(entries[start:end], replace=replace)
            while True:
                status = outlasting(partial(api.client.schedules.import_status, started["id"]))
                show(start + status["seen"], len(entries))
                if status["state"] == "DONE":
                    break
                time.sleep(0.3)
            for error in status["errors"]:
                error["index"] += start
            statuses.append(status)
    api.show(statuses, _print_import)
    if refused := sum(status["refused"] for status in statuses):
        raise PenstockError(f"{refused} of {len(entries)} schedules were refused: fix them and import them again")


def _entries(path: Path) -> list[Any]:
    """The entries of a file. Raises PenstockError naming the invalid line."""
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise PenstockError(f"{path} cannot be read: {exc}") from None
    is_array = text.lstrip().startswith("[")
    lines = {f"{path}, line {number},": line for number, line in enumerate(text.split("\n"), 1) if line.strip()}
    entries: list[Any] = []
    for where, part in ({str(path): text} if is_array else lines).items():
        try:
            found = read_json(part)
        except (ValueError, RecursionError) as exc:
            raise PenstockError(f"{where} is not valid JSON: {exc}") from None
        for entry in found if is_array else [found]:
            if not isinstance(entry, dict):
                raise PenstockError(f"{where} holds {json.dumps(entry)[:50]} where a schedule must be, an object")
            entries.append(entry)
    if not entries:
        raise PenstockError(f"{path} contains no schedule")
    return entries


def _print_import(statuses: list[dict[str, Any]]) -> None:
    counts = {name: sum(status[name] for status in statuses) for name in ("created", "replaced", "refused")}
    print_fields(counts.items())
    errors = [error for status in statuses for error in status["errors"]]
    for error in errors[:20]:
        say(f"entry {error['index']} ({error['name']}): {error['field']} {error['problem']}", err=True)


def _print_schedule(schedule: dict[str, Any]) -> None:
    hidden = ("id", "paused", "upcoming")
    fields = [(name, value) for name, value in schedule.items() if name not in hidden and value not in ({}, 0, 0.0)]
    fields.append(("upcoming", ", ".join(schedule["upcoming"]) or None))
    print_fields(fields)


def _print_run(run: dict[str, Any]) -> None:
    if run["task_id"] is None:
        typer.echo(f"{run['outcome']}: the previous task has not settled, and tasks of this schedule must not overlap")
    else:
        typer.echo(f"task {run['task_id']} {run['outcome']}")


_print_schedules = listing(
    "schedules",
    ("name", "state", "expression", ("zone", "timezone"), "action", ("next", "next_at"), ("last", "last_at")),
)


def _trigger(run: dict[str, Any]) -> str | None:
    if run["manual"]:
        return "by hand"
    return None if run["since"] is None else f"{run['instants']} instants since {run['since']}"


_print_runs = listing(
    "runs", (("scheduled", "scheduled_at"), "outcome", ("task", "task_id"), ("at", "fired_at"), ("", _trigger))
)


def _one(method: str, printer: Printer = _print_schedule) -> Callable[..., None]:
    return calling(f"schedule.{method}", model.ScheduleName, printer)


schedules = Commands(
    "Cron schedules, which create tasks at set times.",
    list=calling("schedule.list", ParamsOf(model.ScheduleListParams, paused=_STANDING), _print_schedules),
    show=_one("get"),
    create=calling("schedule.create", _CREATED, _print_schedule),
    update=update,
    delete=_one("delete", lambda answer: say(f"schedule {answer['name']} is deleted")),
    pause=_one("pause"),
    resume=_one("resume"),
    runs=calling("schedule.runs", model.ScheduleRunsParams, _print_runs),
    run_now=_one("run_now", _print_run),
    import_=import_schedules,
)
