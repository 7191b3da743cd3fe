"""Apply reports from workers to tasks: results, failures and heartbeats, fenced by claim, in one transaction."""

import json
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from typing import Any, get_args

import msgspec

from penstock.db.session import Pair, Session, columns, columns_of
from penstock.limits import reported
from penstock.payloads.codec import aad_of
from penstock.payloads.records import decrypt_error, encrypt_error, encrypt_note, encrypt_progress
from penstock.protocol import reports
from penstock.protocol.errors import HANDLER_ERROR, TOO_LARGE, PayloadLost, PayloadUnavailable, RpcError, SettingsError
from penstock.protocol.journal import StepKey, carried, encode_step
from penstock.protocol.json_text import replace_unstorable, utf8_size
from penstock.protocol.reports import Outcome
from penstock.protocol.retry import Backoff
from penstock.protocol.sealed import MARK, SEALED_ENCODING, is_sealed, reference_of
from penstock.protocol.task import Failure
from penstock.results.spawn import Spawner, read_spawner, refuse_strays, spawn_children
from penstock.results.waits import begin_waits
from penstock.runtime import metrics
from penstock.runtime.logs import log
from penstock.settings.model import Settings
from penstock.tasks import journal, output, settle
from penstock.tasks.enqueue import reference_objects

ERROR_LIMIT_BYTES = 32_768  # of one attempt's error; a task may keep as many as it has attempts
LONGEST_RETRY_SECONDS = 10 * 366 * 86_400.0  # a worker's hint may exceed the instants that Postgres knows
_MESSAGE_KEPT_CHARS = 2000
_POSTPONED_SECONDS = 30.0  # until the next try of an attempt that was given back
# Until a task is sent again that a worker without its handler gave back: half of what it has waited, at least the first
# and at most the last, or the middle one where other workers announce its action. An announcement ends the wait.
_UNKNOWN_FIRST_SECONDS, _UNKNOWN_HERE_SECONDS, _UNKNOWN_SECONDS = 5.0, 60.0, 3600.0
_NOTE_CHARS = 900
_SEAL_BYTES = 200  # the mark, the key's id, nonce and tag of an encrypted text, and their padding
_FEW = 10  # results of a message or ten, one each
_FINAL = reports.Hints(final=True)  # the handler has done its work and would return the same again

_KINDS: dict[Any, Any] = dict.fromkeys(get_args(Outcome), "outcome")  # of any other report: its type


class _Head(msgspec.Struct):
    code: int
    message: str


_decode_head = msgspec.json.Decoder(_Head).decode


@dataclass(slots=True)
class ApplySummary:
    succeeded: int = 0
    failed: int = 0
    waiting: int = 0
    suspended: int = 0  # that go on later, in another attempt
    postponed: int = 0  # attempts given back that do not count, and results whose spawned tasks cannot be read
    alive: int = 0
    output: int = 0  # parts of output stored
    stale: int = 0  # reports whose claim no longer holds its task; they changed nothing
    unreadable: list[reports.Unreadable] = field(default_factory=list)

    @property
    def settled(self) -> int:
        return self.succeeded + self.failed


def plain_results(
    received: Sequence[reports.Report], settings: Settings
) -> tuple[Sequence[reports.Succeeded], Sequence[reports.Report]]:
    """The results of a few tasks, and the run times, if there is nothing else; or nothing, and everything."""
    times = [report for report in received if type(report) is reports.RunTimes]
    count = len(received) - len(times)
    if count > _FEW:
        return (), received
    plain = [
        report
        for report in received
        if type(report) is reports.Succeeded
        and report.claim is not None
        and not (report.spawn or report.steps or is_sealed(report.result))
        and _check_size(report, settings) is None
    ]
    return (plain, times) if count == len({one.task_id for one in plain}) else ((), received)


async def apply_reports(session: Session, received: Sequence[reports.Report], settings: Settings) -> ApplySummary:
    """Record reports, inside a transaction; the caller keeps ``unreadable`` as rejected."""
    kinds: defaultdict[Any, list[Any]] = defaultdict(list)
    for report in received:
        kinds[_KINDS.get(type(report), type(report))].append(report)
    summary = ApplySummary(unreadable=kinds[reports.Unreadable])
    given: list[Outcome] = kinds["outcome"]
    steps: list[reports.Stepped] = kinds[reports.Stepped]
    for outcome in given:
        if outcome.steps and outcome.claim is not None:
            steps += [reports.Stepped(outcome.task_id, outcome.claim, one, outcome.worker) for one in outcome.steps]
    held = [hold for outcome in given if type(outcome) is reports.Failed and (hold := hold_of(outcome)) is not None]
    if held:  # before anything else is locked: a change of limits locks them first, and then tasks
        await reported.hold(session, held)
    full = await _record_steps(session, steps, summary, settings)  # also of old claims: the steps have run
    if parts := kinds[reports.Output]:
        summary.output = await output.record(session, parts, limit_bytes=settings.output_limit_bytes)
    shared, sharing = _as_sent(session, kinds[reports.SharedResult], given, settings)
    outcomes = await _newest_outcomes(session, given, summary)
    if waits := _waits_of(outcomes, given):
        summary.stale -= len(waits) - len({wait.task_id for wait in waits})
        summary.waiting, answered = await begin_waits(session, waits, settings.wait_timeout_seconds)
        outcomes |= answered
        resumed = {pair: one for pair, one in answered.items() if type(one) is reports.Suspended}
        finished = [reports.Stepped(*pair, entry) for pair, one in resumed.items() for entry in one.steps]
        full |= await _record_steps(session, finished, summary, settings)
    if full:
        outcomes |= {
            pair: _without_room(report)
            for pair, report in outcomes.items()
            if type(report) is reports.Suspended and any((pair[0], step.key) in full for step in report.steps)
        }
    await _settle(session, outcomes, shared, summary, settings)
    summary.stale += len(outcomes) + sharing - summary.settled - summary.waiting - summary.postponed - summary.suspended
    if heartbeats := kinds[reports.Progress]:
        summary.alive = await _note_heartbeats(session, heartbeats, outcomes)
    await settle.note_run_times(session, *(report.actions for report in kinds[reports.RunTimes]))
    if announcements := kinds[reports.Announced]:
        await reported.announce(session, announcements)
    metrics.STALE_RESULTS.inc(summary.stale)
    return summary


async def _settle(
    session: Session,
    outcomes: Mapping[Pair, Outcome],
    shared: Sequence[reports.SharedResult],
    summary: ApplySummary,
    settings: Settings,
) -> None:
    succeeded = {pair: one for pair, one in outcomes.items() if type(one) is reports.Succeeded}
    failed = {pair: one for pair, one in outcomes.items() if type(one) is reports.Failed}
    suspended = {pair: one for pair, one in outcomes.items() if type(one) is reports.Suspended}
    spawners: dict[Pair, Spawner] = {}
    for pair, report in [*succeeded.items()]:
        try:
            problem = _check_size(report, settings)
            if problem is None and report.spawn:
                opened = session.codec.decode_inline(report.spawn, aad_of("spawn", pair[0]))
                spawners[pair] = read_spawner(opened, settings, report.trace)
        except RpcError as exc:
            problem = bad_children(report, exc)
        except (PayloadUnavailable, PayloadLost) as exc:
            # The result is kept, and its task runs again unless it is replayed.
            name = session.fence.name(*pair)
            text = reports.encode_result(name, report.result, report.spawn, encoding=SEALED_ENCODING)
            summary.unreadable.append(reports.Unreadable(text, f"its spawned tasks cannot be read: {exc}"))
            summary.postponed += 1
            del succeeded[pair]
            continue
        if problem is not None:
            failed[pair] = problem
            del succeeded[pair]
    for pair in await journal.name_others_objects(session, {pair: report.result for pair, report in succeeded.items()}):
        report, why = succeeded.pop(pair), "the result names an object of another task"
        failed[pair] = as_failed(report, HANDLER_ERROR, why, reports.NO_HINTS, type="BadEncoding", message=why)
        spawners.pop(pair, None)
    locked = await session.fetch("hold_spawners", *columns(spawners)) if spawners else []
    held = {(row["id"], row["claim"]): row for row in locked}  # of claims that hold their task
    if held:
        for pair, reason in (await refuse_strays(session, spawners, held, settings.spawn_actions)).items():
            del held[pair]
            failed[pair] = bad_children(succeeded.pop(pair), reason)
    codec = session.codec
    results = {pair: report.result for pair, report in succeeded.items()}
    if codec.encrypts:
        results = {pair: codec.encode(result, aad_of("result", pair[0])) for pair, result in results.items()}
    workers = {pair: report.worker for pair, report in succeeded.items()}
    summary.succeeded = await settle.finish(session, results, workers, shared)
    await reference_objects(session, [(text, pair[0]) for pair, text in results.items() if text.startswith(MARK)])
    if held:
        await spawn_children(session, spawners, held)
        session.wakes = True
    summary.suspended = await _suspend(session, suspended, failed, settings)
    summary.postponed += await _postpone(session, failed, settings)
    summary.failed = await _fail(session, failed, settings)


def _as_sent(
    session: Session, shared: Sequence[reports.SharedResult], given: list[Outcome], settings: Settings
) -> tuple[Sequence[reports.SharedResult], int]:
    """The shared results and how many tasks they have; or nothing, and ``given`` has them, to be looked at each."""
    ids = [*chain.from_iterable(one.task_ids for one in shared)]
    fit = not session.codec.encrypts and all(utf8_size(one.result) <= settings.result_limit_bytes for one in shared)
    if fit and len({*ids, *(one.task_id for one in given)}) == len(ids) + len(given):
        return shared, len(ids)
    given += chain.from_iterable(one.each() for one in shared)
    return (), 0


async def _newest_outcomes(session: Session, given: Sequence[Outcome], summary: ApplySummary) -> dict[Pair, Outcome]:
    """One outcome per task, of its newest claim: the statements need distinct ids. Older ones count as stale."""
    claims = await settle.find_claims(session, [(one.task_id, one.attempt or 0) for one in given if one.claim is None])
    newest: dict[int, tuple[int, Outcome]] = {}
    for report in given:
        claim = claims.get((report.task_id, report.attempt or 0)) if report.claim is None else report.claim
        if claim is None or (report.task_id in newest and newest[report.task_id][0] >= claim):
            log.info("stale_result", task_id=report.task_id, claim=claim)
        else:
            newest[report.task_id] = (claim, report)
    summary.stale += len(given) - len(newest)
    return {(task_id, claim): report for task_id, (claim, report) in newest.items()}


def _waits_of(outcomes: Mapping[Pair, Outcome], given: Sequence[Outcome]) -> list[reports.Waiting]:
    """Waits of the newest claims, one for each token: a message delivered twice may have two."""
    waits: dict[tuple[int, str], reports.Waiting] = {}
    for report in given:
        if type(report) is reports.Waiting and type(outcomes.get((report.task_id, report.claim))) is reports.Waiting:
            waits.setdefault((report.task_id, report.token), report)
    return [*waits.values()]


async def _note_heartbeats(
    session: Session, heartbeats: Sequence[reports.Progress], outcomes: Mapping[Pair, Outcome]
) -> int:
    """Record the last heartbeat of each task's newest claim, unless its outcome came with it."""
    # The last one stays: of the newest claim, and with a detail where any of its has one.
    ordered = sorted(heartbeats, key=lambda beat: (beat.claim, beat.detail is not None))
    newest = {beat.task_id: beat for beat in ordered if (beat.task_id, beat.claim) not in outcomes}
    beats = {(beat.task_id, beat.claim): beat for beat in newest.values()}
    texts = {pair: encrypt_progress(session.codec, pair[0], beat.detail) for pair, beat in beats.items()}
    return await settle.note_heartbeats(session, texts, {pair: beat.worker for pair, beat in beats.items()})


def hold_of(report: reports.Failed) -> reported.Hold | None:
    """What the handler of a failed attempt asks to be held; nothing for a time that makes no sense."""
    hints, seconds = report.hints, report.hints.retry_after
    if hints.hold not in ("action", "key") or report.claim is None or seconds is None or not seconds > 0:
        return None
    bounded = min(seconds, reported.LONGEST_HOLD_SECONDS)
    return reported.Hold(report.task_id, report.claim, bounded, hints.hold_key, hints.hold == "action")


async def _postpone(session: Session, failed: dict[Pair, reports.Failed], settings: Settings) -> int:
    """Give back attempts that do not count, for another later; returns how many. Leaves in ``failed`` what is over."""
    postponed = {pair: failed.pop(pair) for pair, report in [*failed.items()] if report.hints.spends_none}
    if not postponed:
        return 0
    now = datetime.now(UTC).isoformat(timespec="seconds")
    again: list[tuple[int, int, float, str, str]] = []  # id, claim, seconds, progress as JSON text, reason
    for pair, before in (await settle.read_postponed(session, postponed)).items():
        report = postponed[pair]
        head = _decode_head(report.error)
        with suppress(PayloadUnavailable, PayloadLost, ValueError, RecursionError):  # else it says "encrypted"
            head = _decode_head(replace_unstorable(decrypt_error(session.codec, pair[0], report.error)))
        message = head.message[:_NOTE_CHARS].replace("\0", "\ufffd")
        put_off = postponement(report.hints, before, settings)
        if isinstance(put_off, str):
            kind = "UnknownAction" if report.hints.unknown_action else "PutOffTooOften"
            failed[pair] = as_failed(report, HANDLER_ERROR, f"{put_off}: {message}", _FINAL, type=kind)
        else:
            note = encrypt_note(session.codec, pair[0], f"put off at {now}: {message}")
            again.append((*pair, put_off[0], json.dumps({"percent": None, "note": note}), put_off[1]))
    rows = await session.fetch("postpone_tasks", *map(list, zip(*again, strict=True))) if again else []
    for row in rows:
        metrics.TRANSITIONS.labels(row["action"], row["state"]).inc()
        metrics.POSTPONED.labels(row["action"], row["reason"]).inc()
        log.info("task_put_off", task_id=row["id"], action=row["action"], reason=row["reason"])
    return len(again)


def postponement(hints: reports.Hints, before: settle.PutOff, settings: Settings) -> tuple[float, str] | str:
    """For how many seconds a task is put off, and the reason; or why it is put off no more."""
    if hints.unknown_action:
        most, waited = settings.unknown_action_seconds, before.unknown_seconds or 0.0
        if waited >= most:
            return f"no worker ran its action within {most:g} s (PENSTOCK_UNKNOWN_ACTION_SECONDS)"
        longest = _UNKNOWN_HERE_SECONDS if before.is_announced else _UNKNOWN_SECONDS
        delay = min(max(_UNKNOWN_FIRST_SECONDS, waited / 2), longest) * random.uniform(0.8, 1.2)
        return min(delay, max(1.0, most - waited)), "unknown"
    if not hints.snooze:
        return _POSTPONED_SECONDS * random.uniform(0.8, 1.2), "payload"
    if before.snoozes >= settings.snooze_limit:
        return f"its handler put it off {before.snoozes} times, the limit (PENSTOCK_SNOOZE_LIMIT)"
    asked = hints.retry_after
    is_sane = asked is not None and 0 <= asked <= LONGEST_RETRY_SECONDS
    return asked if is_sane and asked is not None else _POSTPONED_SECONDS, "snooze"


async def _record_steps(
    session: Session, steps: Sequence[reports.Stepped], summary: ApplySummary, settings: Settings
) -> set[tuple[int, StepKey]]:
    """Add steps to the journals of their tasks; returns those without room, which ``summary`` has as unreadable."""
    if not steps:
        return set()
    full = await journal.record(session, steps, most=settings.steps_limit, most_bytes=settings.steps_limit_bytes)
    if full:
        why = "the journal of its task is full (PENSTOCK_STEPS_LIMIT, PENSTOCK_STEPS_LIMIT_BYTES)"
        why += ", or the step names an object of another task"
        for step in steps:
            if (step.task_id, step.entry.key) in full:
                text = encode_step(session.fence.name(step.task_id, step.claim), carried(step.entry))
                summary.unreadable.append(reports.Unreadable(text, why))
    return full


def _without_room(report: reports.Suspended) -> reports.Failed:
    """Instead of a sleep or an event that the journal has no room for, which would begin again and again."""
    why = "its journal has no room for the sleep or the event that ended"
    why += " (PENSTOCK_STEPS_LIMIT, PENSTOCK_STEPS_LIMIT_BYTES)"
    return as_failed(report, TOO_LARGE, why, _FINAL, type="JournalTooLarge", message=why)


async def _suspend(
    session: Session, suspended: dict[Pair, reports.Suspended], failed: dict[Pair, reports.Failed], settings: Settings
) -> int:
    """Let tasks go on later; returns how many. Moves to ``failed`` those that may not.

    A message that comes again means that a worker may have died. Steps that it reported may still be in the results
    queue, so the next claim waits until those are recorded. Where none was recorded since the claim, the task is a
    suspect at the second time, and then such an attempt has failed: a task that no worker survives would run forever.
    """
    redelivered = [pair for pair, report in suspended.items() if report.is_redelivered]
    if redelivered:
        # What reports take to be recorded that are in the queue now, those that a dead resulter keeps included.
        ((*_, lag_seconds, _),) = await session.fetch("read_watermark", settings.visibility_timeout_seconds)
        delay = float(lag_seconds) + settings.visibility_timeout_seconds
        found = await session.fetch("find_excused", *columns(redelivered))
        excused = {(row["id"], row["claim"]): row["excused"] for row in found}  # of claims that hold their task
        for pair in redelivered:
            if excused.get(pair, True):
                suspended[pair] = msgspec.structs.replace(suspended[pair], seconds=delay, until=None)
            else:
                failed[pair] = interrupted(suspended.pop(pair), delay)
    resumes = columns_of(suspended.values(), "seconds", "until", "worker", "is_redelivered")
    rows = await session.fetch("suspend_attempts", *columns(suspended), *resumes) if suspended else []
    for row in rows:
        metrics.TRANSITIONS.labels(row["action"], row["state"]).inc()
    return len(rows)


def interrupted(report: reports.Suspended, delay: float) -> reports.Failed:
    """The failure of a suspect whose message came again before a step of its claim. delay: in seconds."""
    why = "its worker stopped before it finished a step"
    return as_failed(report, HANDLER_ERROR, why, reports.Hints(retry_after=delay), type="Interrupted", message=why)


async def _fail(session: Session, failed: dict[Pair, reports.Failed], settings: Settings) -> int:
    attempts = await settle.read_attempts(session, failed)
    failures = []
    for (task_id, claim), (attempt, max_attempts) in attempts.items():
        report = failed[task_id, claim]
        delay = delay_after(attempt, max_attempts, report.hints, settings.backoff)
        error = encrypt_error(session.codec, task_id, bounded_error(report.error))
        if report.trace is not None:  # for the next attempt to link to; it replaces the worker's own
            error = f'{error.rstrip()[:-1]},"traceparent":"{report.trace.traceparent}"}}'
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
    """The error's JSON text, cut to its code and message when it is over ERROR_LIMIT_BYTES."""
    size = utf8_size(error)
    if size <= ERROR_LIMIT_BYTES:
        return error
    try:
        head = _decode_head(error)  # its data skipped: a number of 5,000 digits in it would be an error of its own
    except RecursionError:
        head = _Head(HANDLER_ERROR, "an error nested too deeply to be kept")
    kept = {"code": head.code, "message": head.message[:_MESSAGE_KEPT_CHARS], "data": {"truncated_from": size}}
    return json.dumps(kept)


def _check_size(report: reports.Succeeded, settings: Settings) -> reports.Failed | None:
    """The failure of a result that is over its limit. The stated size of an object counts: its readers allocate it."""
    size, limit, setting = utf8_size(report.result), settings.result_limit_bytes, "PENSTOCK_RESULT_LIMIT_BYTES"
    if is_sealed(report.result):
        reference = reference_of(report.result)
        if reference is None:
            limit = limit * 4 // 3 + _SEAL_BYTES  # it is base64
        else:
            size, limit, setting = reference.size, settings.largest_result_bytes, "PENSTOCK_PAYLOAD_MAX_BYTES"
    if size <= limit:
        return None
    message = f"the result is {size} bytes; the limit is {limit} ({setting})"
    return as_failed(report, TOO_LARGE, message, _FINAL, type="ResultTooLarge", size=size, limit=limit)


def bad_children(report: reports.Succeeded, exc: RpcError) -> reports.Failed:
    """The failure of a result whose spawned tasks make no sense."""
    return as_failed(report, exc.code, exc.message, _FINAL, type="BadChildren", message=exc.message)


def as_failed(report: Outcome, code: int, message: str, hints: reports.Hints, /, **data: object) -> reports.Failed:
    """A failure instead of that outcome. data: of the error."""
    error = reports.error_text(code, message, **data)
    attempt, trace = getattr(report, "attempt", None), getattr(report, "trace", None)
    return reports.Failed(report.task_id, report.claim, attempt, error, hints, trace, report.worker)


def delay_after(attempt: int, max_attempts: int, hints: reports.Hints, backoff: Backoff) -> float | None:
    """Seconds until the attempt after the failed one of that number; None when it was the last.

    Hints of the worker come first: ``final`` ends, ``max_attempts`` lowers the cap, ``retry_after`` is the delay,
    ``backoff`` the action's own policy. Invalid hints are ignored.
    """
    if hints.max_attempts is not None and hints.max_attempts >= 1:
        max_attempts = min(max_attempts, hints.max_attempts)
    if hints.final or attempt >= max_attempts:
        return None
    if hints.retry_after is not None and 0 <= hints.retry_after <= LONGEST_RETRY_SECONDS:
        return hints.retry_after
    if (own := hints.backoff) is not None:
        try:
            backoff = Backoff(own.base_seconds, own.factor, own.cap_seconds, own.jitter)
        except SettingsError:
            log.warning("backoff_hint_ignored", base_seconds=own.base_seconds, factor=own.factor)
    return min(backoff.delay_seconds(attempt), LONGEST_RETRY_SECONDS)
