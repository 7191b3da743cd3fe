"""The real statements on a real Postgres, one at a time, in simulated time.

A statement runs as soon as the simulation asks for it and takes no simulated time, but for the way there and back.
One that waits for a lock is left waiting, and the simulation goes on; it ends once the lock is free, or is cancelled
when the simulated lock timeout is over. Meanwhile its backend is stopped: those that a commit frees at once go on one
after another, and not beside each other in an order that no seed determines. Connections are real ones, which live as
long as this program; they belong to an event loop of their own, which turns while the simulated one stands still.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import asyncpg

from penstock.db.pool import LOCK_WAIT_SECONDS, PLANNING, Store
from penstock.db.statements import SQL
from penstock.testing.clock import clock_statements
from tests.simulation.clock import real_monotonic, real_urandom, wall
from tests.simulation.loop import Process, current

Returned = TypeVar("Returned")

_PATIENCE_SECONDS = 60.0  # real ones, for one statement
_CHANGES_TASKS = re.compile(r"(update|insert into|delete from) penstock\.(task|task_history)\b")
_LOOK_SECONDS = 0.002  # real ones: what takes longer may wait for a lock

# Postgres asks the simulation for the time: statements name these functions without a schema, and the search path leads
# them here. Statistics stay those of empty tables, and a plan does not depend on how often it was used.
SCHEMA = (
    clock_statements(
        "sim",
        "coalesce(nullif(current_setting('sim.now', true), ''), pg_read_file(current_database()))::timestamptz",
        "pg_read_file(current_database())::timestamptz",
    )
    + """
create sequence sim.uuid;
create function sim.gen_random_uuid() returns uuid language sql as $$select md5(nextval('sim.uuid')::text)::uuid$$;
do $$
declare one record;
begin
    for one in select c.oid::regclass as name from pg_class c
        where c.relnamespace = 'penstock'::regnamespace and c.relname ~ '_[0-9]{8}$' and c.relkind = 'r' loop
        execute format('drop table %s', one.name);  -- of days that are long past
    end loop;
end $$;
create table sim.change (
    seq bigint generated always as identity primary key, what text not null, id bigint not null, state text not null,
    attempts int not null, max_attempts int not null, claim bigint not null, result jsonb, key text, worker text,
    action text not null, failures int not null, workflow bigint
);
create function sim.note() returns trigger language plpgsql as $$
declare one record;
begin
    one := case when tg_op = 'DELETE' then old else new end;
    insert into sim.change (what, id, state, attempts, max_attempts, claim, key, worker, action, failures, workflow,
                            result)
    values (tg_argv[0] || ' ' || lower(tg_op), one.id, one.state, one.attempts, one.max_attempts, one.claim,
            one.ordering_key, one.worker, one.action, jsonb_array_length(coalesce(one.failures, '[]')),
            one.workflow, case when tg_argv[0] = 'ended' then to_jsonb(one) -> 'result' end);
    return null;
end $$;
create trigger note after insert or update or delete on penstock.task
    for each row execute function sim.note('live');
create trigger note after insert or delete on penstock.task_history for each row execute function sim.note('ended');
create function sim.standing() returns setof text language plpgsql stable as $$
begin return query
select 'two tasks of ordering key ' || ordering_key || ' run: ' || string_agg(id::text, ', ')
from penstock.task where state = 'ACQUIRED' and ordering_key is not null
group by ordering_key, tenant having count(*) > 1
union all
select 'task ' || t.id || ' of ordering key ' || t.ordering_key || ' runs before task ' || o.id
from penstock.task t join penstock.task o using (ordering_key)
where t.state = 'ACQUIRED' and o.id < t.id and o.tenant is not distinct from t.tenant
union all
select 'two live tasks have unique key ' || unique_key || ' of ' || action || ': ' || string_agg(id::text, ', ')
from penstock.task where unique_key is not null group by unique_key, action, tenant having count(*) > 1
union all
select count(*) || ' tasks of ' || t.action || ' run; its limit is ' || a.max_in_flight
from penstock.task t join penstock.action a on a.name = t.action
where t.state = 'ACQUIRED' group by t.action, a.max_in_flight having count(*) > a.max_in_flight
union all
select count(*) || ' tasks of ' || t.action || ' with limit key ' || t.limit_key || ' run; its limit is '
    || a.key_max_in_flight
from penstock.task t join penstock.action a on a.name = t.action
where t.state = 'ACQUIRED' and t.limit_key is not null
group by t.action, t.limit_key, a.key_max_in_flight having count(*) > a.key_max_in_flight
union all
select 'task ' || id || ' is both live and ended' from penstock.task join penstock.task_history using (id);
end $$;
create function sim.look() returns table (
    seq bigint, what text, id bigint, state text, attempts int, max_attempts int, claim bigint, result text,
    key text, worker text, action text, failures int, workflow bigint, problem text
) language plpgsql as $$
begin
    return query delete from sim.change c
        returning c.seq, c.what, c.id, c.state, c.attempts, c.max_attempts, c.claim, c.result::text, c.key,
            c.worker, c.action, c.failures, c.workflow, null::text;
    if found then
        return query select null::bigint, null::text, null::bigint, null::text, null::int, null::int, null::bigint,
            null::text, null::text, null::text, null::text, null::int, null::bigint, s.* from sim.standing() s;
    end if;
end $$;
"""
)
_RESET = """
do $$
declare one record;
begin
    for one in select c.oid::regclass as name from pg_class c where c.relkind = 'r'
        and (c.relnamespace = 'penstock'::regnamespace or c.oid = 'sim.change'::regclass)
        and c.relname not in ('alembic_version', 'claim_key') and pg_relation_size(c.oid) > 0 loop
        execute format('truncate %s cascade', one.name);
    end loop;
    for one in select c.oid::regclass as name from pg_class c where c.relkind = 'S'
        and c.relnamespace in ('penstock'::regnamespace, 'sim'::regnamespace) loop
        perform setval(one.name, 1, false);
    end loop;
end $$
"""


class _RealLoop(asyncio.SelectorEventLoop):
    def time(self) -> float:
        return real_monotonic()


@cache
def _changes_tasks(statement: str) -> bool:
    return _CHANGES_TASKS.search(statement) is not None


class Pending:
    """A statement under way. waiter: of the simulated coroutine, once it has to wait for a lock."""

    def __init__(self, connection: RealConnection, work: asyncio.Task[Any]) -> None:
        self.connection = connection
        self.work = work
        self.waiter: asyncio.Future[None] | None = None


class RealConnection:
    """lag: of the way to the server, in real seconds, which is to change nothing."""

    def __init__(self, driver: Any, kind: str, lag: Callable[[], float]) -> None:
        self.driver = driver
        self.kind = kind
        self.pid: int = driver.get_server_pid()
        self._lag = lag

    async def run(self, text: str, args: tuple[Any, ...] | None) -> Any:
        if lag := self._lag():
            await asyncio.sleep(lag)
        return await (self.driver.execute(text) if args is None else self.driver.fetch(text, *args))


class Bridge:
    """Asks Postgres, while nothing else happens. lag: see :class:`RealConnection`."""

    def __init__(self, url: str, *, lag: Callable[[], float] = lambda: 0.0) -> None:
        self._url = url
        self._lag = lag
        self._loop = _RealLoop()
        self._free: dict[str, list[RealConnection]] = defaultdict(list)
        self._connections = 0
        self._blocked: list[Pending] = []
        self._monitor = self._call(self._connect(plain=True))
        self._holder = self._call(self._connect(plain=True))
        file = "current_setting('data_directory') || '/' || current_database()"  # other databases have other times
        self._clock = os.open(self._call(self._monitor.fetchval(f"select {file}")), os.O_WRONLY | os.O_CREAT, 0o644)

    def _call(self, work: Coroutine[Any, Any, Returned]) -> Returned:
        with self._turning():
            return self._loop.run_until_complete(asyncio.wait_for(work, _PATIENCE_SECONDS))

    @contextmanager
    def _turning(self) -> Iterator[None]:
        """The real loop may run, in the middle of a step of the simulated one."""
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        try:
            yield
        finally:
            asyncio._set_running_loop(outer)

    def _run_shortly(self, work: asyncio.Task[Any]) -> None:
        """Turn the loop until the work is done, or has taken long enough to wait for a lock."""
        ended = self._loop.create_future()

        def end(_: object = None) -> None:
            if not ended.done():
                ended.set_result(None)

        work.add_done_callback(end)
        timer = self._loop.call_later(_LOOK_SECONDS, end)
        self._loop.run_until_complete(ended)
        timer.cancel()

    async def _connect(self, *, plain: bool) -> Any:
        settings = {
            "application_name": "simulation", "plan_cache_mode": "force_generic_plan",
            "max_parallel_workers_per_gather": "0",
        }  # fmt: skip
        settings |= (
            {"lock_timeout": "20ms"}
            if plain
            else {**PLANNING, "search_path": "sim, pg_catalog", "deadlock_timeout": "1h"}
        )
        simulated, secrets.token_bytes = (
            secrets.token_bytes,
            real_urandom,
        )  # a run may find its connections made, or not
        try:
            # A statement is never prepared a second time: its plan would be of another moment.
            return await asyncpg.connect(
                self._url, statement_cache_size=1000, max_cacheable_statement_size=0, server_settings=settings,
                max_cached_statement_lifetime=0,
            )  # fmt: skip
        finally:
            secrets.token_bytes = simulated

    def reset(self) -> None:
        """Empty the database, and forget plans: they depend on what was in it as they were made."""
        assert not self._blocked
        free = [connection for kind in self._free.values() for connection in kind]
        assert len(free) == self._connections
        self._call(self._holder.execute("rollback"))
        self._call(self._monitor.execute(_RESET))
        # While it looks back, no row version is removed. When a backend notices that one could be depends on its past,
        # and the order in which rows are found on that.
        self._call(self._holder.execute("begin isolation level repeatable read; select txid_current()"))
        for connection in free:
            self._call(connection.driver.execute("discard plans"))

    def ask(self, text: str, *args: Any) -> list[Any]:
        """Rows of a question about what is committed."""
        rows: list[Any] = self._call(self._monitor.fetch(text, *args))
        return rows

    def take(self, kind: str) -> RealConnection:
        """kind: of process; each has connections of its own, so that a statement is planned on few of them."""
        if self._free[kind]:
            return self._free[kind].pop()
        self._connections += 1
        return RealConnection(self._call(self._connect(plain=False)), kind, self._lag)

    def give_back(self, connection: RealConnection) -> None:
        """The connection is in no transaction."""
        self._free[connection.kind].append(connection)

    def start(self, connection: RealConnection, text: str, args: tuple[Any, ...] | None = None) -> Pending:
        """Start a statement; returns when it has ended, or waits for a lock."""
        os.pwrite(self._clock, wall().isoformat(timespec="microseconds").encode(), 0)
        with self._turning():
            work = self._loop.create_task(connection.run(text, args))
            pending = Pending(connection, work)
            self._run_shortly(work)
        if not work.done():
            self._call(self._settle(pending))
            if not work.done():
                self._blocked.append(pending)
        self._free_blocked()
        return pending

    def end(self, connection: RealConnection) -> None:
        """The client of a connection is gone: cancel its statement, roll its transaction back."""

        async def end() -> None:
            for pending in [one for one in self._blocked if one.connection is connection]:
                await self._cancel(pending)
            await connection.driver.execute("rollback" if connection.driver.is_in_transaction() else "select 1")

        self._call(end())
        self._free_blocked()
        self.give_back(connection)

    def cancel(self, pending: Pending) -> None:
        self._call(self._cancel(pending))
        self._free_blocked()

    async def _cancel(self, pending: Pending) -> None:
        self._blocked.remove(pending)
        await self._monitor.fetchval("select pg_cancel_backend($1)", pending.connection.pid)
        os.kill(pending.connection.pid, signal.SIGCONT)
        await asyncio.wait({pending.work})
        pending.work.exception()  # seen

    def _free_blocked(self) -> None:
        """Let those whose lock has come free go on, one by one, as they came; what they do may free others."""
        while self._blocked:
            waiting = self._call(self._waiting())
            free = next((one for one in self._blocked if one.connection.pid not in waiting), None)
            if free is None:
                return
            os.kill(free.connection.pid, signal.SIGCONT)
            self._call(self._settle(free))
            if free.work.done():
                self._blocked.remove(free)
                if free.waiter is not None and not free.waiter.done():
                    free.waiter.set_result(None)

    async def _settle(self, pending: Pending) -> None:
        """Wait until a statement has ended, or waits for a lock: then its backend is stopped."""
        while not pending.work.done():
            await asyncio.wait({pending.work}, timeout=_LOOK_SECONDS)
            if not pending.work.done() and pending.connection.pid in await self._waiting():
                os.kill(pending.connection.pid, signal.SIGSTOP)
                return

    async def _waiting(self) -> set[int]:
        return {row["pid"] for row in await self._monitor.fetch("select pid from pg_locks where not granted")}


class Database:
    """What the simulated processes see of Postgres.

    pause: the way to the server and back. strikes: whether this call goes wrong. asked: called with each statement's
    name and arguments. answered: with its name and rows, or error. changed: called after each commit.
    """

    def __init__(
        self,
        bridge: Bridge,
        *,
        pause: Callable[[], Awaitable[None]],
        strikes: Callable[[], bool],
        asked: Callable[[str, Any], None],
        answered: Callable[[str, Any], None],
        changed: Callable[[], None],
    ) -> None:
        self.bridge = bridge
        self.pause = pause
        self.strikes = strikes
        self.asked = asked
        self.answered = answered
        self.changed = changed
        self.names = {text: name for name, text in SQL.items()}
        self.listeners: list[_Listener] = []
        self._held: dict[Process, list[SimulatedConnection]] = {}

    def connection(self) -> SimulatedConnection:
        process = current()
        connection = SimulatedConnection(self, self.bridge.take("" if process is None else process.name))
        if process is not None:
            self._held.setdefault(process, []).append(connection)
        return connection

    def release(self, connection: SimulatedConnection) -> None:
        process = current()
        if process is not None:
            self._held[process].remove(connection)
        if not connection.is_broken:
            self.bridge.give_back(connection.real)

    def died(self, process: Process) -> None:
        """The server notices that a client is gone."""
        for connection in self._held.pop(process, []):
            if not connection.is_broken:
                connection.is_broken = True
                self.bridge.end(connection.real)
        self.listeners = [listener for listener in self.listeners if listener.process is not process]

    def end_all(self) -> None:
        """The run is over."""
        for process in list(self._held):
            self.died(process)

    async def notify(self, channel: str, payload: str) -> None:
        if not self.strikes():
            for listener in list(self.listeners):
                listener.hear(channel, payload)


class SimulatedConnection:
    """The part of asyncpg's connection that stores and sessions use."""

    def __init__(self, database: Database, real: RealConnection) -> None:
        self._database = database
        self.real = real
        self.is_broken = False
        self.depth = 0
        self._has_changed = False
        self.lock_wait_seconds = LOCK_WAIT_SECONDS

    def is_closed(self) -> bool:
        return self.is_broken

    async def fetch(self, statement: str, *args: Any, timeout: float | None = None) -> list[Any]:
        name = self._database.names.get(statement, "other")
        if name == "notify_work":
            await self._database.notify(*args)
            return []
        if name in ("shorten_waits", "limit_lock_wait_to"):
            self.lock_wait_seconds = 0.02 if name == "shorten_waits" else args[0] / 1000
            return []
        if name == "lift_statement_timeout":
            return []
        self._database.asked(name, args)
        rows: list[Any] = await self._run(statement, args, name)
        return rows

    async def execute(self, statement: str, *_: Any, timeout: float | None = None) -> None:
        await self._run(statement)

    def transaction(self) -> _Transaction:
        return _Transaction(self)

    async def _run(self, statement: str, args: tuple[Any, ...] | None = None, name: str = "") -> Any:
        """One round trip. Raises what asyncpg raises."""
        await self._database.pause()
        self._check()
        strikes = self._database.strikes()
        answer_is_lost = strikes and self._database.strikes()
        if strikes and not answer_is_lost:
            self._break()
        pending = self._database.bridge.start(self.real, statement, args)
        if not pending.work.done():
            await self._wait_for_lock(pending)
        self._database.answered(name, pending.work.exception() or pending.work.result())
        self._has_changed = self._has_changed or _changes_tasks(statement)
        if self._has_changed and not self.depth:
            self._has_changed = False
            self._database.changed()
        if answer_is_lost:
            self._break()
        await self._database.pause()
        self._check()
        return pending.work.result()

    async def _wait_for_lock(self, pending: Pending) -> None:
        pending.waiter = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self.lock_wait_seconds):
                await pending.waiter
        except TimeoutError:
            self._database.bridge.cancel(pending)
            raise asyncpg.LockNotAvailableError("canceling statement due to lock timeout") from None
        except asyncio.CancelledError:
            if not pending.work.done():
                self._database.bridge.cancel(pending)
            raise

    def _check(self) -> None:
        if self.is_broken:
            raise asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")

    def _break(self) -> None:
        """The connection is lost; the server ends its transaction."""
        self.is_broken = True
        self._database.bridge.end(self.real)
        self._check()

    async def control(self, statement: str) -> None:
        """Begin or end a transaction or a savepoint."""
        self._check()
        if statement == "commit":
            await self._run(statement)
        else:
            pending = self._database.bridge.start(self.real, statement)
            pending.work.result()


class _Transaction:
    def __init__(self, connection: SimulatedConnection) -> None:
        self._connection = connection
        self._name = ""

    async def __aenter__(self) -> None:
        connection = self._connection
        self._lock_wait_seconds = connection.lock_wait_seconds
        self._name = f"s{connection.depth}"
        now = wall().isoformat()
        await connection.control(
            f"savepoint {self._name}" if connection.depth else f"begin; set local sim.now = '{now}'"
        )
        connection.depth += 1

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        connection = self._connection
        connection.depth -= 1
        connection.lock_wait_seconds = self._lock_wait_seconds
        if connection.is_broken:
            if kind is None:
                connection._check()
            return
        if connection.depth:
            await connection.control(f"{'release' if kind is None else 'rollback to'} {self._name}")
        else:
            await connection.control("commit" if kind is None else "rollback")


class _Listener:
    """A connection for LISTEN."""

    def __init__(self, database: Database) -> None:
        self.process = current()
        self._database = database
        self._events: dict[str, Callable[..., None]] = {}

    def add_termination_listener(self, _callback: object) -> None:
        return None

    async def add_listener(self, channel: str, heard: Callable[..., None]) -> None:
        self._events[channel] = heard

    async def execute(self, _statement: str, timeout: float | None = None) -> None:
        await self._database.pause()

    async def fetchval(self, _statement: str, timeout: float | None = None) -> str:
        await self._database.pause()
        return "off"  # transaction_read_only

    def hear(self, channel: str, payload: str) -> None:
        heard = self._events.get(channel)
        if heard is not None and self.process is not None:
            self.process.step(heard, self, 0, channel, payload)

    def terminate(self) -> None:
        self._database.listeners = [one for one in self._database.listeners if one is not self]


class SimulatedPool:
    """The part of asyncpg's pool that stores use."""

    def __init__(self, database: Database, size: int) -> None:
        self._database = database
        self._size = size
        self._places = asyncio.Semaphore(size)

    async def acquire(self, *, timeout: float) -> SimulatedConnection:
        async with asyncio.timeout(timeout):
            await self._places.acquire()
        return self._database.connection()

    async def release(self, connection: SimulatedConnection) -> None:
        self._database.release(connection)
        self._places.release()

    def get_size(self) -> int:
        return self._size

    def get_idle_size(self) -> int:
        return 0

    async def expire_connections(self) -> None:
        return None

    async def close(self) -> None:
        return None


class SimulatedStore(Store):
    """A store whose pool is simulated."""

    def __init__(self, database: Database, *, pool_size: int = 4) -> None:
        super().__init__("postgresql://simulated", pool_size=pool_size)
        self._database = database

    async def open(self) -> Any:
        if self._pool is None:
            self._pool = SimulatedPool(self._database, self.pool_size)
        return self._pool

    async def connect(self) -> Any:
        listener = _Listener(self._database)
        self._database.listeners.append(listener)
        return listener
