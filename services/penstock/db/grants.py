"""Grants for the role of the processes: it reads and writes every table, and changes no schema."""

from __future__ import annotations

import asyncpg

from penstock.db.driver_errors import Translated
from penstock.protocol.errors import Refused

_TABLES = "select, insert, update, delete"
# The locks of a migration and of the supervisor's upkeep, so that neither creates a table without its grants.
_LOCK = "select pg_advisory_xact_lock(hashtext(name)) from unnest(array['penstock migrate', 'penstock upkeep']) name"
_ROLE = """
select quote_ident(r.rolname) as name, pg_has_role(r.oid, n.nspowner, 'MEMBER') as owns,
       n.nspowner::regrole::text as owner
from pg_roles r cross join pg_namespace n where r.rolname = $1 and n.nspname = 'penstock'
"""
# The roles that will create tables: owners of the functions that create partitions, and this role by migrations.
_CREATORS = """
select distinct creator::regrole::text from (
    select proowner from pg_proc where pronamespace = 'penstock'::regnamespace and prosecdef
    union select oid from pg_roles where rolname = current_user) c (creator)
order by 1
"""


async def grant(database_url: str, role: str) -> None:
    """Grant a role the rights of the processes, also on later tables; doing so again changes nothing.

    Raises Refused for an unknown role and for one with the rights of the schema's owner.
    """
    with Translated():
        connection = await asyncpg.connect(database_url)
        try:
            async with connection.transaction():
                await _grant(connection, role)
        finally:
            await connection.close()


async def _grant(connection: asyncpg.Connection, role: str) -> None:
    await connection.execute(_LOCK)
    found = await connection.fetchrow(_ROLE, role)
    if found is None:
        raise Refused(f"there is no role {role!r}: create it first, `create role ... login password ...`")
    if found["owns"]:
        raise Refused(f"the role {role!r} has the rights of {found['owner']}, which owns the schema: name another one")
    name = found["name"]
    statements = [
        f"grant usage on schema penstock to {name}",
        f"grant {_TABLES} on all tables in schema penstock to {name}",
        f"revoke insert, update, delete on penstock.alembic_version from {name}",
        f"grant usage on all sequences in schema penstock to {name}",
        f"grant execute on all functions in schema penstock to {name}",
    ]
    for (creator,) in await connection.fetch(_CREATORS):
        later = f"alter default privileges for role {creator} in schema penstock grant"
        statements += [
            f"{later} {_TABLES} on tables to {name}",
            f"{later} usage on sequences to {name}",
            f"{later} execute on functions to {name}",
        ]
    for statement in statements:
        await connection.execute(statement)
