"""Names of tenants. Statements put them before the stored keys of their tasks and workflows."""

from collections.abc import Callable
from typing import TypeVar

from penstock.protocol.checks import Checked, read_name
from penstock.protocol.errors import InvalidParams

TENANT_MAX_CHARS = 128
EVERY_TENANT = "*"  # in rules: every tenant that has no limits of its own
Key = TypeVar("Key", str, str | None)
_BETWEEN = "\x1f"  # a tenant and a key; no text of a caller may hold it


def read_tenant(tenant: str | None, name: str = "tenant") -> str | None:
    """A tenant's name, checked. Raises InvalidParams."""
    if tenant == EVERY_TENANT:
        raise InvalidParams(name, "must not be *, which stands for every tenant in rules")
    return None if tenant is None else read_name(tenant, name, TENANT_MAX_CHARS)


TENANT = Checked(read_tenant)


def stored_key(tenant: str | None, key: str) -> str:
    """A unique key, ordering key or workflow's key as it is stored."""
    return key if tenant is None else f"{tenant}{_BETWEEN}{key}"


def own_key(key: Key) -> Key:
    return key if key is None else key.rpartition(_BETWEEN)[2]


def check_stored(key: str, name: str, *, check: Callable[[str, str], object]) -> None:
    """Check a key that may be a stored one. check: of the key without the tenant. Raises InvalidParams."""
    read_tenant(tenant_of_key(key), name)
    check(own_key(key), name)


def tenant_of_key(key: str) -> str | None:
    tenant, between, _ = key.rpartition(_BETWEEN)
    return tenant if between else None
