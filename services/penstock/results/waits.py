"""Suspend tasks until an outside event, whichever comes first, the wait or its answer."""

from collections.abc import Iterable, Mapping, Sequence

import asyncpg
import msgspec

from penstock.db.session import Session
from penstock.payloads.codec import aad_of
from penstock.protocol import reports
from penstock.protocol.errors import STATE_CONFLICT, TASK_TIMEOUT, PayloadLost, PayloadUnavailable
from penstock.protocol.journal import Entry, StepPlace
from penstock.protocol.reports import Failed, Hints, Succeeded, Suspended, Waiting, WaitPolicy
from penstock.protocol.task import State
from penstock.runtime import metrics
from penstock.runtime.logs import log
from penstock.tasks.records import Pair, columns, columns_of

_AT_ONCE = 500

Ended = Succeeded | Failed | Suspended
"""The outcome of a wait. Suspended: of a durable step's, whose handler goes on."""

_decode_policy = msgspec.json.Decoder(WaitPolicy).decode


async def begin_waits(session: Session, waits: Sequence[Waiting], default_seconds: float) -> tuple[int, list[Ended]]:
    """Suspend tasks whose claim holds, inside a transaction; the others are ignored. Ids are distinct.

    A task whose answer came first is settled by it; one whose token another task waits for has failed.
    default_seconds: the timeout of a wait that gives none. Returns how many are suspended, and the outcomes of others.
    """
    count = 0
    settled: list[Ended] = []
    by_pair = {(wait.task_id, wait.claim): wait for wait in waits}
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
        waiting = {(row["id"], row["claim"]): row for row in rows if row["noted"]}
        held = await _suspend(session, waiting, by_pair)
        count += len(held)
        if len(held) < len(waiting):  # cancelled or repaired since it was looked at
            await session.fetch("end_waits", [row["token"] for pair, row in waiting.items() if pair not in held])
        others = {(row["id"], row["claim"]): row for row in rows if not row["noted"]}
        if others:
            settled += await _settle_others(session, others, by_pair)
    return count, settled


async def _suspend(
    session: Session, noted: Mapping[Pair, asyncpg.Record], by_pair: Mapping[Pair, Waiting]
) -> set[Pair]:
    """ACQUIRED to WAITING where it is not yet; returns those whose claim holds."""
    if not noted:
        return set()
    rows = await session.fetch("suspend_tasks", *columns(noted), [by_pair[pair].worker for pair in noted])
    held = {(row["id"], row["claim"]) for row in rows}
    for pair in held:
        if noted[pair]["state"] == State.ACQUIRED:
            metrics.TRANSITIONS.labels(noted[pair]["action"], State.WAITING).inc()
    return held


async def _settle_others(
    session: Session, others: Mapping[Pair, asyncpg.Record], by_pair: Mapping[Pair, Waiting]
) -> list[Ended]:
    """The outcomes of waits whose token has an answer or a task already."""
    tokens = {pair: row["token"] for pair, row in others.items()}
    rows = await session.fetch("read_tokens", list(tokens.values()))
    known = {row["token"]: row for row in rows}  # they are locked, so all are there
    settled: list[Ended] = []
    answers: dict[Pair, str] = {}
    for pair, name in tokens.items():
        token, policy = known[name], by_pair[pair].policy
        if token["answer"] is not None:
            try:
                answers[pair] = session.codec.decode_inline(token["answer"], aad_of("answer", name))
            except (PayloadUnavailable, PayloadLost) as exc:
                # The answer stays, for the next attempt that waits for its token.
                problem = f"the answer that came before it waited cannot be read: {exc}"
                settled.append(_failed(pair, policy, problem, type="AnswerNotRead"))
        elif pair_of(token) not in (None, pair):
            settled.append(token_taken(pair, policy, token["task_id"]))
    held = await _suspend(session, {pair: others[pair] for pair in answers}, by_pair)
    answered: list[tuple[str, Pair, bytes]] = []
    for pair in held:  # an answer is not spent on a claim that holds no more
        settled.append(read_answer(answers[pair], pair, by_pair[pair].policy))
        answered.append((tokens[pair], pair, known[tokens[pair]]["digest"]))
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
    ids, claims = columns(pair for _, pair, _ in answered)
    await session.fetch(
        "note_answers", [token for token, _, _ in answered], ids, claims, [digest for _, _, digest in answered]
    )
    await session.fetch("end_waits_of", ids)


def pair_of(row: asyncpg.Record) -> Pair | None:
    """Whose token it is, of a row of ``read_tokens`` or ``keep_answers``."""
    return None if row["task_id"] is None else (row["task_id"], row["claim"])


def read_policy(text: str | None) -> WaitPolicy:
    """How a failure of a wait is retried, as it is stored."""
    return WaitPolicy() if text is None else _decode_policy(text)
