"""The error tree, and the JSON-RPC codes that go on the wire.

    PenstockError
      SettingsError        a setting is missing, wrong or unsafe; found before the first connection
      RpcError             an answer to a caller: code, message, data
        ParseError           -32700  not JSON
        InvalidRequest       -32600  JSON, but no JSON-RPC 2.0 request
        MethodNotFound       -32601
        InvalidParams        -32602  data names the field
        AccessDenied         -32003  no valid API key, one that may not do this, or not from this machine
        TaskNotFound         -32004
        MessageNotFound      -32005  no such message, rejected or in a dead-letter queue
        KeyNotFound          -32006  no such API key
        JobNotFound          -32008
        StateConflict        -32009  the task's state forbids it
          UniqueKeyTaken             another task has its unique key by now
          PayloadGone                its payload was emptied by retention
          PartOfWorkflow             a step is retried with its workflow
          AnsweredAlready            its token has brought another answer
        QueueAway            -32010  the api cannot reach a queue
        RouteNotFound        -32011
        DuplicateTask        -32012  another task has the unique key, and the caller wants to know
        TooLarge             -32013  the payload is over the limit
        ScheduleNotFound     -32020  no such schedule, or import of schedules
        TooManyWaits         -32025  the api waits for as many results as it may
        WorkflowNotFound     -32022
        WorkflowConflict     -32023  the workflow's state forbids it, or its key is that of another definition
        Overloaded           -32026  the process holds as many bytes of requests as it may
        RateLimited          -32029  more requests than the key may send for now
      Unavailable          Postgres or SQS is away; trying again later may work
        Locked               another transaction holds a row or table that this one needs
        TooSlow              Postgres did not finish within its time; what was asked may be to blame
        PayloadUnavailable   a payload or result cannot be had now: S3 is away, a key is not here
      PayloadLost          what was sealed cannot be had any more: its object is gone, or it was changed
      NoResult             what a program that waits for a result gets in its place
        TaskFailed           the task is CRITICAL_ERROR
        ResultCancelled      the task is CANCELLED
        ResultGone           it succeeded, and retention has emptied its result since
        ResultTimeout        it has not settled within the time; a TimeoutError too
      Refused              Postgres refuses these values; trying them again is of no use
      InjectedFault        raised on purpose in a handler, by PENSTOCK_CHAOS_HANDLER
      StackError           the embedded Postgres, SQS or a process could not be started or found

Expected outcomes (duplicate, stale, empty) are return values, not errors.
"""

from __future__ import annotations

from typing import Any

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
HANDLER_ERROR = -32000
TASK_TIMEOUT = -32001
ACCESS_DENIED = -32003
TASK_NOT_FOUND = -32004
MESSAGE_NOT_FOUND = -32005
KEY_NOT_FOUND = -32006
JOB_NOT_FOUND = -32008
STATE_CONFLICT = -32009
QUEUE_AWAY = -32010
ROUTE_NOT_FOUND = -32011
DUPLICATE_TASK = -32012
TOO_LARGE = -32013
SCHEDULE_NOT_FOUND = -32020
WORKFLOW_NOT_FOUND = -32022
WORKFLOW_CONFLICT = -32023
TOO_MANY_WAITS = -32025
OVERLOADED = -32026
RATE_LIMITED = -32029


class PenstockError(Exception):
    """Root of every error that Penstock raises on purpose."""


class SettingsError(PenstockError):
    """A setting is missing, wrong or unsafe; the text lists every mistake found."""


class Unavailable(PenstockError):
    """Postgres or SQS cannot be reached or refuses for the moment; the operation may be tried again."""


class Locked(Unavailable):
    """Another transaction holds a row, key or table for longer than is waited for; it may be tried again."""


class TooSlow(Unavailable):
    """Postgres did not finish a statement in time; it may be busy, or the statement too much for it."""


class PayloadUnavailable(Unavailable):
    """A sealed payload or result cannot be opened or stored now: S3 is away, or this process lacks the key.

    is_refusal: S3 has answered that it will not, which an operator has to change.
    """

    def __init__(self, text: str, *, is_refusal: bool = False) -> None:
        super().__init__(text)
        self.is_refusal = is_refusal


class PayloadLost(PenstockError):
    """A sealed payload or result cannot be opened at all: its object is gone, or it was changed."""


class Refused(PenstockError):
    """Postgres refuses the values themselves; whoever sent them must be told, for trying again is of no use."""


class InjectedFault(PenstockError):
    """A handler's failure made on purpose; see PENSTOCK_CHAOS_HANDLER."""


class StackError(PenstockError):
    """The embedded stack could not be started, found or stopped."""


class RpcError(PenstockError):
    """An error that is answered to the caller as a JSON-RPC error object."""

    code = INTERNAL_ERROR

    def __init__(self, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.message = message
        self.data = data


class ParseError(RpcError):
    code = PARSE_ERROR


class InvalidRequest(RpcError):
    code = INVALID_REQUEST


class MethodNotFound(RpcError):
    code = METHOD_NOT_FOUND


class InvalidParams(RpcError):
    """A parameter is missing, unknown, mistyped or out of range; ``data["field"]`` names it."""

    code = INVALID_PARAMS

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"Invalid params: {field} {problem}", {"field": field, "problem": problem})


class AccessDenied(RpcError):
    """The caller may not ask; ``status`` is the HTTP status that says so."""

    code = ACCESS_DENIED

    def __init__(self, status: int, message: str, data: Any = None) -> None:
        super().__init__(message, data)
        self.status = status


class TaskNotFound(RpcError):
    """There is no task of that id; ``data["id"]`` is the id."""

    code = TASK_NOT_FOUND

    def __init__(self, task_id: int) -> None:
        super().__init__(f"No such task: {task_id}", {"id": task_id})


class MessageNotFound(RpcError):
    """``where`` tells how far was looked."""

    code = MESSAGE_NOT_FOUND

    def __init__(self, message_id: int | str, where: str) -> None:
        super().__init__(f"No such message: {message_id} {where}", {"id": message_id})


class KeyNotFound(RpcError):
    code = KEY_NOT_FOUND

    def __init__(self, key_id: int) -> None:
        super().__init__(f"No such API key: {key_id}", {"id": key_id})


class RouteNotFound(RpcError):
    code = ROUTE_NOT_FOUND

    def __init__(self, name: str) -> None:
        super().__init__(f"No such route: {name}", {"name": name})


class JobNotFound(RpcError):
    """There is no bulk job of that id; ``data["id"]`` is the id."""

    code = JOB_NOT_FOUND

    def __init__(self, job_id: int) -> None:
        super().__init__(f"No such job: {job_id}", {"id": job_id})


class ScheduleNotFound(RpcError):
    """``key``: the name of a schedule, or the number of an import."""

    code = SCHEDULE_NOT_FOUND

    def __init__(self, key: str | int) -> None:
        if isinstance(key, int):
            super().__init__(f"No such import of schedules: {key}", {"id": key})
        else:
            super().__init__(f"No such schedule: {key}", {"name": key})


class WorkflowNotFound(RpcError):
    """``which``: its id, or its key."""

    code = WORKFLOW_NOT_FOUND

    def __init__(self, which: int | str) -> None:
        name = "id" if isinstance(which, int) else "key"
        super().__init__(f"No such workflow: {which}", {name: which})


class WorkflowConflict(RpcError):
    """``data`` has the id and the state of the workflow that stands against what was asked."""

    code = WORKFLOW_CONFLICT

    def __init__(self, workflow_id: int, state: str, problem: str) -> None:
        super().__init__(f"Workflow {workflow_id} {problem}", {"id": workflow_id, "state": state})


class QueueAway(RpcError):
    """``reference`` is repeated in the log, which tells the reason."""

    code = QUEUE_AWAY

    def __init__(self, queue: str, reference: str) -> None:
        super().__init__(
            f"The api cannot use the queue {queue}: it must exist, and the api needs credentials and rights for it",
            {"queue": queue, "ref": reference},
        )


class StateConflict(RpcError):
    """The task's state forbids it; ``data`` has the id and the state."""

    code = STATE_CONFLICT

    def __init__(self, task_id: int, state: str, verb: str) -> None:
        super().__init__(f"Task {task_id} is {state}; it cannot be {verb}", {"id": task_id, "state": state})


class PartOfWorkflow(StateConflict):
    """``data["workflow"]`` is the workflow that the task is a step of."""

    def __init__(self, task_id: int, state: str, workflow_id: int) -> None:
        super().__init__(task_id, state, "retried")
        self.message += f" alone, for it is a step of workflow {workflow_id}: use workflow.retry"
        self.args = (self.message,)
        self.data = {"id": task_id, "state": state, "workflow": workflow_id}


class UniqueKeyTaken(StateConflict):
    """``data["holder"]`` is the task that has the unique key."""

    def __init__(self, task_id: int, state: str, holder: int) -> None:
        super().__init__(task_id, state, "retried")
        self.message += f", for task {holder} has its unique key by now"
        self.args = (self.message,)
        self.data = {"id": task_id, "state": state, "holder": holder}


class PayloadGone(StateConflict):
    """``data["payload_gone"]`` is true."""

    def __init__(self, task_id: int, state: str) -> None:
        super().__init__(task_id, state, "retried")
        self.message += ", for its payload is gone (PENSTOCK_PAYLOAD_RETENTION_SECONDS): enqueue it anew"
        self.args = (self.message,)
        self.data = {"id": task_id, "state": state, "payload_gone": True}


class AnsweredAlready(StateConflict):
    """``data["id"]`` and ``data["state"]``: of the task, null for an answer that is kept for one."""

    def __init__(self, task_id: int | None, state: str | None) -> None:
        RpcError.__init__(
            self, "The token was answered before, and not like this: the first answer counts",
            {"id": task_id, "state": state},
        )  # fmt: skip


class DuplicateTask(RpcError):
    """``data`` has the id and the state of the task that has the unique key."""

    code = DUPLICATE_TASK

    def __init__(self, task_id: int, state: str) -> None:
        super().__init__(f"Task {task_id} has this unique key already", {"id": task_id, "state": state})


class TooLarge(RpcError):
    """A payload, a result or a message is over its limit; ``data`` has the size and the limit in bytes."""

    code = TOO_LARGE

    def __init__(self, what: str, size: int, limit: int) -> None:
        super().__init__(f"{what} is {size} bytes; the limit is {limit}", {"size": size, "limit": limit})


class TooManyWaits(RpcError):
    """``what``: requests or tasks, of which ``limit`` may be waited with or for; the same may be sent again later."""

    code = TOO_MANY_WAITS

    def __init__(self, what: str, limit: int) -> None:
        super().__init__(
            f"Too many {what} are waited for: {limit} at once are the limit; ask again later, or with timeout 0",
            {"limit": limit, "retry_after": 1},
        )


class Overloaded(RpcError):
    """The same may be sent again a moment later."""

    code = OVERLOADED
    retry_after_seconds = 1.0

    def __init__(self) -> None:
        super().__init__(
            "The api holds as many bytes of requests and answers as it may: try again later, or send less at once",
            {"retry_after": self.retry_after_seconds},
        )


class RateLimited(RpcError):
    """The same may be sent again after ``retry_after_seconds``."""

    code = RATE_LIMITED

    def __init__(self, retry_after_seconds: float) -> None:
        seconds = round(retry_after_seconds, 3)
        super().__init__(f"Too many requests: try again in {seconds} s", {"retry_after": seconds})
        self.retry_after_seconds = retry_after_seconds


class NoResult(PenstockError):
    """A task's result cannot be had. ``id`` is the task, ``state`` the one that was seen last, None for none."""

    def __init__(self, task_id: int, state: str | None, text: str) -> None:
        super().__init__(text)
        self.id = task_id
        self.state = state


class TaskFailed(NoResult):
    """The task is CRITICAL_ERROR; ``error`` is the JSON-RPC error object of its last attempt."""

    def __init__(self, task_id: int, error: Any) -> None:
        told = error.get("message") if isinstance(error, dict) else error
        super().__init__(task_id, "CRITICAL_ERROR", f"task {task_id} failed: {told}")
        self.error = error


class ResultCancelled(NoResult):
    """The task is CANCELLED; ``reason`` says why where anybody said, ``error`` is that of its last failed attempt."""

    def __init__(self, task_id: int, reason: str | None, error: Any) -> None:
        super().__init__(task_id, "CANCELLED", f"task {task_id} was cancelled" + (f": {reason}" if reason else ""))
        self.reason = reason
        self.error = error


class ResultGone(NoResult):
    """The task succeeded, and its result was emptied by PENSTOCK_RESULT_RETENTION_SECONDS since."""

    def __init__(self, task_id: int) -> None:
        super().__init__(task_id, "SUCCESS", f"task {task_id} succeeded, and its result is no longer kept")


class ResultTimeout(NoResult, TimeoutError):
    """The task has not settled within the time; it goes on, and its result may be asked for again."""

    def __init__(self, task_id: int, state: str | None, seconds: float) -> None:
        super().__init__(task_id, state, f"task {task_id} is {state} after {seconds:g} s: ask for its result again")
