from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.protocol.errors import Locked, PenstockError, Refused, TooSlow, Unavailable
from penstock.runtime.halving import in_halves


class Work:
    """Stores numbers, all or none of a part; those in ``errors`` fail with what stands there."""

    def __init__(self, errors: dict[int, PenstockError]) -> None:
        self.errors = errors
        self.stored: list[int] = []
        self.alone: list[tuple[int, PenstockError]] = []
        self.left: list[int] = []
        self.parts: list[tuple[int, bool]] = []

    async def store(self, part: Sequence[int], hurried: bool) -> list[int]:
        self.parts.append((len(part), hurried))
        for number in part:
            if number in self.errors:
                raise self.errors[number]
        self.stored += part
        return list(part)

    async def fail(self, number: int, error: PenstockError) -> list[int]:
        self.alone.append((number, error))
        return [-number]

    async def leave(self, part: Sequence[int], error: PenstockError) -> list[int]:
        self.left += part
        return [0] * len(part)


async def test_nothing_is_asked_of_no_items_and_once_of_good_ones() -> None:
    work = Work({})
    assert await in_halves([], work.store, work.fail) == []
    assert await in_halves(range(5), work.store, work.fail) == [[0, 1, 2, 3, 4]]
    assert work.parts == [(5, False)]


@pytest.mark.parametrize("error", [Refused("no"), Locked("held"), TooSlow("slow")])
async def test_one_that_spoils_the_batch_is_found_and_the_others_are_stored_in_their_order(
    error: PenstockError,
) -> None:
    work = Work({700: error})
    done = await in_halves(range(1000), work.store, work.fail, work.leave)
    assert [number for part in done for number in part] == [*range(700), -700, *range(701, 1000)]
    assert work.alone == [(700, error)]
    assert work.left == []
    # Once something was waited for in vain, nothing is waited for long.
    assert [hurried for _, hurried in work.parts[1:]] == [not isinstance(error, Refused)] * (len(work.parts) - 1)


async def test_what_is_behind_many_locked_ones_is_stored() -> None:
    work = Work({number: Locked("held") for number in range(100)} | {300: Refused("no")})
    done = await in_halves(range(1000), work.store, work.fail, work.leave)
    assert len(work.parts) <= 70
    assert set(work.stored) >= {*range(130, 250), *range(500, 1000)}
    assert {*work.left} >= {*range(250, 500)}  # it is unknown which of them is refused
    assert {str(error) for _, error in work.alone} == {"held"}
    assert sum(len(part) for part in done) == 1000


async def test_where_all_are_locked_most_are_left_after_few_tries() -> None:
    work = Work({number: Locked("the table is locked") for number in range(10_000)})
    done = await in_halves(range(10_000), work.store, work.fail, work.leave)
    assert work.stored == []
    assert len(work.parts) <= 75
    assert [number for number, _ in work.alone] + work.left == list(range(10_000))
    assert sum(len(part) for part in done) == 10_000


async def test_without_a_way_to_leave_them_the_untried_count_as_failed() -> None:
    work = Work({number: TooSlow("overloaded") for number in range(1000)})
    await in_halves(range(1000), work.store, work.fail)
    assert [number for number, _ in work.alone] == list(range(1000))
    assert len(work.parts) <= 15


async def test_an_error_that_is_no_items_fault_is_raised() -> None:
    work = Work({3: Unavailable("away")})
    with pytest.raises(Unavailable):
        await in_halves(range(8), work.store, work.fail)
    work = Work({3: Locked("held")})
    with pytest.raises(Locked):
        await in_halves(range(8), work.store, work.fail, errors=(Refused,))
    assert work.parts == [(8, False)]
