"""What reports from workers do to tasks: results, failures and signs of life, fenced by claim, in one transaction.

The resulter applies what comes through the results queue; the api uses the same for a replayed rejected message,
the supervisor for tasks whose worker fell silent.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec

from penstock.db.session import Session
from penstock.payloads.codec import result_aad, spawn_aad
from penstock.payloads.failures import encrypt_error, encrypt_progress
from penstock.protocol.errors import HANDLER_ERROR, TOO_LARGE, PayloadLost, PayloadUnavailable, RpcError, SettingsError
from penstock.protocol.json_text import utf8_size
from penstock.protocol.reports import (
    Failed,
    Hints,
    Progress,
    Report,
    RunTimes,
    Succeeded,
    Unreadable,
    Waiting,
    encode_sealed_result,
)
from penstock.protocol.retry import Backoff
from penstock.protocol.sealed import MARK, is_sealed, reference_of
from penstock.protocol.task import Failure
from penstock.protocol.trace_context import TraceContext
from penstock.results.spawn import Spawner, hold_spawners, read_spawner, refuse_strays, spawn_children
from penstock.results.waits import begin_waits
from penstock.runtime import metrics
from penstock.runtime.logs import get_logger
from penstock.settings.model import Settings
from penstock.tasks import settle
from penstock.tasks.objects import reference_objects
from penstock.tasks.records import Pair

ERROR_LIMIT_BYTES = 32_768  # of one attempt's error; a task may keep as many as it has attempts
LONGEST_RETRY_SECONDS = 10 * 366 * 86_400.0  # Postgres knows no instant that a worker's wildest hint may lead to
_MESSAGE_KEPT_CHARS = 2000
_POSTPONED_SECONDS = 30.0  # until an attempt that was given back is made again
_NOTE_CHARS = 900
_SEAL_BYTES = 200  # the mark, the key's id, nonce and tag of an encrypted text, and their padding
_FINAL = Hints(final=True)  # of a handler that has done its work: it would return the same again

log = get_logger()


Outcome = Succeeded | Failed | Waiting


class _Head(msgspec.Struct):
    code: int
    message: str


_decode_head = msgspec.json.Decoder(_Head).decode


@dataclass(slots=True)
class ApplySummary:
    """What a set of reports did. ``stale``: reports whose claim no longer holds its task; no harm, no change.

    postponed: attempts given back, for their payload could not be had, and results whose tasks cannot be read here.
    """

    succeeded: int = 0
    failed: int = 0
    waiting: int = 0
    postponed: int = 0
    alive: int = 0
    stale: int = 0
    unreadable: list[Unreadable] = field(default_factory=list)

    @property
    def settled(self) -> int:
        return self.succeeded + self.failed


async def apply_reports(session: Session, reports: Sequence[Report], settings: Settings) -> ApplySummary:
    """Record reports, inside a transaction; the caller keeps ``unreadable`` as rejected."""
    summary = ApplySummary()
    sorted_ = _sort(reports)
    summary.unreadable = sorted_.unreadable
    outcomes = await _newest_outcomes(session, sorted_.outcomes, summary)
    if sorted_.any_waits:
        outcomes = await _begin_waits(session, outcomes, summary, settings)
    results: dict[Pair, str] = {}
    workers: dict[Pair, str | None] = {}
    failed: dict[Pair, Failed] = {}
    spawners: dict[Pair, Spawner] = {}
    limit = settings.result_limit_bytes
    codec = session.codec
    encrypts = codec.encrypts
    for task_id, (claim, report) in outcomes.items():
        if type(report) is Succeeded:
            size, most = utf8_size(report.result), limit
            problem: Failed | None = None
            if is_sealed(report.result):
                size, most = _size_of_sealed(report.result, size, settings)
            if size > most:
                problem = _too_large(report, size, most)
            elif report.spawn:
                try:
                    opened = codec.decode_inline(report.spawn, spawn_aad(task_id))
                    spawners[task_id, claim] = read_spawner(opened, settings, report.trace)
                except RpcError as exc:
                    problem = _bad_children(report, exc)
                except (PayloadUnavailable, PayloadLost) as exc:
                    summary.unreadable.append(_not_opened(report, session.fence.name(task_id, claim), exc))
                    summary.postponed += 1
                    continue
            if problem is None:
                results[task_id, claim] = (
                    codec.encode(report.result, result_aad(task_id)) if encrypts else report.result
                )
                workers[task_id, claim] = report.worker
                continue
            report = problem
        if type(report) is Failed:
            failed[task_id, claim] = report
    for pair in await _taken_by_others(session, results):
        report = outcomes[pair[0]][1]
        assert isinstance(report, Succeeded)  # no other has a result
        failed[pair] = _not_its_own(report)
        del results[pair], workers[pair]
        spawners.pop(pair, None)
    held = await hold_spawners(session, spawners) if spawners else {}
    if held:
        for pair, reason in (await refuse_strays(session, spawners, held, settings.spawn_actions)).items():
            del held[pair], results[pair], workers[pair]
            report = outcomes[pair[0]][1]
            assert isinstance(report, Succeeded)  # no other brings tasks along
            failed[pair] = _bad_children(report, reason)
    summary.succeeded = await settle.finish(session, results, workers)
    sealed = [(result, pair[0]) for pair, result in results.items() if result.startswith(MARK)]
    if sealed:
        await reference_objects(session, sealed)
    if held:
        await spawn_children(session, spawners, held)
    if failed:
        put_off = {pair: report for pair, report in failed.items() if report.hints.not_begun}
        if put_off:
            summary.postponed += await _postpone(session, put_off)
            failed = {pair: report for pair, report in failed.items() if pair not in put_off}
        summary.failed = await _fail(session, failed, settings)
    summary.stale += len(outcomes) - summary.settled - summary.waiting - summary.postponed
    if sorted_.signs:
        summary.alive = await _note_signs(session, sorted_.signs, outcomes)
    await settle.note_run_times(session, sorted_.run_times)
    if summary.stale:
        metrics.STALE_RESULTS.inc(summary.stale)
    return summary


@dataclass(slots=True)
class _Sorted:
    outcomes: list[Outcome] = field(default_factory=list)
    any_waits: bool = False
    signs: list[Progress] = field(default_factory=list)
    run_times: dict[str, tuple[int, float]] = field(default_factory=dict)
    unreadable: list[Unreadable] = field(default_factory=list)


def _sort(reports: Sequence[Report]) -> _Sorted:
    """Reports by kind; run times are added up."""
    found = _Sorted()
    for report in reports:
        match report:
            case Succeeded() | Failed():
                found.outcomes.append(report)
            case Waiting():
                found.outcomes.append(report)
                found.any_waits = True
            case Progress():
                found.signs.append(report)
            case RunTimes():
                for action, (count, seconds) in report.actions.items():
                    before = found.run_times.get(action, (0, 0.0))
                    found.run_times[action] = before[0] + count, before[1] + seconds
            case Unreadable():
                found.unreadable.append(report)
    return found


async def _taken_by_others(session: Session, results: Mapping[Pair, str]) -> list[Pair]:
    """Results that name an object of another task, which the worker could only have read about."""
    named = {}
    for pair, result in results.items():
        reference = reference_of(result)
        if reference is not None:
            named[pair] = reference.name
    if not named:
        return []
    owners = {tuple(row) for row in await session.fetch("find_owners", list(named.values()))}
    owned = {name for name, _ in owners}
    return [pair for pair, name in named.items() if name in owned and (name, pair[0]) not in owners]


async def _newest_outcomes(
    session: Session, reports: Sequence[Outcome], summary: ApplySummary
) -> dict[int, tuple[int, Outcome]]:
    """One outcome a task, of its newest claim: the statements need distinct ids. Older ones count as stale."""
    by_attempt = [
        (r.task_id, r.attempt)
        for r in reports
        if r.claim is None and not isinstance(r, Waiting) and r.attempt is not None
    ]
    claims = await settle.find_claims(session, by_attempt)
    newest: dict[int, tuple[int, Outcome]] = {}
    for report in reports:
        claim = report.claim
        if claim is None and not isinstance(report, Waiting) and report.attempt is not None:
            claim = claims.get((report.task_id, report.attempt))
        held = newest.get(report.task_id)
        if claim is None or (held is not None and held[0] >= claim):
            summary.stale += 1
            log.info("stale_result", task_id=report.task_id, claim=claim)
            continue
        if held is not None:
            summary.stale += 1
        newest[report.task_id] = (claim, report)
    return newest


async def _note_signs(session: Session, signs: Sequence[Progress], outcomes: Mapping[int, tuple[int, Outcome]]) -> int:
    """Record signs of life, of each task the newest claim's last; an outcome that came with it says more."""
    newest: dict[int, Progress] = {}
    for sign in signs:
        settled = outcomes.get(sign.task_id)
        held = newest.get(sign.task_id)
        if settled is not None and settled[0] == sign.claim:
            continue
        if held is not None and (held.claim > sign.claim or (held.claim == sign.claim and sign.detail is None)):
            continue
        newest[sign.task_id] = sign
    codec = session.codec
    return await settle.note_heartbeats(
        session,
        {(sign.task_id, sign.claim): encrypt_progress(codec, sign.task_id, sign.detail) for sign in newest.values()},
        {(sign.task_id, sign.claim): sign.worker for sign in newest.values()},
    )


async def _begin_waits(
    session: Session, outcomes: Mapping[int, tuple[int, Outcome]], summary: ApplySummary, settings: Settings
) -> dict[int, tuple[int, Outcome]]:
    """Put to wait what is to; what has its answer already has it in the place of its wait."""
    waits = [report for _, report in outcomes.values() if type(report) is Waiting]
    outcome = await begin_waits(session, waits, settings.wait_timeout_seconds)
    summary.waiting = outcome.waiting
    settled = {report.task_id: (report.claim or 0, report) for report in outcome.settled}
    return {**outcomes, **settled}


async def _postpone(session: Session, failed: Mapping[Pair, Failed]) -> int:
    """Give attempts back that never began, to be made again a while later."""
    reports = list(failed.values())
    delays = [_POSTPONED_SECONDS * random.uniform(0.8, 1.2) for _ in reports]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    notes = [json.dumps({"percent": None, "note": f"put off at {now}: {_message_of(r.error)}"}) for r in reports]
    ids, claims = [pair[0] for pair in failed], [pair[1] for pair in failed]
    rows = await session.fetch("postpone_tasks", ids, claims, delays, notes)
    for row in rows:
        metrics.TRANSITIONS.labels(row["action"], row["state"]).inc()
        metrics.PAYLOADS_POSTPONED.labels(row["action"]).inc()
        log.warning("task_put_off", task_id=row["id"], action=row["action"])
    return len(rows)


def _message_of(error: str) -> str:
    return _decode_head(error).message[:_NOTE_CHARS].replace("\0", "\ufffd")


def _not_opened(report: Succeeded, claim_id: str, exc: Exception) -> Unreadable:
    """A result whose spawned tasks cannot be read here: it is kept, and its task is run again if nobody replays it."""
    return Unreadable(
        encode_sealed_result(claim_id, report.result, report.spawn), f"its spawned tasks cannot be read: {exc}"
    )


async def _fail(session: Session, failed: dict[Pair, Failed], settings: Settings) -> int:
    attempts = await settle.read_attempts(session, failed)
    failures = []
    for (task_id, claim), (attempt, max_attempts) in attempts.items():
        report = failed[task_id, claim]
        delay = delay_after(attempt, max_attempts, report.hints, settings.backoff)
        error = encrypt_error(session.codec, task_id, bounded_error(report.error))
        if report.trace is not None:
            error = _with_trace(error, report.trace)
        failures.append(Failure(task_id, claim, error, delay, worker=report.worker))
    settled = await settle.fail(session, failures, hold_keys=settings.holds_ordering_keys)
    for failure in failures:
        is_last = failure.delay_seconds is None
        (log.warning if is_last else log.info)(
            "task_given_up" if is_last else "task_failed",
            task_id=failure.id, claim=failure.claim, attempt=attempts[failure.id, failure.claim][0],
            delay_seconds=None if failure.delay_seconds is None else round(failure.delay_seconds, 3),
        )  # fmt: skip
    return len(settled)


def bounded_error(error: str) -> str:
    """The error's JSON text, cut to its code and message when it is longer than is kept."""
    size = utf8_size(error)
    if size <= ERROR_LIMIT_BYTES:
        return error
    try:
        head = _decode_head(error)  # its data skipped: a number of 5,000 digits in it would be an error of its own
    except RecursionError:
        head = _Head(HANDLER_ERROR, "an error nested too deeply to be kept")
    kept = {"code": head.code, "message": head.message[:_MESSAGE_KEPT_CHARS], "data": {"truncated_from": size}}
    return json.dumps(kept)


def _with_trace(error: str, trace: TraceContext) -> str:
    """An error object that names the attempt, for the next one to link to; where it does so itself, ours counts."""
    return f'{error.rstrip()[:-1]},"traceparent":"{trace.traceparent}"}}'


def _size_of_sealed(result: str, size: int, settings: Settings) -> tuple[int, int]:
    """Bytes of a result that its worker has sealed, as they count, and their limit.

    The worker is not believed: an object may state any size, and readers of the result make room for it.
    """
    reference = reference_of(result)
    if reference is not None:
        return reference.size, settings.largest_result_bytes
    return size, settings.result_limit_bytes * 4 // 3 + _SEAL_BYTES  # it is base64


def _too_large(report: Succeeded, size: int, limit: int) -> Failed:
    setting = "PENSTOCK_RESULT_LIMIT_BYTES" if reference_of(report.result) is None else "PENSTOCK_PAYLOAD_MAX_BYTES"
    error = {
        "code": TOO_LARGE,
        "message": f"the result is {size} bytes; the limit is {limit} ({setting})",
        "data": {"type": "ResultTooLarge", "size": size, "limit": limit},
    }
    return Failed(report.task_id, report.claim, report.attempt, json.dumps(error), _FINAL, report.trace, report.worker)


def _not_its_own(report: Succeeded) -> Failed:
    text = "the result names an object of another task"
    error = {"code": HANDLER_ERROR, "message": text, "data": {"type": "BadEncoding", "message": text}}
    return Failed(report.task_id, report.claim, report.attempt, json.dumps(error), Hints(), report.trace, report.worker)


def _bad_children(report: Succeeded, exc: RpcError) -> Failed:
    error = {"code": exc.code, "message": exc.message, "data": {"type": "BadChildren", "message": exc.message}}
    return Failed(report.task_id, report.claim, report.attempt, json.dumps(error), _FINAL, report.trace, report.worker)


def delay_after(attempt: int, max_attempts: int, hints: Hints, backoff: Backoff) -> float | None:
    """Seconds until the next attempt after the failed one of that number, or None when it was the last.

    A worker's hints steer: ``final`` ends, ``max_attempts`` lowers the cap, ``retry_after`` sets this delay,
    ``backoff`` is the action's own policy. Hints that make no sense are ignored.
    """
    cap = max_attempts
    if hints.max_attempts is not None and hints.max_attempts >= 1:
        cap = min(cap, hints.max_attempts)
    if hints.final or attempt >= cap:
        return None
    if hints.retry_after is not None and 0 <= hints.retry_after <= LONGEST_RETRY_SECONDS:
        return hints.retry_after
    if hints.backoff is not None:
        own = hints.backoff
        try:
            backoff = Backoff(own.base_seconds, own.factor, own.cap_seconds, own.jitter)
        except SettingsError:
            log.warning("backoff_hint_ignored", base_seconds=own.base_seconds, factor=own.factor)
    return min(backoff.delay_seconds(attempt), LONGEST_RETRY_SECONDS)
