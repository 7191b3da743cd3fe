"""`penstock task`: one task, by its id, or by what it waits for."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.common import (
    ApiUrlOption,
    DataDirOption,
    DelayOption,
    JsonOption,
    PriorityOption,
    RunAtOption,
    connect,
    given,
    print_fields,
    print_json,
    say,
)
from penstock.cli.follow import follow
from penstock.cli.groups import Commands, add_group
from penstock.cli.tasks import print_tasks
from penstock.cli.values import duration_option, instant, json_value
from penstock.protocol.errors import NoResult, PenstockError, ResultTimeout
from penstock.protocol.task import State

if TYPE_CHECKING:
    from penstock.client.client import Client

_LOOK_SECONDS = 1.0
# What only --detail shows; the payload is shown anyway.
_DETAILS = {
    "payload_gone", "payload_unread", "unique_key", "ordering_key", "limit_key", "labels", "expires_at", "timeout",
    "claim", "worker", "failures",
}  # fmt: skip
TaskId = Annotated[int, typer.Argument(metavar="ID", help="The task's id.")]
TokenArgument = Annotated[
    str, typer.Argument(help="What the task waits for: `penstock task show ID --detail` shows it as waits_for.")
]


def add_to(app: typer.Typer) -> None:
    commands: Commands = {
        "show": show, "result": result, "cancel": cancel, "retry": retry, "reschedule": reschedule,
        "complete": complete, "fail": fail,
    }  # fmt: skip
    add_group(app, "task", commands, panel="Tasks", help="One task: look at it, change it, answer what it waits for.")


def show(
    ids: Annotated[list[int], typer.Argument(metavar="ID", help="One task's id, or several.")],
    detail: Annotated[
        bool, typer.Option("--detail", help="With keys, labels, expiry and every failed attempt.")
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
        print_tasks([task for task in tasks if task is not None])
        unknown = [task_id for task_id, task in zip(ids, tasks, strict=True) if task is None]
        if unknown:
            raise PenstockError(f"no such task: {', '.join(map(str, unknown))}")
        return
    task = client.call("status", {"id": ids[0], "detail": detail or not as_json})
    if as_json:
        print_json(task)
        return
    _print_task(task, detail)


def result(
    task_id: TaskId,
    timeout: Annotated[float | None, duration_option(help="How long to wait; default for ever.")] = None,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Wait until a task has settled and print its result as JSON.

    Exit codes: 0 it succeeded; 3 it failed, was cancelled, or its result is no longer kept; 4 it has not settled in
    time; 1 and 2 as ever.
    """
    print_result(connect(api_url, data_dir), task_id, timeout)


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
    run_at: RunAtOption = None,
    delay: DelayOption = None,
    priority: PriorityOption = None,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Move a task that waits (WAITING, SCHEDULED, ERROR) to another time or priority."""
    params = {"id": task_id, "run_at": instant(run_at), "delay": delay, "priority": priority}
    _print_change(connect(api_url, data_dir).call("reschedule", given(params)), as_json)


WaitingTenantOption = Annotated[
    str | None,
    typer.Option("--tenant", show_default=False, help="Of the task, with a token that its handler thought out."),
]


def complete(
    token: TokenArgument,
    result: Annotated[str, typer.Argument(metavar="[JSON]", help="The result; - reads standard input.")] = "null",
    tenant: WaitingTenantOption = None,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Give a task the result that it waits for; one that comes before its task waits is kept."""
    value = json_value(result, "result")
    _print_answered(connect(api_url, data_dir).complete(token, value, tenant=tenant), as_json)


def fail(
    token: TokenArgument,
    error: Annotated[str, typer.Argument(metavar="MESSAGE", help="What went wrong.")],
    final: Annotated[bool, typer.Option("--final", help="No more attempts: CRITICAL_ERROR now.")] = False,
    retry_after: Annotated[float | None, duration_option(help="The time until the next attempt.")] = None,
    tenant: WaitingTenantOption = None,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Fail the attempt of a task that waits; it is tried again as after any other failure."""
    params = {"token": token, "error": error, "final": final, "retry_after": retry_after, "tenant": tenant}
    _print_answered(connect(api_url, data_dir).call("task.fail", given(params)), as_json)


def print_result(
    client: Client, task_id: int, timeout: float | None, *, tell_failures: bool = False, fail_fast: bool = False
) -> None:
    """Wait for a result and print it. Raises typer.Exit with the code of what came instead.

    tell_failures: print each failed attempt meanwhile; fail_fast: and stop after the first.
    """
    ends = math.inf if timeout is None else time.monotonic() + timeout
    told: set[Any] = set()
    while True:
        left = max(0.0, ends - time.monotonic())
        wait = min(left, _LOOK_SECONDS) if tell_failures else left
        try:
            print_json(client.result(task_id, timeout=None if wait == math.inf else wait))
            return
        except ResultTimeout as exc:
            if tell_failures and _tell_failures(
                client.call("status", {"id": task_id, "detail": True}), told, fail_fast
            ):
                raise typer.Exit(3) from None
            if wait >= left:
                say(f"penstock: {exc}", err=True)
                raise typer.Exit(4) from None
        except NoResult as exc:
            say(f"penstock: {exc}", err=True)
            error = getattr(exc, "error", None)
            if isinstance(error, dict) and isinstance(error.get("data"), dict) and error["data"].get("traceback"):
                say(f"\n{error['data']['traceback'].rstrip()}", err=True)
            raise typer.Exit(3) from None


def _tell_failures(task: dict[str, Any], told: set[Any], fail_fast: bool) -> bool:
    """Print the failed attempts that are new, on standard error; returns whether to stop for one."""
    new = [failure for failure in task["failures"] if failure["claim"] not in told]
    told.update(failure["claim"] for failure in new)
    if new and fail_fast:
        say(f"penstock: task {task['id']}, {failure_line(task, new[0])}", err=True)
        if found := _traceback(new[0]["error"]):
            say(f"\n{found}", err=True)
        return True
    for failure in new:
        last = failure is new[-1] and task["state"] == State.ERROR
        then = f"; retrying at {task['run_at']}" if last else ""
        say(f"task {task['id']}, {failure_line(task, failure)}{then}", err=True)
    return False


def failure_line(task: dict[str, Any], failure: dict[str, Any]) -> str:
    """One failed attempt in one line."""
    on = f" on {failure['worker']}" if failure.get("worker") else ""
    return f"attempt {failure['attempt']} of {task['max_attempts']} failed{on}: {_error_line(failure['error'])}"


def _error_line(error: Any) -> str:
    """An error's type and message."""
    if not isinstance(error, dict):
        return " ".join(str(error).split())
    data = error.get("data")
    kind = data.get("type") if isinstance(data, dict) else None
    return " ".join(": ".join(str(part) for part in (kind, error.get("message")) if part).split())


def _traceback(error: Any) -> str:
    data = error.get("data") if isinstance(error, dict) else None
    return str(data.get("traceback") or "").rstrip() if isinstance(data, dict) else ""


def _print_task(task: dict[str, Any], detail: bool) -> None:
    shown = {name: value for name, value in task.items() if detail or name not in _DETAILS}
    failures = shown.pop("failures", ())
    error = shown.pop("error", None)
    print_fields(shown.items())
    if error is not None:
        print_fields([("error", _error_line(error))])
        more = error.get("data") if isinstance(error, dict) else None
        if isinstance(more, dict):
            print_fields((name, value) for name, value in more.items() if name not in ("type", "message", "traceback"))
    for failure in failures:
        say(f"{failure['at']}  {failure_line(task, failure)}")
    if found := _traceback(error):
        say(f"\n{found}")


def _print_change(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(result)
    else:
        say(f"task {result['id']} {result['state']}")


def _print_answered(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(answer)
    elif answer["id"] is None:
        say("kept until a task waits for it" + (" (it was there already)" if answer["duplicate"] else ""))
    else:
        note = " (it was answered already)" if answer["duplicate"] else ""
        say(f"task {answer['id']} {answer['state'] or 'is gone'}{note}")
