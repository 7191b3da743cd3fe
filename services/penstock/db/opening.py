"""The store by settings."""

from __future__ import annotations

from typing import Any

from penstock.db.credentials import passwords_of
from penstock.db.pool import Store
from penstock.settings.model import Settings


def open_store(settings: Settings, application_name: str, **options: Any) -> Store:
    """The store of PENSTOCK_DATABASE_URL, which connects when it is first used; options as of ``Store``.

    Raises SettingsError when there is no URL.
    """
    return Store(
        settings.require_database_url,
        pooler=settings.database_pooler,
        listen_url=settings.listen_url,
        passwords=passwords_of(settings),
        application_name=application_name,
        **{
            "pool_size": settings.database_pool_size,
            "statement_timeout_seconds": settings.statement_timeout_seconds,
            **options,
        },
    )
