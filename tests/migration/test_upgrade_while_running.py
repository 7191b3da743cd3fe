"""What docs/upgrading.md promises of migrations: older processes go on beside a newer schema, tasks live through it."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory

from penstock.db import migrate
from penstock.db.migrate import downgrade, head_revision, migrations_path, upgrade
from penstock.db.pool import Store
from penstock.protocol.errors import Unavailable
from penstock.protocol.task import Failure, State
from penstock.tasks import claim as claiming
from penstock.tasks import reschedule, settle

# The rules hold for what comes after this revision.
FIRST = "initial"
FOLLOWING = Path(__file__).parent / "versions"


def revisions_from(first: str) -> list[str]:
    known = [script.revision for script in ScriptDirectory.from_config(migrate._config()).walk_revisions()][::-1]
    return known[known.index(first) :]


@pytest.fixture
def following(monkeypatch: pytest.MonkeyPatch) -> None:
    """One revision more than those that ship, so that there is an upgrade to look at also while there is but one."""
    shipped = migrate._config

    def more(*args: Any, **options: Any) -> Config:
        config = shipped(*args, **options)
        config.set_main_option(
            "version_locations", os.pathsep.join([str(migrations_path() / "versions"), str(FOLLOWING)])
        )
        return config

    monkeypatch.setattr(migrate, "_config", more)


async def fetch(url: str, statement: str, *args: Any) -> list[Any]:
    connection = await asyncpg.connect(url)
    try:
        return [tuple(row) for row in await connection.fetch(statement, *args)]
    finally:
        await connection.close()


_COLUMNS = """
select c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull,
       a.atthasdef or a.attidentity <> '' or a.attgenerated <> ''
from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
where c.relnamespace = 'penstock'::regnamespace and c.relkind in ('r', 'p') and c.relname <> 'alembic_version'
"""
_LABELS = """
select typname, enumlabel from pg_enum join pg_type on pg_type.oid = enumtypid
where typnamespace = 'penstock'::regnamespace
"""
_FUNCTIONS = """
select pronamespace::regnamespace::text, proname, proargtypes::oid[]::regtype[]::text[], pronargdefaults,
       pg_get_function_result(oid)
from pg_proc
where pronamespace = 'penstock'::regnamespace or (pronamespace = 'public'::regnamespace and proname like 'penstock%')
"""


class Schema:
    """What statements of a process name."""

    def __init__(self, url: str) -> None:
        async def read() -> tuple[list[Any], ...]:
            return await fetch(url, _COLUMNS), await fetch(url, _LABELS), await fetch(url, _FUNCTIONS)

        columns, labels, functions = asyncio.run(read())
        self.columns = {(table, name): tuple(rest) for table, name, *rest in columns}
        self.tables = {table for table, _ in self.columns}
        self.labels = set(labels)
        self.functions = functions

    def answers(self, call: Any) -> bool:
        """Whether what calls that function of an older schema may call one of this one in the same way."""
        home, name, types, _, result = call
        return any(
            (home, name, types, result) == (here, found, given[: len(types)], gives)
            and len(given) - spare <= len(types)
            for here, found, given, spare, gives in self.functions
        )

    def problems_for(self, older: Schema) -> list[str]:
        """What statements written for an older schema would stumble over in this one."""
        found = [f"{table}.{name} is gone" for table, name in older.columns.keys() - self.columns.keys()]
        for column in older.columns.keys() & self.columns.keys():
            (old_type, old_required, old_default), (kind, required, default) = (
                older.columns[column],
                self.columns[column],
            )
            if kind != old_type:
                found.append(f"{'.'.join(column)} was {old_type} and is {kind}")
            if required and not default and (not old_required or old_default):
                found.append(f"{'.'.join(column)} has to be given now")
        for table, name in self.columns.keys() - older.columns.keys():
            _, required, default = self.columns[table, name]
            if table in older.tables and required and not default:
                found.append(f"{table}.{name} is new and has to be given")
        found += [f"{'.'.join(label)} is no label any more" for label in older.labels - self.labels]
        found += [
            f"{call[0]}.{call[1]} cannot be called as before" for call in older.functions if not self.answers(call)
        ]
        return found


@pytest.mark.usefixtures("following")
def test_every_revision_keeps_what_statements_of_the_version_before_it_name(empty_database_url: str) -> None:
    first, *later = revisions_from(FIRST)
    upgrade(empty_database_url, first)
    schema = Schema(empty_database_url)
    assert len(schema.columns) > 100
    assert later
    for revision in later:
        upgrade(empty_database_url, revision)
        newer = Schema(empty_database_url)
        assert (revision, newer.problems_for(schema)) == (revision, [])
        schema = newer


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("alter table penstock.task drop column labels", "task.labels is gone"),
        ("alter table penstock.task rename labels to tags", "task.labels is gone"),
        ("alter table penstock.tally alter seconds type numeric", "tally.seconds was double precision and is numeric"),
        ("alter table penstock.tally alter seconds drop default", "tally.seconds has to be given now"),
        ("alter table penstock.tally add more int not null", "tally.more is new and has to be given"),
        ("drop function penstock.read_instant", "penstock.read_instant cannot be called as before"),
        ("drop table penstock.rejected", "rejected.body is gone"),
    ],
    ids=["drop", "rename", "type", "default", "required", "function", "table"],
)
def test_the_rule_sees_what_breaks_it(database_url: str, change: str, problem: str) -> None:
    before = Schema(database_url)
    asyncio.run(fetch(database_url, change))
    assert problem in Schema(database_url).problems_for(before)


_BEGIN = [
    # 1 is at a worker, 2 waits behind it, 3 has failed once, 4 is new, 5 waits for its time, 6 was given up.
    "select penstock_enqueue('a', ordering_key => 'k')",
    "select penstock_enqueue('a', ordering_key => 'k')",
    *["select penstock_enqueue('a')"] * 2,
    "select penstock_enqueue('a', delay => 3600)",
    "update penstock.task set state = 'ACQUIRED', attempts = 1, claim = nextval('penstock.claim_seq'),"
    " claimed_at = now() where id = 1",
    "update penstock.task set state = 'ERROR', attempts = 1, claim = nextval('penstock.claim_seq') where id = 3",
    "insert into penstock.task_history (id, state, action, payload, priority, run_at, attempts, max_attempts, claim,"
    " claimed_at, created_at, updated_at, finished_at, failures) select nextval('penstock.task_id_seq'),"
    " 'CRITICAL_ERROR', 'a', '{}', 0, now(), 10, 10, nextval('penstock.claim_seq'), now(), now(), now(), now(), '[]'",
]


@pytest.mark.usefixtures("following")
@pytest.mark.parametrize("revision", revisions_from(FIRST))
def test_tasks_in_every_state_live_on_over_an_upgrade(empty_database_url: str, revision: str) -> None:
    upgrade(empty_database_url, revision)

    async def begin() -> int:
        for statement in _BEGIN:
            await fetch(empty_database_url, statement)
        rows = await fetch(empty_database_url, "select id, state::text, claim from penstock.task order by id")
        assert [state for _, state, _ in rows] == ["ACQUIRED", "WAITING", "ERROR", "SCHEDULED", "SCHEDULED"]
        return int(rows[0][2])

    async def live(claim: int) -> None:
        store = Store(empty_database_url)
        try:
            async with store.transaction() as session:
                assert await settle.finish(session, {(1, claim): '{"ok":true}'}) == 1
                assert await settle.cancel(session, [5]) == {5}
                assert await reschedule.restart(session, [6]) == {6: State.SCHEDULED}
            async with store.session() as session:
                batch = await claiming.claim(session, 10)
                assert batch is not None
                await claiming.confirm(session, batch.id)
            claims = {task.id: task.claim for task in batch.tasks}
            assert set(claims) == {2, 3, 4, 6}
            async with store.transaction() as session:
                assert await settle.finish(session, {(task, claims[task]): "1" for task in (2, 3, 6)}) == 3
                failure = Failure(4, claims[4], '{"code":1,"message":"boom"}', None)
                assert len(await settle.fail(session, [failure])) == 1
                rows = await session.fetch("read_tasks", [1, 2, 3, 4, 5, 6])
            assert {row["id"]: row["state"] for row in rows} == {
                1: "SUCCESS", 2: "SUCCESS", 3: "SUCCESS", 4: "CRITICAL_ERROR", 5: "CANCELLED", 6: "SUCCESS",
            }  # fmt: skip
        finally:
            await store.close()

    claim = asyncio.run(begin())
    upgrade(empty_database_url)
    asyncio.run(live(claim))


class Holder(threading.Thread):
    """A transaction that has read the tasks and stays open, as a report or a backup does, until it is asked to end."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url = url
        self.holds = threading.Event()
        self.may_end = threading.Event()

    def run(self) -> None:
        asyncio.run(self._hold())

    async def _hold(self) -> None:
        connection = await asyncpg.connect(self.url)
        try:
            async with connection.transaction():
                await connection.fetch("select 1 from penstock.task")
                self.holds.set()
                await asyncio.to_thread(self.may_end.wait, 60)
        finally:
            await connection.close()


@pytest.fixture
def holder(empty_database_url: str, following: None) -> Any:
    upgrade(empty_database_url, FIRST)
    thread = Holder(empty_database_url)
    thread.start()
    assert thread.holds.wait(60)
    yield thread
    thread.may_end.set()
    thread.join(60)


def test_an_upgrade_gives_way_while_an_old_transaction_holds_a_table_and_goes_on_after_it(
    empty_database_url: str, holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = []

    def pause(seconds: float) -> None:
        # Between two tries no other session waits: a writer gets its turn.
        asyncio.run(fetch(empty_database_url, "select penstock_enqueue('a')"))
        pauses.append(seconds)
        holder.may_end.set()
        holder.join(60)

    monkeypatch.setattr("penstock.db.migrate.time.sleep", pause)
    upgrade(empty_database_url, lock_seconds=0.05, tries=100)
    assert set(pauses) == {0.05}
    version = asyncio.run(fetch(empty_database_url, "select version_num from penstock.alembic_version"))
    assert version == [(head_revision(),)]


def test_an_upgrade_that_never_gets_its_lock_says_what_to_do_and_leaves_the_schema_as_it_was(
    empty_database_url: str, holder: Holder
) -> None:
    for change in (upgrade, lambda url, **options: downgrade(url, "base", **options)):
        with pytest.raises(Unavailable, match=r"over 2 tries of 0.05 s each; look for old ones in pg_stat_activity"):
            change(empty_database_url, lock_seconds=0.05, tries=2)
    assert asyncio.run(fetch(empty_database_url, "select version_num from penstock.alembic_version")) == [(FIRST,)]
