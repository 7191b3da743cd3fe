"""Names and keys of tenants, the ids of their groups, shares between them, and messages that mix none."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.brokers.sqs import group_id
from penstock.protocol.errors import InvalidParams
from penstock.protocol.message_attributes import decode_tenants
from penstock.protocol.task import Claimed
from penstock.protocol.tenant import own_key, read_tenant, stored_key, tenant_of_key
from penstock.scheduler.gates import Allowance, TenantLimits
from tests.packs import pack_messages

names = st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1, max_size=128).filter(lambda t: t != "*")


@given(tenant=names, key=st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1, max_size=20))
def test_a_key_comes_back_as_it_was_and_no_two_tenants_share_one(tenant: str, key: str) -> None:
    read_tenant(tenant)
    kept = stored_key(tenant, key)
    assert (own_key(kept), tenant_of_key(kept)) == (key, tenant)
    assert (own_key(key), tenant_of_key(key)) == (key, None)


@pytest.mark.parametrize(
    ("tenant", "problem"),
    [("", "1 to 128 characters, not 0"), ("x" * 129, "not 129"), ("a\0", "control"), ("*", "stands for every tenant")],
)
def test_what_is_no_tenant_is_told(tenant: str, problem: str) -> None:
    with pytest.raises(InvalidParams, match=problem.replace("*", r"\*")):
        read_tenant(tenant)


@given(names)
def test_a_group_id_is_one_that_sqs_takes_and_stays_as_it_is(tenant: str) -> None:
    made = group_id(tenant)
    assert re.fullmatch(r"[!-~]{1,128}", made)
    assert group_id(made) == made


def test_a_plain_name_is_its_own_group_id() -> None:
    assert group_id("acme-1") == "acme-1"
    assert group_id("Größe & Co") != group_id("Größe & co")


@given(
    tasks=st.lists(
        st.tuples(
            st.sampled_from([None, "a", "b", "c"]),
            st.sampled_from([None, 1.0]),
            st.booleans(),
            st.text("x", max_size=40),
        ),
        max_size=200,
    ),
    max_tasks=st.integers(1, 50),
    by_tenant=st.booleans(),
)
def test_no_message_mixes_tenants_and_none_is_lost(tasks: list[Any], max_tasks: int, by_tenant: bool) -> None:
    claimed = [
        Claimed(number, 7, "act", f'{{"a":"{text}"}}', timeout, 0.0, suspect, None, tenant)
        for number, (tenant, timeout, suspect, text) in enumerate(tasks, 1)
    ]
    messages = pack_messages(claimed, {}, max_tasks=max_tasks, max_bytes=2000, max_seconds=1000, by_tenant=by_tenant)
    for packed in messages:
        assert len({task.timeout_seconds for task in packed.tasks}) == 1
        if by_tenant:
            assert {task.tenant for task in packed.tasks} == {packed.message.group}
        else:
            assert packed.message.group is None
    assert sorted(task.id for packed in messages for task in packed.tasks) == [task.id for task in claimed]
    for packed in messages:
        told = decode_tenants(packed.message.attributes, (task.id for task in packed.tasks))
        assert {task.id: told.get(task.id) for task in packed.tasks} == {task.id: task.tenant for task in packed.tasks}
    if not by_tenant:
        # The bodies are those of tasks without tenants, and so are messages whose tasks have none.
        nobodys = [task._replace(tenant=None) for task in claimed]
        again = pack_messages(nobodys, {}, max_tasks=max_tasks, max_bytes=2000, max_seconds=1000)
        assert [packed.message.body for packed in messages] == [packed.message.body for packed in again]
        assert all("tenant" not in name for packed in again for name in packed.message.attributes)


@given(
    gates=st.lists(st.tuples(st.sampled_from([None, "a", "b", "c"]), st.integers(0, 30)), max_size=20),
    limits=st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(0, 40)),
    room=st.integers(0, 60),
)
def test_shares_keep_to_gates_to_tenants_and_to_the_room_and_waste_none(
    gates: list[tuple[str | None, int]], limits: dict[str, int], room: int
) -> None:
    tenants = TenantLimits(
        allowances={name: Allowance(tasks, 0.1, None) for name, tasks in limits.items()},
        of={f"g{place}": tenant for place, (tenant, _) in enumerate(gates) if tenant is not None},
    )
    bound = tenants.bound({f"g{place}": Allowance(tasks, 0.1, None) for place, (_, tasks) in enumerate(gates)})
    shares = tenants.share_out(room, bound)
    for name, one in bound.items():
        assert shares.get(name, 0) <= one.tasks
    used: dict[str | None, int] = {}
    most: dict[str | None, int] = {}
    for place, (tenant, tasks) in enumerate(gates):
        used[tenant] = used.get(tenant, 0) + shares.get(f"g{place}", 0)
        most[tenant] = most.get(tenant, 0) + min(tasks, limits.get(tenant or "", tasks))
    for tenant, count in used.items():
        assert tenant is None or count <= limits.get(tenant, count)
    possible = sum(count if tenant is None else min(count, limits.get(tenant, count)) for tenant, count in most.items())
    assert sum(shares.values()) == min(room, possible)


def test_a_flood_of_gates_of_one_tenant_gets_no_more_than_the_one_gate_of_another() -> None:
    flood = [f"flood{n}" for n in range(50)]
    tenants = TenantLimits(of=dict.fromkeys(flood, "flood") | {"quiet": "quiet"})
    shares = tenants.share_out(100, dict.fromkeys([*flood, "quiet"], Allowance(100, 0.1, None)))
    assert shares["quiet"] == 50
    assert sum(shares.values()) == 100


def test_gates_of_a_paused_tenant_are_left_out() -> None:
    gates = {"g": Allowance(1, 0.1, None), "h": Allowance(1, 0.1, None)}
    tenants = TenantLimits(of={"g": "a", "h": "b"}, paused=["g"], allowances={"a": Allowance(5, 0.1, None)})
    assert list(tenants.bound(gates)) == ["h"]
    assert tenants.share_out(5, tenants.bound(gates)) == {"h": 1}


def test_the_tenants_of_a_message_fit_beside_its_body() -> None:
    claimed = [
        Claimed(10**18 + n, 7, "act", "{}", None, 0.0, False, None, f"{n:04}" + "\U0001f600" * 92) for n in range(500)
    ]
    messages = pack_messages(claimed * 4, {}, max_tasks=500, max_bytes=1_000_000, max_seconds=1000)
    assert max(len(value) for packed in messages for value in packed.message.attributes.values()) <= 32_768
    assert sum(len(packed.tasks) for packed in messages) == 2000
    (packed,) = pack_messages(claimed[:1], {}, max_tasks=1, max_bytes=2500, max_seconds=1, by_tenant=True)
    assert sum(len(key + value) for key, value in packed.message.attributes.items()) < 1024 + 256
