"""The errors that Penstock raises on purpose; expected outcomes (duplicate, stale, empty) are return values. The first
sentence of a JSON-RPC error stands in the OpenRPC document, too."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal

METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
HANDLER_ERROR = -32000
TASK_TIMEOUT = -32001
STATE_CONFLICT = -32009
TOO_LARGE = -32013
OVERLOADED = -32026


class PenstockError(Exception):
    """Root of every error that Penstock raises on purpose."""


class SettingsError(PenstockError):
    """A setting is missing, wrong or unsafe; the text lists every mistake found."""


@contextmanager
def needing(what: str, extra: str) -> Iterator[None]:
    """Raises SettingsError that names an extra of the package where an import in the block fails."""
    try:
        yield
    except ModuleNotFoundError as exc:
        if (exc.name or "").startswith("penstock"):
            raise
        raise SettingsError(f"{what} needs {exc.name}: pip install 'penstock[{extra}]'") from exc


class Unavailable(PenstockError):
    """Postgres or SQS is unavailable or rejects requests for now; the operation may be tried again."""


class Locked(Unavailable):
    """Another transaction holds a row, key or table for too long; the operation may be tried again."""


class TooSlow(Unavailable):
    """Postgres did not finish a statement in time; it may be busy, or the statement too expensive."""


class PayloadUnavailable(Unavailable):
    """S3 or the key of a payload or result is unavailable. is_refusal: S3 rejects it, which an operator must change."""

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

    def __init_subclass__(cls, code: int | None = None) -> None:
        if code is not None:
            cls.code = code

    def __init__(self, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.message = message
        self.data = data


class InternalError(RpcError):
    """A failure of the server; data.ref finds it in the log."""


class ParseError(RpcError, code=-32700):
    """The body is not JSON."""


class InvalidRequest(RpcError, code=-32600):
    """The entry is no JSON-RPC 2.0 request, or the batch is empty or too long."""


class MethodNotFound(RpcError, code=METHOD_NOT_FOUND):
    """Method not found."""


class InvalidParams(RpcError, code=INVALID_PARAMS):
    """A parameter is missing, unknown, mistyped or out of range; data.field names it."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"Invalid params: {field} {problem}", {"field": field, "problem": problem})


class AccessDenied(RpcError, code=-32003):
    """No valid API key, or not from this machine, or not permitted, data.needs naming the permission; HTTP 401 or 403.

    status: the HTTP status.
    """

    def __init__(self, status: int, message: str, data: Any = None) -> None:
        super().__init__(message, data)
        self.status = status


class NotFound(RpcError):
    """An id, name or key is unknown; ``data`` has it. what: the kind of object. called: a key that is text."""

    what = "object"
    called = "id"

    def __init__(self, key: int | str, where: str = "") -> None:
        name = "id" if isinstance(key, int) else self.called
        super().__init__(f"No such {self.what}: {key}{where}", {name: key})


class TaskNotFound(NotFound, code=-32004):
    what = "task"


class MessageNotFound(NotFound, code=-32005):
    """No such message, rejected or in a dead-letter queue."""

    what = "message"


class KeyNotFound(NotFound, code=-32006):
    what = "API key"


class RouteNotFound(NotFound, code=-32011):
    what = "route"
    called = "name"


class JobNotFound(NotFound, code=-32008):
    what = "job"


class ScheduleNotFound(NotFound, code=-32020):
    """No such schedule, by its name, or import of schedules, by its number."""

    called = "name"

    def __init__(self, key: str | int) -> None:
        self.what = "import of schedules" if isinstance(key, int) else "schedule"
        super().__init__(key)


class WorkflowNotFound(NotFound, code=-32022):
    what = "workflow"
    called = "key"


class WorkflowConflict(RpcError, code=-32023):
    """The workflow's state forbids it, or its key belongs to another definition; see data.id and data.state."""

    def __init__(self, workflow_id: int, state: str, problem: str) -> None:
        super().__init__(f"Workflow {workflow_id} {problem}", {"id": workflow_id, "state": state})


class QueueAway(RpcError, code=-32010):
    """The api cannot use a queue; data.queue names it, data.ref finds why in the log."""

    def __init__(self, queue: str, reference: str) -> None:
        problem = "it must exist, and the api needs credentials and rights for it"
        super().__init__(f"The api cannot use the queue {queue}: {problem}", {"queue": queue, "ref": reference})


class StateConflict(RpcError, code=STATE_CONFLICT):
    """The task's state forbids it; data.state is that state; a retry names data.holder, which has the unique key, or
    data.workflow, of which it is a step."""

    def __init__(self, task_id: int, state: str, verb: str, reason: str = "", **more: Any) -> None:
        message = f"Task {task_id} is {state}; it cannot be {verb}{reason}"
        super().__init__(message, {"id": task_id, "state": state, **more})


class AnsweredAlready(StateConflict):
    """The token has another answer. ``data`` has the id and the state of the task, null for an answer that is kept."""

    def __init__(self, task_id: int | None, state: str | None) -> None:
        message = "The token already has a different answer: the first answer counts"
        RpcError.__init__(self, message, {"id": task_id, "state": state})


class DuplicateTask(RpcError, code=-32012):
    """Another task has the unique key, and on_duplicate is error; data has its id and state."""

    def __init__(self, task_id: int, state: str) -> None:
        super().__init__(f"Task {task_id} has this unique key already", {"id": task_id, "state": state})


class TooLarge(RpcError, code=TOO_LARGE):
    """A payload, a result or a request is over its limit; data.size and data.limit in bytes."""

    def __init__(self, what: str, size: int, limit: int) -> None:
        super().__init__(f"{what} is {size} bytes; the limit is {limit}", {"size": size, "limit": limit})


class TooManyWaits(RpcError, code=-32025):
    """The api waits for as many results as it may; data.limit, and data.retry_after in seconds."""

    def __init__(self, what: str, limit: int) -> None:
        message = f"Too many {what} wait: the limit is {limit} at once; ask again later, or with timeout 0"
        super().__init__(message, {"limit": limit, "retry_after": 1})


class Overloaded(RpcError, code=OVERLOADED):
    """The process holds as many bytes of requests as it may; the request may be sent again a moment later."""

    retry_after_seconds = 1.0

    def __init__(self) -> None:
        message = "The api is at its limit of bytes in requests and answers: try again later, or send less at once"
        super().__init__(message, {"retry_after": self.retry_after_seconds})


class RateLimited(RpcError, code=-32029):
    """Too many requests for now; the same may be sent again after data.retry_after seconds; HTTP 429.

    The api refuses with it; a handler raises it when a service refuses. The task then runs again after that time
    without spending an attempt, and until then no task of its action is sent.
    key: no task with this limit_key instead; True: that of the task itself, if it has one.
    Raises ValueError for a time below 0.
    """

    key: str | Literal[True] | None = None

    def __init__(
        self, retry_after: float | timedelta, key: str | Literal[True] | None = None, reason: str = ""
    ) -> None:
        if isinstance(retry_after, timedelta):
            retry_after = retry_after.total_seconds()
        if not 0 <= retry_after < math.inf:
            raise ValueError(f"RateLimited(retry_after=...) takes seconds, 0 or more, not {retry_after!r}")
        seconds = round(retry_after, 3)
        super().__init__(reason or f"Too many requests: try again in {seconds} s", {"retry_after": seconds})
        self.retry_after_seconds = retry_after
        self.key = key

    @cached_property
    def retry_after_seconds(self) -> float:
        """When the same may be sent again; 1 where the answer of an api does not say."""
        try:  # a client makes the error of an answer without __init__
            return float(self.data["retry_after"])
        except (TypeError, KeyError, ValueError):
            return 1.0


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


class UnexpectedResult(PenstockError):
    """The result of a task is not of the type that its handler's annotation says: another release may have run it."""

    def __init__(self, task_id: int, problem: str) -> None:
        super().__init__(f"the result of task {task_id} is not of the annotated type: {problem}")
        self.id = task_id
