"""The store by settings."""

from typing import Any

from penstock.db.credentials import passwords_of
from penstock.db.pool import Store
from penstock.db.replica import Replica
from penstock.settings.model import Settings


def connecting_options(settings: Settings) -> dict[str, Any]:
    """How connections are made, for ``Store`` and the functions of ``migrate``."""
    return {"passwords": passwords_of(settings), "schema": settings.database_schema}


def open_store(settings: Settings, application_name: str, *, url: str | None = None, **options: Any) -> Store:
    """The store of PENSTOCK_DATABASE_URL, or of another URL, which connects when it is first used.

    options: as of ``Store``. Raises SettingsError when there is no URL.
    """
    options.setdefault("pool_size", settings.database_pool_size)
    options.setdefault("statement_timeout_seconds", settings.statement_timeout_seconds)
    known = connecting_options(settings) | {"pooler": settings.database_pooler, "listen_url": settings.listen_url}
    return Store(url or settings.require_database_url, application_name=application_name, **known, **options)


def open_replica(settings: Settings, primary: Store) -> Replica | None:
    if (url := settings.read_url) is None:
        return None
    store = open_store(settings, "penstock-api", url=url, codec=primary.codec)
    return Replica(store, primary, settings.database_read_max_age_seconds)
