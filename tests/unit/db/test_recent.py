"""Answers that many callers share for some seconds."""

from __future__ import annotations

import asyncio

import pytest

from penstock.db import context
from penstock.db.context import Recent
from penstock.runtime.budget import Budget, in_hand


class Made:
    def __init__(self) -> None:
        self.times = 0
        self.at_once = 0

    async def __call__(self) -> int:
        self.at_once += 1
        assert self.at_once == 1
        await asyncio.sleep(0)
        self.at_once -= 1
        self.times += 1
        return self.times


async def test_an_answer_is_made_once_for_all_who_ask_and_by_key() -> None:
    answers, make = Recent(), Made()
    assert await asyncio.gather(*(answers.get("stats", "", make) for _ in range(20))) == [1] * 20
    assert await answers.get("stats", "other", make) == 2
    assert await answers.get("stats", "", make) == 1


async def test_an_answer_is_made_again_when_it_is_too_old() -> None:
    answers, make = Recent(), Made()
    assert [await answers.get("stats", "", make, seconds=0) for _ in range(3)] == [1, 2, 3]
    assert await answers.get("stats", "", make, seconds=60) == 3


async def test_the_oldest_answers_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, make = Recent(), Made()
    monkeypatch.setattr(context, "_KEPT", 2)
    for key in ("a", "b", "c"):
        await answers.get("stats of tenants", key, make)
    assert await answers.get("stats of tenants", "c", make) == 3
    assert await answers.get("stats of tenants", "a", make) == 4


async def test_a_failure_is_not_kept() -> None:
    answers, make = Recent(), Made()

    async def fail() -> int:
        raise OSError("away")

    with pytest.raises(OSError, match="away"):
        await answers.get("stats", "", fail)
    assert await answers.get("stats", "", make) == 1


async def test_a_kept_answer_has_the_age_of_its_data() -> None:
    answers, ages = Recent(), []

    async def make() -> int:
        in_hand().aged(2.0)
        await asyncio.sleep(0)
        return 1

    async def app(*_: object) -> None:
        await answers.get("stats", "", make)
        ages.append(in_hand().age_seconds or 0)
        await asyncio.sleep(0.01)

    request = Budget(1024).counting(app)
    for _ in range(2):
        await request(None, None, None)
    first, second = ages
    assert first == 2.0
    assert 2.01 <= second < 3
