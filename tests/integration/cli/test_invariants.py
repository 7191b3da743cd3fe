"""`penstock doctor --invariants`: finds nothing among tasks of all kinds, and each invariant that is broken by hand."""

from __future__ import annotations

import json
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.cli.doctor.database import INVARIANTS, examine_invariants, examine_stored
from penstock.cli.doctor.findings import Finding, Report
from penstock.db.migrate import grants
from penstock.db.pool import Store
from penstock.db.session import Session
from penstock.local.postgres import EmbeddedPostgres
from penstock.protocol.task import Failure, NewTask
from penstock.settings.model import Settings, load_settings
from penstock.tasks import reschedule, settle
from tests.integration.limits.test_limits import enqueue, limit
from tests.integration.lives import Lives
from tests.integration.test_waits import World

# What breaks each invariant, by its statement. Ids are those of `prepare`.
BREAKS = {
    "find_tasks_settled_twice": "insert into penstock.task_history select * from penstock.task_history where id = 1",
    "find_attempts_beyond_limit": """
        alter table penstock.task drop constraint task_attempts_within_cap;
        update penstock.task set attempts = max_attempts + 1 where id = 2""",
    "find_sequences_behind": "update penstock.task set claim = 1000000 where id = 3",
    "find_keys_run_twice": "update penstock.task set state = 'SCHEDULED' where id = 4",
    "find_keys_out_of_order": """
        update penstock.task set state = 'WAITING', attempts = 0, claimed_at = null, updated_at = now() - interval '1 h'
        where id = 3;
        update penstock.task set state = 'ACQUIRED', attempts = 1, claim = 1, claimed_at = now() where id = 4""",
    "find_keys_without_head": "delete from penstock.ordering_head",
    "find_keys_that_stand_still": "delete from penstock.task where id = 3",
    "find_unique_keys_free": "delete from penstock.unique_key",
    "find_unique_keys_shared": "update penstock.task set unique_key = 'u', action = 'plain' where id = 8",
    "find_limits_exceeded": """
        update penstock.action set updated_at = now() - interval '1 hour';
        update penstock.task set state = 'ACQUIRED', attempts = 1, claim = 1, claimed_at = now(),
            gate = 'limited' where action = 'limited'""",
    "find_waits_without_end": "delete from penstock.wait",
    "find_gates_missing": "update penstock.task set gate = 'gone' where action = 'limited'",
    "find_workflows_astray": "delete from penstock.task where workflow is not null",
    "find_work_overdue": """
        update penstock.task set claimed_at = now() - interval '1 day', heartbeat_at = now() - interval '1 hour'
        where id = 3""",
}


async def prepare(store: Store, settings: Settings) -> None:
    """Task 1 is settled, 2 waits for an event, 3 runs, 4 and 5 wait for it, 6 has a unique key, 7 and 8 a limit."""
    lives = Lives(store, settings)
    await enqueue(store, NewTask("plain"))
    await lives.work(await lives.claim(), lambda *_: None)
    await World(store, settings).waiting(NewTask("plain"))
    await enqueue(store, *(NewTask("plain", ordering_key="k") for _ in range(3)))
    await lives.claim()
    await enqueue(store, NewTask("plain", unique_key="u", unique="live"))
    await enqueue(store, NewTask("limited"), NewTask("limited"))
    await limit(store, "limited", max_in_flight=1)
    await lives.create(name="w", chain=[{"action": "plain", "name": name} for name in "ab"])


async def complaints(session: Session, settings: Settings) -> list[Finding]:
    report = Report()
    await examine_invariants(session, report, settings)
    assert len(report.findings) == len(INVARIANTS)
    return [finding for finding in report.findings if finding.level != "ok"]


class _Undone(Exception):
    pass


async def test_each_broken_invariant_is_found_and_nothing_without(store: Store, settings: Settings) -> None:
    await prepare(store, settings)
    assert set(BREAKS) == {invariant.statement for invariant in INVARIANTS}
    async with store.session() as session:
        assert await complaints(session, settings) == []
    for invariant in INVARIANTS:
        with suppress(_Undone):
            async with store.transaction() as session:
                await session._connection.execute(BREAKS[invariant.statement])
                found = {finding.what: finding for finding in await complaints(session, settings)}
                raise _Undone
        finding = found[invariant.holds]
        assert (finding.level, finding.fix) == (invariant.level, invariant.fix)
        assert any(char.isdigit() for char in finding.seen), finding
    async with store.session() as session:
        assert await complaints(session, settings) == []


async def test_what_many_tasks_break_is_shown_shortly_and_a_look_is_bounded(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    await enqueue(store, *(NewTask("plain", unique_key=str(number)) for number in range(9)))
    monkeypatch.setattr("penstock.cli.doctor.database.LOOKED_AT", 5)
    report = Report()
    async with store.transaction() as session:
        await session._connection.execute("delete from penstock.unique_key")
        await examine_invariants(session, report, settings)
    (found, bound) = [finding for finding in report.findings if finding.level != "ok"]
    assert found.seen.endswith("; task 3 is live, and its unique key is free and 2 more")
    assert bound.seen == "only the 5 oldest live tasks were read"


async def test_a_task_that_waits_in_its_queue_for_a_worker_is_not_overdue(store: Store, settings: Settings) -> None:
    await enqueue(store, NewTask("plain"))
    await Lives(store, settings).claim()
    report = Report()
    async with store.session() as session:
        await session._connection.execute("update penstock.task set claimed_at = now() - interval '1 hour'")
        await examine_invariants(session, report, settings)
    assert "nothing is overdue" not in {one.what for one in report.findings if one.level != "ok"}


async def test_a_task_that_was_retried_before_the_next_of_its_key_was_claimed_is_not_out_of_order(
    store: Store, settings: Settings
) -> None:
    lives = Lives(store, settings)
    await enqueue(store, *(NewTask("plain", ordering_key="k") for _ in range(2)))
    (first,) = await lives.claim()
    async with store.transaction() as session:
        await settle.fail(session, [Failure(first.id, first.claim, '{"code":-32000,"message":"boom"}', None)])
    async with store.transaction() as session:
        assert await reschedule.restart(session, [first.id]) == {first.id: "WAITING"}
    await lives.claim()
    async with store.session() as session:
        assert await complaints(session, settings) == []


async def test_a_role_that_may_not_read_a_sequence_is_told_nothing_of_it(
    store: Store, settings: Settings, postgres: EmbeddedPostgres, sql: Any
) -> None:
    await prepare(store, settings)
    role = f"own_{secrets.token_hex(4)}"
    await sql.execute(f"create role {role} login password 'p'")
    try:
        await sql.execute(";".join(grants(role, ["api"])))
        parts = urlsplit(settings.require_database_url)
        own = Store(parts._replace(netloc=f"{role}:p@{parts.hostname}:{parts.port}").geturl())
        async with own.session() as session:
            assert "every claim has a token of its own" not in {one.what for one in await complaints(session, settings)}
        await own.close()
    finally:
        await sql.execute(f"drop owned by {role}")
        await sql.execute(f"drop role {role}")


def test_the_command_shows_them(database_url: str, sqs_url: str) -> None:
    env = {
        "PENSTOCK_DATABASE_URL": database_url, "PENSTOCK_SQS_ENDPOINT_URL": sqs_url, "PENSTOCK_AWS_REGION": "us-east-1",
    }  # fmt: skip
    done = CliRunner().invoke(app, ["doctor", "--invariants", "--json"], env=env)
    found = {finding["what"]: finding["level"] for finding in json.loads(done.stdout)}
    assert [found[invariant.holds] for invariant in INVARIANTS] == ["ok"] * len(INVARIANTS)
    done = CliRunner().invoke(app, ["doctor", "--json"], env=env)
    assert INVARIANTS[0].holds not in done.stdout


async def test_what_is_stored_is_read_over_a_connection_as_the_processes_have_it(
    database_url: str, tmp_path: Path
) -> None:
    file = tmp_path / "password"
    password = urlsplit(database_url).password or ""
    file.write_text(password)
    bare = database_url.replace(f":{password}@", "@")
    report = Report()
    await examine_stored(load_settings(database_url=bare, database_password_file=str(file)), report)
    assert {finding.level for finding in report.findings} == {"ok"}
