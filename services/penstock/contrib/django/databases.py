"""The databases of Penstock's backends: their URLs, and whether tasks can be enqueued there."""

import ssl
from collections.abc import Collection, Iterable
from typing import Any

from django.core import checks
from django.db import connections
from sqlalchemy import URL

from penstock.contrib.django.backend import aliases
from penstock.protocol.errors import SettingsError
from penstock.protocol.schema import renamed
from penstock.settings.model import load_settings

# Parameters of libpq that asyncpg knows too.
_PARAMETERS = frozenset({
    "sslmode", "sslrootcert", "sslcert", "sslkey", "sslpassword", "sslcrl", "ssl_min_protocol_version",
    "ssl_max_protocol_version", "passfile", "target_session_attrs", "krbsrvname", "gsslib",
})  # fmt: skip

_LOOK = """
select has_function_privilege(current_user, oid, 'execute') from pg_proc
where proname = 'penstock_enqueue_many' and pronamespace = 'public'::regnamespace"""


def database_url(alias: str) -> str:
    """The URL by which Penstock opens a database of Django's, as safely as Django does. Raises SettingsError."""
    known = connections[alias].settings_dict
    if connections[alias].vendor != "postgresql":
        raise SettingsError(f"the database {alias!r} is not Postgres")
    if not known["NAME"]:
        raise SettingsError(f"the database {alias!r} has no NAME: run `penstock migrate --database-url URL` instead")
    host, port = known["HOST"] or None, known["PORT"]
    query = {name: str(value) for name, value in known["OPTIONS"].items() if value and name in _PARAMETERS}
    if query.get("sslrootcert") == "system":  # libpq's name for those of the system; to asyncpg it is a file
        cafile = ssl.get_default_verify_paths().cafile
        if cafile is None:
            raise SettingsError(f"the database {alias!r} needs a file as sslrootcert on this system")
        query |= {"sslrootcert": cafile, "sslmode": "verify-full"}
    if host and host[0] == "/":
        query["host"] = host
    return URL.create(
        "postgresql", known["USER"] or None, known["PASSWORD"] or None, None if "host" in query else host,
        int(port) if port else None, known["NAME"], query,
    ).render_as_string(hide_password=False)  # fmt: skip


def check_databases(databases: Collection[str] | None = None, **_: Any) -> Iterable[checks.CheckMessage]:
    """What keeps tasks from being enqueued. Warnings: Django's `migrate` does not run while there is an error."""
    schema = load_settings().database_schema
    for alias in aliases():
        if alias not in (databases or ()) or connections[alias].vendor != "postgresql":
            continue
        with connections[alias].cursor() as cursor:
            cursor.execute(renamed(_LOOK, schema))
            found = cursor.fetchall()
        if not found:
            hint = f"Run manage.py penstock_migrate --database {alias}, or `penstock migrate`."
            problem = f"the database {alias!r} lacks {schema}_enqueue_many"
            yield checks.Warning(problem, hint=hint, id="penstock.W002")
        elif not found[0][0]:
            hint = f"grant execute on function {schema}_enqueue, {schema}_enqueue_many to <role>"
            yield checks.Warning(f"the role of {alias!r} may not enqueue tasks", hint=hint, id="penstock.W003")
