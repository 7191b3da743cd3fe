"""`penstock task show --follow`: the changes of tasks, line by line, until they have settled."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.cli.common import outlasting, print_json, say
from penstock.cli.values import state_label
from penstock.protocol.errors import PenstockError
from penstock.protocol.task import FINAL_STATES, State

if TYPE_CHECKING:
    from penstock.client.client import Client

LOOK_SECONDS = 0.5
_STREAMS = 10  # tasks whose output is shown
_LATE_SECONDS = 5.0  # for output that arrives behind the outcome


def follow(client: Client, ids: Sequence[int], *, as_json: bool) -> int:
    """Print each change until all tasks have settled; returns the exit code.

    as_json: print the whole task at each change, one a line, and each line of output as its event.
    Raises PenstockError for an unknown task.
    """
    known: dict[int, dict[str, Any]] = {}
    left = list(dict.fromkeys(ids))
    outputs = [
        threading.Thread(target=_print_beside, args=(client, task_id, as_json), daemon=True)
        for task_id in left[:_STREAMS]
    ]
    for thread in outputs:
        thread.start()
    while True:
        tasks = outlasting(partial(client.call, "status", {"ids": left, "detail": True}))
        for task_id, task in zip(left, tasks, strict=True):
            if task is None:
                gone = "is no longer kept" if task_id in known else "does not exist"
                raise PenstockError(f"task {task_id} {gone}")
            if as_json:
                if task != known.get(task_id):
                    print_json(task, indent=None)
            else:
                for line in changes(known.get(task_id), task):
                    say(line)
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
        if kind not in ("log", "chunk", "dropped"):
            continue
        if as_json:
            print_json({"id": task_id, "event": kind, **event}, indent=None)
        else:
            say(_output_line(task_id, kind, event))


def _print_beside(client: Client, task_id: int, as_json: bool) -> None:
    try:
        print_output(client, task_id, as_json)
    except PenstockError:
        pass  # the look at the task says what is wrong
    except BrokenPipeError:  # with no reader left, the command ends here as it does where the main thread prints
        os._exit(1)


def _output_line(task_id: int, kind: str, event: dict[str, Any]) -> str:
    if kind == "dropped":
        return f"task {task_id}  " + (event["unread"] or f"{event['dropped']} entries dropped above the limit")
    if kind == "chunk":
        chunk = event["chunk"]
        text = chunk if isinstance(chunk, str) else json.dumps(chunk, ensure_ascii=False)
    else:
        source = f" {event['logger']}:" if event["logger"] else ""
        text = f"{event['level'] or 'log'}{source} {event['text']}"
    return f"{event['at']}  task {task_id}  {text}"


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
