"""How tasks begin to wait for an outside event, whichever comes first, the wait or its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.db.session import Session
from penstock.payloads.codec import answer_aad
from penstock.protocol.errors import STATE_CONFLICT, PayloadLost, PayloadUnavailable
from penstock.protocol.reports import Failed, Hints, Succeeded, Waiting, decode_report
from penstock.results.wait_store import (
    NewWait,
    end_waits,
    note_answers,
    note_waits,
    read_tokens,
    resume_waits,
    suspend,
)
from penstock.runtime.logs import get_logger
from penstock.tasks.records import Pair

_AT_ONCE = 500

log = get_logger()


@dataclass(slots=True)
class WaitOutcome:
    """``waiting``: how many tasks wait from now on. ``settled``: what is to be recorded of others in its place."""

    waiting: int = 0
    settled: list[Succeeded | Failed] = field(default_factory=list)


async def begin_waits(session: Session, waits: Sequence[Waiting], default_seconds: float) -> WaitOutcome:
    """Put tasks to wait, inside a transaction, those whose claim holds; of others nothing is said.

    Ids are distinct. One whose answer came first is not put to wait but settled by it; one whose token another task
    waits for has failed.
    """
    outcome = WaitOutcome()
    workers = {(wait.task_id, wait.claim): wait.worker for wait in waits}
    todo = list(waits)
    while todo:
        part: dict[str, Waiting] = {}  # one of each token: a statement takes no row twice
        for wait in todo[:_AT_ONCE]:
            part.setdefault(wait.token, wait)
        todo = [wait for wait in todo if part.get(wait.token) is not wait]
        noted = await note_waits(session, list(part.values()), default_seconds)
        waiting = [one for one in noted if one.noted]
        held = await suspend(session, waiting, workers)
        outcome.waiting += len(held)
        if len(held) < len(waiting):  # cancelled or repaired since it was looked at
            await end_waits(session, [one.token for one in waiting if one.pair not in held])
        others = [one for one in noted if not one.noted]
        if others:
            policies = {(wait.task_id, wait.claim): wait.policy for wait in part.values()}
            outcome.settled += await _settle_others(session, others, policies, workers)
    return outcome


async def _settle_others(
    session: Session, others: Sequence[NewWait], policies: Mapping[Pair, Hints], workers: Mapping[Pair, str | None]
) -> list[Succeeded | Failed]:
    """Of waits whose token has an answer or a task already."""
    known = await read_tokens(session, [one.token for one in others])  # they are locked, so all are there
    settled: list[Succeeded | Failed] = []
    answers: dict[str, str] = {}
    for one in others:
        answer = known[one.token].answer
        if answer is not None:
            try:
                answers[one.token] = session.codec.decode_inline(answer, answer_aad(one.token))
            except (PayloadUnavailable, PayloadLost) as exc:
                settled.append(_unread(one.pair, exc, policies[one.pair]))
    held = await suspend(session, [one for one in others if one.token in answers], workers)
    answered: list[tuple[str, Pair, bytes]] = []
    for one in others:
        token = known[one.token]
        if token.answer is not None:
            if one.token in answers and one.pair in held:  # an answer is not spent on a claim that holds no more
                assert token.digest is not None
                settled.append(read_answer(answers[one.token], one.pair, policies[one.pair]))
                answered.append((one.token, one.pair, token.digest))
                log.info("wait_answered_before", task_id=one.pair[0], claim=one.pair[1])
        elif token.pair != one.pair:
            assert token.pair is not None
            settled.append(_taken(one.pair, token.pair[0], policies[one.pair]))
    if answered:
        await resume_waits(session, held)
        await note_answers(session, answered)
        await session.fetch("end_waits_of", [pair[0] for _, pair, _ in answered])
    return settled


def _unread(pair: Pair, exc: Exception, policy: Hints) -> Failed:
    """The answer stays, for the next attempt that waits for its token."""
    problem = f"the answer that came before it waited cannot be read: {exc}"
    error = {"code": STATE_CONFLICT, "message": problem, "data": {"type": "AnswerNotRead", "message": problem}}
    return Failed(*pair, None, json.dumps(error), Hints(None, False, policy.max_attempts, policy.backoff))


def _taken(pair: Pair, holder: int, policy: Hints) -> Failed:
    problem = f"task {holder} waits for the same token; a token is one task's at a time"
    error = {
        "code": STATE_CONFLICT,
        "message": problem,
        "data": {"type": "TokenTaken", "message": problem, "holder": holder},
    }
    return Failed(*pair, None, json.dumps(error), Hints(None, False, policy.max_attempts, policy.backoff))


def read_answer(answer: str, pair: Pair, policy: Hints) -> Succeeded | Failed:
    """An answer, a member of a JSON-RPC response, as if the worker of that claim had given it."""
    report = decode_report(f'{{"jsonrpc":"2.0",{answer},"id":"{pair[0]}:{pair[1]}"}}')
    if isinstance(report, Failed):
        hints = Hints(report.hints.retry_after, report.hints.final, policy.max_attempts, policy.backoff)
        return Failed(*pair, None, report.error, hints)
    assert isinstance(report, Succeeded)  # it was checked before it was kept
    return report
