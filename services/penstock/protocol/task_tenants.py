"""Tenants of tasks beside the body of an outbound message: strict servers refuse a member of the request."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping

import msgspec

TENANT_ATTRIBUTE = "tenant"  # of an outbound message: all of its tasks are for this tenant
TENANTS_ATTRIBUTE = "tenants"  # likewise, where they are for several: ids of tasks by tenant, as JSON
_ENTRY_BYTES = 26  # of a task in it, beside its tenant's name

_decode = msgspec.json.Decoder(dict[str, list[int]]).decode


def tenant_bytes(tenant: str) -> int:
    """What a task of this tenant may add to the attributes."""
    return len(json.dumps(tenant)) + _ENTRY_BYTES


def encode_tenants(tenants: Iterable[tuple[int, str | None]]) -> dict[str, str]:
    """The attributes that name the tenants of these tasks; empty if no task has one."""
    ids: dict[str | None, list[int]] = defaultdict(list)
    for task_id, tenant in tenants:
        ids[tenant].append(task_id)
    if len(ids) == 1:
        (only,) = ids
        return {} if only is None else {TENANT_ATTRIBUTE: json.dumps(only)}
    ids.pop(None, None)
    return {TENANTS_ATTRIBUTE: json.dumps(ids, separators=(",", ":"))}


def decode_tenants(attributes: Mapping[str, str], task_ids: Iterable[int]) -> dict[int, str]:
    """Tenants by task. Raises ValueError for attributes that no scheduler wrote."""
    if TENANT_ATTRIBUTE in attributes:
        return dict.fromkeys(task_ids, msgspec.json.decode(attributes[TENANT_ATTRIBUTE], type=str))
    if TENANTS_ATTRIBUTE not in attributes:
        return {}
    return {task_id: tenant for tenant, ids in _decode(attributes[TENANTS_ATTRIBUTE]).items() for task_id in ids}
