from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from migrations.penstock_tables import SCHEMA, metadata
from penstock.db.migrate import _config, downgrade, head_revision, migrations_path, upgrade, upgrade_sql
from penstock.db.pool import Store
from penstock.db.statements import SQL
from penstock.local.postgres import EmbeddedPostgres
from penstock.protocol.errors import Unavailable
from penstock.protocol.task import Failure, NewTask, State
from penstock.tasks import claim, enqueue, reschedule, settle
from tests.waiting import wait_until

SERVICES = Path(__file__).parents[2] / "services"
Query = Callable[..., list[Any]]

# Everything in our schema, as text: what two databases must agree on to be of one schema.
_INVENTORY = """
select 'column', c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull::text,
       pg_get_expr(d.adbin, d.adrelid)
from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
left join pg_attrdef d on d.adrelid = c.oid and d.adnum = a.attnum
where c.relnamespace = 'penstock'::regnamespace and c.relkind in ('r', 'p')
union all
select 'index', tablename, indexname, indexdef, null, null from pg_indexes where schemaname = 'penstock'
union all
select 'constraint', conrelid::regclass::text, conname, pg_get_constraintdef(oid), null, null
from pg_constraint where connamespace = 'penstock'::regnamespace
union all
select 'relation', relname, relkind::text, reloptions::text, obj_description(oid, 'pg_class'), null
from pg_class where relnamespace = 'penstock'::regnamespace
union all
select 'comment', objoid::regclass::text, attname, description, null, null
from pg_description left join pg_attribute on attrelid = objoid and attnum = objsubid and attnum > 0
where classoid = 'pg_class'::regclass
  and objoid in (select oid from pg_class where relnamespace = 'penstock'::regnamespace)
union all
select 'type', typname, string_agg(enumlabel, ',' order by enumsortorder), null, null, null
from pg_type join pg_enum on enumtypid = pg_type.oid
where typnamespace = 'penstock'::regnamespace group by typname
union all
select 'sequence', s.sequencename, s.cache_size::text, s.cycle::text, null, null
from pg_sequences s where s.schemaname = 'penstock'
union all
select 'function', proname, pg_get_functiondef(oid), null, null, null
from pg_proc where pronamespace = 'penstock'::regnamespace
order by 1, 2, 3, 4
"""


def query(url: str, statement: str, *args: Any) -> list[Any]:
    async def run() -> list[Any]:
        connection = await asyncpg.connect(url)
        try:
            return [tuple(row) for row in await connection.fetch(statement, *args)]
        finally:
            await connection.close()

    return asyncio.run(run())


def inventory(url: str) -> list[Any]:
    return query(url, _INVENTORY)


@pytest.fixture
def migrated_url(empty_database_url: str) -> str:
    upgrade(empty_database_url)
    return empty_database_url


def test_an_upgrade_from_nothing_ends_at_the_newest_revision(migrated_url: str) -> None:
    assert query(migrated_url, "select version_num from penstock.alembic_version") == [(head_revision(),)]
    assert {row[1] for row in inventory(migrated_url) if row[0] == "column"} > {"task", "task_history", "dispatch"}


def test_upgrading_twice_changes_nothing(migrated_url: str) -> None:
    before = inventory(migrated_url)
    upgrade(migrated_url)
    assert inventory(migrated_url) == before


def test_a_downgrade_to_base_leaves_nothing_behind_and_the_way_up_is_the_same_again(migrated_url: str) -> None:
    fresh = inventory(migrated_url)
    downgrade(migrated_url, "base")
    left = inventory(migrated_url)
    assert {row[1].removeprefix("penstock.") for row in left} == {"alembic_version", "alembic_version_pkc"}
    assert query(migrated_url, "select * from penstock.alembic_version") == []
    upgrade(migrated_url)
    assert inventory(migrated_url) == fresh


def test_every_revision_can_be_stepped_up_and_down_alone(empty_database_url: str) -> None:
    revisions = [script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()][::-1]
    seen = []
    for revision in revisions:
        upgrade(empty_database_url, revision)
        seen.append(inventory(empty_database_url))
    for number, revision in reversed(list(enumerate(revisions))):
        downgrade(empty_database_url, "-1")
        if number:
            assert inventory(empty_database_url) == seen[number - 1], f"down from {revision}"
        upgrade(empty_database_url, revision)
        assert inventory(empty_database_url) == seen[number], f"up again to {revision}"
        downgrade(empty_database_url, "-1")


def test_a_month_of_partitions_goes_with_their_tables(migrated_url: str) -> None:
    query(migrated_url, "select penstock.ensure_partitions(30)")
    downgrade(migrated_url, "base")
    assert query(migrated_url, "select relname from pg_class where relnamespace = 'penstock'::regnamespace") == [
        ("alembic_version",), ("alembic_version_pkc",),
    ]  # fmt: skip


@pytest.mark.parametrize("change", [upgrade, lambda url: downgrade(url, "base")], ids=["up", "down"])
def test_a_database_at_an_unknown_revision_is_left_as_it_is_with_what_to_do(
    migrated_url: str, change: Callable[[str], None]
) -> None:
    query(migrated_url, "update penstock.alembic_version set version_num = '0029'")
    before = inventory(migrated_url)
    with pytest.raises(Unavailable, match=r"at revision '0029', which this version does not know: .* empty database"):
        change(migrated_url)
    assert inventory(migrated_url) == before
    assert query(migrated_url, "select version_num from penstock.alembic_version") == [("0029",)]


def test_a_key_for_claim_ids_is_made_with_the_schema(migrated_url: str) -> None:
    keys = query(migrated_url, "select octet_length(secret), accepted_until from penstock.claim_key")
    assert keys == [(32, None)]


def test_a_downgrade_leaves_no_function_in_the_public_schema(migrated_url: str) -> None:
    ours = (
        "select proname from pg_proc where pronamespace = 'public'::regnamespace and proname like 'penstock%'"
        " order by proname"
    )
    assert query(migrated_url, ours) == [
        ("penstock_enqueue",), ("penstock_enqueue_many",), ("penstock_note_trace",), ("penstock_settle",),
    ]  # fmt: skip
    downgrade(migrated_url, "base")
    assert query(migrated_url, ours) == []


@pytest.mark.parametrize(
    "name", ["enqueue_plain_tasks", "enqueue_keyed_tasks", "replace_tasks", "enqueue_traced_tasks", "note_traces"]
)
def test_a_function_of_the_database_is_the_statement_of_the_code(migrated_url: str, name: str) -> None:
    """A change of the statement replaces the function by a migration of its own."""
    rows = query(
        migrated_url,
        "select prosrc from pg_proc where proname = $1 and pronamespace = 'penstock'::regnamespace", name,
    )  # fmt: skip
    source = rows[0][0]
    body = (source.partition("return query")[2] or source.partition("begin")[2]).rpartition(";\n")[0].strip()
    assert body == SQL[name]


def test_migrations_make_one_line_of_history() -> None:
    assert len(ScriptDirectory.from_config(_config()).get_heads()) == 1


def test_the_tables_that_the_code_describes_are_those_of_the_migrations(migrated_url: str) -> None:
    def ours(_object: object, name: str | None, kind: str, reflected: bool, other: object) -> bool:
        # Partitions and indexes are the migrations' own affair.
        if kind == "index" or (kind == "table" and name == "alembic_version"):
            return False
        return not (kind == "table" and reflected and other is None and str(name).startswith("task_"))

    def compare(connection: Connection) -> Any:
        options = {
            "include_schemas": True,
            "include_name": lambda name, kind, _parents: kind != "schema" or name == SCHEMA,
            "include_object": ours,
            "compare_type": True,
            "compare_server_default": True,
        }
        return compare_metadata(MigrationContext.configure(connection, opts=options), metadata)

    async def differences() -> Any:
        # The embedded server's user is called as our schema, which would make it the default one, compared as nameless.
        engine = create_async_engine(
            "postgresql+asyncpg://",
            async_creator=lambda: asyncpg.connect(migrated_url, server_settings={"search_path": "public"}),
            poolclass=NullPool,
        )
        try:
            async with engine.connect() as connection:
                return await connection.run_sync(compare)
        finally:
            await engine.dispose()

    found = [
        change for entry in asyncio.run(differences()) for change in (entry if isinstance(entry, list) else [entry])
    ]
    # Comments are for those who look at the database; they stand in the migrations alone.
    assert [change for change in found if not change[0].endswith("_comment")] == []


def test_the_described_columns_keep_the_order_null_and_type_of_the_database(migrated_url: str) -> None:
    seen = query(
        migrated_url,
        "select c.relname, a.attname, not a.attnotnull from pg_class c join pg_attribute a on a.attrelid = c.oid"
        " where c.relnamespace = 'penstock'::regnamespace and a.attnum > 0 and not a.attisdropped"
        " and c.relname = any($1) order by c.relname, a.attname",
        [table.name for table in metadata.tables.values()],
    )
    described = [
        (table.name, column.name, bool(column.nullable))
        for table in metadata.tables.values()
        for column in table.columns
    ]
    assert seen == sorted(described)


def test_the_states_of_the_database_are_those_of_the_code(migrated_url: str) -> None:
    rows = query(migrated_url, "select unnest(enum_range(null::penstock.task_state))::text")
    assert [row[0] for row in rows] == [state.value for state in State]


# CHECKs: a row that is right, and for each constraint one change that makes it wrong.

_LIVE = {
    "id": "1", "state": "'SCHEDULED'", "action": "'a'", "payload": "'{}'", "priority": "0", "run_at": "now()",
    "attempts": "0", "max_attempts": "2", "claim": "0", "claimed_at": "null", "heartbeat_at": "null",
    "created_at": "now()", "updated_at": "now()", "ordering_key": "null",
}  # fmt: skip
_ACQUIRED = _LIVE | {"state": "'ACQUIRED'", "attempts": "1", "claim": "1", "claimed_at": "now()"}
_WAITING = _LIVE | {"state": "'WAITING'", "ordering_key": "'k'"}
_WAITING_FOR_EVENT = _ACQUIRED | {"state": "'WAITING'"}
_ERROR = _LIVE | {"state": "'ERROR'", "attempts": "1", "claim": "1"}
_SUCCESS = {
    "id": "1", "state": "'SUCCESS'", "action": "'a'", "payload": "'{}'", "priority": "0", "run_at": "now()",
    "attempts": "1", "max_attempts": "2", "claim": "1", "claimed_at": "now()", "created_at": "now()",
    "updated_at": "now()", "finished_at": "now()", "result": "'1'", "failures": "null",
}  # fmt: skip
_CRITICAL = _SUCCESS | {"state": "'CRITICAL_ERROR'", "result": "null", "failures": "'[]'"}
_CANCELLED = _SUCCESS | {"state": "'CANCELLED'", "result": "null", "claimed_at": "null", "attempts": "0"}
_REJECTED = {"source": "'inbound'", "body": "''", "reason": "''"}
_API_KEY = {
    "name": "'n'", "prefix": "'p'", "hash": "sha256('s')", "permissions": "'{read,enqueue}'",
}  # fmt: skip

_WAIT = {"token": "'t'", "task_id": "1", "claim": "1", "deadline": "now()"}
_SCHEDULE = {"name": "'n'", "expression": "'@hourly'", "timezone": "'UTC'", "action": "'a'", "payload": "'{}'"}
_CLOCK = {"schedule_id": "1", "next_at": "now()", "due_at": "now()"}
_RUN = {"schedule_id": "1", "scheduled_at": "now()", "outcome": "'FIRED'", "task_id": "1"}
_IMPORT = {"replace": "false", "total": "3", "seen": "1", "created": "1"}

_RIGHT = [
    ("task", _WAITING | {"ordering_key": "null", "workflow": "1"}),
    ("task", _LIVE), ("task", _ACQUIRED), ("task", _ACQUIRED | {"heartbeat_at": "now()", "attempts": "2"}),
    ("task", _WAITING), ("task", _WAITING_FOR_EVENT), ("task", _ERROR),
    ("wait", _WAIT),
    ("wait", {"token": "'t'", "answer": "'1'", "digest": "''"}), ("wait", _WAIT | {"deadline": "null"}),
    ("task_history", _SUCCESS), ("task_history", _CRITICAL), ("task_history", _CANCELLED), ("rejected", _REJECTED),
    ("api_key", _API_KEY),
    ("schedule", _SCHEDULE), ("schedule_clock", _CLOCK), ("schedule_clock", {"schedule_id": "1"}),
    ("schedule_run", _RUN), ("schedule_run", _RUN | {"outcome": "'SKIPPED'", "task_id": "null"}),
    ("schedule_import", _IMPORT),
]  # fmt: skip
_WORKFLOW = {"name": "''", "definition": "''", "steps": "1", "open": "1"}
_STEP = {"workflow_id": "1", "number": "0", "name": "'a'", "kind": "'task'"}
_WRONG = [
    ("task_state_is_live", "task", _LIVE | {"state": "'SUCCESS'"}),
    ("task_claimed_at_iff_acquired", "task", _ACQUIRED | {"claimed_at": "null"}),
    ("task_claimed_at_iff_acquired", "task", _LIVE | {"claimed_at": "now()"}),
    ("task_heartbeat_only_while_acquired", "task", _LIVE | {"heartbeat_at": "now()"}),
    ("task_attempts_within_cap", "task", _ACQUIRED | {"attempts": "3"}),
    ("task_attempts_fit_state", "task", _LIVE | {"attempts": "1"}),
    ("task_attempts_fit_state", "task", _ACQUIRED | {"attempts": "0"}),
    ("task_attempts_fit_state", "task", _ERROR | {"attempts": "0"}),
    ("task_attempts_fit_state", "task", _ERROR | {"attempts": "2"}),
    ("task_claimed_at_iff_acquired", "task", _WAITING | {"attempts": "1"}),
    ("task_claimed_at_iff_acquired", "task", _WAITING | {"claimed_at": "now()"}),
    ("task_heartbeat_only_while_acquired", "task", _WAITING_FOR_EVENT | {"heartbeat_at": "now()"}),
    ("task_claimed_has_token", "task", _ACQUIRED | {"claim": "0"}),
    ("task_claimed_has_token", "task", _WAITING_FOR_EVENT | {"claim": "0"}),
    ("task_waiting_has_key", "task", _WAITING | {"ordering_key": "null"}),
    ("tenant_limits_make_sense", "tenant", {"name": "'t'", "rate": "0"}),
    ("tenant_limits_make_sense", "tenant", {"name": "'t'", "max_in_flight": "0"}),
    ("tenant_default_is_own", "tenant", {"name": "'*'"}),
    ("tenant_default_is_own", "tenant", {"name": "'*'", "own": "true", "paused": "true"}),
    ("wait_names_claim", "wait", _WAIT | {"claim": "null"}),
    ("wait_is_active_or_answered", "wait", _WAIT | {"answer": "'1'", "digest": "''"}),
    ("wait_is_active_or_answered", "wait", {"token": "'t'", "deadline": "now()"}),
    ("wait_keeps_what_it_knows", "wait", {"token": "'t'", "answer": "'1'"}),
    (
        "audit_ends_with_outcome",
        "audit",
        {"who": "''", "address": "''", "door": "''", "method": "''", "params": "''", "outcome": "'ok'"},
    ),
    ("history_state_is_final", "task_history", _SUCCESS | {"state": "'ERROR'"}),
    ("history_result_iff_success", "task_history", _SUCCESS | {"result": "null"}),
    ("history_result_iff_success", "task_history", _CRITICAL | {"result": "'1'"}),
    ("history_claimed_if_run", "task_history", _CRITICAL | {"claimed_at": "null"}),
    ("history_failed_if_critical", "task_history", _CRITICAL | {"failures": "null"}),
    ("rejected_source_check", "rejected", _REJECTED | {"source": "'elsewhere'"}),
    ("api_key_hash_is_sha256", "api_key", _API_KEY | {"hash": "'s'"}),
    ("api_key_permissions_known", "api_key", _API_KEY | {"permissions": "'{read,root}'"}),
    ("api_key_permissions_known", "api_key", _API_KEY | {"permissions": "'{}'"}),
    ("action_limits_make_sense", "action", {"name": "'a'", "max_in_flight": "0"}),
    ("action_limits_make_sense", "action", {"name": "'a'", "key_rate": "0"}),
    ("action_limits_make_sense", "action", {"name": "'a'", "burst": "0"}),
    ("emptying_known", "emptying", {"what": "'labels'", "upto": "now()", "step_seconds": "1"}),
    ("emptying_steps", "emptying", {"what": "'payload'", "upto": "now()", "step_seconds": "0"}),
    ("schedule_missed_known", "schedule", _SCHEDULE | {"missed": "'some'"}),
    ("schedule_overlap_known", "schedule", _SCHEDULE | {"overlap": "'maybe'"}),
    ("schedule_ends_after_its_start", "schedule", _SCHEDULE | {"start_at": "now()", "end_at": "now() - interval '1s'"}),
    ("schedule_clock_goes_forward", "schedule_clock", _CLOCK | {"last_at": "now()"}),
    ("schedule_clock_due_with_next", "schedule_clock", _CLOCK | {"due_at": "null"}),
    ("schedule_clock_due_with_next", "schedule_clock", _CLOCK | {"next_at": "null"}),
    ("schedule_clock_due_with_next", "schedule_clock", _CLOCK | {"due_at": "now() - interval '1s'"}),
    ("schedule_run_outcome_known", "schedule_run", _RUN | {"outcome": "'LOST'", "task_id": "null"}),
    ("schedule_run_task_iff_fired", "schedule_run", _RUN | {"task_id": "null"}),
    ("schedule_run_task_iff_fired", "schedule_run", _RUN | {"outcome": "'MISSED'"}),
    ("schedule_import_counts_agree", "schedule_import", _IMPORT | {"seen": "2"}),
    ("schedule_import_counts_agree", "schedule_import", _IMPORT | {"seen": "4", "created": "4"}),
    ("job_state_known", "job", {"kind": "'a'", "params": "'{}'", "state": "'ASLEEP'"}),
    ("workflow_state_known", "workflow", _WORKFLOW | {"state": "'ASLEEP'"}),
    ("workflow_open_within_steps", "workflow", _WORKFLOW | {"open": "2"}),
    ("workflow_finished_iff_final", "workflow", _WORKFLOW | {"state": "'FAILED'"}),
    ("workflow_finished_iff_final", "workflow", _WORKFLOW | {"finished_at": "now()"}),
    ("workflow_step_kind_known", "workflow_step", _STEP | {"kind": "'loop'"}),
    ("workflow_step_counts_make_sense", "workflow_step", _STEP | {"pending": "-1"}),
    ("workflow_step_counts_make_sense", "workflow_step", _STEP | {"open_children": "1"}),
    ("workflow_step_done_is_final", "workflow_step", _STEP | {"done": "true"}),
    ("workflow_step_passed_is_done", "workflow_step", _STEP | {"passed": "true"}),
    (
        "scheduler0_credential_secret_hash_is_sha256",
        "scheduler0_credential",
        {"api_key": "'k'", "secret_hash": "'short'::bytea"},
    ),
]


async def insert(connection: Any, table: str, row: dict[str, str]) -> None:
    transaction = connection.transaction()
    await transaction.start()
    try:
        await connection.execute(f"insert into penstock.{table} ({', '.join(row)}) values ({', '.join(row.values())})")
    finally:
        await transaction.rollback()


async def test_rows_whose_state_and_timestamps_agree_are_taken(database_url: str) -> None:
    connection = await asyncpg.connect(database_url)
    try:
        for table, row in _RIGHT:
            await insert(connection, table, row)
    finally:
        await connection.close()


@pytest.mark.parametrize(("constraint", "table", "row"), _WRONG)
async def test_a_row_that_contradicts_itself_is_refused(
    database_url: str, constraint: str, table: str, row: dict[str, str]
) -> None:
    connection = await asyncpg.connect(database_url)
    try:
        with pytest.raises(asyncpg.CheckViolationError) as caught:
            await insert(connection, table, row)
    finally:
        await connection.close()
    # A state of the other table has no partition there; Postgres says so instead of the CHECK's name.
    if constraint != "history_state_is_final":
        assert caught.value.constraint_name == constraint


def test_every_check_has_a_row_that_it_refuses(migrated_url: str) -> None:
    rows = query(
        migrated_url,
        "select distinct conname from pg_constraint where contype = 'c' and connamespace = 'penstock'::regnamespace",
    )
    assert {row[0] for row in rows} == {constraint for constraint, _, _ in _WRONG}


# Running migrations


def test_concurrent_upgrades_wait_for_each_other(empty_database_url: str) -> None:
    script = "import os; from penstock.db.migrate import upgrade; upgrade(os.environ['URL'])"
    environment = {**os.environ, "PYTHONPATH": str(SERVICES), "URL": empty_database_url}

    async def hold_until_all_wait() -> list[subprocess.Popen[bytes]]:
        holder = await asyncpg.connect(empty_database_url)
        try:
            await holder.execute("select pg_advisory_lock(hashtext('penstock migrate'))")
            processes = [
                subprocess.Popen([sys.executable, "-c", script], env=environment, stderr=subprocess.PIPE)
                for _ in range(3)
            ]
            deadline = asyncio.get_running_loop().time() + 120
            asking = (
                "select count(*) from pg_stat_activity where datname = current_database()"
                " and pid <> pg_backend_pid() and query like '%pg_try_advisory_xact_lock%'"
            )
            while await holder.fetchval(asking) < 3:
                assert asyncio.get_running_loop().time() < deadline
                assert all(process.poll() is None for process in processes)
                await asyncio.sleep(0.05)
            # Nothing is touched before the lock is had, not even the schema.
            assert await holder.fetchval("select to_regnamespace('penstock')") is None
        finally:
            await holder.close()
        return processes

    processes = asyncio.run(hold_until_all_wait())
    errors = [process.communicate(timeout=120)[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], errors
    assert query(empty_database_url, "select version_num from penstock.alembic_version") == [(head_revision(),)]
    wait_until(
        lambda: query(empty_database_url, "select count(*) from pg_locks where locktype = 'advisory'") == [(0,)],
        "the locks to be gone",
    )


def test_a_migration_that_fails_leaves_the_revision_before_it(empty_database_url: str) -> None:
    query(empty_database_url, "create schema penstock")
    query(empty_database_url, "create table penstock.tally (someone text)")
    with pytest.raises(Exception, match="tally"):
        upgrade(empty_database_url)
    rows = query(
        empty_database_url,
        "select relname from pg_class where relnamespace = 'penstock'::regnamespace and relkind in ('r', 'p', 'S')",
    )
    assert {row[0] for row in rows} <= {"tally", "alembic_version"}
    query(empty_database_url, "drop table penstock.tally")
    upgrade(empty_database_url)
    assert query(empty_database_url, "select version_num from penstock.alembic_version") == [(head_revision(),)]


def test_the_sql_of_an_upgrade_makes_the_same_schema_when_run_by_hand(
    empty_database_url: str, template_database: str, postgres: EmbeddedPostgres
) -> None:
    script = upgrade_sql()

    async def run() -> None:
        connection = await asyncpg.connect(empty_database_url)
        try:
            await connection.execute(script)
        finally:
            await connection.close()

    asyncio.run(run())
    assert inventory(empty_database_url) == inventory(postgres.dsn(template_database))


def test_the_migrations_are_found_beside_the_package() -> None:
    assert (migrations_path() / "env.py").is_file()


def test_a_fresh_schema_carries_tasks_through_their_whole_life(migrated_url: str) -> None:
    async def live() -> None:
        store = Store(migrated_url)
        try:
            async with store.transaction() as session:
                answers = await enqueue.enqueue(
                    session,
                    [NewTask("a", unique_key="u", ordering_key="o"), NewTask("a", ordering_key="o"), NewTask("a")],
                )
            first, second, third = (answer.id for answer in answers)
            async with store.session() as session:
                batch = await claim.claim(session, 10)
                assert batch is not None
                assert [task.id for task in batch.tasks] == [first, third]
                await claim.confirm(session, batch.id)
            claims = {task.id: task.claim for task in batch.tasks}
            async with store.transaction() as session:
                assert await settle.finish(session, {(first, claims[first]): '{"ok":true}'}) == 1
                error = '{"code":1,"message":"boom"}'
                assert len(await settle.fail(session, [Failure(third, claims[third], error, 0.0)])) == 1
            async with store.session() as session:
                again = await claim.claim(session, 10)
                assert again is not None
                assert {task.id for task in again.tasks} == {second, third}
            claims = {task.id: task.claim for task in again.tasks}
            async with store.transaction() as session:
                assert len(await settle.fail(session, [Failure(third, claims[third], error, None)])) == 1
                assert await settle.cancel(session, [second]) == {second}
                assert await reschedule.restart(session, [third]) == {third: State.SCHEDULED}
                states = {row["id"]: row["state"] for row in await session.fetch("read_tasks", [first, second, third])}
            assert states == {first: "SUCCESS", second: "CANCELLED", third: "SCHEDULED"}
        finally:
            await store.close()

    asyncio.run(live())
