"""Tenants of tasks, as attributes of an outbound message: strict servers refuse unknown members of a request."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping

import msgspec

TENANT_ATTRIBUTE = "tenant"  # of an outbound message whose tasks all are of this tenant
TENANTS_ATTRIBUTE = "tenants"  # of one with several tenants: ids of tasks by tenant, as JSON
_ENTRY_BYTES = 26  # of a task, without its tenant's name

_decode = msgspec.json.Decoder(dict[str, list[int]]).decode


def tenant_bytes(tenant: str) -> int:
    """The most bytes that a task of this tenant adds to the attributes."""
    return len(json.dumps(tenant)) + _ENTRY_BYTES


def encode_tenants(tenants: Iterable[tuple[int, str | None]]) -> dict[str, str]:
    """Attributes with the tenants of these tasks, given as (id, tenant)."""
    ids: dict[str | None, list[int]] = defaultdict(list)
    for task_id, tenant in tenants:
        ids[tenant].append(task_id)
    if len(ids) == 1:
        (only,) = ids
        return {} if only is None else {TENANT_ATTRIBUTE: json.dumps(only)}
    ids.pop(None, None)
    return {TENANTS_ATTRIBUTE: json.dumps(ids, separators=(",", ":"))}


def decode_tenants(attributes: Mapping[str, str], task_ids: Iterable[int]) -> dict[int, str]:
    """Tenants by task. Raises ValueError for invalid attributes."""
    if TENANT_ATTRIBUTE in attributes:
        return dict.fromkeys(task_ids, msgspec.json.decode(attributes[TENANT_ATTRIBUTE], type=str))
    if TENANTS_ATTRIBUTE not in attributes:
        return {}
    return {task_id: tenant for tenant, ids in _decode(attributes[TENANTS_ATTRIBUTE]).items() for task_id in ids}
