"""Connections whose statements and channels are those of another schema than ``penstock``."""

from functools import cache
from typing import Any

from penstock.protocol.schema import DEFAULT, renamed


@cache
def renaming(schema: str, connection_class: Any) -> Any:
    """A class of the driver's connections whose statements and channels are those of the schema."""
    if schema == DEFAULT:
        return connection_class

    def renaming_first(name: str) -> Any:
        method = getattr(connection_class, name)

        async def call(self: Any, text: str, *args: Any, **options: Any) -> Any:
            return await method(self, renamed(text, schema), *args, **options)

        return call

    names = ("execute", "fetch", "fetchrow", "fetchval", "prepare", "add_listener")
    return type("Renaming", (connection_class,), {name: renaming_first(name) for name in names})
