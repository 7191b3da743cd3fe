"""What reads input from outside, as functions of bytes that raise only for a defect.

A reader refuses what it cannot read by its own errors, in time that grows with the size of the input.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from starlette.requests import Request

from penstock.api.access import Caller
from penstock.api.mcp import EARLIER, McpServer
from penstock.api.rpc import Dispatcher, error_body
from penstock.api.table import METHODS as API_METHODS
from penstock.brokers.kafka.messages import Received
from penstock.compat.clockwork import schedules as clockwork
from penstock.compat.scheduler0 import jobs
from penstock.compat.scheduler0.http import records
from penstock.compat.topics import schedules as topics
from penstock.methods.inbound import read_inbound
from penstock.methods.table import METHODS, read_command
from penstock.protocol.api_key import ALL_PERMISSIONS
from penstock.protocol.errors import RpcError
from penstock.protocol.fence import ClaimKey, Fence
from penstock.protocol.reports import Failed, Succeeded, decode_reports
from penstock.protocol.requests import Invalid, decode_body
from penstock.schedules import cron
from penstock.settings.model import load_settings

LONGEST_BYTES = 20_000
SLOW_SECONDS = 2.0  # of processor time, for an input of that size
_NOW = datetime(2030, 1, 1, tzinfo=UTC)
_SETTINGS = load_settings(database_url="postgresql://fuzz", inbound_methods="*")
_FENCE = Fence([ClaimKey(b"key")])
_ALL_METHODS = {**METHODS, **API_METHODS}
_MCP = McpServer(Dispatcher({}, batch_limit=1), _SETTINGS)
_read_avro = topics.avro_reader()
_decode = msgspec.json.decode


class Slow(AssertionError):
    pass


def json_rpc(data: bytes) -> None:
    """A body over HTTP, up to the point where its methods are called."""
    try:
        entries = decode_body(data, batch_limit=_SETTINGS.batch_limit).entries
    except RpcError as exc:
        _decode(error_body(exc))
        return
    for entry in entries:
        if isinstance(entry, Invalid):
            continue
        try:
            read_command(entry.method, entry.params, _SETTINGS, _ALL_METHODS)
        except RpcError as exc:
            _decode(error_body(exc))


def mcp(data: bytes) -> None:
    """A body of POST /mcp, up to the point where a method is called."""
    headers = [(b"mcp-protocol-version", EARLIER[0].encode())]
    caller = Caller("fuzz", ALL_PERMISSIONS, None)
    status, answer = asyncio.run(_MCP.answer(data, caller, Request({"type": "http", "headers": headers})))
    assert status in (200, 202, 400)
    assert (answer is None) is (status == 202)
    if answer is not None:
        _decode(answer)


def inbound(data: bytes) -> None:
    """A body of the inbound queue."""
    found = read_inbound(data.decode("utf-8", "replace"), _SETTINGS)
    for task in found.tasks:
        _decode(task.payload)
        assert "\0" not in task.payload + task.action
    for text, reason in found.refused:
        assert reason
        text.encode()


def results(data: bytes) -> None:
    """A body of the results queue."""
    for fence, bare_ids in ((None, False), (None, True), (_FENCE, False)):
        for report in decode_reports(data, batch_limit=_SETTINGS.batch_limit, fence=fence, bare_ids=bare_ids):
            if isinstance(report, Succeeded):
                _decode(report.result)
            elif isinstance(report, Failed):
                _decode(report.error)


def clockwork_http(data: bytes) -> None:
    """A body of POST /schedule."""
    try:
        request = clockwork.read(data, clockwork.ScheduleRequest)
        _decode(clockwork.delayed_record_of(request, _SETTINGS).record)
    except (clockwork.BadRequest, clockwork.IllegalArgument):
        pass


def scheduler0_http(data: bytes) -> None:
    """A body of POST /jobs, up to the schedules that it makes."""
    try:
        given = records.decode(data, list[jobs.JobGiven], read=jobs.read)
        jobs.check_jobs(given)
        jobs.check_deliverable(given)
        for job_id, one in enumerate(given):
            schedule = jobs.schedule_of(jobs.make_job(one, job_id, _NOW), _SETTINGS)
            read_command("schedule.create", msgspec.json.encode(schedule), _SETTINGS)
    except (records.Problem, RpcError):
        pass


def kafka(data: bytes) -> None:
    """A record of a topic of schedules: in Avro if its first byte is odd, else in JSON."""
    record = Received("schedules", 0, 1, data[:8], data[1:], [], None)
    try:
        schedule = (_read_avro if data[:1] and data[0] % 2 else topics.read_json)(data[1:])
        delayed = topics.delayed_record_of(schedule, record, _SETTINGS, held=False)
        _decode(delayed.record)
    except topics.Undecodable:
        pass


def cron_expression(data: bytes) -> None:
    """A line with an expression, and one with a zone."""
    expression, _, zone = data.decode("utf-8", "replace").partition("\n")
    try:
        when = cron.timing(expression, zone or "UTC", _NOW)
    except cron.CronError:
        return
    first = when.next_after(_NOW)
    if first is not None:
        assert first > _NOW
        later = when.next_after(first)
        assert later is None or later > first
        cron.elapsed(when, first, first + timedelta(days=30), 10, 100)


def _bodies(*bodies: Any) -> tuple[bytes, ...]:
    return tuple(msgspec.json.encode(body) for body in bodies)


def _call(method: str, params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "method": method, "params": params, "id": 1}


_ENQUEUE = _call("enqueue", {
    "action": "a", "payload": {"n": 1}, "priority": 3, "unique_key": "u", "unique": "live",
    "ordering_key": "k", "labels": {"l": "m"}, "max_attempts": 3, "run_at": "2030-01-01T00:00:00Z", "expires_in": 9,
})  # fmt: skip
_SCHEDULE = _call(
    "schedule.create", {"name": "s", "expression": "*/5 * * * *", "action": "a", "timezone": "Europe/Berlin"}
)
_WORKFLOW = _call("workflow.create", {"chain": [{"action": "a", "name": "b"}, {"map": {"action": "c"}, "name": "d"}]})
_JOB = {
    "spec": "@every 1h30m", "timezone": "UTC", "projectId": 1, "callbackUrl": "https://h/p", "executionType": "http",
    "data": "{{run}}", "startDate": "2030-01-01T00:00:00Z",
}  # fmt: skip
_CLOCKWORK = {
    "clientId": "c", "scheduleKey": "k", "orderingKey": "o", "taskData": "d", "scheduleTime": 1893456000000,
    "delivery": {"topic": "t"},
}  # fmt: skip
_OUTCOMES = (
    {"jsonrpc": "2.0", "result": {"ok": [1.5e3]}, "id": "1:2", "spawn": [{"action": "a"}]},
    {
        "jsonrpc": "2.0",
        "error": {"code": -32000, "message": "m", "data": {"retry_after": 3, "final": True}},
        "id": "1:2",
    },
    {"jsonrpc": "2.0", "method": "progress", "params": {"id": "1:2", "percent": 3, "note": "n"}},
    {"jsonrpc": "2.0", "method": "wait", "params": {"id": "1:2", "token": "t", "timeout": 3}},
    {"jsonrpc": "2.0", "method": "shared_result", "params": {"pack": "pack:2:1-3:0a", "places": "0", "result": 1}},
    {"jsonrpc": "2.0", "result": "x", "id": 7, "attempt": 1},
)

_RECORD = {"time": 1, "topic": "t", "key": "aw==", "value": "dg", "headers": {"h": "dg"}}

Target = Callable[[bytes], None]
TARGETS: dict[str, tuple[Target, tuple[bytes, ...]]] = {
    "json-rpc": (
        json_rpc,
        _bodies(
            _ENQUEUE, _SCHEDULE, _WORKFLOW, [_ENQUEUE, _call("task.cancel", {"id": 1})],
            _call("bulk.cancel", {"action": "a*", "states": ["ERROR"]}),
        ),
    ),
    "mcp": (
        mcp,
        _bodies(
            _call("initialize", {"protocolVersion": "2025-06-18", "capabilities": {}}), _call("tools/list", {}),
            _call("tools/call", {"name": "bulk_cancel", "arguments": {"action": "a*", "confirm": "9.9.f"}}),
            _call("tools/call", {"name": "schedule_create", "arguments": _SCHEDULE["params"] | {"confirm": "1.0.f"}}),
            _call("tools/call", {"name": "enqueue", "arguments": _ENQUEUE["params"], "_meta": {"progressToken": 1}}),
        ),
    ),
    "inbound": (inbound, _bodies(_ENQUEUE, [_ENQUEUE, _SCHEDULE], _call("submit:a", {"objectID": 3}))),
    "results": (results, _bodies(*_OUTCOMES, list(_OUTCOMES))),
    "clockwork": (clockwork_http, _bodies(_CLOCKWORK)),
    "scheduler0": (
        scheduler0_http,
        _bodies([_JOB], [{"spec": "0 30 * * * *", "project_id": 1, "callback_url": "http://h"}]),
    ),
    "kafka": (
        kafka,
        (
            b"\0" + msgspec.json.encode(_RECORD), b"\x01\x02\x02t\x02k\x02v\x00",
            b"\x01\x80\x80\x80\x80\x10\x02t\x02k\x00\x02v\x02\x02h\x02x\x00",
        ),
    ),
    "cron": (
        cron_expression,
        (
            b"*/5 0-23 * * 1-5\nEurope/Berlin", b"0 0 29 2 *", b"@every 1h30m", b"@daily\nAsia/Tokyo",
            b"@robfig 0 30 * * * *", b"30 2 L * MON#2\nAmerica/New_York", b"* * * * * *",
        ),
    ),
}  # fmt: skip


def run(name: str, data: bytes) -> None:
    """Give a target an input. Raises what it raises, and Slow."""
    began = time.process_time()
    TARGETS[name][0](data)
    seconds = time.process_time() - began
    if seconds > SLOW_SECONDS:
        raise Slow(f"{seconds:.1f} s for {len(data)} bytes")
