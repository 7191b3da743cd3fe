from __future__ import annotations

import inspect

import pytest

from penstock.protocol import errors
from penstock.protocol.errors import InvalidParams, PenstockError, RpcError, StateConflict, TaskNotFound, TooLarge


def test_every_error_descends_from_the_root() -> None:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]
    assert kinds
    for kind in kinds:
        assert issubclass(kind, PenstockError)


def test_every_rpc_error_has_a_code_of_its_own() -> None:
    classes = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, RpcError)]
    kinds = [kind for kind in classes if kind is not RpcError and "code" in vars(kind)]
    codes = [kind.code for kind in kinds]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize(
    ("error", "code", "message", "data"),
    [
        (
            InvalidParams("delay", "must not be negative"),
            -32602,
            "Invalid params: delay must not be negative",
            {"field": "delay", "problem": "must not be negative"},
        ),
        (TaskNotFound(42), -32004, "No such task: 42", {"id": 42}),
        (
            StateConflict(42, "SUCCESS", "cancelled"),
            -32009,
            "Task 42 is SUCCESS; it cannot be cancelled",
            {"id": 42, "state": "SUCCESS"},
        ),
        (
            TooLarge("payload", 11, 10),
            -32013,
            "payload is 11 bytes; the limit is 10",
            {"size": 11, "limit": 10},
        ),
    ],
)
def test_an_rpc_error_tells_what_was_seen(error: RpcError, code: int, message: str, data: object) -> None:
    assert (error.code, error.message, str(error), error.data) == (code, message, message, data)
