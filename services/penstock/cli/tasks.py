"""`penstock enqueue`, `status` and the like: the api's methods from a shell."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from penstock.cli.common import (
    EPILOG,
    ApiUrlOption,
    DataDirOption,
    JsonOption,
    connect,
    given,
    print_cursor,
    print_fields,
    print_json,
    print_table,
    short,
)
from penstock.cli.follow import follow
from penstock.errors import NoResult, PenstockError, ResultTimeout
from penstock.tasks import State

if TYPE_CHECKING:
    from penstock.client import Client

TaskId = Annotated[int, typer.Argument(metavar="ID", help="The task's id.")]


def add_to(app: typer.Typer) -> None:
    panel = "Tasks"
    for command in (enqueue, status, result, cancel, retry, reschedule, stats):
        app.command(rich_help_panel=panel)(command)
    app.command("list", rich_help_panel=panel)(list_tasks)
    ordering = typer.Typer(no_args_is_help=True, epilog=EPILOG, help="Ordering keys that a failed task holds.")
    ordering.command("list")(ordering_list)
    ordering.command("release")(ordering_release)
    app.add_typer(ordering, name="ordering", rich_help_panel=panel)


class OnDuplicate(StrEnum):
    RETURN = "return"
    REPLACE = "replace"
    ERROR = "error"


def enqueue(
    action: Annotated[str, typer.Argument(metavar="ACTION", help="What a worker's handler is registered for.")],
    payload: Annotated[
        str, typer.Argument(metavar="JSON", help="The payload, an object or array; - reads standard input.")
    ] = "{}",
    priority: Annotated[
        int | None, typer.Option(show_default=False, help="-32768 to 32767, higher first; default 0.")
    ] = None,
    delay: Annotated[float | None, typer.Option(show_default=False, help="Seconds to wait before it may run.")] = None,
    run_at: Annotated[
        str | None, typer.Option(show_default=False, help="Not before: RFC 3339 with a zone, or epoch milliseconds.")
    ] = None,
    unique_key: Annotated[
        str | None,
        typer.Option(show_default=False, help="One task per action and key; a second one gets the first's id."),
    ] = None,
    ordering_key: Annotated[
        str | None, typer.Option(show_default=False, help="Tasks of one key run one at a time, in order.")
    ] = None,
    max_attempts: Annotated[
        int | None, typer.Option(show_default=False, help="Attempts before CRITICAL_ERROR.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(show_default=False, help="Seconds that one attempt may take.")
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="NAME=TEXT", help="A label; may be given several times.")
    ] = None,
    expires_at: Annotated[
        str | None, typer.Option(show_default=False, help="Cancelled unless started before; as --run-at.")
    ] = None,
    expires_in: Annotated[
        float | None, typer.Option(show_default=False, help="Cancelled unless started within so many seconds.")
    ] = None,
    limit_key: Annotated[
        str | None, typer.Option(show_default=False, help="Which of its action's limits by key it counts against.")
    ] = None,
    unique: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help="Until when another task keeps the unique key: retained (until its record is cleaned, the default), "
            "live (until it settles), or seconds from when it took it.",
        ),
    ] = None,
    on_duplicate: Annotated[
        OnDuplicate | None,
        typer.Option(show_default=False, help="When another task has the unique key; default return."),
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(show_default=False, help="For whom it is; its keys are that tenant's own.")
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until it has settled and print its result, as `penstock result`.")
    ] = False,
    wait_timeout: Annotated[
        float | None, typer.Option(min=0, show_default=False, help="With --wait: seconds to wait; default for ever.")
    ] = None,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Add a task; it is stored when this returns. With --wait the exit codes are those of `penstock result`."""
    if wait_timeout is not None and not wait:
        raise typer.BadParameter("goes with --wait", param_hint="--wait-timeout")
    given = {
        "priority": priority, "delay": delay, "run_at": _instant(run_at), "unique_key": unique_key,
        "ordering_key": ordering_key, "max_attempts": max_attempts, "timeout": timeout, "labels": _labels(label),
        "expires_at": _instant(expires_at), "expires_in": expires_in, "limit_key": limit_key,
        "unique": _scope(unique), "on_duplicate": on_duplicate, "tenant": tenant,
    }  # fmt: skip
    params = {"action": action, "payload": _parse(sys.stdin.read() if payload == "-" else payload)}
    params |= {name: value for name, value in given.items() if value is not None}
    client = connect(api_url, data_dir)
    result = client.call("enqueue", params)
    if wait:
        typer.echo(f"task {result['id']}", err=True)
        _print_result(client, result["id"], wait_timeout)
        return
    if as_json:
        print_json(result)
        return
    note = " (it was there already)" if result["duplicate"] else ""
    typer.echo(f"task {result['id']} {result['state']}" + (" (replaced)" if result.get("replaced") else note))


def status(
    ids: Annotated[list[int], typer.Argument(metavar="ID", help="One task's id, or several.")],
    detail: Annotated[
        bool, typer.Option("--detail", help="With payload, keys, labels, expiry and every failed attempt.")
    ] = False,
    until_settled: Annotated[
        bool,
        typer.Option(
            "--follow", "-f", help="Print each change until all have settled; with --json, each as a line of JSON."
        ),
    ] = False,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Show a task: its state, attempts, times, result or error.

    With --follow the exit codes are 0 when all have succeeded, 3 when one has failed or was cancelled.
    """
    client = connect(api_url, data_dir)
    if until_settled:
        raise typer.Exit(follow(client, ids, as_json=as_json))
    if len(ids) > 1:
        tasks = client.call("status", {"ids": ids, "detail": detail})
        if as_json:
            print_json(tasks)
            return
        _print_tasks([task for task in tasks if task is not None])
        unknown = [task_id for task_id, task in zip(ids, tasks, strict=True) if task is None]
        if unknown:
            raise PenstockError(f"no such task: {', '.join(map(str, unknown))}")
        return
    task = client.call("status", {"id": ids[0], "detail": detail})
    if as_json:
        print_json(task)
        return
    _print_task(task)


def result(
    task_id: TaskId,
    timeout: Annotated[
        float | None, typer.Option(min=0, show_default=False, help="Seconds to wait; default for ever.")
    ] = None,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Wait until a task has settled and print its result as JSON.

    Exit codes: 0 it succeeded; 3 it failed, was cancelled, or its result is no longer kept; 4 it has not settled in
    time; 1 and 2 as ever.
    """
    _print_result(connect(api_url, data_dir), task_id, timeout)


def cancel(
    task_id: TaskId,
    reason: Annotated[str | None, typer.Option(show_default=False, help="Shown with the task.")] = None,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Cancel a task that is not settled; a result that comes later is ignored, and its handler is told to stop."""
    _print_change(connect(api_url, data_dir).call("cancel", given({"id": task_id, "reason": reason})), as_json)


def retry(
    task_id: TaskId, as_json: JsonOption = False, api_url: ApiUrlOption = None, data_dir: DataDirOption = None
) -> None:
    """Start a CRITICAL_ERROR or CANCELLED task anew, its attempts at 0."""
    _print_change(connect(api_url, data_dir).call("retry", {"id": task_id}), as_json)


def reschedule(
    task_id: TaskId,
    run_at: Annotated[
        str | None, typer.Option(show_default=False, help="Not before: RFC 3339 with a zone, or epoch milliseconds.")
    ] = None,
    delay: Annotated[
        float | None, typer.Option(show_default=False, help="Not before so many seconds from now.")
    ] = None,
    priority: Annotated[int | None, typer.Option(show_default=False, help="-32768 to 32767, higher first.")] = None,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Move a task that waits (WAITING, SCHEDULED, ERROR) to another time or priority."""
    params = {"id": task_id, "run_at": _instant(run_at), "delay": delay, "priority": priority}
    _print_change(connect(api_url, data_dir).call("reschedule", given(params)), as_json)


def ordering_list(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Keys at the most.")] = 50,
    cursor: Annotated[str | None, typer.Option(show_default=False, help="Go on where the last list ended.")] = None,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """List ordering keys that a task in CRITICAL_ERROR holds."""
    result = connect(api_url, data_dir).call("ordering.list", given({"limit": limit, "cursor": cursor}))
    if as_json:
        print_json(result)
        return
    if not result["keys"]:
        typer.echo("there is none")
        return
    columns = ("key", "tenant", "task_id", "action", "since", "waiting")
    print_table(columns, [[row[c] for c in columns] for row in result["keys"]], right=("task_id", "waiting"))
    print_cursor(result["cursor"])


def ordering_release(
    key: Annotated[str, typer.Argument(help="From `ordering list`.")],
    tenant: Annotated[str | None, typer.Option(show_default=False, help="Whose key it is.")] = None,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Let a held ordering key go: the next task of the key may run."""
    result = connect(api_url, data_dir).call("ordering.release", given({"key": key, "tenant": tenant}))
    if as_json:
        print_json(result)
    elif not result["released"]:
        typer.echo("it is not held")
    else:
        typer.echo("released" + (f"; task {result['next']} may run" if result["next"] is not None else ""))


def list_tasks(
    state: Annotated[
        str | None,
        typer.Option(
            show_default=False, help="SCHEDULED, ACQUIRED, ERROR, SUCCESS and so on.", autocompletion=lambda: [*State]
        ),
    ] = None,
    action: Annotated[str | None, typer.Option(show_default=False, help="Only tasks of this action.")] = None,
    tenant: Annotated[str | None, typer.Option(show_default=False, help="Only tasks of this tenant.")] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=TEXT", help="Only tasks with this label; given several times, with all of them."),
    ] = None,
    key: Annotated[
        str | None, typer.Option(show_default=False, help="Only tasks that have this unique key or ordering key.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(show_default=False, help="Created then or later: RFC 3339 with a zone, or epoch milliseconds."),
    ] = None,
    until: Annotated[str | None, typer.Option(show_default=False, help="Created before; as --since.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Tasks at the most.")] = 50,
    cursor: Annotated[str | None, typer.Option(show_default=False, help="Go on where the last list ended.")] = None,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """List tasks, newest first.

    With a filter, one call looks at a bounded number of tasks; the cursor that is printed leads further back.
    """
    params = {
        "state": state.upper() if state else None, "action": action, "labels": _labels(label), "key": key,
        "since": _instant(since), "until": _instant(until), "limit": limit, "cursor": cursor, "tenant": tenant,
    }  # fmt: skip
    result = connect(api_url, data_dir).call("list", given(params))
    if as_json:
        print_json(result)
        return
    if result["tasks"]:
        _print_tasks(result["tasks"])
    else:
        typer.echo("there is none" + (" among those looked at" if result["cursor"] else ""))
    print_cursor(result["cursor"])


def stats(
    tenant: Annotated[
        str | None, typer.Option(show_default=False, help="Counts of this tenant alone, among the newest records.")
    ] = None,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Show counts per state and action, rates and lag."""
    result = connect(api_url, data_dir).call("stats", given({"tenant": tenant}))
    if as_json:
        print_json(result)
        return
    for name, value in result.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            typer.echo(f"{name}:")
            columns = list(value[0])
            print_table(columns, [[row.get(column) for column in columns] for row in value])
        elif isinstance(value, dict) and value:
            _print_counts(name, value)
        else:
            print_fields([(name, "none" if value is None or value in ([], {}) else value)])


def _print_result(client: Client, task_id: int, timeout: float | None) -> None:
    try:
        print_json(client.result(task_id, timeout=timeout))
    except NoResult as exc:
        typer.echo(f"penstock: {exc}", err=True)
        error = getattr(exc, "error", None)
        if isinstance(error, dict) and isinstance(error.get("data"), dict) and error["data"].get("traceback"):
            typer.echo(f"\n{error['data']['traceback'].rstrip()}", err=True)
        raise typer.Exit(4 if isinstance(exc, ResultTimeout) else 3) from None


def _instant(text: str | None) -> str | int | None:
    """RFC 3339 as it is, epoch milliseconds as a number."""
    return int(text) if text is not None and text.lstrip("-").isdecimal() else text


def _scope(text: str | None) -> str | float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def _labels(pairs: list[str] | None) -> dict[str, str] | None:
    if not pairs:
        return None
    for pair in pairs:
        if "=" not in pair:
            raise typer.BadParameter(f"{pair!r} is not NAME=TEXT", param_hint="--label")
    return dict(pair.split("=", 1) for pair in pairs)


def _parse(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as exc:
        raise typer.BadParameter(
            f"the payload is not JSON at line {exc.lineno}, column {exc.colno}: {exc.msg}", param_hint="JSON"
        ) from exc
    except (ValueError, RecursionError) as exc:
        raise typer.BadParameter(f"the payload is not JSON: {exc}", param_hint="JSON") from exc


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _print_task(task: dict[str, Any]) -> None:
    traceback = None
    error = task.get("error")
    if isinstance(error, dict) and isinstance(error.get("data"), dict):
        # Lines of a traceback are worth more than its JSON.
        data = dict(error["data"])
        traceback = data.pop("traceback", None)
        task = task | {"error": error | {"data": data}}
    print_fields(task.items())
    if traceback:
        typer.echo(f"\n{traceback.rstrip()}")


def _print_tasks(tasks: list[dict[str, Any]]) -> None:
    whose = ["tenant"] if any(task.get("tenant") for task in tasks) else []
    columns = ("id", "action", *whose, "state", "attempts", "run_at", "updated_at", "error")
    rows = []
    for task in tasks:
        error = task.get("error")
        message = error.get("message") if isinstance(error, dict) else error
        attempts = f"{task.get('attempts')}/{task.get('max_attempts')}" if "attempts" in task else None
        rows.append(
            (task.get("id"), task.get("action"), *(task.get(name) for name in whose), task.get("state"), attempts,
             task.get("run_at"),
             task.get("updated_at"), None if message is None else short(str(message)))
        )  # fmt: skip
    print_table(columns, rows, right=("id", "attempts"))


def _print_counts(name: str, value: dict[str, Any]) -> None:
    """A mapping of counts; of mappings of counts, as a table with one row each."""
    typer.echo(f"{name}:")
    if all(isinstance(inner, dict) for inner in value.values()):
        columns = sorted({column for inner in value.values() for column in inner})
        rows = [[key, *(inner.get(column) for column in columns)] for key, inner in value.items()]
        print_table([name, *columns], rows, right=columns)
    else:
        print_fields((f"  {key}", inner) for key, inner in value.items())


def _print_change(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(result)
    else:
        typer.echo(f"task {result['id']} {result['state']}")
