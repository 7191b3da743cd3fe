from __future__ import annotations

import json
import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.fence import ClaimKey, Fence
from penstock.protocol.json_text import utf8_size
from penstock.protocol.message_attributes import (
    PACK_ATTRIBUTE,
    PACK_FROM,
    SUSPECT_ATTRIBUTE,
    TIMEOUT_ATTRIBUTE,
    parse_pack_id,
)
from penstock.protocol.task import Claimed
from penstock.scheduler.sending import PackedMessage, message_of
from tests.integration.doors import sample
from tests.packs import pack_messages


def claimed(
    number: int, action: str = "a", *, payload: str = "{}", timeout: float | None = None, suspect: bool = False
) -> Claimed:
    return Claimed(number, number + 1000, action, payload, timeout, 0.0, suspect)


def packed_in(
    tasks: list[Claimed], run_seconds: dict[str, float], *, max_tasks: int = 500, max_seconds: float = 1.0
) -> list[PackedMessage]:
    return pack_messages(tasks, run_seconds, max_tasks=max_tasks, max_bytes=1_000_000, max_seconds=max_seconds)


def sizes(messages: list[PackedMessage]) -> list[int]:
    return [len(packed.tasks) for packed in messages]


# Packing


def test_a_message_holds_about_a_second_of_work() -> None:
    tasks = [claimed(n) for n in range(2000)]
    assert sizes(packed_in(tasks, {"a": 0.3})) == [3] * 666 + [2]
    assert sizes(packed_in(tasks, {"a": 0.125})) == [8] * 250
    assert sizes(packed_in(tasks, {"a": 0.001})) == [200] * 10
    assert sizes(packed_in(tasks, {"a": 0.0}, max_tasks=50)) == [50] * 40


def test_a_small_claim_is_one_call_to_sqs() -> None:
    for count, messages in ((1, 1), (10, 10), (12, 6), (25, 9), (101, 10)):
        assert len(packed_in([claimed(n) for n in range(count)], {"a": 0.001})) == messages


def test_a_task_of_more_than_a_second_travels_alone() -> None:
    assert sizes(packed_in([claimed(n) for n in range(50)], {"a": 20.0})) == [1] * 50


def test_an_action_that_no_worker_has_reported_yet_is_taken_for_a_tenth_of_a_second() -> None:
    assert sizes(packed_in([claimed(n) for n in range(200)], {"b": 0.0})) == [10] * 20


def test_slow_and_fast_tasks_share_a_message_only_up_to_its_seconds() -> None:
    tasks = [claimed(n, "slow" if n % 10 == 0 else "fast") for n in range(1000)]
    known = {"slow": 0.5, "fast": 0.001}
    for packed in packed_in(tasks, known):
        assert sum(known[task.action] for task in packed.tasks) <= 1.0


def test_a_suspect_travels_alone_and_the_others_in_their_order() -> None:
    tasks = [claimed(n, suspect=n % 100 == 7) for n in range(1000)]
    messages = packed_in(tasks, {"a": 0.0})
    alone = [packed for packed in messages if packed.tasks[0].suspect]
    assert [task.id for packed in alone for task in packed.tasks] == [n for n in range(1000) if n % 100 == 7]
    assert sizes(alone) == [1] * 10
    others = [packed for packed in messages if not packed.tasks[0].suspect]
    assert [task.id for packed in others for task in packed.tasks] == [n for n in range(1000) if n % 100 != 7]
    assert max(sizes(others)) == 100


def test_a_message_of_many_tasks_names_them_all_where_they_have_few_gaps() -> None:
    fence = Fence([ClaimKey(b"key")])
    plain = [claimed(n)._replace(claim=7) for n in range(100)]
    timed = [claimed(n, timeout=2.0)._replace(claim=7) for n in range(100, 180, 2)]
    messages = pack_messages(
        [*plain, *timed], {"a": 0.0}, max_tasks=500, max_bytes=10_000, max_seconds=1.0, fence=fence
    )
    assert sizes(messages) == [14] * 7 + [2] + [14, 14, 12]
    for packed in messages:
        name = packed.message.attributes.get(PACK_ATTRIBUTE)
        assert (name is not None) == (len(packed.tasks) >= PACK_FROM)
        if name is not None:
            assert fence.problem(name) is None
            assert parse_pack_id(name) == (7, [task.id for task in packed.tasks])
    far = [claimed(n)._replace(claim=7) for n in range(10**12, 2 * 10**12, 5 * 10**8)]
    assert all(PACK_ATTRIBUTE not in packed.message.attributes for packed in packed_in(far, {"a": 0.0}))


def test_a_suspect_is_marked_and_keeps_its_time_limit() -> None:
    (packed,) = packed_in([claimed(1, suspect=True, timeout=2.5)], {})
    assert packed.message.attributes == {TIMEOUT_ATTRIBUTE: "2.5", SUSPECT_ATTRIBUTE: "1"}


def test_tasks_of_one_limit_travel_in_one_message() -> None:
    packed = message_of([claimed(1, timeout=2.5), claimed(2, "b", timeout=2.5)])
    assert [call["id"] for call in json.loads(packed.message.body)] == ["1:1001", "2:1002"]
    assert packed.message.attributes == {TIMEOUT_ATTRIBUTE: "2.5"}


def test_the_number_of_tasks_in_each_message_is_observed() -> None:
    before = [sample(f"penstock_batch_size_{kind}", operation="outbound_message") for kind in ("count", "sum")]
    packed_in([claimed(n) for n in range(100)], {"a": 0.0})
    after = [sample(f"penstock_batch_size_{kind}", operation="outbound_message") for kind in ("count", "sum")]
    assert [after[0] - before[0], after[1] - before[1]] == [10, 100]


tasks_of_any_kind = st.lists(
    st.builds(
        lambda action, payload, timeout, suspect: (action, payload, timeout, suspect),
        st.sampled_from(["a", "b", "unknown"]),
        st.sampled_from(["{}", '["\uffff"]', '{"n":"' + "x" * 300 + '"}']),
        st.sampled_from([None, 1.5]),
        st.sampled_from([False, False, True]),
    ),
    max_size=80,
)


@given(
    drawn=tasks_of_any_kind,
    seconds=st.fixed_dictionaries({"a": st.floats(0, 2), "b": st.floats(0, 0.2)}),
    max_tasks=st.integers(1, 20),
    max_bytes=st.integers(200, 2000),
)
def test_parcels_hold_every_task_once_within_all_their_limits(
    drawn: list[tuple[str, str, float | None, bool]], seconds: Mapping[str, float], max_tasks: int, max_bytes: int
) -> None:
    tasks = [
        claimed(n, action, payload=payload, timeout=timeout, suspect=suspect)
        for n, (action, payload, timeout, suspect) in enumerate(drawn)
    ]
    messages = pack_messages(tasks, seconds, max_tasks=max_tasks, max_bytes=max_bytes, max_seconds=1.0)
    assert sorted(task.id for packed in messages for task in packed.tasks) == list(range(len(tasks)))
    for packed in messages:
        body = json.loads(packed.message.body)
        calls = body if isinstance(body, list) else [body]
        assert [call["id"] for call in calls] == [f"{task.id}:{task.claim}" for task in packed.tasks]
        (limit,) = {task.timeout_seconds for task in packed.tasks}
        assert packed.message.attributes.get(TIMEOUT_ATTRIBUTE) == (None if limit is None else repr(limit))
        assert (SUSPECT_ATTRIBUTE in packed.message.attributes) == packed.tasks[0].suspect
        if len(packed.tasks) > 1:
            assert len(packed.tasks) <= max_tasks
            assert not any(task.suspect for task in packed.tasks)
            assert utf8_size(packed.message.body) <= max_bytes
            assert sum(seconds.get(task.action, 0.1) for task in packed.tasks) <= 1.0 + 1e-9


@pytest.mark.parametrize("seconds", [0.0, 5.0])
def test_work_without_a_limit_in_seconds_is_cut_by_number_alone(seconds: float) -> None:
    assert sizes(packed_in([claimed(n) for n in range(100)], {"a": seconds}, max_seconds=math.inf)) == [10] * 10
