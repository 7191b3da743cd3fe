from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.fence import ClaimKey, Fence
from penstock.protocol.message_attributes import (
    PACK_ID_MAX_BYTES,
    PACK_MAX_TASKS,
    name_pack,
    parse_pack_id,
    parse_ranges,
    ranges_of,
)
from penstock.protocol.requests import INT8_MAX

ids = st.lists(st.one_of(st.integers(0, 40), st.integers(0, INT8_MAX)), min_size=1, max_size=50)


@given(ids)
def test_numbers_are_read_as_they_were_written_in_their_order(numbers: list[int]) -> None:
    assert parse_ranges(ranges_of(numbers)) == numbers


@given(ids, st.integers(0, INT8_MAX), st.booleans())
def test_a_pack_id_names_its_claim_and_tasks_with_a_token_or_without(
    task_ids: list[int], claim: int, is_signed: bool
) -> None:
    plain = name_pack(claim, task_ids)
    assert plain is not None
    text = Fence([ClaimKey(b"key")] if is_signed else ()).sign(plain)
    assert parse_pack_id(text) == (claim, task_ids)


def test_numbers_that_follow_each_other_are_a_range() -> None:
    assert ranges_of([17, 18, 19, 140, 3, 4]) == "17-19,140,3-4"
    assert ranges_of([*range(5, 505)]) == "5-504"
    assert ranges_of([7]) == "7"


def test_task_ids_with_too_many_gaps_have_no_pack_id() -> None:
    far = [*range(10**6, 2 * 10**6, 2000)]
    assert name_pack(7, far) is None
    longest = next(n for n in range(len(far), 0, -1) if name_pack(7, far[:n]) is not None)
    assert longest > 200
    assert len(Fence([ClaimKey(b"key")]).sign(name_pack(7, far[:longest]) or "")) <= PACK_ID_MAX_BYTES


@pytest.mark.parametrize(
    "text",
    [
        "", "7:1-2", "pack", "pack:7", "pack:x:1-2", "pack:7:", "pack:7:2-1", "pack:7:1-", "pack:7:-3", "pack:7:1,,2",
        "pack:7:1-2-3", "pack:7:٣", "pack:7: 1", f"pack:7:0-{PACK_MAX_TASKS}", f"pack:7:{INT8_MAX + 1}",
        f"pack:7:0-99,0-{PACK_MAX_TASKS - 100}", "pack:7:" + "9" * 5000, "pack:9999999999999999999:1-2",
        'pack:7:1-2:"', "pack:7:1-2:", "pack:7:1-2:a:b",
    ],
)  # fmt: skip
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not|is no number"):
        parse_pack_id(text)
