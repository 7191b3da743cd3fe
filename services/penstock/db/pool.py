"""The pool of connections that sessions run on."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from time import monotonic
from typing import Any, cast

import asyncpg

from penstock.db.connecting import Passwords, connect, connecting_options
from penstock.db.pooler import REFUSALS, PooledConnection, Pooler, is_direct, keeps_statements, set_local
from penstock.db.session import LOST_REPLY, TRANSIENT, Session, Translated
from penstock.payloads.codec import PayloadCodec
from penstock.protocol.errors import Unavailable
from penstock.protocol.fence import ClaimKey, Fence
from penstock.protocol.schema import DEFAULT
from penstock.runtime.chaos import Faults
from penstock.runtime.logs import log
from penstock.settings.model import Settings

_FENCE_SECONDS = 60.0

PLANNING = {"jit": "off", "enable_seqscan": "off"}
"""Settings of every connection that decide on plans.

A plan outlives the state it was made for. One made while the live table was empty reads and sorts all of it, for each
claim and each few results, until the next analyze. Every statement of ours has an index; without one, Postgres scans
all the same.
"""

# The server is no longer the primary, or stops: the pool makes new connections.
_ANOTHER_SERVER = (
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
)

LOCK_WAIT_SECONDS = 0.5
"""How long a statement waits for a lock before the error Locked.

Most statements are of many tasks, which would all wait for one. It is shorter than Postgres's deadlock_timeout, so in a
deadlock with another program it is rarely the other that fails.
"""
PATIENT_SECONDS = 5.0
"""The same for statements of one caller, with which nothing else waits."""


class Store(AbstractAsyncContextManager["Store"]):
    """A pool of connections to the database that holds the tasks; opened when first used.

    pooler: what stands before Postgres; None: found out when the pool is opened. listen_url: for LISTEN, None for the
    database_url. passwords: None for those of the URLs. schema: its name. faults: refuse statements, and lose the reply
    of commits, which stay; None: no fault is injected.
    """

    def __init__(self, database_url: str, *, pooler: Pooler | None = None, listen_url: str | None = None,
                 passwords: Passwords | None = None, schema: str = DEFAULT, pool_size: int = 8,
                 statement_timeout_seconds: float = 30, acquire_timeout_seconds: float = 30,
                 application_name: str = "penstock", codec: PayloadCodec | None = None,
                 faults: Faults | None = None) -> None:  # fmt: skip
        self.codec = codec or PayloadCodec()
        self.fence = Fence()
        self._faults = faults
        self._fence_read_at = float("-inf")
        self._url = database_url
        self._listen_url = listen_url
        self._connect = partial(connect, passwords=passwords, schema=schema)
        self._pooler = pooler
        self.is_pooled = pooler == "transaction"
        """Whether connections are shared by transactions of many clients; known once the pool is open."""
        self.keeps_statements = False
        """Whether such a pooler was found to keep prepared statements."""
        self._pool_size = pool_size
        self._statement_timeout_seconds = statement_timeout_seconds
        self._acquire_timeout_seconds = acquire_timeout_seconds
        self._application_name = application_name
        self.asked = {
            "statement_timeout": str(int(statement_timeout_seconds * 1000)),
            # Behind a lock, a statement is to say so before it runs out of its own time.
            "lock_timeout": str(int(min(LOCK_WAIT_SECONDS, statement_timeout_seconds / 2) * 1000)),
            "idle_in_transaction_session_timeout": "60000",
            **PLANNING,
        }
        """Settings of each new connection, or through a pooler of each transaction."""
        self._pool: Any = None
        self._opening = asyncio.Lock()
        self._spare: Any = None  # a connection for the next session: to release and acquire it takes 50 us
        self._acquiring = 0  # sessions that wait for a connection
        self.settled_steps = False
        """Whether a task of a workflow was settled here since this was last cleared."""
        self.left_keys = False
        """Whether ordering keys were left for later since this was last cleared."""

    async def open(self) -> Any:
        """The pool, made if there is none yet. Raises Unavailable while the database cannot be reached."""
        async with self._opening:
            if self._pool is None:
                with Translated():
                    self._pool = await self._open()
        return self._pool

    async def _open(self) -> Any:
        if self._pooler is not None:
            return await self._make_pool()
        self.is_pooled = False
        try:
            pool = await self._make_pool()
        except REFUSALS:  # if for another reason, the next is refused too
            self.is_pooled = True
        else:
            self.is_pooled = True
            try:
                async with pool.acquire() as connection:
                    self.is_pooled = not await is_direct(connection)
            finally:
                if self.is_pooled:
                    pool.terminate()
            if not self.is_pooled:
                return pool
        connection = await self._connect(self._url, statement_cache_size=0)
        try:
            self.keeps_statements = await keeps_statements(connection)
        finally:
            connection.terminate()
        wake_ups = "polling" if self._listen_url is None else "PENSTOCK_DATABASE_LISTEN_URL"
        log.info("pooler_found", wake_ups=wake_ups, statements="prepared" if self.keeps_statements else "unnamed")
        return await self._make_pool()

    async def _make_pool(self) -> Any:
        async def begin_with_settings(connection: Any) -> None:
            connection.settings = set_local(self.asked)

        named = {"application_name": self._application_name}
        direct: dict[str, Any] = {"server_settings": named | self.asked}
        pooled: dict[str, Any] = {
            "server_settings": named,
            **({} if self.keeps_statements else {"statement_cache_size": 0}),
            "connection_class": PooledConnection,
            "init": begin_with_settings,
        }
        return await asyncpg.create_pool(
            self._url,
            min_size=1,
            max_size=self._pool_size,
            connect=cast(Any, self._connect),
            command_timeout=self._statement_timeout_seconds + 5,
            reset=_no_reset,
            **(pooled if self.is_pooled else direct),
        )

    async def __aexit__(self, *_exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._pool is not None:
            pool, self._pool = self._pool, None
            spare = self._take_spare()
            try:
                async with asyncio.timeout(5):
                    if spare is not None:
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
            return await pool.acquire(timeout=self._acquire_timeout_seconds)
        except TimeoutError:
            if pool.get_size() < self._pool_size or pool.get_idle_size():
                raise
            raise Unavailable(
                f"all {self._pool_size} connections of the pool were in use for {self._acquire_timeout_seconds:g} "
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
                connection, self.codec, self.fence, self._statement_timeout_seconds, self._faults, commits_each
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
        if self._faults is not None:
            self._faults.fail("commit", LOST_REPLY)

    async def read_fence(self, *, older_than_seconds: float = _FENCE_SECONDS) -> Fence:
        """The fence with the keys that count now, read again when it is older than that. Raises Unavailable."""
        if monotonic() - self._fence_read_at >= older_than_seconds:
            keys = [ClaimKey(*row) for row in await self.fetch("read_claim_keys")]
            if not keys:
                raise Unavailable("no key makes claim ids: run `penstock claim-key`, which makes one")
            self.fence.set(keys)
            self._fence_read_at = monotonic()
        return self.fence

    async def ping(self) -> None:
        await self.fetch("read_clock")

    async def connect(self) -> Any:
        """A connection of its own beside the pool, for LISTEN; the caller closes it. None through a pooler."""
        await self.open()
        if self.is_pooled and self._listen_url is None:
            return None
        with Translated():
            named = {"application_name": f"{self._application_name}-listen"}
            return await self._connect(self._listen_url or self._url, server_settings=named)


async def _no_reset(_connection: Any) -> None:
    """Nothing of ours survives a statement or its transaction, so the reset's round trip is saved."""


def open_store(settings: Settings, application_name: str, *, url: str | None = None, **options: Any) -> Store:
    """The store of PENSTOCK_DATABASE_URL, or of another URL, which connects when it is first used.

    options: as of ``Store``. Raises SettingsError when there is no URL.
    """
    options.setdefault("pool_size", settings.database_pool_size)
    options.setdefault("statement_timeout_seconds", settings.statement_timeout_seconds)
    known = connecting_options(settings) | {"pooler": settings.database_pooler, "listen_url": settings.listen_url}
    return Store(url or settings.require_database_url, application_name=application_name, **known, **options)
