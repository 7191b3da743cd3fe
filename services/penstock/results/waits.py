"""Suspend tasks until an outside event, whichever comes first, the wait or its answer."""

from collections.abc import Iterable, Mapping, Sequence

import asyncpg
import msgspec

from penstock.db.session import Pair, Session, columns, columns_of
from penstock.payloads.codec import aad_of
from penstock.protocol import reports
from penstock.protocol.errors import STATE_CONFLICT, TASK_TIMEOUT, PayloadLost, PayloadUnavailable
from penstock.protocol.journal import Entry, StepPlace
from penstock.protocol.reports import Failed, Hints, Succeeded, Suspended, Waiting, WaitPolicy
from penstock.protocol.task import State
from penstock.runtime import metrics
from penstock.runtime.logs import log

_AT_ONCE = 500

Ended = Succeeded | Failed | Suspended
"""The outcome of a wait. Suspended: of a durable step's, whose handler goes on."""

read_policy = msgspec.json.Decoder(WaitPolicy).decode
"""How a failure of a wait is retried, as it is stored."""


async def begin_waits(
    session: Session, waits: Sequence[Waiting], default_seconds: float
) -> tuple[int, dict[Pair, Ended]]:
    """Suspend tasks whose claim holds, inside a transaction; the others are ignored. Of a task, all are of one claim.

    A task whose answer came first is settled by it; one whose token another task waits for has failed.
    default_seconds: the timeout of a wait that gives none. Returns how many are suspended, and the outcomes of others.
    """
    suspended: set[Pair] = set()
    settled: dict[Pair, Ended] = {}
    todo = list(waits)
    while todo:
        part: dict[str, Waiting] = {}  # one of each token: a statement takes no row twice
        for wait in todo[:_AT_ONCE]:
            part.setdefault(wait.token, wait)
        todo = [wait for wait in todo if part.get(wait.token) is not wait]
        # What tasks wait for, as it is stored; claims that no longer hold are left out.
        rows = await session.fetch(
            "note_waits", *columns_of(part.values(), "task_id", "claim"), list(part),
            [default_seconds if w.timeout is None else w.timeout for w in part.values()],
            [msgspec.json.encode(w.policy).decode() for w in part.values()],
            [reports.claim_of_token(token) is None for token in part],
        )  # fmt: skip
        if others := [row for row in rows if not row["noted"]]:
            settled |= await _settle_others(session, others, part)
        noted = [((row["id"], row["claim"]), row) for row in rows if row["noted"]]
        held = await _suspend(session, {pair: row for pair, row in noted if pair not in settled}, part)
        suspended |= held
        # Cancelled or repaired since it was looked at, or settled by another token.
        if ended := [row["token"] for pair, row in noted if pair not in held]:
            await session.fetch("end_waits", ended)
    return len(suspended - settled.keys()), settled


async def _suspend(session: Session, noted: Mapping[Pair, asyncpg.Record], waits: Mapping[str, Waiting]) -> set[Pair]:
    """ACQUIRED to WAITING where it is not yet; returns those whose claim holds. waits: by token."""
    if not noted:
        return set()
    workers = [waits[row["given"]].worker for row in noted.values()]
    rows = await session.fetch("suspend_tasks", *columns(noted), workers)
    held = {(row["id"], row["claim"]) for row in rows}
    for pair in held:
        if noted[pair]["state"] == State.ACQUIRED:
            metrics.TRANSITIONS.labels(noted[pair]["action"], State.WAITING).inc()
    return held


async def _settle_others(
    session: Session, others: Sequence[asyncpg.Record], waits: Mapping[str, Waiting]
) -> dict[Pair, Ended]:
    """The outcomes of waits whose token has an answer or a task already. Of a task, one answer counts."""
    rows = await session.fetch("read_tokens", [row["token"] for row in others])
    known = {row["token"]: row for row in rows}  # they are locked, so all are there
    failed: dict[Pair, Ended] = {}
    answers: dict[Pair, tuple[asyncpg.Record, str]] = {}
    for row in others:
        pair, name, policy = (row["id"], row["claim"]), row["token"], waits[row["given"]].policy
        token = known[name]
        if token["answer"] is not None:
            try:
                answer = session.codec.decode_inline(token["answer"], aad_of("answer", name))
                answers.setdefault(pair, (row, answer))
            except (PayloadUnavailable, PayloadLost) as exc:
                # The answer stays, for the next attempt that waits for its token.
                problem = f"the answer that came before it waited cannot be read: {exc}"
                failed[pair] = _failed(pair, policy, problem, type="AnswerNotRead")
        elif pair_of(token) not in (None, pair):
            failed[pair] = token_taken(pair, policy, token["task_id"])
    settled = {pair: one for pair, one in failed.items() if pair not in answers}
    held = await _suspend(session, {pair: row for pair, (row, _) in answers.items()}, waits)
    answered: list[tuple[str, Pair, bytes]] = []
    for pair in held:  # an answer is not spent on a claim that holds no more
        row, answer = answers[pair]
        settled[pair] = read_answer(answer, pair, waits[row["given"]].policy)
        answered.append((row["token"], pair, known[row["token"]]["digest"]))
        log.info("wait_answered_before", task_id=pair[0], claim=pair[1])
    if answered:
        await resume_waits(session, held)
        await note_answers(session, answered)
    return settled


def token_taken(pair: Pair, policy: Hints, holder: int) -> Failed:
    """The failure of a wait for a token that another task waits for."""
    problem = f"task {holder} waits for the same token; a token is one task's at a time"
    return _failed(pair, policy, problem, type="TokenTaken", holder=holder)


def _failed(pair: Pair, policy: Hints, problem: str, **data: object) -> Failed:
    error = reports.error_text(STATE_CONFLICT, problem, **data, message=problem)
    return Failed(*pair, None, error, Hints(None, False, policy.max_attempts, policy.backoff))


def read_answer(answer: str, pair: Pair, policy: WaitPolicy) -> Ended:
    """An answer, a member of a JSON-RPC response, as if the worker of that claim had given it."""
    report = reports.decode_report(f'{{"jsonrpc":"2.0",{answer},"id":"{pair[0]}:{pair[1]}"}}')
    if isinstance(report, Failed) and policy.step is not None:
        return resumed(pair, policy.step, error=report.error)
    if isinstance(report, Failed):
        hints = Hints(report.hints.retry_after, report.hints.final, policy.max_attempts, policy.backoff)
        return Failed(*pair, None, report.error, hints)
    assert isinstance(report, Succeeded)  # it was checked before it was kept
    return report if policy.step is None else resumed(pair, policy.step, report.result)


def resumed(pair: Pair, step: StepPlace, result: str = "", *, error: str = "") -> Suspended:
    """The end of an event that a durable step waits for: its task goes on in its handler at once."""
    return Suspended(*pair, steps=(Entry.of(step, error or result, is_error=bool(error)),))


def timed_out(pair: Pair, policy: WaitPolicy) -> Ended:
    """The outcome of a wait for which no answer came in time."""
    problem = "no answer came before its wait timed out"
    error = reports.error_text(TASK_TIMEOUT, problem, type="WaitTimeout", message=problem)
    return Failed(*pair, None, error, policy) if policy.step is None else resumed(pair, policy.step, error=error)


async def resume_waits(session: Session, pairs: Iterable[Pair]) -> set[Pair]:
    """WAITING to ACQUIRED, to be settled in the same transaction; returns those that waited."""
    rows = await session.fetch("resume_waits", *columns(pairs))
    return {(row["id"], row["claim"]) for row in rows}


async def note_answers(session: Session, answered: Sequence[tuple[str, Pair, bytes]]) -> None:
    """Note that these tokens gave their tasks an answer of that digest; their tasks wait for nothing any more."""
    tokens, pairs, digests = map(list, zip(*answered, strict=True))
    ids, claims = columns(pairs)
    await session.fetch("note_answers", tokens, ids, claims, digests)
    await session.fetch("end_waits_of", ids)


def pair_of(row: asyncpg.Record) -> Pair | None:
    """Whose token it is, of a row of ``read_tokens`` or ``keep_answers``."""
    return None if row["task_id"] is None else (row["task_id"], row["claim"])
