from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.datastructures import Headers

from penstock.api import keys as api_keys
from penstock.api.access import Authenticator, Caller
from penstock.api.keys import KeyCache
from penstock.api.table import METHODS, method_of
from penstock.protocol.api_key import Permission, digest_of, implied, parse_entries
from penstock.protocol.errors import AccessDenied

MAY = {
    Permission.ENQUEUE: {"enqueue", "workflow.create", "task.complete", "task.fail"},
    Permission.READ: {
        "status", "result", "list", "stats", "rejected.list", "rejected.show", "dlq.stats", "dlq.list", "dlq.show",
        "ordering.list", "action.get", "action.list", "action.announced", "route.list", "job.get", "job.list",
        "tenant.get", "tenant.list", "task.explain",
        "schedule.get", "schedule.list", "schedule.runs", "schedule.import_status", "rpc.discover",
        "workflow.status", "workflow.list",
    },
    Permission.WORKER: {"claims.check"},
    Permission.ADMIN: {
        "cancel", "retry", "reschedule", "rejected.retry", "rejected.purge", "dlq.replay", "dlq.purge", "keys.create",
        "keys.list", "keys.revoke", "audit.list", "ordering.release", "bulk.cancel", "bulk.retry", "bulk.delete",
        "bulk.reschedule", "job.cancel", "action.set", "action.pause", "action.resume", "route.set", "route.delete",
        "tenant.set", "tenant.delete", "tenant.pause", "tenant.resume",
        "schedule.create", "schedule.update", "schedule.delete", "schedule.pause", "schedule.resume",
        "schedule.run_now", "schedule.create_many", "workflow.cancel", "workflow.retry",
    },
}  # fmt: skip


class NoKeys:
    """A store in which no key is."""

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Any]:
        yield self

    async def fetch(self, statement: str) -> list[Any]:
        return []


def keys_of(*entries: str) -> KeyCache:
    store: Any = NoKeys()
    ring = KeyCache(parse_entries(entries), store)
    asyncio.run(ring.refresh())
    return ring


def test_every_method_needs_the_permission_that_is_promised() -> None:
    """A method that is added must be placed here by hand."""
    promised = {method: permission for permission, methods in MAY.items() for method in methods}
    assert promised == {name: method.permission for name, method in METHODS.items()}


def test_submit_of_any_action_needs_enqueue_and_an_unknown_method_needs_nothing() -> None:
    for name in ("submit:keys.create", "submit:"):
        submit = method_of(name)
        assert submit is not None
        assert submit.permission is Permission.ENQUEUE
    assert method_of("keys.createx") is None
    assert method_of("Cancel") is None


@pytest.mark.parametrize("permission", Permission)
def test_caller_may_what_its_permissions_imply_and_nothing_else(permission: Permission) -> None:
    caller = Caller("k", implied([permission]), None)
    for name, method in METHODS.items():
        if method.permission in implied([permission]):
            caller.check_method(name)
            continue
        with pytest.raises(AccessDenied) as caught:
            caller.check_method(name)
        assert (caught.value.status, caught.value.data) == (403, {"needs": method.permission})


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[Any, Any]] = []
    real = api_keys.hmac.compare_digest
    monkeypatch.setattr(api_keys.hmac, "compare_digest", lambda one, two: compared.append((one, two)) or real(one, two))
    ring = keys_of("the-first-of-keys", "second-of-the-keys")
    found = ring.find(digest_of(b"second-of-the-keys"))
    assert found is not None
    assert compared == [(found.digest, found.digest)]
    assert ring.find(digest_of(b"third")) is None
    assert len(compared) == 1


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer "}, {"authorization": "Bearer second-of-the-keys-"},
     {"authorization": "Basic second-of-the-keys"}, {"x-api-key": ""}, {"x-api-key": "second-of-the-key"},
     {"authorization": "second-of-the-keys"}],
)  # fmt: skip
def test_anything_but_a_key_is_refused(headers: dict[str, str]) -> None:
    authenticator = Authenticator(keys_of("the-first-of-keys", "second-of-the-keys"))
    with pytest.raises(AccessDenied) as caught:
        authenticator.admit(Headers(headers), "127.0.0.1")
    assert caught.value.status == 401


def test_guard_without_keys_counts_callers_by_address_and_with_keys_by_key() -> None:
    assert Authenticator().admit(Headers({}), "127.0.0.9").name == "127.0.0.9"
    ring = keys_of("the-first-of-keys", f"ci:read:{'ab' * 32}")
    assert Authenticator(ring).admit(Headers({"x-api-key": "the-first-of-keys"}), "127.0.0.9").name == ":entry 1"


@pytest.mark.parametrize("steps", range(6))
async def test_a_stop_that_meets_the_end_of_a_refresh_is_not_lost(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost, it would keep the api from stopping."""
    monkeypatch.setattr(api_keys, "REFRESH_SECONDS", 0.0)
    store: Any = NoKeys()
    ring = api_keys.KeyCache((), store)
    begun, end = asyncio.Event(), asyncio.Event()

    async def refresh() -> None:
        begun.set()
        await end.wait()
        end.clear()

    monkeypatch.setattr(ring, "refresh", refresh)
    running = asyncio.create_task(ring.run())
    await begun.wait()
    end.set()
    for _ in range(steps):
        await asyncio.sleep(0)
    running.cancel()
    done, _ = await asyncio.wait({running}, timeout=5)
    assert done, "it runs on"
    assert running.cancelled()
