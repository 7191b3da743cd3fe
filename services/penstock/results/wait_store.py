"""What tasks wait for, in Postgres: one thin function a statement of ``waits.sql``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from penstock.db.session import Session
from penstock.payloads.codec import answer_aad
from penstock.protocol.reports import NO_HINTS, Hints, Waiting
from penstock.protocol.task import State
from penstock.protocol.wait_tokens import claim_of_token
from penstock.runtime import metrics
from penstock.tasks.records import Pair

_decode_policy = msgspec.json.Decoder(Hints).decode


@dataclass(frozen=True, slots=True)
class Token:
    """What is known of a token.

    pair: the task that waits or waited for it, with its claim; None for an answer that is kept. active: it waits now.
    answer: kept until a task waits, as a member of a JSON-RPC response. digest: of the answer that was given or is
    kept. policy: how a failure of the wait is retried. fresh: nothing was known of it before.
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
    """What became of a wait: ``noted``, or its token has an answer or another task already. ``state``: the task's.
    ``token``: as it is kept, see ``wire.stored_token``."""

    pair: Pair
    action: str
    state: State
    token: str
    noted: bool


async def note_waits(session: Session, waits: Sequence[Waiting], default_seconds: float) -> list[NewWait]:
    """Note what tasks wait for, inside a transaction; of claims that hold no more there is no answer.

    Ids are distinct, and so are tokens. default_seconds: of a wait that does not say how long.
    """
    rows = await session.fetch(
        "note_waits", [w.task_id for w in waits], [w.claim for w in waits], [w.token for w in waits],
        [default_seconds if w.timeout is None else w.timeout for w in waits],
        [msgspec.json.encode(w.policy).decode() for w in waits], [claim_of_token(w.token) is None for w in waits],
    )  # fmt: skip
    return [
        NewWait((row["id"], row["claim"]), row["action"], State(row["state"]), row["token"], row["noted"])
        for row in rows
    ]


async def suspend(session: Session, waits: Sequence[NewWait], workers: Mapping[Pair, str | None]) -> set[Pair]:
    """ACQUIRED to WAITING for each that is not there yet; returns those whose claim holds. workers: who told it."""
    if not waits:
        return set()
    rows = await session.fetch(
        "suspend_tasks", [wait.pair[0] for wait in waits], [wait.pair[1] for wait in waits],
        [workers.get(wait.pair) for wait in waits],
    )  # fmt: skip
    held = {(row["id"], row["claim"]) for row in rows}
    for wait in waits:
        if wait.pair in held and wait.state is State.ACQUIRED:
            metrics.TRANSITIONS.labels(wait.action, State.WAITING).inc()
    return held


async def resume_waits(session: Session, pairs: Iterable[Pair]) -> set[Pair]:
    """WAITING to ACQUIRED, to be settled in the same transaction; returns those that waited."""
    listed = list(pairs)
    rows = await session.fetch("resume_waits", [pair[0] for pair in listed], [pair[1] for pair in listed])
    return {(row["id"], row["claim"]) for row in rows}


async def read_tokens(session: Session, tokens: Sequence[str]) -> dict[str, Token]:
    """What is known of these tokens."""
    return {row["token"]: _token(row) for row in await session.fetch("read_tokens", list(tokens))}


async def keep_answer(session: Session, token: str, answer: str, digest: bytes) -> Token:
    """Keep an answer if nothing is known of its token; returns what is, locked."""
    (row,) = await session.fetch("keep_answers", [token], [_sealed(session, token, answer)], [digest])
    return _token(row, fresh=row["fresh"])


async def keep_next_answer(session: Session, token: str, answer: str, digest: bytes) -> None:
    """Keep an answer for the next wait, in the place of what was known of its token."""
    await session.fetch("keep_next_answers", [token], [_sealed(session, token, answer)], [digest])


async def note_answers(session: Session, answered: Sequence[tuple[str, Pair, bytes]]) -> None:
    """These tokens have brought their tasks an answer of that digest."""
    await session.fetch(
        "note_answers", [token for token, _, _ in answered], [pair[0] for _, pair, _ in answered],
        [pair[1] for _, pair, _ in answered], [digest for _, _, digest in answered],
    )  # fmt: skip


async def forget_token(session: Session, token: str) -> None:
    """Know nothing of it any more."""
    await session.fetch("forget_tokens", [token])


async def end_waits(session: Session, tokens: Sequence[str]) -> None:
    """Nobody waits for these tokens any more."""
    await session.fetch("end_waits", list(tokens))


async def find_overdue_waits(session: Session, limit: int, *, now: datetime | None = None) -> list[Token]:
    """Waits whose time is up, longest first, locked."""
    rows = await session.fetch("find_overdue_waits", limit, now)
    return [
        Token(row["token"], (row["task_id"], row["claim"]), True, None, None, _policy(row["policy"])) for row in rows
    ]


async def delete_ended_waits(session: Session, after_seconds: float, *, limit: int, now: datetime | None = None) -> int:
    """Forget answers that nobody came to wait for, and waits that are over; returns how many."""
    gone: int = await session.value("delete_ended_waits", after_seconds, limit, now)
    return gone


def _sealed(session: Session, token: str, answer: str) -> str:
    return session.codec.encode(answer, answer_aad(token))


def _token(row: Any, *, fresh: bool = False) -> Token:
    pair = None if row["task_id"] is None else (row["task_id"], row["claim"])
    return Token(row["token"], pair, row["active"], row["answer"], row["digest"], _policy(row["policy"]), fresh)


def _policy(text: str | None) -> Hints:
    return NO_HINTS if text is None else _decode_policy(text)
