"""Every JSON-RPC method by name: those of ``methods/table.py``, and those that only the api carries out."""

from functools import cache
from typing import Any

import msgspec

from penstock.api import audit, dead_letters, keys, rejected
from penstock.api.openrpc import describe
from penstock.methods import table
from penstock.protocol.api_key import Permission
from penstock.protocol.method import Method, NoParams, Scope, by_name, method


@method("rpc.discover", permission=Permission.READ, scope=Scope.OPEN)
async def discover(_context: Any, _given: NoParams) -> msgspec.Raw:
    """This document."""
    return _document()


METHODS = {**table.METHODS, **by_name(rejected, dead_letters, keys, audit), discover.name: discover}


@cache
def _document() -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(describe(METHODS)))


def method_of(name: str) -> Method | None:
    """The method of that name, ``submit:<action>`` included; None for an unknown one."""
    return METHODS.get("enqueue" if name.startswith(table.SUBMIT_PREFIX) else name)
