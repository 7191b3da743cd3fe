"""The rules of docs/protocol.md, each as a check of a program at work."""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from penstock.cli.conformance import station as stations
from penstock.cli.conformance.station import Broken, Endpoint, Reported, Sent, Station, Unsupported
from penstock.payloads.bucket import folder_of, new_name
from penstock.payloads.codec import payload_aad
from penstock.protocol.message_attributes import TENANT_ATTRIBUTE, TIMEOUT_ATTRIBUTE
from penstock.protocol.reports import Failed, Progress, Stepped, Succeeded, Suspended, Unreadable
from penstock.protocol.sealed import Reference, encode_reference

MINIMUM = "minimum"
ECHO, FAIL, SLEEP, STEPS, TENANT = (f"conformance.{name}" for name in ("echo", "fail", "sleep", "steps", "tenant"))
_VALUE: dict[str, Any] = {"text": 'é "\\ \u2028 😀', "list": [None, True, -1.5, 0, []], "object": {"a.b": {}}}
_LONG_SECONDS = stations.VISIBILITY_SECONDS + 3
_DELIVERIES = 4
_STEP_NAMES = ["one", "two", "three"]
_TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
_ACME = {TENANT_ATTRIBUTE: '"acme"'}


class Found(NamedTuple):
    """The outcome of a check. detail: why it did not pass."""

    feature: str
    rule: str
    outcome: Literal["passed", "failed", "not supported"]
    detail: str = ""


Run = Callable[[Station], Awaitable[None]]


async def _returns(wanted: Any, action: str, params: Any, station: Station, /, **attributes: str) -> None:
    """A task must have this result, and its message be deleted then."""
    sent, reported = await station.call(action, params, **attributes)
    await station.expect(wanted, reported)
    await station.deleted(sent)


async def _fails(action: str, params: Any, station: Station, *, is_final: bool = False) -> None:
    """A task must be answered with an error, and its message be deleted then. is_final: no further attempt helps."""
    sent, reported = await station.call(action, params)
    if not _expect_failed(reported).hints.final and is_final:
        raise Unsupported("the error's data has no final: true")
    await station.deleted(sent)


def _expect_failed(reported: Reported) -> Failed:
    if not isinstance(reported.report, Failed):
        raise Broken(f"it was answered with {type(reported.report).__name__.lower()}")
    return reported.report


async def _opens(seal: Callable[[Station], str], station: Station, /, **attributes: str) -> None:
    """A sealed payload must be opened, or the attempt given back."""
    sent, reported = await station.call(ECHO, seal(station), **attributes)
    if isinstance(reported.report, Failed) and reported.report.hints.not_begun:
        await station.deleted(sent)
        raise Unsupported("it gives such attempts back, as it should")
    if isinstance(reported.report, Failed):
        raise Broken("it failed without not_begun in the error's data, so the attempt is spent")
    await station.expect(_VALUE, reported)


def _encrypted(station: Station, tenant: str | None = None) -> str:
    return station.endpoint.codec.encode(json.dumps({"value": _VALUE}), payload_aad(ECHO, tenant))


def _object(station: Station) -> str:
    data = json.dumps({"value": _VALUE}).encode()
    name = new_name(folder_of("main-outbound"))
    station.endpoint.objects[name] = data
    return encode_reference(Reference(name, None, len(data), hashlib.sha256(data).hexdigest()))


async def _batches(station: Station) -> None:
    tasks = [station.task(ECHO, {"value": number}) for number in range(10)]
    sent = [await station.send(*tasks), *[await station.send(station.task(ECHO, {"value": 0})) for _ in range(12)]]
    for position, task in enumerate(tasks):
        await station.expect(position, await station.outcome(task))
    for message in sent:
        await station.deleted(message)


async def _duplicates(station: Station) -> None:
    task = station.task(ECHO, {"value": 1})
    for sent in [await station.send(task) for _ in range(2)]:
        await station.deleted(sent)
    await station.expect(1, await station.outcome(task))


async def _visibility(station: Station) -> None:
    sent, reported = await station.call(SLEEP, {"seconds": _LONG_SECONDS})
    await station.expect(None, reported)
    await station.deleted(sent)
    if (received := len(station.traffic.times_of("receive", sent.message_id))) > 1:
        raise Broken(f"its message was received {received} times")


async def _well_formed(station: Station) -> None:
    reasons = [report.reason for report, _ in station.traffic.reported if isinstance(report, Unreadable)]
    if reasons:
        raise Broken(reasons[0][:200])


async def _refused(station: Station) -> None:
    station.traffic.refuses = True
    sent = await station.send(station.task(ECHO, {"value": 1}))
    await station.until(lambda: station.traffic.refused >= 2, "the answer was not sent again")
    await asyncio.sleep(1)
    station.traffic.refuses = False
    await station.outcome(sent.tasks[0])
    await station.deleted(sent)


async def _running(station: Station, seconds: float) -> Sent:
    """A task that has begun and runs so long."""
    sent = await station.send(station.task(SLEEP, {"seconds": seconds}))
    await station.received(sent)
    await asyncio.sleep(0.3)
    return sent


async def _killed(station: Station) -> None:
    sent = await _running(station, 2)
    station.kill()
    await station.outcome(sent.tasks[0])
    await station.deleted(sent)


async def _finishes(station: Station) -> None:
    sent = await _running(station, 1)
    await station.stop()
    await station.deleted(sent)


async def _releases(station: Station) -> None:
    station.start()
    sent = await _running(station, 10 * stations.GRACE_SECONDS)
    await station.stop()
    if not station.traffic.times_of("release", sent.message_id):
        raise Broken("its visibility timeout was not set to 0")


async def _heartbeats(station: Station) -> None:
    sent, _ = await station.call(SLEEP, {"seconds": _LONG_SECONDS})
    count = len(station.reports_of(sent.tasks[0], Progress))
    if not count:
        raise Unsupported("none was sent")
    if count < _LONG_SECONDS / stations.HEARTBEAT_SECONDS / 2:
        raise Broken(f"{count} were sent in {_LONG_SECONDS} s")


async def _time_limit(station: Station) -> None:
    _, reported = await station.call(SLEEP, {"seconds": _LONG_SECONDS}, **{TIMEOUT_ATTRIBUTE: "1"})
    if isinstance(reported.report, Succeeded):
        raise Unsupported("the task ran to its end")
    _expect_failed(reported)


async def _bad_messages(station: Station) -> None:
    bad = await station.send(body="{")
    task = station.task(ECHO, {"value": 2})
    await station.send(body=f'[{{"jsonrpc":"2.0","id":"x"}},{task.text}]')
    await station.expect(2, await station.outcome(task))
    await station.received(bad, 2)
    await _returns(3, ECHO, {"value": 3}, station)


async def _steps(station: Station) -> None:
    task, reported = await _end_of_steps(station, 0.1)
    await station.expect(_STEP_NAMES, reported)
    early = [one.report.entry for one in station.reports_of(task, Stepped)]
    for entries in (early, station.succeeded(reported).steps):
        found = [(entry.name, entry.position) for entry in entries]
        if found != [*zip(_STEP_NAMES, range(3), strict=True)]:
            raise Broken(f"names and positions of the steps are {found}")


async def _goes_on(station: Station, of: stations.Task | None = None) -> None:
    task, reported = await _end_of_steps(station, 0, journal='[{"name":"one","result":"kept"}]', of=of)
    await station.expect(["kept", *_STEP_NAMES[1:]], reported)
    if any(one.report.entry.name == "one" for one in station.reports_of(task, Stepped)):
        raise Broken("the step of the journal ran again")


async def _end_of_steps(
    station: Station, seconds: float, *, journal: str | None = None, of: stations.Task | None = None
) -> tuple[stations.Task, Reported]:
    """A task with steps, and what ended it. On a busy machine its message may come twice: then it is sent again."""
    for _ in range(_DELIVERIES):
        of = station.task(STEPS, {"seconds": seconds}, journal=journal, of=of)
        await station.send(of)
        reported = await station.outcome(of)
        if not (isinstance(reported.report, Suspended) and reported.report.is_redelivered):
            return of, reported
    raise Broken(f"it suspended the task as redelivered {_DELIVERIES} times")


async def _redelivered_steps(station: Station) -> None:
    task = station.task(STEPS, {"seconds": 1})
    sent = await station.send(task)
    await station.until(lambda: station.reports_of(task, Stepped, Succeeded, Failed), "no step was reported")
    for early in station.outcomes_of(task):
        station.succeeded(early)
    station.kill()
    outcome = (await station.outcome(task)).report
    if not (isinstance(outcome, Suspended) and outcome.is_redelivered):
        raise Broken(f"it was answered with {type(outcome).__name__.lower()} instead of suspend with redelivered")
    await station.deleted(sent)
    await _goes_on(station, task)


async def _trace(station: Station) -> None:
    _, reported = await station.call(ECHO, {"value": 1}, traceparent=f"00-{_TRACE_ID}-00f067aa0ba902b7-01")
    trace = station.succeeded(reported).trace
    if trace is None:
        raise Unsupported("the response has none")
    if trace.trace_id != _TRACE_ID:
        raise Broken(f"the trace is {trace.trace_id}")


_GIVEN_BACK = "or the attempt is given back by not_begun"
# Feature, rule, station and check. Those of the station `main` run side by side, those of another one after the other.
CHECKS: list[tuple[str, str, str, Run]] = [
    (MINIMUM, "A task is answered by its id, then its message is deleted", "main",
     partial(_returns, _VALUE, ECHO, {"value": _VALUE})),
    (MINIMUM, "A payload may be an array of positional parameters", "main", partial(_returns, _VALUE, ECHO, [_VALUE])),
    (MINIMUM, "Each task of a batch is answered by its own id", "main", _batches),
    (MINIMUM, "A failed task is answered with an error: a number as code, a text as message", "main",
     partial(_fails, FAIL, {"message": "no such mailbox", "final": False})),
    (MINIMUM, "A task of an unknown action is answered with an error", "main",
     partial(_fails, "conformance.unknown", {})),
    (MINIMUM, "A task that comes twice is answered, and both messages are deleted", "main", _duplicates),
    (MINIMUM, "The visibility timeout of a longer task is extended", "main", _visibility),
    (MINIMUM, "No message is deleted while the results queue refuses its answer", "refused", _refused),
    (MINIMUM, "The task of a killed worker is received again soon, and answered", "killed", _killed),
    (MINIMUM, "Only responses and known notifications are sent, under ids as they came", "last", _well_formed),
    ("stopping", "SIGTERM: a running task is answered, and the exit code is 0", "stopped", _finishes),
    ("stopping", "SIGTERM: a message that cannot be answered in time is released", "stopped", _releases),
    ("heartbeats", "A running task is reported every PENSTOCK_HEARTBEAT_SECONDS", "main", _heartbeats),
    ("retry hints", "A permanent failure has final in the error's data", "main",
     partial(_fails, FAIL, {"message": "not an address", "final": True}, is_final=True)),
    ("time limits", "The attribute timeout_seconds ends an attempt with an error", "main", _time_limit),
    ("bad messages", "Neither a message that is no JSON nor an invalid entry holds up tasks", "killed", _bad_messages),
    ("steps", "Each step is reported before the next begins, and all again with the outcome", "main", _steps),
    ("steps", "A step in the request's journal does not run again", "main", _goes_on),
    ("steps", "A redelivered task with steps is suspended, and goes on by its journal", "killed", _redelivered_steps),
    ("traces", "The response has a traceparent of the trace in the message's attributes", "main", _trace),
    ("encryption", f"An encrypted payload is opened, {_GIVEN_BACK}", "main", partial(_opens, _encrypted)),
    ("large payloads", f"A payload in the bucket is fetched, {_GIVEN_BACK}", "main", partial(_opens, _object)),
    ("tenants", "A handler learns the tenant of its task", "main", partial(_returns, "acme", TENANT, {}, **_ACME)),
    ("tenants", f"An encrypted payload of a tenant is opened, {_GIVEN_BACK}", "main",
     partial(_opens, partial(_encrypted, tenant="acme"), **_ACME)),
]  # fmt: skip


async def examine(command: str, folder: Path, timeout: float) -> list[Found]:
    """Run every check on a program. timeout: seconds for anything awaited. Raises SettingsError without the library for
    encryption, StackError for a program that ends again and again."""
    found: dict[str, Found] = {}

    async def visit(endpoint: Endpoint, name: str) -> None:
        async with Station(endpoint, name, command, timeout) as station:
            here = [_find(found, station, *one) for one in CHECKS if one[2] == name]
            if name == "main":
                await asyncio.gather(*here)
                here = [_find(found, station, *one) for one in CHECKS if one[2] == "last"]
            for check in here:
                await check

    async with Endpoint(folder) as endpoint:
        await asyncio.gather(*(visit(endpoint, name) for name in ("main", "refused", "killed", "stopped")))
    return [found[rule] for _, rule, *_ in CHECKS]


async def _find(found: dict[str, Found], station: Station, feature: str, rule: str, _name: str, run: Run) -> None:
    try:
        await run(station)
        found[rule] = Found(feature, rule, "passed")
    except Broken as exc:
        found[rule] = Found(feature, rule, "failed", str(exc))
    except Unsupported as exc:
        found[rule] = Found(feature, rule, "not supported", str(exc))
