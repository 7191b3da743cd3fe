"""Divide ``penstock.task`` into hash partitions, or back, while all processes run.

No row is copied: tasks stay where they are until they settle, and new ones go to new tables, by their ids. Each step is
a transaction, and a run that was ended between two of them is begun again by the next.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import asyncpg

from penstock.db.migrate import LOCK, connector
from penstock.db.session import Translated
from penstock.db.statements import SQL
from penstock.protocol.errors import Refused, Unavailable
from penstock.protocol.schema import DEFAULT

LOCKS_OF_A_PARTITION = 12  # a table and its indexes, which a statement may lock all
_PAUSE_SECONDS = 0.3  # for which a step may keep everything waiting, less than a statement waits for a lock
_Plan = tuple[Any, ...]  # the name of a statement, whose rows are the statements to run, and its parameters


async def partition_tasks(
    database_url: str, partitions: int, *, report: Callable[[str], None], tries: int = 60, schema: str = DEFAULT,
    **options: Any,
) -> None:  # fmt: skip
    """Have tasks that come from now on stored in so many hash partitions, or in one table.

    report: is given each step. options: of connections. Raises Refused where it cannot be done, and Unavailable where
    other transactions keep the table locked.
    """
    connect = connector(database_url, schema=schema, **options)
    with Translated():
        holder, connection = await connect(), await connect()
        try:
            async with holder.transaction():
                await holder.execute("set local idle_in_transaction_session_timeout = 0")
                # A statement that waits would hold a snapshot, for which an index that is made concurrently waits.
                while not await holder.fetchval(f"select pg_try_advisory_xact_lock({LOCK})"):  # noqa: ASYNC110
                    await asyncio.sleep(0.2)
                await _Division(connection, report, tries).run(partitions)
        finally:
            await connection.close()
            await holder.close()


@dataclass
class _Division:
    _connection: Any
    _report: Callable[[str], None]
    _tries: int
    _owner: str = ""

    async def run(self, partitions: int) -> None:
        (table,) = await self._fetch("read_task_table")
        self._owner = table["owner"]
        if not table["owns"]:
            raise Refused(
                f"the role {table['role']} has not the rights of {self._owner}, which owns the table: run it as that"
            )
        if table["locks"] < (needed := partitions * LOCKS_OF_A_PARTITION) and partitions > 1:
            raise Refused(
                f"max_locks_per_transaction is {table['locks']}, and a statement over {partitions} partitions may take "
                f"{needed} locks: set it to {needed} or more, and restart Postgres"
            )
        if await self._fetch("drop_unfinished_division"):
            await self._step("drops what an unfinished run has left", ("drop_unfinished_division",))
        if not table["is_divided"] and partitions == 1:
            return self._report("tasks are in one table")
        ranges = await self._fetch("list_ranges") if table["is_divided"] else [("task", 0, 1)]
        name, first, present = ranges[-1]
        if present != partitions:
            first = await self._add_range(name, first, table["bound"], partitions, is_divided=table["is_divided"])
        await self._fetch("skip_ids", first)
        await self._unite()

    async def _add_range(self, name: str, first: int, bound: int, partitions: int, *, is_divided: bool) -> int:
        plans: list[_Plan] = [("create_range", bound, partitions)]
        if not is_divided:
            await self._refuse_dependents()
            plans.append(("create_divided_table", bound))
        await self._step(f"makes {partitions} for the ids from {bound} on", *plans, pauses=False)
        await self._step(f"bounds the ids of {name}", ("bound_range", name, first, bound))
        await self._step(f"checks the ids of {name}", ("validate_range", name), pauses=False)
        if is_divided:
            await self._step(f"attaches task_from_{bound}", ("replace_newest_range", name, first, bound))
        else:
            replaced = ("replace_undivided_table", bound), ("copy_grants", "task_from_0", "task")
            await self._step(f"divides the table at {bound}", *replaced)
        return bound

    async def _unite(self) -> None:
        """Drop older ranges once all of them are empty; the newest, if it is one table, is then the undivided one."""
        *older, (newest, _, partitions) = await self._fetch("list_ranges")
        if names := [name for name, *_ in older]:
            filled = [name for name in names if await self._has_tasks(name)]
            plans = *(("drop_older_range", name) for name in names), ("widen_newest_range", newest)
            if filled or not await self._step(f"drops {', '.join(names)}", *plans, unless=names):
                text = f"new tasks go to {partitions} tables; older ones are in {', '.join(filled)}, until they settle"
                return self._report(f"{text}: run it again to drop what is empty by then")
        if partitions > 1:
            return self._report(f"tasks are in {partitions} partitions")
        await self._refuse_dependents()
        await self._step("makes the only range the table", ("copy_grants", "task", "task_from_0"), ("unite_table",))
        self._report("tasks are in one table")

    async def _step(self, text: str, *plans: _Plan, pauses: bool = True, unless: list[str] | None = None) -> bool:
        """Run a step in a transaction; False where ``unless`` has tasks. pauses: nothing else uses the table then."""
        self._report(text)
        for left in reversed(range(self._tries)):
            try:
                async with self._connection.transaction():
                    await self._set(role=self._owner, statement_timeout=0, lock_timeout=10)
                    if pauses:
                        await self._connection.execute(SQL["lock_task_table_against_vacuum"])
                        await self._set(lock_timeout=_PAUSE_SECONDS)
                        await self._connection.execute(SQL["lock_task_table"])
                    if any([await self._has_tasks(name) for name in unless or ()]):
                        return False
                    for name, *args in plans:
                        for (statement,) in await self._fetch(name, *args):
                            # Not renamed: it has the names of the schema and of roles.
                            await asyncpg.Connection.execute(self._connection, statement)
                return True
            except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError) as exc:
                if not left:
                    raise Unavailable(
                        f"other transactions kept the table locked over {self._tries} tries; look for old ones in "
                        "pg_stat_activity, end them and run it again"
                    ) from exc
            await asyncio.sleep(_PAUSE_SECONDS)
        return False

    async def _refuse_dependents(self) -> None:
        if found := [what for (what,) in await self._fetch("list_dependents")]:
            raise Refused(
                f"these depend on the table that is replaced: {'; '.join(found)}: drop them, and make them again"
            )

    async def _has_tasks(self, name: str) -> bool:
        return bool(await self._connection.fetchval(SQL["has_tasks"].replace("{partition}", name)))

    async def _set(self, **values: str | float) -> None:
        """For the rest of the transaction. Times are in seconds."""
        for name, value in values.items():
            text = value if isinstance(value, str) else f"{value * 1000:.0f}"
            await self._connection.fetch("select set_config($1, $2, true)", name, text)

    async def _fetch(self, name: str, *args: Any) -> list[Any]:
        return list(await self._connection.fetch(SQL[name], *args))
