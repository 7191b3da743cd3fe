"""Names of tenants. Statements put them before the stored keys of their tasks and workflows."""

from collections.abc import Callable
from typing import TypeVar

from penstock.protocol.checks import CONTROL, Checked
from penstock.protocol.errors import InvalidParams

TENANT_MAX_CHARS = 128
TENANT_MAX_BYTES = 3 * TENANT_MAX_CHARS  # in UTF-8: keys stand behind it, and an index holds both
EVERY_TENANT = "*"  # in rules: every tenant that has no limits of its own
Key = TypeVar("Key", str, str | None)
_BETWEEN = "\x1f"  # a tenant and a key; no text of a caller may hold it


def check_tenant(tenant: str) -> str:
    """Raises ValueError for an invalid name, with the reason."""
    if not 1 <= len(tenant) <= TENANT_MAX_CHARS:
        raise ValueError(f"must have 1 to {TENANT_MAX_CHARS} characters, not {len(tenant)}")
    if CONTROL.search(tenant):
        raise ValueError("holds a control character")
    size = len(tenant.encode())
    if size > TENANT_MAX_BYTES:
        raise ValueError(f"has {size} bytes in UTF-8; the limit is {TENANT_MAX_BYTES}")
    if tenant == EVERY_TENANT:
        raise ValueError("must not be *, which stands for every tenant in rules")
    return tenant


def read_tenant(tenant: str | None, name: str = "tenant") -> str | None:
    """As ``check_tenant``, of a parameter. Raises InvalidParams."""
    try:
        return None if tenant is None else check_tenant(tenant)
    except ValueError as exc:
        raise InvalidParams(name, str(exc)) from None


TENANT = Checked(read_tenant)


def stored_key(tenant: str | None, key: str) -> str:
    """A unique key, ordering key or workflow's key as it is stored."""
    return key if tenant is None else f"{tenant}{_BETWEEN}{key}"


def own_key(key: Key) -> Key:
    return key if key is None else key.rpartition(_BETWEEN)[2]


def read_stored(key: str, read: Callable[[str], object], name: str) -> str:
    """A key that may be a stored one; ``read`` checks it without the tenant. Raises InvalidParams."""
    tenant = tenant_of_key(key)
    read_tenant(tenant, name)
    read(key if tenant is None else own_key(key))
    return key


def tenant_of_key(key: str) -> str | None:
    tenant, between, _ = key.rpartition(_BETWEEN)
    return tenant if between else None
