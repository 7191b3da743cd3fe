"""Answers to tasks that wait for an event: parameters of `task.complete` and `task.fail`."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.protocol.checks import check_span
from penstock.protocol.errors import HANDLER_ERROR, InvalidParams, TooLarge
from penstock.protocol.json_text import check_json, utf8_size
from penstock.protocol.reports import check_token
from penstock.protocol.tenant import read_tenant
from penstock.protocol.wait_tokens import digest_of
from penstock.settings.model import Settings
from penstock.tasks.commands import AnswerWait
from penstock.tasks.params import TaskCompleteParams, TaskFailParams


def read_completion(given: TaskCompleteParams, settings: Settings) -> AnswerWait:
    return _answer(given, "result", bytes(given.result).decode("utf-8"), settings)


def read_failure(given: TaskFailParams, settings: Settings) -> AnswerWait:
    """The error as that of a worker, its hints among the data."""
    error = {"message": given.error} if isinstance(given.error, str) else dict(given.error)
    for name in error.keys() - {"code", "message", "data"}:
        raise InvalidParams(f"error.{name[:60]}", "is no member of an error; these are code, message and data")
    if not isinstance(error.get("message"), str) or not error["message"]:
        raise InvalidParams("error", "must be a text that is not empty, or an object with one as its message")
    code = error.get("code", HANDLER_ERROR)
    if isinstance(code, bool) or not isinstance(code, int):
        raise InvalidParams("error.code", f"must be an integer, not {str(code)[:60]!r}")
    data: Any = error.get("data", {})
    if not isinstance(data, dict):
        raise InvalidParams("error.data", "must be an object")
    check_span(given.retry_after, "retry_after")
    hints = {"final": given.final or None, "retry_after": given.retry_after}
    data = {**data, **{name: value for name, value in hints.items() if value is not None}}
    whole = {"code": code, "message": error["message"]} | ({"data": data} if data else {})
    return _answer(given, "error", msgspec.json.encode(whole).decode("utf-8"), settings)


def _answer(given: TaskCompleteParams | TaskFailParams, member: str, text: str, settings: Settings) -> AnswerWait:
    try:
        check_token(given.token)
    except ValueError as exc:
        raise InvalidParams("token", f"is wrong: {exc}") from None
    size = utf8_size(text)
    if size > settings.result_limit_bytes:
        raise TooLarge(member, size, settings.result_limit_bytes)
    check_json(text, member)
    answer = f'"{member}":{text}'
    return AnswerWait(given.token, answer, digest_of(answer), settings, read_tenant(given.tenant))
