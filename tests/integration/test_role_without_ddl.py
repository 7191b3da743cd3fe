"""All processes work with one role that `penstock migrate --grant` has prepared, or with one each by `penstock grants`.

No such role may change the schema.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import httpx
import pytest
from typer.testing import CliRunner

from penstock import Context, action
from penstock.brokers.sqs import SqsQueue
from penstock.cli.app import app
from penstock.compat import delayed_records
from penstock.db.migrate import grant
from penstock.db.pool import Store
from penstock.local.postgres import EmbeddedPostgres
from penstock.protocol.errors import Refused
from penstock.settings.model import Settings
from penstock.settings.values import DAY
from penstock.submitter import Submitter
from penstock.supervisor.process import Supervisor
from penstock.supervisor.retention import Retention
from penstock.worker.handlers.actions import Registry
from tests.integration.apis import JSON, queues_of
from tests.integration.apis import running as api_running
from tests.integration.doors import no_routes, put, request
from tests.integration.lines import running as line_running
from tests.integration.roles import role_of

ROLE = "penstock App"  # which has to be quoted


@pytest.fixture
def role(postgres: EmbeddedPostgres, database_url: str) -> Iterator[str]:
    """A role that may connect to the test's database, and no more."""
    postgres.execute(f"""create role "{ROLE}" login password 'app'""")
    yield ROLE
    postgres.execute(f'drop owned by "{ROLE}"', urlsplit(database_url).path.removeprefix("/"))
    postgres.execute(f'drop role "{ROLE}"')


@pytest.fixture
async def app_url(role: str, database_url: str, postgres: EmbeddedPostgres) -> str:
    await grant(database_url, role)
    await grant(database_url, role)
    return urlsplit(database_url)._replace(netloc=f"penstock%20App:app@127.0.0.1:{postgres.port}").geturl()


PROCESSES = ("submitter", "scheduler", "resulter", "supervisor", "api")


@pytest.fixture
def roles(postgres: EmbeddedPostgres, database_url: str) -> Iterator[dict[str, str]]:
    """URLs by process, each of a role with what `penstock grants` prints for it."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(role_of(name, postgres, database_url)) for name in PROCESSES}


@pytest.fixture(params=["one role", "a role each"])
async def stores(
    request: pytest.FixtureRequest, app_url: str, roles: dict[str, str]
) -> AsyncIterator[dict[str, Store]]:
    """A store for each process."""
    urls = dict.fromkeys(PROCESSES, app_url) if request.param == "one role" else roles
    stores = {process: Store(url, pool_size=4) for process, url in urls.items()}
    yield stores
    for store in stores.values():
        await store.close()


@pytest.fixture
async def as_app(app_url: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(app_url)
    yield connection
    await connection.close()


def register(registry: Registry) -> None:
    @action("fine", registry=registry)
    async def fine(ctx: Context, **payload: Any) -> Any:
        return payload

    @action("broken", registry=registry)
    async def broken(ctx: Context) -> None:
        raise ArithmeticError


async def test_every_process_works_by_a_role_without_ddl(
    stores: dict[str, Store], settings: Settings, inbound: SqsQueue, sql: Any
) -> None:
    async with AsyncExitStack() as stack:
        transport, queues, dead_letters = queues_of(settings)
        stack.push_async_callback(transport.close)
        submitter = Submitter(store=stores["submitter"], inbound=inbound, settings=settings)
        supervisor = Supervisor(
            store=stores["supervisor"], queues=queues, dead_letters=dead_letters, settings=settings,
            open_queue=no_routes, additions=[delayed_records.side_tasks],
        )  # fmt: skip
        line = await stack.enter_async_context(line_running(stores["api"], settings, stores))
        api = await stack.enter_async_context(api_running(stores["api"], settings))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=api.url, timeout=60, headers=JSON))
        register(line.registry)

        async def call(method: str, **params: Any) -> Any:
            answer = (await http.post("/rpc", content=request(method, params, id=1))).json()
            assert "result" in answer, answer
            return answer["result"]

        sides = [asyncio.ensure_future(run()) for run in supervisor.side_tasks().values()]
        try:
            await put(inbound, request("enqueue", {"action": "fine", "payload": {"n": 1}, "unique_key": "by queue"}))
            await submitter.run_once()
            ours = (await call("enqueue", action="fine", payload={"n": 2}, ordering_key="k"))["id"]
            failing = (await call("enqueue", action="broken", payload={}, max_attempts=2, unique_key="u"))["id"]
            later = (await call("enqueue", action="fine", payload={}, delay=3600))["id"]
            assert (await call("cancel", id=later))["state"] == "CANCELLED"
            await call("schedule.create", name="often", expression="* * * * * *", action="fine")
            job = (await call("bulk.cancel", action="nothing"))["job"]
            steps = [{"name": "a", "action": "fine"}, {"name": "b", "action": "fine", "after": ["a"]}]
            workflow = (await call("workflow.create", name="w", steps=steps))["id"]
            assert json.loads((await line.until(ours, "SUCCESS"))["payload"]) == {"n": 2}
            await line.until(failing, "CRITICAL_ERROR")
            assert (await call("retry", id=failing))["state"] == "SCHEDULED"
            await line.until(failing, "CRITICAL_ERROR")
            async with asyncio.timeout(60):
                while (await call("workflow.status", id=workflow))["state"] != "SUCCESS":
                    await line.run_once()
                while (await call("job.get", id=job))["state"] == "RUNNING":
                    await asyncio.sleep(0.1)
                while not await sql.fetchval("select count(*) from penstock.schedule_run where outcome = 'FIRED'"):
                    await asyncio.sleep(0.1)
            await supervisor.run_once()
            assert not [side for side in sides if side.done()]
        finally:
            for side in sides:
                side.cancel()
            await asyncio.gather(*sides, return_exceptions=True)
        assert (await call("status", id=1))["state"] == "SUCCESS"
        assert (await call("stats"))["states"]["SUCCESS"] >= 4
    assert await sql.fetchval("select count(*) from penstock.rejected") == 0


async def test_partitions_are_made_filled_detached_and_dropped_by_it(
    stores: dict[str, Store], settings: Settings, sql: Any
) -> None:
    today = datetime.now(UTC)
    days = [f"task_success_{today + timedelta(days=n):%Y%m%d}" for n in range(4)]
    await sql.execute(f"drop table {', '.join(f'penstock.{name}' for name in days)}")
    async with line_running(stores["api"], settings, stores) as line:
        register(line.registry)
        ids = await line.enqueue("fine", {}, {}, {}, unique_key=None)
        for task_id in ids:
            await line.until(task_id, "SUCCESS")
        old = today.replace(hour=12) - timedelta(days=9)
        await sql.execute("update penstock.task_history set finished_at = $1 where id = $2", old, ids[0])
        # What settled without a partition of its day stands in the default one: it is copied and replaced.
        keeping = settings.model_copy(
            update={"retention_success_seconds": 30 * DAY, "retention_cancelled_seconds": 3600.0}
        )
        await Retention(store=stores["supervisor"], settings=keeping).run_once()
        await Retention(store=stores["supervisor"], settings=keeping).run_once()
        assert await sql.fetchval("select count(*) from penstock.task_success_default") == 0
        for name in [*days, f"task_success_{old:%Y%m%d}"]:
            found = await sql.fetchrow(
                "select relowner::regrole::text, relispartition from pg_class where relname = $1", name
            )
            assert tuple(found) == ("penstock", True), name
        (again,) = await line.enqueue("fine", {})
        await line.until(again, "SUCCESS")
    weekly = settings.model_copy(update={"retention_success_seconds": 7 * DAY})
    assert await Retention(store=stores["supervisor"], settings=weekly).run_once() == 1
    assert await sql.fetchval("select to_regclass($1)", f"penstock.task_success_{old:%Y%m%d}") is None
    assert await sql.fetchval("select count(*) from penstock.task_history") == 3
    # States that are kept for a short time leave record by record, by an index on partitions of the days.
    shortly = settings.model_copy(update={"retention_success_seconds": 1.0})
    await sql.execute("update penstock.task_history set finished_at = finished_at - interval '2 s'")
    await Retention(store=stores["supervisor"], settings=shortly).run_once()
    assert await sql.fetchval("select count(*) from penstock.task_history") == 0


@pytest.mark.parametrize(
    "statement",
    [
        "create table penstock.x ()",
        "create function penstock.x() returns int language sql return 1",
        "drop table penstock.task",
        "drop table penstock.task_success_default",
        "alter table penstock.task add x int",
        "alter table penstock.task_success detach partition penstock.task_success_default",
        "create index on penstock.task (action)",
        "truncate penstock.task",
        "update penstock.alembic_version set version_num = 'x'",
        "drop function penstock.drop_partition(text)",
        "create or replace function penstock.check_parent(parent text) returns text language sql return parent",
        "create trigger t after insert on penstock.task execute function penstock.note_default_change()",
    ],
)
async def test_it_may_change_no_schema(as_app: Any, statement: str) -> None:
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await as_app.execute(statement)


@pytest.mark.parametrize(
    "call",
    [
        "drop_partition('task')",
        "drop_partition('task_success_default')",
        "drop_partition('task_success')",
        "drop_partition('task_success_{today}')",  # still attached
        "drop_partition('receipt_{today}')",
        "drop_partition(null)",
        "detach_partition('task_success_default')",
        "detach_partition('task')",
        "index_partition('task')",
        "make_partition('task', 'x', null, null)",
        "make_partition('task_success', 'x', null, null)",
        "make_partition('task_success', 'task_success_20200101', null, null)",
        "make_partition('task_success', 'task_success_20200101', '2020-01-02Z', '2020-01-03Z')",
        "make_partition('task_success', 'task_success_20200101', '2020-01-01Z', '2020-01-03Z')",
        "make_partition('task_success', 'task_success_20200101', '2020-01-01Z', null)",
        "make_partition('task_success', 'task_cancelled_20200101', '2020-01-01Z', '2020-01-02Z')",
        "begin_default_move('task')",
        "step_default_move('task_history', 1, 1)",
        "end_default_move(null, 1)",
    ],
)
async def test_functions_of_upkeep_touch_nothing_but_days_of_the_history(as_app: Any, sql: Any, call: str) -> None:
    before = await sql.fetch("select oid from pg_class order by 1")
    with pytest.raises((asyncpg.InvalidParameterValueError, asyncpg.ObjectInUseError)):
        await as_app.execute(f"select penstock.{call.format(today=f'{datetime.now(UTC):%Y%m%d}')}")
    assert await sql.fetch("select oid from pg_class order by 1") == before


async def test_functions_of_upkeep_take_nothing_from_the_callers_search_path(as_app: Any, sql: Any) -> None:
    """A table or function of the caller's that comes first in its own path would be run with the owner's rights."""
    await as_app.execute("create temp table pg_inherits (inhrelid oid)")
    await as_app.execute("set search_path = pg_temp, pg_catalog")
    with pytest.raises(asyncpg.ObjectInUseError):
        await as_app.execute(f"select penstock.drop_partition('task_success_{datetime.now(UTC):%Y%m%d}')")
    settings = await sql.fetch(
        "select proname, proconfig[1] as path from pg_proc where prosecdef and pronamespace = 'penstock'::regnamespace"
        " and prorettype <> 'trigger'::regtype"
    )
    assert len(settings) == 8
    assert {row["path"] for row in settings} == {"search_path=pg_catalog, penstock, pg_temp"}


async def test_another_role_may_not_call_functions_of_upkeep(role: str, sql: Any) -> None:
    await sql.execute(f'grant usage on schema penstock to "{role}"')
    async with sql.transaction():
        await sql.execute(f'set local role "{role}"')
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            async with sql.transaction():
                await sql.execute("select penstock.drop_partition('task_success_20200101')")


async def test_tables_of_later_migrations_are_granted_too(app_url: str, as_app: Any, sql: Any) -> None:
    await sql.execute("create table penstock.later (id bigint generated by default as identity, n serial)")
    await as_app.execute("insert into penstock.later default values")
    assert await as_app.fetchval("select count(*) from penstock.later") == 1


async def test_a_role_that_is_missing_or_owns_the_schema_is_refused(role: str, database_url: str, sql: Any) -> None:
    with pytest.raises(Refused, match="there is no role 'nowhere'"):
        await grant(database_url, "nowhere")
    with pytest.raises(Refused, match="'penstock' has the rights of penstock, which owns the schema"):
        await grant(database_url, "penstock")
    await sql.execute(f'grant penstock to "{role}"')
    with pytest.raises(Refused, match=f"'{role}' has the rights of penstock"):
        await grant(database_url, role)


def test_migrate_grants(role: str, database_url: str) -> None:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["migrate", "--database-url", database_url, *arguments])

    done = run("--grant", role)
    assert (done.exit_code, done.stdout) == (0, f"schema is at head\nrole {role} may do what the processes need\n")
    assert run("--grant", "nowhere").exit_code == 1
    for other in (["--sql"], ["--down-to", "base"]):
        assert run("--grant", role, *other).exit_code == 2
