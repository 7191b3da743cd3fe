"""The methods that answer tasks which wait for an event, and waits that time out: recorded as workers' reports are."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

import asyncpg
import msgspec

from penstock.db.context import Context, ServingContext
from penstock.db.session import Session
from penstock.payloads.codec import aad_of
from penstock.protocol import errors
from penstock.protocol.answers import Answered
from penstock.protocol.api_key import Permission, narrow_tenant
from penstock.protocol.json_text import check_json
from penstock.protocol.method import Scope, method
from penstock.protocol.reports import check_token, claim_of_token, digest_of_answer, stored_token
from penstock.protocol.task import State
from penstock.results import waits
from penstock.results.apply import apply_reports
from penstock.runtime import metrics
from penstock.runtime.halving import in_halves
from penstock.runtime.logs import log
from penstock.settings.model import Settings
from penstock.tasks.methods import check_own_task
from penstock.tasks.params import TaskCompleteParams, TaskFailParams


@dataclass(frozen=True, slots=True)
class AnswerWait:
    token: str
    answer: str  # as a member of a worker's JSON-RPC response, result or error
    digest: bytes  # distinguishes answers
    tenant: str | None = None  # of the task; also None for a token that Penstock made


KEPT = Answered(id=None, state=None, kept=True, duplicate=False)


_answers = partial(
    method, permission=Permission.ENQUEUE, scope=Scope.OWN, narrow=narrow_tenant, by_queue=True, savepoint=True,
    errors=(errors.TaskNotFound, errors.StateConflict, errors.TooLarge),
)  # fmt: skip


def _read_complete(given: TaskCompleteParams, settings: Settings) -> AnswerWait:
    return _read_answer(given, "result", bytes(given.result).decode("utf-8"), settings)


@_answers("task.complete", read=_read_complete)
async def complete(context: Context, command: AnswerWait) -> Answered:
    """Complete a task that waits, with a result; a result that arrives before the task waits is kept."""
    return await _answer_task(context, command)


def _read_fail(given: TaskFailParams, settings: Settings) -> AnswerWait:
    """The error as that of a worker, its hints among the data."""
    error = {"message": given.error} if isinstance(given.error, str) else dict(given.error)
    for name in error.keys() - {"code", "message", "data"}:
        raise errors.InvalidParams(f"error.{name[:60]}", "is no member of an error; these are code, message and data")
    if not isinstance(error.get("message"), str) or not error["message"]:
        raise errors.InvalidParams("error", "must be a text that is not empty, or an object with one as its message")
    code = error.get("code", errors.HANDLER_ERROR)
    if isinstance(code, bool) or not isinstance(code, int):
        raise errors.InvalidParams("error.code", f"must be an integer, not {str(code)[:60]!r}")
    data: Any = error.get("data", {})
    if not isinstance(data, dict):
        raise errors.InvalidParams("error.data", "must be an object")
    hints = {"final": given.final or None, "retry_after": given.retry_after}
    data = {**data, **{name: value for name, value in hints.items() if value is not None}}
    whole = {"code": code, "message": error["message"]} | ({"data": data} if data else {})
    return _read_answer(given, "error", msgspec.json.encode(whole).decode("utf-8"), settings)


@_answers("task.fail", read=_read_fail)
async def fail(context: Context, command: AnswerWait) -> Answered:
    """Fail the attempt of a task that waits; it is retried as after any other failure. One that comes before the task
    waits is kept."""
    return await _answer_task(context, command)


def _read_answer(given: TaskCompleteParams | TaskFailParams, member: str, text: str, settings: Settings) -> AnswerWait:
    try:
        check_token(given.token)
    except ValueError as exc:
        raise errors.InvalidParams("token", f"is wrong: {exc}") from None
    check_json(text, member, settings.result_limit_bytes)
    answer = f'"{member}":{text}'
    return AnswerWait(given.token, answer, digest_of_answer(answer), given.tenant)


async def _answer_task(context: Context, command: AnswerWait) -> Answered:
    try:
        async with context.transaction() as session:
            made_for = claim_of_token(command.token)
            if made_for is not None:
                await check_own_task(session, made_for[0])
            answered = await answer_wait(session, command, context.settings)
    except errors.Refused as exc:
        if not isinstance(context, ServingContext):
            raise  # the owner of the transaction splits the batch
        log.warning("answer_refused", reason=str(exc))
        raise errors.InvalidParams("result", "holds a value that Postgres refuses to store") from exc
    if not answered.kept:
        context.wake()  # a successor by ordering key may run, or the next attempt
    return answered


async def answer_wait(session: Session, command: AnswerWait, settings: Settings) -> Answered:
    """Settle the task that waits for a token, inside a transaction, or keep the answer until a task waits for it.

    Raises StateConflict: the task is settled, or the attempt that the token was made for is over; AnsweredAlready:
    another answer came first; TaskNotFound: a token made for an unknown task; InvalidParams: the journal of the task
    has no room for it, and the caller rolls back.
    """
    try:
        answered = await _answer(session, command, settings)
    except errors.RpcError:
        metrics.WAITS_ENDED.labels("refused").inc()
        raise
    outcome = "duplicate" if answered.duplicate else "kept" if answered.kept else "settled"
    metrics.WAITS_ENDED.labels(outcome).inc()
    log.info("wait_answered", task_id=answered.id, state=answered.state, outcome=outcome)
    return answered


async def _answer(session: Session, command: AnswerWait, settings: Settings) -> Answered:
    kept = stored_token(command.token, command.tenant)
    answer = session.codec.encode(command.answer, aad_of("answer", kept))
    (token,) = await session.fetch("keep_answers", [kept], [answer], [command.digest])
    pair, made_for = waits.pair_of(token), claim_of_token(command.token)
    if token["fresh"]:
        if made_for is not None and not await session.fetch("find_claim_to_wait", *made_for):
            await session.fetch("forget_tokens", [kept])
            state = await _state_of(session, made_for[0])
            if state is None:
                raise errors.TaskNotFound(made_for[0])
            raise errors.StateConflict(made_for[0], state, "answered by a token of that attempt")
        return KEPT
    if token["active"] and pair is not None and await waits.resume_waits(session, [pair]):
        policy = waits.read_policy(token["policy"])
        applied = await apply_reports(session, [waits.read_answer(command.answer, pair, policy)], settings)
        if applied.unreadable:
            member = msgspec.json.decode(f"{{{command.answer}}}", type=dict[str, msgspec.Raw])
            raise errors.InvalidParams(next(iter(member)), f"cannot be kept: {applied.unreadable[0].reason}")
        await waits.note_answers(session, [(kept, pair, command.digest)])
        return Answered(id=pair[0], state=await _state_of(session, pair[0]), kept=False, duplicate=False)
    if token["active"]:
        await session.fetch("end_waits", [kept])  # its task was cancelled at this very moment
    waited = None if pair is None else (pair[0], await _state_of(session, pair[0]))
    told = answer_again(command, token["digest"], waited)
    if not told.duplicate:
        await session.fetch("keep_next_answers", [kept], [answer], [command.digest])
    return told


def answer_again(command: AnswerWait, digest: bytes | None, waited: tuple[int, State | None] | None) -> Answered:
    """What a known token for which no task waits now says to an answer; KEPT: it is to be kept.

    digest: of the answer that the token has. waited: id and state of the task that did. Raises as `answer_wait`.
    """
    task_id, state = waited or (None, None)
    if digest == command.digest:
        return Answered(id=task_id, state=state, kept=task_id is None, duplicate=True)
    if task_id is None:
        raise errors.AnsweredAlready(None, None)
    if state is None:
        raise errors.TaskNotFound(task_id)
    if state.final or claim_of_token(command.token) is not None:
        if digest is not None:
            raise errors.AnsweredAlready(task_id, state)
        raise errors.StateConflict(task_id, state, "answered")
    return KEPT  # the attempt that waited is over, and another is to come, which may wait for the same token


async def _state_of(session: Session, task_id: int) -> State | None:
    rows = await session.fetch("read_states", [task_id])
    return State(rows[0]["state"]) if rows else None


async def give_up_overdue(session: Session, limit: int, settings: Settings, *, now: datetime | None = None) -> int:
    """End up to ``limit`` overdue waits, longest first, inside a transaction; returns how many.

    Each is a failed attempt of its task, the last one where its handler said so. One whose ordering key another
    transaction holds is left for the next round.
    """

    async def give_up(overdue: Sequence[asyncpg.Record], hurried: bool) -> int:
        policies = {(row["task_id"], row["claim"]): waits.read_policy(row["policy"]) for row in overdue}
        async with session.savepoint(hurried=hurried):
            resumed = await waits.resume_waits(session, policies)
            ended = [waits.timed_out(pair, policy) for pair, policy in policies.items() if pair in resumed]
            await apply_reports(session, ended, settings)
            await session.fetch("end_waits", [row["token"] for row in overdue])
            await session.fetch("end_waits_of", [pair[0] for pair in resumed])
        metrics.WAITS_ENDED.labels("timeout").inc(len(resumed))
        return len(overdue)

    async def leave(overdue: asyncpg.Record, error: errors.PenstockError) -> int:
        log.warning("overdue_wait_left", task_id=overdue["task_id"], reason=str(error))
        return 0

    return sum(await in_halves(await session.fetch("find_overdue_waits", limit, now), give_up, leave))
