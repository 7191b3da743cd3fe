"""`penstock schedules`: cron schedules, by the api's methods."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.common import (
    ApiUrlOption,
    DataDirOption,
    JsonOption,
    PriorityOption,
    connect,
    print_fields,
    print_json,
    print_page,
    progress,
)
from penstock.cli.groups import Commands, add_group
from penstock.cli.values import duration_option, instant, json_value, labels
from penstock.protocol.errors import PenstockError
from penstock.schedules.policy import Missed, Overlap

LOOK_SECONDS = 0.3
IMPORT_ENTRIES = 20_000  # a call: together they stay well below what the api takes in one request
ERRORS_SHOWN = 20

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The schedule's name.")]
TimezoneOption = Annotated[
    str | None, typer.Option("--timezone", "--tz", show_default=False, help="IANA zone; a new one's default is UTC.")
]
StartOption = Annotated[
    str | None, typer.Option(show_default=False, help="No fire before: RFC 3339 with a zone, or epoch milliseconds.")
]
EndOption = Annotated[str | None, typer.Option(show_default=False, help="No fire after; likewise.")]
JitterOption = Annotated[float | None, duration_option(help="Delay each fire by up to so long.")]
MissedOption = Annotated[
    Missed | None, typer.Option(show_default=False, help="What becomes of missed fires; a new one's default is one.")
]
MaxMissedOption = Annotated[
    int | None, typer.Option(show_default=False, help="With --missed all: so many at the most; default 100.")
]
MaxLatenessOption = Annotated[float | None, duration_option(help="What is later than so long never runs.")]
OverlapOption = Annotated[
    Overlap | None,
    typer.Option(show_default=False, help="While the task before is not settled; a new one's default is allow."),
]
MaxAttemptsOption = Annotated[int | None, typer.Option(show_default=False, help="Attempts before CRITICAL_ERROR.")]
TimeoutOption = Annotated[float | None, duration_option(help="How long one attempt may take.")]
OrderingKeyOption = Annotated[
    str | None, typer.Option(show_default=False, help="Tasks of one key run one at a time, in order.")
]
TenantOption = Annotated[str | None, typer.Option(show_default=False, help="For whom its tasks are.")]
LabelOption = Annotated[
    list[str] | None, typer.Option("--label", metavar="NAME=TEXT", show_default=False, help="Repeatable.")
]


def add_to(app: typer.Typer) -> None:
    commands: Commands = {
        "list": list_schedules, "show": show, "create": create, "update": update, "delete": delete, "pause": pause,
        "resume": resume, "runs": runs, "run-now": run_now, "import": import_schedules,
    }  # fmt: skip
    add_group(
        app, "schedules", commands, panel="Tasks", help="Cron schedules: tasks made by the clock, again and again."
    )


def create(
    name: NameArgument,
    expression: Annotated[
        str,
        typer.Argument(
            metavar="EXPRESSION", help='"*/5 * * * *", with seconds first "0 */5 * * * *", @daily, "@every 90s".'
        ),
    ],
    action: Annotated[str, typer.Argument(metavar="ACTION", help="What a worker's handler is registered for.")],
    payload: Annotated[
        str, typer.Argument(metavar="JSON", help="The payload, an object or array; - reads standard input.")
    ] = "{}",
    timezone: TimezoneOption = None,
    start_at: StartOption = None,
    end_at: EndOption = None,
    jitter: JitterOption = None,
    missed: MissedOption = None,
    max_missed: MaxMissedOption = None,
    max_lateness: MaxLatenessOption = None,
    overlap: OverlapOption = None,
    priority: PriorityOption = None,
    max_attempts: MaxAttemptsOption = None,
    timeout: TimeoutOption = None,
    ordering_key: OrderingKeyOption = None,
    label: LabelOption = None,
    tenant: TenantOption = None,
    paused: Annotated[bool, typer.Option("--paused", help="It waits for `penstock schedules resume`.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="One of that name becomes this one.")] = False,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Make a schedule."""
    given = _options(
        timezone, start_at, end_at, jitter, missed, max_missed, max_lateness, overlap, priority, max_attempts, timeout,
        ordering_key, label, tenant,
    ) | {"paused": paused or None, "replace": replace}  # fmt: skip
    body = json_value(payload, "payload")
    _print_schedule(connect(api_url, data_dir).schedules.create(name, expression, action, body, **given), as_json)


def update(
    name: NameArgument,
    expression: Annotated[str | None, typer.Option(show_default=False, help="As of create.")] = None,
    action: Annotated[str | None, typer.Option(show_default=False, help="As of create.")] = None,
    payload: Annotated[
        str | None, typer.Option(metavar="JSON", show_default=False, help="As of create; - reads standard input.")
    ] = None,
    timezone: TimezoneOption = None,
    start_at: StartOption = None,
    end_at: EndOption = None,
    jitter: JitterOption = None,
    missed: MissedOption = None,
    max_missed: MaxMissedOption = None,
    max_lateness: MaxLatenessOption = None,
    overlap: OverlapOption = None,
    priority: PriorityOption = None,
    max_attempts: MaxAttemptsOption = None,
    timeout: TimeoutOption = None,
    ordering_key: OrderingKeyOption = None,
    label: LabelOption = None,
    tenant: TenantOption = None,
    clear: Annotated[
        list[str] | None,
        typer.Option(show_default=False, help="start_at, end_at, max_lateness, max_attempts, timeout or ordering_key."),
    ] = None,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Change what is named of a schedule, and leave the rest. --label replaces all labels."""
    changes = _options(
        timezone, start_at, end_at, jitter, missed, max_missed, max_lateness, overlap, priority, max_attempts, timeout,
        ordering_key, label, tenant,
    )  # fmt: skip
    if expression is not None:
        changes["expression"] = expression
    if action is not None:
        changes["action"] = action
    if payload is not None:
        changes["payload"] = json_value(payload, "payload")
    changes |= dict.fromkeys((field.replace("-", "_") for field in clear or ()), None)
    _print_schedule(connect(api_url, data_dir).schedules.update(name, **changes), as_json)


def show(
    name: NameArgument, as_json: JsonOption = False, api_url: ApiUrlOption = None, data_dir: DataDirOption = None
) -> None:
    """Show a schedule, its payload and its next few instants."""
    _print_schedule(connect(api_url, data_dir).schedules.get(name), as_json)


def list_schedules(
    label: LabelOption = None,
    tenant: TenantOption = None,
    action: Annotated[str | None, typer.Option(show_default=False, help="Only those of this action.")] = None,
    paused: Annotated[
        bool | None, typer.Option("--paused/--running", show_default=False, help="Only those that are, or are not.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Schedules at the most.")] = 50,
    cursor: Annotated[str | None, typer.Option(show_default=False, help="Go on where the last list ended.")] = None,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """List schedules, newest first."""
    given: dict[str, Any] = {"action": action, "paused": paused, "limit": limit, "cursor": cursor, "tenant": tenant}
    if label:
        given["labels"] = labels(label)
    page = connect(api_url, data_dir).schedules.list(**given)
    if as_json:
        print_json(page)
        return
    rows = [
        (one["name"], one["state"], one["expression"], one["timezone"], one["action"], one["next_at"], one["last_at"])
        for one in page["schedules"]
    ]
    print_page(("name", "state", "expression", "zone", "action", "next", "last"), rows, page["cursor"])


def delete(
    name: NameArgument, as_json: JsonOption = False, api_url: ApiUrlOption = None, data_dir: DataDirOption = None
) -> None:
    """Delete a schedule; tasks that it made stay."""
    deleted = connect(api_url, data_dir).schedules.delete(name)
    if as_json:
        print_json(deleted)
    else:
        typer.echo(f"schedule {deleted['name']} is deleted")


def pause(
    name: NameArgument, as_json: JsonOption = False, api_url: ApiUrlOption = None, data_dir: DataDirOption = None
) -> None:
    """Stop a schedule; what it does not fire meanwhile is not made up for."""
    _print_schedule(connect(api_url, data_dir).schedules.pause(name), as_json)


def resume(
    name: NameArgument, as_json: JsonOption = False, api_url: ApiUrlOption = None, data_dir: DataDirOption = None
) -> None:
    """Let a schedule go on, from now."""
    _print_schedule(connect(api_url, data_dir).schedules.resume(name), as_json)


def run_now(
    name: NameArgument, as_json: JsonOption = False, api_url: ApiUrlOption = None, data_dir: DataDirOption = None
) -> None:
    """Run a schedule once, beside its clock, also when it is paused."""
    run = connect(api_url, data_dir).schedules.run_now(name)
    if as_json:
        print_json(run)
    elif run["task_id"] is None:
        typer.echo(f"{run['outcome']}: the task before is not settled, and this schedule's are not to overlap")
    else:
        typer.echo(f"task {run['task_id']} {run['outcome']}")


def runs(
    name: NameArgument,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Runs at the most.")] = 50,
    cursor: Annotated[str | None, typer.Option(show_default=False, help="Go on where the last list ended.")] = None,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """List what became of a schedule's instants, newest first."""
    page = connect(api_url, data_dir).schedules.runs(name, limit=limit, cursor=cursor)
    if as_json:
        print_json(page)
        return
    rows = [
        (
            run["scheduled_at"],
            run["outcome"],
            run["task_id"],
            run["fired_at"],
            "by hand" if run["manual"] else _span(run),
        )
        for run in page["runs"]
    ]
    print_page(("scheduled", "outcome", "task", "at", ""), rows, page["cursor"])


def import_schedules(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            allow_dash=True,
            help="A JSON array of schedules, or one a line; each as schedule.create takes it. - reads standard input.",
        ),
    ],
    replace: Annotated[bool, typer.Option("--replace", help="Those that exist become these.")] = False,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Make many schedules; waits until all are read, and fails when any was refused."""
    entries = _entries(path)
    client = connect(api_url, data_dir)
    statuses = []
    with progress(len(entries), "schedules") as advance:
        for start in range(0, len(entries), IMPORT_ENTRIES):
            started = client.schedules.create_many(entries[start : start + IMPORT_ENTRIES], replace=replace)
            seen = 0
            while True:
                status = client.schedules.import_status(started["id"])
                advance(status["seen"] - seen)
                seen = status["seen"]
                if status["state"] == "DONE":
                    break
                time.sleep(LOOK_SECONDS)
            for error in status["errors"]:
                error["index"] += start
            statuses.append(status)
    if as_json:
        print_json(statuses)
    else:
        counts = {name: sum(status[name] for status in statuses) for name in ("created", "replaced", "refused")}
        print_fields(counts.items())
        errors = [error for status in statuses for error in status["errors"]]
        for error in errors[:ERRORS_SHOWN]:
            typer.echo(f"entry {error['index']} ({error['name']}): {error['field']} {error['problem']}", err=True)
    refused = sum(status["refused"] for status in statuses)
    if refused:
        raise PenstockError(f"{refused} of {len(entries)} schedules were refused: mend them and import them again")


def _options(
    timezone: str | None, start_at: str | None, end_at: str | None, jitter: float | None, missed: Missed | None,
    max_missed: int | None, max_lateness: float | None, overlap: Overlap | None, priority: int | None,
    max_attempts: int | None, timeout: float | None, ordering_key: str | None, label: list[str] | None,
    tenant: str | None,
) -> dict[str, Any]:  # fmt: skip
    """What was given of that which create and update share."""
    given = {
        "timezone": timezone, "start_at": instant(start_at), "end_at": instant(end_at), "jitter": jitter,
        "missed": missed, "max_missed": max_missed, "max_lateness": max_lateness, "overlap": overlap,
        "priority": priority, "max_attempts": max_attempts, "timeout": timeout, "ordering_key": ordering_key,
        "labels": labels(label), "tenant": tenant,
    }  # fmt: skip
    return {name: value for name, value in given.items() if value is not None}


def _entries(path: Path) -> list[Any]:
    """The entries of a file. Raises PenstockError naming the line that is wrong."""
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise PenstockError(f"{path} cannot be read: {exc}") from None
    if text.lstrip().startswith("["):
        try:
            entries: list[Any] = json.loads(text)
        except ValueError as exc:
            raise PenstockError(f"{path} is not valid JSON: {exc}") from None
    else:
        entries = []
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    entries.append(json.loads(line))
                except ValueError as exc:
                    raise PenstockError(f"{path}, line {number}, is not valid JSON: {exc}") from None
    if not entries:
        raise PenstockError(f"{path} holds no schedule")
    return entries


def _print_schedule(schedule: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(schedule)
        return
    hidden = ("id", "paused", "upcoming")
    fields = [(name, value) for name, value in schedule.items() if name not in hidden and value not in ({}, 0, 0.0)]
    fields.append(("upcoming", ", ".join(schedule["upcoming"]) or None))
    print_fields(fields)


def _span(run: dict[str, Any]) -> str | None:
    return None if run["since"] is None else f"{run['instants']} instants since {run['since']}"
