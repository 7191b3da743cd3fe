"""The error tree, and the JSON-RPC codes that go on the wire.

    PenstockError
      SettingsError        a setting is missing, wrong or unsafe; found before the first connection
      RpcError             an answer to a caller: code, message, data
        ParseError           -32700  not JSON
        InvalidRequest       -32600  JSON, but no JSON-RPC 2.0 request
        MethodNotFound       -32601
        InvalidParams        -32602  data names the field
        AccessDenied         -32003  no valid API key, one that may not do this, or not from this machine
        NotFound                     an unknown id, name or key
          TaskNotFound       -32004
          MessageNotFound    -32005  rejected, or in a dead-letter queue
          KeyNotFound        -32006  of the API
          JobNotFound        -32008
          RouteNotFound      -32011
          ScheduleNotFound   -32020  a schedule, or an import of schedules
          WorkflowNotFound   -32022
        StateConflict        -32009  the task's state forbids it
          UniqueKeyTaken             another task now has its unique key
          PayloadGone                retention has deleted its payload
          PartOfWorkflow             a step is retried with its workflow
          AnsweredAlready            its token already has another answer
        QueueAway            -32010  the api cannot reach a queue
        DuplicateTask        -32012  another task has the unique key, and on_duplicate is error
        TooLarge             -32013  the payload is over the limit
        TooManyWaits         -32025  the api waits for as many results as it may
        WorkflowConflict     -32023  the workflow's state forbids it, or another definition has its key
        Overloaded           -32026  the process holds as many bytes of requests as it may
        RateLimited          -32029  more requests than the key may send for now
      Unavailable          Postgres or SQS is unavailable; a later try may work
        Locked               another transaction holds a row or table that this one needs
        TooSlow              Postgres did not finish in time; the statement may be too expensive
        PayloadUnavailable   a payload or result cannot be read now: S3 is unavailable, a key is missing
      PayloadLost          an encoded text cannot be decoded: its object is gone, or it was changed
      NoResult             what waiting for a result raises instead
        TaskFailed           the task is CRITICAL_ERROR
        ResultCancelled      the task is CANCELLED
        ResultGone           it succeeded, and retention has deleted its result since
        ResultTimeout        it has not settled within the time; a TimeoutError too
      Refused              Postgres rejects the values; they fail at every try
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
    """Postgres or SQS is unavailable or rejects requests for now; the operation may be tried again."""


class Locked(Unavailable):
    """Another transaction holds a row, key or table for too long; the operation may be tried again."""


class TooSlow(Unavailable):
    """Postgres did not finish a statement in time; it may be busy, or the statement too expensive."""


class PayloadUnavailable(Unavailable):
    """A payload or result cannot be decoded or stored now: S3 is unavailable, or this process lacks the key.

    is_refusal: S3 rejected the request, which an operator has to change.
    """

    def __init__(self, text: str, *, is_refusal: bool = False) -> None:
        super().__init__(text)
        self.is_refusal = is_refusal


class PayloadLost(PenstockError):
    """A payload or result cannot be decoded at all: its object is gone, or it was changed."""


class Refused(PenstockError):
    """Postgres rejects the values themselves, at every try; report it to their sender."""


class InjectedFault(PenstockError):
    """An injected failure of a handler; see PENSTOCK_CHAOS_HANDLER."""


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


class NotFound(RpcError):
    """An id, name or key is unknown; ``data`` has it. what: the kind of object."""

    what = "object"

    def __init__(self, key: int | str, *, called: str = "id") -> None:
        super().__init__(f"No such {self.what}: {key}", {called: key})


class TaskNotFound(NotFound):
    """Unknown task; ``data["id"]`` is the id."""

    code = TASK_NOT_FOUND
    what = "task"


class MessageNotFound(NotFound):
    """Unknown message; ``where``: the places that were searched."""

    code = MESSAGE_NOT_FOUND

    def __init__(self, message_id: int | str, where: str) -> None:
        RpcError.__init__(self, f"No such message: {message_id} {where}", {"id": message_id})


class KeyNotFound(NotFound):
    code = KEY_NOT_FOUND
    what = "API key"


class RouteNotFound(NotFound):
    code = ROUTE_NOT_FOUND
    what = "route"

    def __init__(self, name: str) -> None:
        super().__init__(name, called="name")


class JobNotFound(NotFound):
    """Unknown bulk job; ``data["id"]`` is the id."""

    code = JOB_NOT_FOUND
    what = "job"


class ScheduleNotFound(NotFound):
    """Unknown schedule, by its name, or import of schedules, by its number."""

    code = SCHEDULE_NOT_FOUND

    def __init__(self, key: str | int) -> None:
        self.what = "import of schedules" if isinstance(key, int) else "schedule"
        super().__init__(key, called="id" if isinstance(key, int) else "name")


class WorkflowNotFound(NotFound):
    """Unknown workflow, by its id or its key."""

    code = WORKFLOW_NOT_FOUND
    what = "workflow"

    def __init__(self, which: int | str) -> None:
        super().__init__(which, called="id" if isinstance(which, int) else "key")


class WorkflowConflict(RpcError):
    """``data`` has the id and the state of the conflicting workflow."""

    code = WORKFLOW_CONFLICT

    def __init__(self, workflow_id: int, state: str, problem: str) -> None:
        super().__init__(f"Workflow {workflow_id} {problem}", {"id": workflow_id, "state": state})


class QueueAway(RpcError):
    """``reference`` is also in the log, with the reason."""

    code = QUEUE_AWAY

    def __init__(self, queue: str, reference: str) -> None:
        super().__init__(
            f"The api cannot use the queue {queue}: it must exist, and the api needs credentials and rights for it",
            {"queue": queue, "ref": reference},
        )


class StateConflict(RpcError):
    """The task's state forbids it; ``data`` has the id, the state and ``more``. reason: end of the sentence."""

    code = STATE_CONFLICT

    def __init__(self, task_id: int, state: str, verb: str, reason: str = "", **more: Any) -> None:
        message = f"Task {task_id} is {state}; it cannot be {verb}{reason}"
        super().__init__(message, {"id": task_id, "state": state, **more})


class PartOfWorkflow(StateConflict):
    """``data["workflow"]`` is the workflow that the task is a step of."""

    def __init__(self, task_id: int, state: str, workflow_id: int) -> None:
        reason = f" alone, as it is a step of workflow {workflow_id}: use workflow.retry"
        super().__init__(task_id, state, "retried", reason, workflow=workflow_id)


class UniqueKeyTaken(StateConflict):
    """``data["holder"]`` is the task that has the unique key."""

    def __init__(self, task_id: int, state: str, holder: int) -> None:
        super().__init__(task_id, state, "retried", f", as task {holder} now has its unique key", holder=holder)


class PayloadGone(StateConflict):
    """``data["payload_gone"]`` is true."""

    def __init__(self, task_id: int, state: str) -> None:
        reason = ", as its payload is gone (PENSTOCK_PAYLOAD_RETENTION_SECONDS): enqueue it again"
        super().__init__(task_id, state, "retried", reason, payload_gone=True)


class AnsweredAlready(StateConflict):
    """``data["id"]`` and ``data["state"]``: of the task, null for an answer that is kept for one."""

    def __init__(self, task_id: int | None, state: str | None) -> None:
        message = "The token already has a different answer: the first answer counts"
        RpcError.__init__(self, message, {"id": task_id, "state": state})


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
    """``what``: requests or tasks, of which ``limit`` may wait at once; try again later."""

    code = TOO_MANY_WAITS

    def __init__(self, what: str, limit: int) -> None:
        super().__init__(
            f"Too many {what} wait: the limit is {limit} at once; ask again later, or with timeout 0",
            {"limit": limit, "retry_after": 1},
        )


class Overloaded(RpcError):
    """The same request may be sent again a moment later."""

    code = OVERLOADED
    retry_after_seconds = 1.0

    def __init__(self) -> None:
        super().__init__(
            "The api is at its limit of bytes in requests and answers: try again later, or send less at once",
            {"retry_after": self.retry_after_seconds},
        )


class RateLimited(RpcError):
    """The same request may be sent again after ``retry_after_seconds``."""

    code = RATE_LIMITED

    def __init__(self, retry_after_seconds: float) -> None:
        seconds = round(retry_after_seconds, 3)
        super().__init__(f"Too many requests: try again in {seconds} s", {"retry_after": seconds})
        self.retry_after_seconds = retry_after_seconds


class NoResult(PenstockError):
    """A task has no result for the caller. ``id`` is the task, ``state`` its last known state, or None."""

    def __init__(self, task_id: int, state: str | None, text: str) -> None:
        super().__init__(text)
        self.id = task_id
        self.state = state


class TaskFailed(NoResult):
    """The task is CRITICAL_ERROR; ``error`` is the JSON-RPC error object of its last attempt."""

    def __init__(self, task_id: int, error: Any) -> None:
        message = error.get("message") if isinstance(error, dict) else error
        super().__init__(task_id, "CRITICAL_ERROR", f"task {task_id} failed: {message}")
        self.error = error


class ResultCancelled(NoResult):
    """The task is CANCELLED; ``reason``: text or None; ``error``: of its last failed attempt."""

    def __init__(self, task_id: int, reason: str | None, error: Any) -> None:
        super().__init__(task_id, "CANCELLED", f"task {task_id} was cancelled" + (f": {reason}" if reason else ""))
        self.reason = reason
        self.error = error


class ResultGone(NoResult):
    """The task succeeded, and PENSTOCK_RESULT_RETENTION_SECONDS later its result was deleted."""

    def __init__(self, task_id: int) -> None:
        super().__init__(task_id, "SUCCESS", f"task {task_id} succeeded, and its result is no longer kept")


class ResultTimeout(NoResult, TimeoutError):
    """The task has not settled in time; it continues, and its result may be asked for again."""

    def __init__(self, task_id: int, state: str | None, seconds: float) -> None:
        text = f"task {task_id} has not finished after {seconds:g} s (state {state}): ask for its result again"
        super().__init__(task_id, state, text)
