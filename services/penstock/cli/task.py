"""`penstock enqueue`, and `penstock task`: one task, by its id or by the token that it waits for."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import common
from penstock.cli.parameters import PAYLOAD, Commands, Given, ParamsOf
from penstock.cli.tasks import print_tasks
from penstock.cli.values import duration_option, state_label
from penstock.limits.model import TaskExplainParams
from penstock.protocol.errors import NoResult, PenstockError, RateLimited, ResultTimeout, TooManyWaits, Unavailable
from penstock.protocol.task import FINAL_STATES, State
from penstock.tasks import params

if TYPE_CHECKING:
    from penstock.client.client import Client

LOOK_SECONDS = 0.5
_STREAMS = 10  # tasks whose output is shown
_LATE_SECONDS = 5.0  # for output that arrives behind the outcome


def follow(client: Client, ids: Sequence[int], *, as_json: bool) -> int:
    """Print each change, as JSON the whole task, and each line of output, until all tasks have settled; returns the
    exit code. Raises PenstockError for an unknown task."""
    known: dict[int, dict[str, Any]] = {}
    left = list(dict.fromkeys(ids))
    outputs = [
        threading.Thread(target=_print_beside, args=(client, task_id, as_json), daemon=True)
        for task_id in left[:_STREAMS]
    ]
    for thread in outputs:
        thread.start()
    while True:
        tasks = common.outlasting(partial(client.call, "status", {"ids": left, "detail": True}))
        for task_id, task in zip(left, tasks, strict=True):
            if task is None:
                gone = "is no longer kept" if task_id in known else "does not exist"
                raise PenstockError(f"task {task_id} {gone}")
            if as_json:
                if task != known.get(task_id):
                    common.print_json(task, indent=None)
            else:
                for line in changes(known.get(task_id), task):
                    common.say(line)
            known[task_id] = task
        left = [task_id for task_id in left if known[task_id]["state"] not in FINAL_STATES]
        if not left:
            for thread in outputs:
                thread.join(_LATE_SECONDS)
            have_succeeded = all(task["state"] == State.SUCCESS for task in known.values())
            return 0 if have_succeeded else 3  # as of `penstock task result`
        time.sleep(LOOK_SECONDS)


def print_output(client: Client, task_id: int, as_json: bool, *, follow: bool = True) -> None:
    """Print what a task logs and emits; follow: until it has settled. Raises PenstockError."""
    for kind, event in client.events(task_id, follow=follow):
        if as_json and kind in ("log", "chunk", "dropped"):
            common.print_json({"id": task_id, "event": kind, **event}, indent=None)
        elif kind == "dropped":
            common.say(f"task {task_id}  " + (event["unread"] or f"{event['dropped']} entries dropped above the limit"))
        elif kind == "chunk":
            chunk = event["chunk"]
            text = chunk if isinstance(chunk, str) else json.dumps(chunk, ensure_ascii=False)
            common.say(f"{event['at']}  task {task_id}  {text}")
        elif kind == "log":
            source = f" {event['logger']}:" if event["logger"] else ""
            common.say(f"{event['at']}  task {task_id}  {event['level'] or 'log'}{source} {event['text']}")


def _print_beside(client: Client, task_id: int, as_json: bool) -> None:
    try:
        print_output(client, task_id, as_json)
    except PenstockError:
        pass  # the look at the task says what is wrong
    except BrokenPipeError:  # with no reader left, the command ends here as it does where the main thread prints
        os._exit(1)


def changes(before: dict[str, Any] | None, task: dict[str, Any]) -> Iterator[str]:
    """Lines about the changes of a task since an earlier look; everything if it is the first."""
    known = {failure["claim"] for failure in before["failures"]} if before else set()
    for failure in task["failures"]:
        if failure["claim"] not in known:
            text = f"attempt {failure['attempt']} failed{on_worker(failure)}: {error_line(failure['error'])}"
            yield _line(task, failure["at"], text)
    state = task["state"]
    if before is None or (before["state"], before["attempts"]) != (state, task["attempts"]):
        yield _line(task, task["updated_at"], _standing(task))
    elif before["run_at"] != task["run_at"] and state in (State.SCHEDULED, State.ERROR, State.WAITING):
        yield _line(task, task["updated_at"], f"moved to {task['run_at']}")
    progress = task["progress"]
    if progress is not None and (before is None or before["progress"] != progress) and state not in FINAL_STATES:
        percent = "" if progress.get("percent") is None else f"{progress['percent']:g} % "
        yield _line(task, task["updated_at"], f"{percent}{progress.get('note') or ''}".strip() or "alive")


def _standing(task: dict[str, Any]) -> str:
    state = str(task["state"])
    shown = state_label(state)
    if state == State.ACQUIRED:
        return f"{shown}{on_worker(task)}, attempt {task['attempts']} of {task['max_attempts']}"
    if state in (State.SCHEDULED, State.ERROR):
        return f"{shown}, runs at {task['run_at']}"
    if state == State.WAITING and task.get("waits_for"):
        return f"{state} for an event until {task['waits_for']['until']}"
    if state == State.SUCCESS and task.get("result_unread"):
        return f"{state}{on_worker(task)}, its result is not shown: {task['result_unread']}"
    if state == State.SUCCESS:
        return f"{state}{on_worker(task)}: {json.dumps(task['result'], ensure_ascii=False)}"
    if state == State.CANCELLED:
        return state + (f": {task['reason']}" if task.get("reason") else "")
    return shown


def error_line(error: Any) -> str:
    """A task's or a step's error in one line, with its type, which the message of most begins with."""
    if not isinstance(error, dict):
        return " ".join(str(error).split())
    kind, message = str(data_of(error).get("type") or ""), str(error.get("message") or "")
    parts = (message,) if message.startswith(kind) else (kind, message)
    return " ".join(": ".join(filter(None, parts)).split())


def data_of(error: Any) -> dict[str, Any]:
    data = error.get("data") if isinstance(error, dict) else None
    return data if isinstance(data, dict) else {}


def on_worker(ran: dict[str, Any]) -> str:
    """The worker of a task or a failed attempt."""
    return f" on {ran['worker']}" if ran["worker"] else ""


def _line(task: dict[str, Any], at: str, text: str) -> str:
    return f"{at}  task {task['id']}  {text}"


_OUTAGE_SECONDS = 30.0  # of the api, after which a wait gives up
_VALUE_CHARS = 100  # of a step's result that a line shows
# Fields shown only with --detail; the payload is always shown.
_DETAILS = {
    "payload_gone", "payload_unread", "unique_key", "ordering_key", "limit_key", "labels", "expires_at", "timeout",
    "claim", "worker", "failures",
}  # fmt: skip
_TOKEN = "The token that the task waits for, shown as waits_for by `penstock task show ID --detail`."
_RESULT = typer.Argument(metavar="[JSON]", help="The result; - reads standard input.", show_default="null")
_ERROR = typer.Argument(metavar="MESSAGE", help="What went wrong.")


def enqueue(
    *,
    task: Annotated[Given, ParamsOf(params.EnqueueParams, without=["sealed_payload"], payload=PAYLOAD)],
    wait: bool = False,
    wait_timeout: Annotated[float | None, duration_option()] = None,
    fail_fast: bool = False,
    api: common.Api,
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
    api: common.Api,
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
    api.show(tasks, lambda _: print_tasks({"tasks": [task for task in tasks if task is not None]}))
    unknown = [task_id for task_id, task in zip(ids, tasks, strict=True) if task is None]
    if unknown:
        raise PenstockError(f"no such task: {', '.join(map(str, unknown))}")


def logs(
    *,
    task_id: Annotated[int, typer.Argument(metavar="ID", help="The task's id.")],
    until_settled: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the task has settled.")] = False,
    api: common.Api,
) -> None:
    """Print what a task's handler logged and emitted; with --json each as one line of JSON.

    Workers keep it where PENSTOCK_TASK_OUTPUT or the action asks for it.
    """
    print_output(api.client, task_id, api.as_json, follow=until_settled)


def result(
    task_id: Annotated[int, typer.Argument(metavar="ID", help="The task's id.")],
    timeout: Annotated[float | None, duration_option(help="How long to wait; default forever.")] = None,
    api_url: common.ApiUrlOption = None,
    data_dir: common.DataDirOption = None,
) -> None:
    """Wait until a task has settled and print its result as JSON.

    Exit codes: 0 success; 3 it failed, was cancelled, or its result is no longer kept; 4 it did not settle in time; 1
    and 2 as for every command.
    """
    _print_result(common.connect(api_url, data_dir), task_id, timeout)


def _print_result(
    client: Client, task_id: int, timeout: float | None, *, show_failures: bool = False, fail_fast: bool = False
) -> None:
    """Wait for a result and print it, and if asked to, failed attempts meanwhile; ``fail_fast``: stop after the first.
    Raises typer.Exit with the exit code of any other outcome."""
    from penstock.client.results import PollPauses

    ends = math.inf if timeout is None else time.monotonic() + timeout
    shown: set[Any] = set()
    # Over all looks, each of which is a wait of its own; the api has just taken a task whose failures are shown.
    pauses = PollPauses(_OUTAGE_SECONDS, is_reached=show_failures)
    while True:
        left = max(0.0, ends - time.monotonic())
        wait = min(left, 1.0) if show_failures else left
        try:
            try:
                common.print_json(client.result(task_id, timeout=None if wait == math.inf else wait))
                return
            except ResultTimeout as exc:
                if show_failures:
                    _show_failures(client.call("status", {"id": task_id, "detail": True}), shown, fail_fast)
                if wait >= left:
                    common.say(f"penstock: {exc}", err=True)
                    raise typer.Exit(4) from None
            pauses.answered()
        except NoResult as exc:
            common.say(f"penstock: {exc}", err=True)
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
            common.say(f"penstock: {line}", err=True)
            _print_traceback(failure["error"], err=True)
            raise typer.Exit(3)
        is_retried = failure is new[-1] and task["state"] == State.ERROR
        common.say(line + (f"; retrying at {task['run_at']}" if is_retried else ""), err=True)


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
        common.say(f"\n{str(traceback).rstrip()}", err=err)


def _print_task(task: dict[str, Any], detail: bool) -> None:
    fields = {name: value for name, value in task.items() if detail or name not in _DETAILS}
    fields["state"] = state_label(task["state"])
    failures, steps = fields.pop("failures", ()), fields.pop("steps", ())
    error = fields.pop("error", None)
    common.print_fields(fields.items())
    if error is not None:
        common.print_fields([("error", error_line(error))])
        hidden = ("type", "message", "traceback")
        common.print_fields((name, value) for name, value in data_of(error).items() if name not in hidden)
    for step in steps:
        common.say(f"{step['began_at'] or step['recorded_at']}  {_step_line(step)}")
    for failure in failures:
        common.say(f"{failure['at']}  {_failure_line(task, failure)}")
    _print_traceback(error)


def _print_change(result: dict[str, Any]) -> None:
    note = " (already existed)" if result.get("duplicate") else ""
    if result.get("replaced"):
        note = " (replaced)"
    common.say(f"task {result['id']} {state_label(result['state'])}{note}")


def _print_answered(answer: dict[str, Any]) -> None:
    if answer["id"] is None:
        common.say("kept until a task waits for it" + (" (already kept)" if answer["duplicate"] else ""))
    else:
        note = " (already answered)" if answer["duplicate"] else ""
        common.say(f"task {answer['id']} {state_label(answer['state']) if answer['state'] else 'is deleted'}{note}")


task = Commands(
    "One task: show it, change it, answer its wait.",
    show=show,
    why=common.calling("task.explain", TaskExplainParams, lambda found: common.say(found["reason"])),
    logs=logs,
    result=result,
    cancel=common.calling("cancel", params.CancelParams, _print_change),
    retry=common.calling("retry", params.RetryParams, _print_change),
    reschedule=common.calling("reschedule", params.RescheduleParams, _print_change),
    complete=common.calling(
        "task.complete", ParamsOf(params.TaskCompleteParams, token=_TOKEN, result=_RESULT), _print_answered
    ),
    fail=common.calling("task.fail", ParamsOf(params.TaskFailParams, token=_TOKEN, error=_ERROR), _print_answered),
)
