"""A shop's hour, as the dashboard might find it: what tests look for, and what screenshots show.

Written straight into the tables, because an hour of history would take an hour; schedules, workflows, limits
and keys are made by the methods that everybody uses.
"""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from penstock.api.audit import set_actor
from penstock.protocol.requests import Request

SUCCESSES, FAILURES, WAITING, IN_FLIGHT = 3000, 60, 400, 34
_ACTIONS = {  # tasks a minute, seconds, share that fails
    "charge-card": (140, 0.4, 0.02), "send-email": (260, 0.15, 0.004), "render-invoice": (90, 1.4, 0.01),
    "resize-image": (320, 0.6, 0.001), "sync-inventory": (40, 4.0, 0.06), "geocode-address": (60, 0.25, 0.03),
}  # fmt: skip
_ERRORS = {
    "charge-card": ("CardDeclined", "the issuer declined card ending 4242: insufficient funds"),
    "sync-inventory": ("ConnectionError", "warehouse-3.internal:8443 refused the connection"),
    "geocode-address": ("KeyError", "'postcode'"),
    "render-invoice": ("TemplateError", "invoice.html, line 88: 'vat_rate' is undefined"),
}
_TRACE = """Traceback (most recent call last):
  File "/app/shop/tasks/{module}.py", line 48, in {name}
    reply = await client.post(url, json=body)
            ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/app/shop/http.py", line 112, in post
    return self._checked(await self._send(request))
  File "/app/shop/http.py", line 131, in _checked
    raise {kind}({message!r})
shop.errors.{kind}: {message}
"""
_HISTORY = """
insert into penstock.task_history (id, state, action, payload, priority, run_at, attempts, max_attempts, claim,
    claimed_at, created_at, updated_at, finished_at, result, failures, labels, unique_key)
values (nextval('penstock.task_id_seq'), $1, $2, $3::json, $4, $5, $6, 10, $13, $7, $8, $9, $9, $10::json,
    $11::jsonb, $12::jsonb, null) returning id
"""
_LIVE = """
insert into penstock.task (state, action, payload, priority, run_at, attempts, max_attempts, claim, claimed_at,
    heartbeat_at, created_at, updated_at, progress, failures, labels)
values ($1, $2, $3::json, $4, $5, $6, 10,
    case when $7::timestamptz is null then 0 else nextval('penstock.claim_seq') end, $7, $8, $9, now(),
    $10::json, $11::jsonb, $12::jsonb) returning id
"""

Call = Callable[..., Awaitable[Any]]


def caller_of(methods: Any) -> Call:
    """A way to call the methods of an api that runs in this process."""

    async def call(method: str, **params: Any) -> Any:
        (outcome,) = await methods.handlers[method]([Request("2.0", method, msgspec.Raw(msgspec.json.encode(params)))])
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return call


async def fill(sql: Any, call: Call) -> dict[str, int]:
    """Fill an empty database; ids of some tasks and workflows by what they are."""
    chance = random.Random(7)
    now = datetime.now(UTC)
    ids: dict[str, int] = {}
    await _tally(sql, chance, now)
    for number in range(SUCCESSES):
        action = chance.choices(list(_ACTIONS), [rate for rate, _, _ in _ACTIONS.values()])[0]
        at = now - timedelta(seconds=3600 * (1 - number / SUCCESSES))
        took, waited = chance.lognormvariate(0, 0.6) * _ACTIONS[action][1], chance.lognormvariate(-3, 1)
        ids["success"] = await sql.fetchval(
            _HISTORY, "SUCCESS", action, _payload(chance, action), 0, at, 1, at + timedelta(seconds=waited), at,
            at + timedelta(seconds=waited + took), json.dumps({"ok": True, "bytes": chance.randint(900, 90_000)}), None,
            _labels(chance), number + 1,
        )  # fmt: skip
    for number in range(FAILURES):
        action = chance.choices(list(_ERRORS), [6, 9, 3, 1])[0]
        at = now - timedelta(seconds=3300 * (1 - number / FAILURES))
        ids["failure"] = await sql.fetchval(
            _HISTORY, "CRITICAL_ERROR", action, _payload(chance, action), 0, at, 4, at + timedelta(seconds=38), at,
            at + timedelta(seconds=42), None, _failures(action, at, 4), _labels(chance), 4,
        )  # fmt: skip
    for number in range(WAITING):
        action = chance.choices(list(_ACTIONS), [rate for rate, _, _ in _ACTIONS.values()])[0]
        at = now - timedelta(seconds=chance.uniform(0, 14))
        retried = number % 17 == 0 and action in _ERRORS
        ids["error" if retried else "scheduled"] = await sql.fetchval(
            _LIVE, "ERROR" if retried else "SCHEDULED", action, _payload(chance, action), chance.choice([0, 0, 5]),
            now + timedelta(seconds=chance.uniform(-14, 90)), 2 if retried else 0, None, None, at, None,
            _failures(action, at, 2) if retried else None, _labels(chance),
        )  # fmt: skip
    for number in range(IN_FLIGHT):
        at = now - timedelta(seconds=chance.uniform(0, 9))
        ids["acquired"] = await sql.fetchval(
            _LIVE, "ACQUIRED", "sync-inventory" if number % 3 else "render-invoice", _payload(chance, "x"), 0, at, 1,
            at,
            at + timedelta(seconds=1) if number % 2 else None, at,
            json.dumps({"percent": 40, "note": "page 2 of 5"}) if number % 2 else None, None, _labels(chance),
        )  # fmt: skip
    await sql.execute("analyze")
    await _plans(call)
    ids["workflow"] = await _workflow(sql, call)
    await sql.execute(
        "insert into penstock.rejected (source, body, reason) values ('inbound', $1, $2), ('results', $3, $4)",
        b'{"jsonrpc": "2.0", "method": "submit:exprot", "params": [', "ParseError: the body is not JSON",
        b'{"jsonrpc": "2.0", "result": 1}', "it names no task: id is missing",
    )  # fmt: skip
    return ids


async def _tally(sql: Any, chance: random.Random, now: datetime) -> None:
    rows = []
    start = now.replace(second=0, microsecond=0)
    for minute in range(57):
        wave = 1 + 0.35 * ((minute % 24) / 24) + (0.9 if 38 < minute < 44 else 0)
        for action, (rate, seconds, share) in _ACTIONS.items():
            count = round(rate * wave * chance.uniform(0.85, 1.15))
            failed = round(count * share * (6 if 38 < minute < 46 else 1) * chance.uniform(0.3, 1.7))
            at = start - timedelta(minutes=60 - minute)
            rows += [(at, action, "ENQUEUED", count, 0.0), (at, action, "SUCCESS", count - failed, 0.0)]
            rows += [(at, action, "ERROR", failed, 0.0)] if failed else []
            rows += [(at, action, "RAN", count, count * seconds)]
    for step in range(int((now - start).total_seconds() + 180) // 5):
        for action, (rate, seconds, share) in _ACTIONS.items():
            count = round(rate / 12 * chance.uniform(0.6, 1.4))
            at = now - timedelta(seconds=step * 5 + 2)
            rows += [(at, action, "ENQUEUED", count, 0.0), (at, action, "SUCCESS", round(count * 0.97), 0.0)]
            rows += [(at, action, "RAN", count, count * seconds)]
            rows += [(at, action, "ERROR", 1, 0.0)] if chance.random() < share * 8 else []
    rows += [(now - timedelta(hours=2), action, "SUCCESS", 180_000, 0.0) for action in _ACTIONS]
    rows += [(now - timedelta(minutes=3), "sync-inventory", "CRITICAL_ERROR", 27, 0.0)]
    rows += [(now - timedelta(minutes=9), "charge-card", "CRITICAL_ERROR", 18, 0.0)]
    await sql.executemany(
        "insert into penstock.tally (at, action, event, count, seconds) values ($1,$2,$3,$4,$5)", rows
    )


async def _plans(call: Call) -> None:
    """Schedules, limits, a route, keys, by two people."""
    set_actor("ada", "10.2.0.7", "http")
    for name, expression, action, zone in (
        ("nightly-report", "30 2 * * *", "render-invoice", "Europe/Berlin"),
        ("inventory", "@every 5m", "sync-inventory", "UTC"),
        ("invoices", "0 6 1 * *", "render-invoice", "America/New_York"),
        ("card-retries", "*/15 * * * *", "charge-card", "UTC"),
    ):  # fmt: skip
        await call(
            "schedule.create", name=name, expression=expression, action=action, timezone=zone,
            payload={"warehouse": 3, "run": "{{run}}"}, labels={"team": "shop"},
        )  # fmt: skip
    set_actor("grace", "10.2.0.9", "dashboard")
    await call("schedule.pause", name="invoices")
    for _ in range(3):
        await call("schedule.run_now", name="inventory")
    await call("action.set", action="charge-card", max_in_flight=20, rate=50, burst=100)
    await call("action.set", action="geocode-address", key_rate=5)
    await call("action.pause", action="geocode-address")
    await call("route.set", name="images", queue="penstock-images", actions=["resize-*"])
    await call("keys.create", name="checkout-service", permissions=["enqueue"])
    await call("keys.create", name="grafana", permissions=["read"], expires_in=90 * 86_400)


async def _workflow(sql: Any, call: Call) -> int:
    """An order on its way: some steps done, some running, one being tried again."""
    made = await call("workflow.create", name="order-48213", steps=[
        {"name": "reserve", "action": "sync-inventory", "payload": {"order": 48213}},
        {"name": "charge", "action": "charge-card", "payload": {"order": 48213}},
        *({"name": f"label-{n}", "action": "render-invoice", "after": ["reserve"]} for n in range(1, 4)),
        {"name": "invoice", "action": "render-invoice", "after": ["charge"]},
        {"name": "pack", "action": "sync-inventory", "after": ["label-1", "label-2", "label-3", "charge"]},
        {"name": "email-invoice", "action": "send-email", "after": ["invoice"]},
        {"name": "ship", "action": "sync-inventory", "after": ["pack"]},
        {"name": "email-shipped", "action": "send-email", "after": ["ship", "invoice"]},
        {"name": "close", "action": "sync-inventory", "after": ["email-shipped", "email-invoice"]},
    ])  # fmt: skip
    states = {"reserve": "SUCCESS", "charge": "SUCCESS", "label-1": "SUCCESS", "label-2": "SUCCESS",
              "label-3": "ACQUIRED", "invoice": "ERROR"}  # fmt: skip
    for name, state in states.items():
        live = state in ("ACQUIRED", "ERROR")
        task_id = await sql.fetchval(
            "update penstock.workflow_step set state = $3, done = $4, passed = $4 where workflow_id = $1 and name = $2 "
            "returning task_id", made.id, name, "SCHEDULED" if live else state, not live,
        )  # fmt: skip
        if live:
            await sql.execute(
                "update penstock.task set state = $2, attempts = 1, claim = nextval('penstock.claim_seq'), "
                "claimed_at = case when $3 then now() end where id = $1", task_id, state, state == "ACQUIRED",
            )  # fmt: skip
        else:
            await sql.execute("delete from penstock.task where id = $1", task_id)
    await sql.execute("update penstock.workflow set open = open - 4 where id = $1", made.id)
    result: int = made.id
    return result


def _payload(chance: random.Random, action: str) -> str:
    order = chance.randint(10_000, 99_999)
    return json.dumps({"order": order, "customer": f"c-{chance.randint(100, 999)}",
                       "amount": chance.randint(5, 400) / 2, "currency": "EUR", "source": action})  # fmt: skip


def _labels(chance: random.Random) -> str:
    return json.dumps({"tenant": chance.choice(["acme", "globex", "initech"])})


def _failures(action: str, at: datetime, count: int) -> str:
    kind, message = _ERRORS[action]
    module = action.replace("-", "_")
    trace = _TRACE.format(module=module, name=module, kind=kind, message=message)
    return json.dumps([
        {"attempt": n, "claim": n, "at": (at + timedelta(seconds=10 * n)).isoformat(),
         "error": {"code": -32000, "message": f"{kind}: {message}",
                   "data": {"type": kind, "message": message, "traceback": trace}}}
        for n in range(1, count + 1)
    ])  # fmt: skip
