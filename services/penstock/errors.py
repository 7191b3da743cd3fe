"""The error tree, and the JSON-RPC codes that go on the wire.

    PenstockError
      SettingsError        a setting is missing, wrong or unsafe; found before the first connection
      RpcError             an answer to a caller: code, message, data
        ParseError           -32700  not JSON
        InvalidRequest       -32600  JSON, but no JSON-RPC 2.0 request
        MethodNotFound       -32601
        InvalidParams        -32602  data names the field
        AccessDenied         -32003  no valid API key, or not from this machine
        TaskNotFound         -32004
        StateConflict        -32009  the task's state forbids it
        TooLarge             -32013  the payload is over the limit
      Unavailable          Postgres or SQS is away; trying again later may work
      Refused              Postgres refuses these values; trying them again is of no use
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
STATE_CONFLICT = -32009
TOO_LARGE = -32013


class PenstockError(Exception):
    """Root of every error that Penstock raises on purpose."""


class SettingsError(PenstockError):
    """A setting is missing, wrong or unsafe; the text lists every mistake found."""


class Unavailable(PenstockError):
    """Postgres or SQS cannot be reached or refuses for the moment; the operation may be tried again."""


class Refused(PenstockError):
    """Postgres refuses the values themselves; whoever sent them must be told, for trying again is of no use."""


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

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class TaskNotFound(RpcError):
    code = TASK_NOT_FOUND

    def __init__(self, task_id: int) -> None:
        super().__init__(f"No such task: {task_id}", {"id": task_id})


class StateConflict(RpcError):
    code = STATE_CONFLICT

    def __init__(self, task_id: int, state: str, verb: str) -> None:
        super().__init__(f"Task {task_id} is {state}; it cannot be {verb}", {"id": task_id, "state": state})


class TooLarge(RpcError):
    code = TOO_LARGE

    def __init__(self, what: str, size: int, limit: int) -> None:
        super().__init__(f"{what} is {size} bytes; the limit is {limit}", {"size": size, "limit": limit})
