"""The pool of connections that sessions run on."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, cast

import asyncpg

from penstock.db.connecting import Passwords, connect, connecting_options
from penstock.db.pooler import REFUSALS, PooledConnection, Pooler, is_direct, keeps_statements
from penstock.db.session import LOST_REPLY, TRANSIENT, Session, Translated
from penstock.payloads.codec import PayloadCodec
from penstock.protocol.errors import Unavailable
from penstock.protocol.fence import ClaimKey, Fence
from penstock.protocol.schema import DEFAULT
from penstock.runtime.chaos import Faults
from penstock.runtime.logs import log
from penstock.settings.model import Settings

# Settings of every connection that decide on plans. A plan outlives the state it was made for: one made while the live
# table was empty reads and sorts all of it, for each claim and each few results, until the next analyze. Every
# statement of ours has an index; without one, Postgres scans all the same.
PLANNING = {"jit": "off", "enable_seqscan": "off"}

# The server is no longer the primary, or stops: the pool makes new connections.
_ANOTHER_SERVER = (
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
)

# How long a statement waits for a lock before the error Locked. Most are of many tasks, which would all wait for one.
# Shorter than Postgres's deadlock_timeout, so in a deadlock with another program it is rarely the other that fails.
LOCK_WAIT_SECONDS = 0.5
PATIENT_SECONDS = 5.0  # the same for statements of one caller, with which nothing else waits


@dataclass(eq=False, repr=False, kw_only=True)
class Store(AbstractAsyncContextManager["Store"]):
    """A pool of connections to the database that holds the tasks; opened when first used."""

    database_url: str = field(kw_only=False)
    pooler: Pooler | None = None  # what stands before Postgres; None: found out when the pool is opened
    listen_url: str | None = None  # for LISTEN, None for the database_url
    passwords: Passwords | None = None  # None for those of the URLs
    schema: str = DEFAULT  # its name
    pool_size: int = 8
    statement_timeout_seconds: float = 30
    acquire_timeout_seconds: float = 30
    application_name: str = "penstock"
    codec: PayloadCodec = field(default_factory=PayloadCodec)
    faults: Faults | None = None  # refuse statements, and lose the reply of commits, which stay
    fence: Fence = field(init=False, default_factory=Fence)
    keeps_statements: bool = field(init=False, default=False)  # the pooler was found to keep prepared statements
    settled_steps: bool = field(init=False, default=False)  # a task of a workflow was settled since this was cleared
    left_keys: bool = field(init=False, default=False)  # ordering keys were left for later since this was cleared
    _fence_read_at: float = field(init=False, default=float("-inf"))
    _pool: Any = field(init=False, default=None)
    _opening: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    _spare: Any = field(init=False, default=None)  # for the next session: to release and acquire one takes 50 us
    _acquiring: int = field(init=False, default=0)  # sessions that wait for a connection

    def __post_init__(self) -> None:
        self._connect = partial(connect, passwords=self.passwords, schema=self.schema)
        self.is_pooled = self.pooler == "transaction"  # transactions of many clients share them; known once it is open
        self.asked = {  # settings of each new connection, or through a pooler of each transaction
            "statement_timeout": str(int(self.statement_timeout_seconds * 1000)),
            # Behind a lock, a statement is to say so before it runs out of its own time.
            "lock_timeout": str(int(min(LOCK_WAIT_SECONDS, self.statement_timeout_seconds / 2) * 1000)),
            "idle_in_transaction_session_timeout": "60000",
            **PLANNING,
        }

    async def open(self) -> Any:
        """The pool, made if there is none yet. Raises Unavailable while the database cannot be reached."""
        async with self._opening:
            if self._pool is None:
                with Translated():
                    self._pool = await self._open()
        return self._pool

    async def _open(self) -> Any:
        if self.pooler is not None:
            return await self._make_pool()
        self.is_pooled = False
        with suppress(*REFUSALS), ExitStack() as unless_direct:  # if refused for another reason, the next is too
            pool = await self._make_pool()
            unless_direct.callback(pool.terminate)
            async with pool.acquire() as connection:
                if await is_direct(connection):
                    unless_direct.pop_all()
                    return pool
        self.is_pooled = True
        connection = await self._connect(self.database_url, statement_cache_size=0)
        try:
            self.keeps_statements = await keeps_statements(connection)
        finally:
            connection.terminate()
        wake_ups = "polling" if self.listen_url is None else "PENSTOCK_DATABASE_LISTEN_URL"
        log.info("pooler_found", wake_ups=wake_ups, statements="prepared" if self.keeps_statements else "unnamed")
        return await self._make_pool()

    async def _make_pool(self) -> Any:
        settings = "".join(f" set local {name} = '{value}';" for name, value in self.asked.items())
        named = {"application_name": self.application_name}
        direct: dict[str, Any] = {"server_settings": named | self.asked}
        pooled: dict[str, Any] = {
            "server_settings": named,
            **({} if self.keeps_statements else {"statement_cache_size": 0}),
            "connection_class": type("Pooled", (PooledConnection,), {"settings": settings}),
        }
        return await asyncpg.create_pool(
            self.database_url,
            min_size=1,
            max_size=self.pool_size,
            connect=cast(Any, self._connect),
            command_timeout=self.statement_timeout_seconds + 5,
            reset=_no_reset,
            **(pooled if self.is_pooled else direct),
        )

    async def __aexit__(self, *_exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._pool is not None:
            pool, self._pool = self._pool, None
            try:
                async with asyncio.timeout(5):
                    if (spare := self._take_spare()) is not None:
                        await pool.release(spare)
                    await pool.close()
            except (TimeoutError, *TRANSIENT):
                pool.terminate()
        await self.codec.close()

    def _take_spare(self) -> Any:
        """The connection that the last session left, None if there is none or it was closed."""
        spare, self._spare = self._spare, None
        try:
            return None if spare is None or spare.is_closed() else spare
        except asyncpg.InterfaceError:  # closed, it has gone back to the pool
            return None

    async def _acquire(self, pool: Any) -> Any:
        self._acquiring += 1
        try:
            return await pool.acquire(timeout=self.acquire_timeout_seconds)
        except TimeoutError:
            if pool.get_size() < self.pool_size or pool.get_idle_size():
                raise
            raise Unavailable(
                f"all {self.pool_size} connections of the pool were in use for {self.acquire_timeout_seconds:g} "
                "s: is Postgres slow, or is PENSTOCK_DATABASE_POOL_SIZE too small?"
            ) from None
        finally:
            self._acquiring -= 1

    @asynccontextmanager
    async def session(self, *, commits_each: bool = True) -> AsyncIterator[Session]:
        """Statements that commit one by one, unless ``transaction`` makes them one."""
        with Translated():
            pool = self._pool or await self.open()
            connection = self._take_spare() or await self._acquire(pool)
            is_spare = False
            session = Session(
                connection, self.codec, self.fence, self.statement_timeout_seconds, self.faults, commits_each
            )
            try:
                yield session
                is_spare = self._spare is None and not self._acquiring and pool is self._pool
            except Exception as exc:
                if isinstance(exc, _ANOTHER_SERVER) or isinstance(exc.__cause__, _ANOTHER_SERVER):
                    await pool.expire_connections()
                raise
            finally:
                self.settled_steps |= session.settled_steps
                self.left_keys |= session.left_keys
                if is_spare:
                    self._spare = connection
                else:
                    await pool.release(connection)

    async def fetch(self, name: str, *args: Any) -> list[asyncpg.Record]:
        """As ``Session.fetch``, in a session of its own."""
        async with self.session() as session:
            return await session.fetch(name, *args)

    async def value(self, name: str, *args: Any, partition: str | None = None) -> Any:
        """As ``Session.value``, in a session of its own."""
        async with self.session() as session:
            return await session.value(name, *args, partition=partition)

    @asynccontextmanager
    async def transaction(
        self, *, hurried: bool = False, lock_wait_seconds: float | None = None
    ) -> AsyncIterator[Session]:
        """Statements that commit together when the block ends without an error.

        hurried: they wait only shortly, see ``in_halves``. lock_wait_seconds: None for LOCK_WAIT_SECONDS.
        """
        async with self.session(commits_each=False) as session, session.savepoint(hurried=hurried):
            if lock_wait_seconds is not None and not hurried:
                await session.fetch("limit_lock_wait_to", round(lock_wait_seconds * 1000))
            yield session
        if self.faults is not None:
            self.faults.fail("commit", LOST_REPLY)

    async def read_fence(self, *, older_than_seconds: float = 60.0) -> Fence:
        """The fence with the keys that count now, read again when it is older than that. Raises Unavailable."""
        if monotonic() - self._fence_read_at >= older_than_seconds:
            keys = [ClaimKey(*row) for row in await self.fetch("read_claim_keys")]
            if not keys:
                raise Unavailable("no key makes claim ids: run `penstock claim-key`, which makes one")
            self.fence = Fence(keys)
            self._fence_read_at = monotonic()
        return self.fence

    async def ping(self) -> None:
        await self.fetch("read_clock")

    async def connect(self) -> Any:
        """A connection of its own beside the pool, for LISTEN; the caller closes it. None through a pooler."""
        await self.open()
        if self.is_pooled and self.listen_url is None:
            return None
        with Translated():
            named = {"application_name": f"{self.application_name}-listen"}
            return await self._connect(self.listen_url or self.database_url, server_settings=named)


async def _no_reset(_connection: Any) -> None:
    """Nothing of ours survives a statement or its transaction, so the reset's round trip is saved."""


def open_store(settings: Settings, application_name: str, *, url: str | None = None, **options: Any) -> Store:
    """The store of PENSTOCK_DATABASE_URL or another URL. options: as of ``Store``. Raises SettingsError without one."""
    options.setdefault("pool_size", settings.database_pool_size)
    options.setdefault("statement_timeout_seconds", settings.statement_timeout_seconds)
    known = connecting_options(settings) | {"pooler": settings.database_pooler, "listen_url": settings.listen_url}
    return Store(url or settings.require_database_url, application_name=application_name, **known, **options)
