"""The methods that answer tasks which wait for an event."""

from functools import partial
from typing import Any

import msgspec

from penstock.db.context import Context, ServingContext
from penstock.protocol.api_key import Permission, narrow_tenant
from penstock.protocol.checks import check_span
from penstock.protocol.errors import HANDLER_ERROR, InvalidParams, Refused, StateConflict, TaskNotFound, TooLarge
from penstock.protocol.json_text import check_json, utf8_size
from penstock.protocol.method import Scope, method
from penstock.protocol.reports import check_token, claim_of_token, digest_of_answer
from penstock.protocol.tenant import read_tenant
from penstock.results.wait_answers import Answered, AnswerWait, answer_wait
from penstock.runtime.logs import log
from penstock.settings.model import Settings
from penstock.tasks.methods import check_own_task
from penstock.tasks.params import TaskCompleteParams, TaskFailParams

_answers = partial(
    method, permission=Permission.ENQUEUE, scope=Scope.OWN, errors=(TaskNotFound, StateConflict, TooLarge),
    narrow=narrow_tenant, by_queue=True, savepoint=True,
)  # fmt: skip


def _read_complete(given: TaskCompleteParams, settings: Settings) -> AnswerWait:
    return _read_answer(given, "result", bytes(given.result).decode("utf-8"), settings)


@_answers("task.complete", read=_read_complete)
async def complete(context: Context, command: AnswerWait) -> Answered:
    """Complete a task that waits, with a result; a result that arrives before the task waits is kept."""
    return await _answer(context, command)


def _read_fail(given: TaskFailParams, settings: Settings) -> AnswerWait:
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
    return _read_answer(given, "error", msgspec.json.encode(whole).decode("utf-8"), settings)


@_answers("task.fail", read=_read_fail)
async def fail(context: Context, command: AnswerWait) -> Answered:
    """Fail the attempt of a task that waits; it is retried as after any other failure. One that comes before the task
    waits is kept."""
    return await _answer(context, command)


def _read_answer(given: TaskCompleteParams | TaskFailParams, member: str, text: str, settings: Settings) -> AnswerWait:
    try:
        check_token(given.token)
    except ValueError as exc:
        raise InvalidParams("token", f"is wrong: {exc}") from None
    size = utf8_size(text)
    if size > settings.result_limit_bytes:
        raise TooLarge(member, size, settings.result_limit_bytes)
    check_json(text, member)
    answer = f'"{member}":{text}'
    return AnswerWait(given.token, answer, digest_of_answer(answer), read_tenant(given.tenant))


async def _answer(context: Context, command: AnswerWait) -> Answered:
    try:
        async with context.transaction() as session:
            made_for = claim_of_token(command.token)
            if made_for is not None:
                await check_own_task(session, made_for[0])
            answered = await answer_wait(session, command, context.settings)
    except Refused as exc:
        if not isinstance(context, ServingContext):
            raise  # the owner of the transaction splits the batch
        log.warning("answer_refused", reason=str(exc))
        raise InvalidParams("result", "holds a value that Postgres refuses to store") from exc
    if not answered.kept:
        context.wake()  # a successor by ordering key may run, or the next attempt
    return answered
