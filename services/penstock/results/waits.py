"""Suspend tasks until an outside event, whichever comes first, the wait or its answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.db.session import Session
from penstock.payloads.codec import answer_aad
from penstock.protocol.errors import STATE_CONFLICT, PayloadLost, PayloadUnavailable
from penstock.protocol.reports import (
    NO_HINTS,
    Failed,
    Hints,
    Succeeded,
    Waiting,
    claim_of_token,
    decode_report,
    error_text,
)
from penstock.protocol.task import State
from penstock.runtime import metrics
from penstock.runtime.logs import get_logger
from penstock.tasks.records import Pair, columns

_AT_ONCE = 500

log = get_logger()
_decode_policy = msgspec.json.Decoder(Hints).decode


@dataclass(frozen=True, slots=True)
class Token:
    """What is known of a token.

    pair: the task that waits or waited for it, with its claim; None for an answer that is kept. active: it waits now.
    answer: kept until a task waits, as a member of a JSON-RPC response. digest: of the answer that was given or is
    kept. policy: how a failure of the wait is retried. fresh: the token was unknown before.
    """

    token: str
    pair: Pair | None
    active: bool
    answer: str | None
    digest: bytes | None
    policy: Hints
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class NewWait:
    """A wait that was reported. state: the task's. token: as it is stored. noted: False if the token has an answer or
    another task already."""

    pair: Pair
    action: str
    state: State
    token: str
    noted: bool


@dataclass(slots=True)
class WaitOutcome:
    """waiting: how many tasks are suspended from now on. settled: what to record of others instead."""

    waiting: int = 0
    settled: list[Succeeded | Failed] = field(default_factory=list)


async def begin_waits(session: Session, waits: Sequence[Waiting], default_seconds: float) -> WaitOutcome:
    """Suspend tasks whose claim holds, inside a transaction; the others are ignored. Ids are distinct.

    A task whose answer came first is settled by it; one whose token another task waits for has failed.
    default_seconds: the timeout of a wait that gives none.
    """
    outcome = WaitOutcome()
    workers = {(wait.task_id, wait.claim): wait.worker for wait in waits}
    todo = list(waits)
    while todo:
        part: dict[str, Waiting] = {}  # one of each token: a statement takes no row twice
        for wait in todo[:_AT_ONCE]:
            part.setdefault(wait.token, wait)
        todo = [wait for wait in todo if part.get(wait.token) is not wait]
        noted = await _note_waits(session, list(part.values()), default_seconds)
        waiting = [one for one in noted if one.noted]
        held = await _suspend(session, waiting, workers)
        outcome.waiting += len(held)
        if len(held) < len(waiting):  # cancelled or repaired since it was looked at
            await session.fetch("end_waits", [one.token for one in waiting if one.pair not in held])
        others = [one for one in noted if not one.noted]
        if others:
            policies = {(wait.task_id, wait.claim): wait.policy for wait in part.values()}
            outcome.settled += await _settle_others(session, others, policies, workers)
    return outcome


async def _note_waits(session: Session, waits: Sequence[Waiting], default_seconds: float) -> list[NewWait]:
    """Note what tasks wait for; claims that no longer hold are left out. Ids and tokens are distinct."""
    rows = await session.fetch(
        "note_waits", [w.task_id for w in waits], [w.claim for w in waits], [w.token for w in waits],
        [default_seconds if w.timeout is None else w.timeout for w in waits],
        [msgspec.json.encode(w.policy).decode() for w in waits], [claim_of_token(w.token) is None for w in waits],
    )  # fmt: skip
    return [
        NewWait((row["id"], row["claim"]), row["action"], State(row["state"]), row["token"], row["noted"])
        for row in rows
    ]


async def _suspend(session: Session, waits: Sequence[NewWait], workers: Mapping[Pair, str | None]) -> set[Pair]:
    """ACQUIRED to WAITING where it is not yet; returns those whose claim holds."""
    if not waits:
        return set()
    ids, claims = columns(wait.pair for wait in waits)
    rows = await session.fetch("suspend_tasks", ids, claims, [workers.get(wait.pair) for wait in waits])
    held = {(row["id"], row["claim"]) for row in rows}
    for wait in waits:
        if wait.pair in held and wait.state is State.ACQUIRED:
            metrics.TRANSITIONS.labels(wait.action, State.WAITING).inc()
    return held


async def _settle_others(
    session: Session, others: Sequence[NewWait], policies: Mapping[Pair, Hints], workers: Mapping[Pair, str | None]
) -> list[Succeeded | Failed]:
    """The outcomes of waits whose token has an answer or a task already."""
    known = await read_tokens(session, [one.token for one in others])  # they are locked, so all are there
    settled: list[Succeeded | Failed] = []
    answers: dict[str, str] = {}
    for one in others:
        answer = known[one.token].answer
        if answer is not None:
            try:
                answers[one.token] = session.codec.decode_inline(answer, answer_aad(one.token))
            except (PayloadUnavailable, PayloadLost) as exc:
                # The answer stays, for the next attempt that waits for its token.
                problem = f"the answer that came before it waited cannot be read: {exc}"
                error = error_text(STATE_CONFLICT, problem, type="AnswerNotRead", message=problem)
                settled.append(_failed(one.pair, error, policies[one.pair]))
    held = await _suspend(session, [one for one in others if one.token in answers], workers)
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
            holder = token.pair[0]
            problem = f"task {holder} waits for the same token; a token is one task's at a time"
            error = error_text(STATE_CONFLICT, problem, type="TokenTaken", message=problem, holder=holder)
            settled.append(_failed(one.pair, error, policies[one.pair]))
    if answered:
        await resume_waits(session, held)
        await note_answers(session, answered)
    return settled


def _failed(pair: Pair, error: str, policy: Hints) -> Failed:
    return Failed(*pair, None, error, Hints(None, False, policy.max_attempts, policy.backoff))


def read_answer(answer: str, pair: Pair, policy: Hints) -> Succeeded | Failed:
    """An answer, a member of a JSON-RPC response, as if the worker of that claim had given it."""
    report = decode_report(f'{{"jsonrpc":"2.0",{answer},"id":"{pair[0]}:{pair[1]}"}}')
    if isinstance(report, Failed):
        hints = Hints(report.hints.retry_after, report.hints.final, policy.max_attempts, policy.backoff)
        return Failed(*pair, None, report.error, hints)
    assert isinstance(report, Succeeded)  # it was checked before it was kept
    return report


async def resume_waits(session: Session, pairs: Iterable[Pair]) -> set[Pair]:
    """WAITING to ACQUIRED, to be settled in the same transaction; returns those that waited."""
    rows = await session.fetch("resume_waits", *columns(pairs))
    return {(row["id"], row["claim"]) for row in rows}


async def note_answers(session: Session, answered: Sequence[tuple[str, Pair, bytes]]) -> None:
    """Note that these tokens gave their tasks an answer of that digest; their tasks wait for nothing any more."""
    ids, claims = columns(pair for _, pair, _ in answered)
    await session.fetch(
        "note_answers", [token for token, _, _ in answered], ids, claims, [digest for _, _, digest in answered]
    )
    await session.fetch("end_waits_of", ids)


async def read_tokens(session: Session, tokens: Sequence[str]) -> dict[str, Token]:
    """The known ones of these tokens."""
    return {row["token"]: read_token(row) for row in await session.fetch("read_tokens", list(tokens))}


def read_token(row: Any, *, fresh: bool = False) -> Token:
    """A row of ``read_tokens`` or ``keep_answers``."""
    pair = None if row["task_id"] is None else (row["task_id"], row["claim"])
    policy = read_policy(row["policy"])
    return Token(row["token"], pair, row["active"], row["answer"], row["digest"], policy, fresh)


def read_policy(text: str | None) -> Hints:
    """How a failure of a wait is retried, as it is stored."""
    return NO_HINTS if text is None else _decode_policy(text)
