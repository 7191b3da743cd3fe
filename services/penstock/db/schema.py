"""Connections whose statements and channels are those of another schema than ``penstock``."""

from functools import cache
from typing import Any

from penstock.protocol.schema import DEFAULT, renamed


@cache
def renaming(schema: str, connection_class: Any) -> Any:
    """A class of the driver's connections whose statements and channels are those of the schema."""
    if schema == DEFAULT:
        return connection_class

    class Renaming(connection_class):  # type: ignore[misc]
        async def execute(self, query: str, *args: Any, **options: Any) -> Any:
            return await super().execute(renamed(query, schema), *args, **options)

        async def fetch(self, query: str, *args: Any, **options: Any) -> Any:
            return await super().fetch(renamed(query, schema), *args, **options)

        async def fetchrow(self, query: str, *args: Any, **options: Any) -> Any:
            return await super().fetchrow(renamed(query, schema), *args, **options)

        async def fetchval(self, query: str, *args: Any, **options: Any) -> Any:
            return await super().fetchval(renamed(query, schema), *args, **options)

        async def prepare(self, query: str, **options: Any) -> Any:
            return await super().prepare(renamed(query, schema), **options)

        async def add_listener(self, channel: str, callback: Any) -> None:
            await super().add_listener(renamed(channel, schema), callback)

    return Renaming
