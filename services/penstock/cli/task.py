"""`penstock enqueue`, and `penstock task`: one task, by its id or by the token that it waits for."""

from __future__ import annotations

import json
import math
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.common import Api, ApiUrlOption, DataDirOption, calling, connect, print_fields, print_json, say
from penstock.cli.follow import data_of, error_line, follow, on_worker, print_output
from penstock.cli.groups import Commands, add_group
from penstock.cli.parameters import PAYLOAD, Given, ParamsOf, expanded
from penstock.cli.tasks import print_tasks
from penstock.cli.values import duration_option, state_label
from penstock.limits.model import TaskExplainParams
from penstock.protocol.errors import NoResult, PenstockError, RateLimited, ResultTimeout, TooManyWaits, Unavailable
from penstock.protocol.task import State
from penstock.tasks.params import (
    CancelParams,
    EnqueueParams,
    RescheduleParams,
    RetryParams,
    TaskCompleteParams,
    TaskFailParams,
)

if TYPE_CHECKING:
    from penstock.client.client import Client

_LOOK_SECONDS = 1.0
_OUTAGE_SECONDS = 30.0  # of the api, after which a wait gives up
_VALUE_CHARS = 100  # of a step's result that a line shows
# Fields shown only with --detail; the payload is always shown.
_DETAILS = {
    "payload_gone", "payload_unread", "unique_key", "ordering_key", "limit_key", "labels", "expires_at", "timeout",
    "claim", "worker", "failures",
}  # fmt: skip
_TOKEN = "The token that the task waits for, shown as waits_for by `penstock task show ID --detail`."


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel="Tasks")(expanded(enqueue))
    result_json = typer.Argument(metavar="[JSON]", help="The result; - reads standard input.", show_default="null")
    completed = ParamsOf(TaskCompleteParams, token=_TOKEN, result=result_json)
    message = typer.Argument(metavar="MESSAGE", help="What went wrong.")
    failed = ParamsOf(TaskFailParams, token=_TOKEN, error=message)
    commands: Commands = {
        "show": show,
        "why": calling("task.explain", TaskExplainParams, lambda found: say(found["reason"])),
        "logs": logs,
        "result": result,
        "cancel": calling("cancel", CancelParams, _print_change),
        "retry": calling("retry", RetryParams, _print_change),
        "reschedule": calling("reschedule", RescheduleParams, _print_change),
        "complete": calling("task.complete", completed, _print_answered),
        "fail": calling("task.fail", failed, _print_answered),
    }
    add_group(app, "task", commands, panel="Tasks", help="One task: show it, change it, answer its wait.")


def enqueue(
    *,
    task: Annotated[Given, ParamsOf(EnqueueParams, without=["sealed_payload"], payload=PAYLOAD)],
    wait: bool = False,
    wait_timeout: Annotated[float | None, duration_option()] = None,
    fail_fast: bool = False,
    api: Api,
) -> None:
    """Add a task; it is stored when this returns. With --wait the exit codes are those of `penstock task result`.

    wait: Wait until it has settled and print its result, as `penstock task result`, and each failed attempt.
    wait_timeout: With --wait: how long to wait; default forever.
    fail_fast: With --wait: stop after the first failed attempt, with exit code 3.
    """
    for option, is_given in (("--wait-timeout", wait_timeout is not None), ("--fail-fast", fail_fast)):
        if is_given and not wait:
            raise typer.BadParameter("goes with --wait", param_hint=option)
    result = api.client.call("enqueue", task)
    if wait:
        typer.echo(f"task {result['id']}", err=True)
        _print_result(api.client, result["id"], wait_timeout, show_failures=True, fail_fast=fail_fast)
    else:
        api.show(result, _print_change)


def show(
    *,
    ids: Annotated[list[int], typer.Argument(metavar="ID")],
    detail: bool = False,
    until_settled: Annotated[bool, typer.Option("--follow", "-f")] = False,
    api: Api,
) -> None:
    """Show a task: its state, attempts, times, result or error.

    With --follow the exit codes are 0 if all succeeded, 3 if one failed or was cancelled.

    ids: Id of a task. Repeatable.
    detail: Include keys, labels, expiry and every failed attempt.
    until_settled: Print each change and line of output until all tasks have settled; with --json, each as one line.
    """
    if until_settled:
        raise typer.Exit(follow(api.client, ids, as_json=api.as_json))
    if len(ids) == 1:
        task = api.call("status", id=ids[0], detail=detail or not api.as_json)
        api.show(task, partial(_print_task, detail=detail))
        return
    tasks = api.call("status", ids=ids, detail=detail)
    api.show(tasks, lambda _: print_tasks([task for task in tasks if task is not None]))
    unknown = [task_id for task_id, task in zip(ids, tasks, strict=True) if task is None]
    if unknown:
        raise PenstockError(f"no such task: {', '.join(map(str, unknown))}")


def logs(
    *,
    task_id: Annotated[int, typer.Argument(metavar="ID", help="The task's id.")],
    until_settled: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the task has settled.")] = False,
    api: Api,
) -> None:
    """Print what a task's handler logged and emitted; with --json each as one line of JSON.

    Workers keep it where PENSTOCK_TASK_OUTPUT or the action asks for it.
    """
    print_output(api.client, task_id, api.as_json, follow=until_settled)


def result(
    task_id: Annotated[int, typer.Argument(metavar="ID", help="The task's id.")],
    timeout: Annotated[float | None, duration_option(help="How long to wait; default forever.")] = None,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Wait until a task has settled and print its result as JSON.

    Exit codes: 0 success; 3 it failed, was cancelled, or its result is no longer kept; 4 it did not settle in time; 1
    and 2 as for every command.
    """
    _print_result(connect(api_url, data_dir), task_id, timeout)


def _print_result(
    client: Client, task_id: int, timeout: float | None, *, show_failures: bool = False, fail_fast: bool = False
) -> None:
    """Wait for a result and print it. Raises typer.Exit with the exit code of any other outcome.

    show_failures: print each failed attempt meanwhile; fail_fast: stop after the first.
    """
    from penstock.client.results import PollPauses

    ends = math.inf if timeout is None else time.monotonic() + timeout
    shown: set[Any] = set()
    # Over all looks, each of which is a wait of its own; the api has just taken a task whose failures are shown.
    pauses = PollPauses(_OUTAGE_SECONDS, is_reached=show_failures)
    while True:
        left = max(0.0, ends - time.monotonic())
        wait = min(left, _LOOK_SECONDS) if show_failures else left
        try:
            try:
                print_json(client.result(task_id, timeout=None if wait == math.inf else wait))
                return
            except ResultTimeout as exc:
                if show_failures:
                    _show_failures(client.call("status", {"id": task_id, "detail": True}), shown, fail_fast)
                if wait >= left:
                    say(f"penstock: {exc}", err=True)
                    raise typer.Exit(4) from None
            pauses.answered()
        except NoResult as exc:
            say(f"penstock: {exc}", err=True)
            _print_traceback(getattr(exc, "error", None), err=True)
            raise typer.Exit(3) from None
        except (Unavailable, RateLimited, TooManyWaits) as exc:
            pause = pauses.seconds_after(exc)
            if time.monotonic() + pause > ends:
                raise
            time.sleep(pause)


def _show_failures(task: dict[str, Any], shown: set[Any], fail_fast: bool) -> None:
    """Print new failed attempts on standard error. Raises typer.Exit after the first if ``fail_fast``."""
    new = [failure for failure in task["failures"] if failure["claim"] not in shown]
    for failure in new:
        shown.add(failure["claim"])
        line = f"task {task['id']}, {_failure_line(task, failure)}"
        if fail_fast:
            say(f"penstock: {line}", err=True)
            _print_traceback(failure["error"], err=True)
            raise typer.Exit(3)
        is_retried = failure is new[-1] and task["state"] == State.ERROR
        say(line + (f"; retrying at {task['run_at']}" if is_retried else ""), err=True)


def _failure_line(task: dict[str, Any], failure: dict[str, Any]) -> str:
    attempt = f"attempt {failure['attempt']} of {task['max_attempts']}"
    return f"{attempt} failed{on_worker(failure)}: {error_line(failure['error'])}"


def _step_line(step: dict[str, Any]) -> str:
    repetition = f"#{step['repetition'] + 1}" if step["repetition"] else ""
    took = "" if step["seconds"] is None else f" in {step['seconds']:.3g} s"
    tries = f" after {step['tries']} tries" if step["tries"] > 1 else ""
    if step["error"] is not None:
        outcome = f"failed{took}{tries}: {error_line(step['error'])}"
    else:
        value = step["unread"] or json.dumps(step["result"], ensure_ascii=False)
        outcome = f"done{took}{tries}: {value if len(value) <= _VALUE_CHARS else value[:_VALUE_CHARS] + '…'}"
    return f"step {step['name']}{repetition} {outcome}"


def _print_traceback(error: Any, *, err: bool = False) -> None:
    if traceback := data_of(error).get("traceback"):
        say(f"\n{str(traceback).rstrip()}", err=err)


def _print_task(task: dict[str, Any], detail: bool) -> None:
    fields = {name: value for name, value in task.items() if detail or name not in _DETAILS}
    fields["state"] = state_label(task["state"])
    failures, steps = fields.pop("failures", ()), fields.pop("steps", ())
    error = fields.pop("error", None)
    print_fields(fields.items())
    if error is not None:
        print_fields([("error", error_line(error))])
        hidden = ("type", "message", "traceback")
        print_fields((name, value) for name, value in data_of(error).items() if name not in hidden)
    for step in steps:
        say(f"{step['began_at'] or step['recorded_at']}  {_step_line(step)}")
    for failure in failures:
        say(f"{failure['at']}  {_failure_line(task, failure)}")
    _print_traceback(error)


def _print_change(result: dict[str, Any]) -> None:
    note = " (already existed)" if result.get("duplicate") else ""
    if result.get("replaced"):
        note = " (replaced)"
    say(f"task {result['id']} {state_label(result['state'])}{note}")


def _print_answered(answer: dict[str, Any]) -> None:
    if answer["id"] is None:
        say("kept until a task waits for it" + (" (already kept)" if answer["duplicate"] else ""))
    else:
        note = " (already answered)" if answer["duplicate"] else ""
        say(f"task {answer['id']} {state_label(answer['state']) if answer['state'] else 'is deleted'}{note}")
