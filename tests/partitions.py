"""The table of live tasks in hash partitions, as `penstock partition-tasks` divides it."""

from __future__ import annotations

import asyncio

from penstock.db.partitions import partition_tasks
from penstock.local.postgres import EmbeddedPostgres
from penstock.protocol.schema import DEFAULT


def divide(server: EmbeddedPostgres, database: str, partitions: int, schema: str = DEFAULT) -> None:
    """Divide the table of an empty database; ids begin at 1 again."""
    asyncio.run(partition_tasks(server.dsn(database), partitions, report=lambda _: None, schema=schema))
    server.execute(f"alter sequence {schema}.task_id_seq restart", database)
