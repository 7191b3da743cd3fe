from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import pytest

from penstock.runtime.batcher import Batcher


class Recorder:
    """Keeps the batches that it was given and answers each item with its double, once it is let."""

    def __init__(self, *, open: bool = True) -> None:
        self.batches: list[list[int]] = []
        self.parallel = self.most_parallel = 0
        self.gate = asyncio.Event()
        if open:
            self.gate.set()

    async def __call__(self, items: Sequence[int]) -> list[int | Exception]:
        self.batches.append(list(items))
        self.parallel += 1
        self.most_parallel = max(self.most_parallel, self.parallel)
        try:
            await self.gate.wait()
        finally:
            self.parallel -= 1
        return [ValueError(f"no {item}") if item < 0 else item * 2 for item in items]


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_items_of_one_turn_travel_together_and_get_their_own_answers() -> None:
    run = Recorder()
    batcher = Batcher(run)
    assert await asyncio.gather(*(batcher.submit(n) for n in range(5))) == [0, 2, 4, 6, 8]
    assert run.batches == [[0, 1, 2, 3, 4]]


async def test_an_item_that_finds_nothing_under_way_goes_at_once() -> None:
    run = Recorder()
    batcher = Batcher(run)
    assert [await batcher.submit(1), await batcher.submit(2)] == [2, 4]
    assert run.batches == [[1], [2]]


async def test_items_that_come_while_a_batch_runs_form_the_next() -> None:
    run = Recorder(open=False)
    batcher = Batcher(run)
    first = batcher.submit_soon(0)
    await turns()
    later = []
    for n in (1, 2, 3):
        later.append(batcher.submit_soon(n))
        await turns()
    assert run.batches == [[0]]
    run.gate.set()
    assert await asyncio.gather(first, *later) == [0, 2, 4, 6]
    assert run.batches == [[0], [1, 2, 3]]


async def test_a_batch_is_cut_at_its_limit_and_nothing_is_lost() -> None:
    run = Recorder()
    batcher = Batcher(run, max_items=3)
    assert await asyncio.gather(*(batcher.submit(n) for n in range(8))) == [n * 2 for n in range(8)]
    assert run.batches == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert run.most_parallel == 1


async def test_batches_run_side_by_side_up_to_their_limit() -> None:
    run = Recorder(open=False)
    batcher = Batcher(run, max_items=1, max_parallel=2)
    futures = [batcher.submit_soon(n) for n in range(5)]
    await turns()
    assert run.batches == [[0], [1]]
    run.gate.set()
    assert await asyncio.gather(*futures) == [0, 2, 4, 6, 8]
    assert run.most_parallel == 2


async def test_an_answer_that_is_an_error_is_raised_at_its_item_alone() -> None:
    batcher = Batcher(Recorder())
    answers = await asyncio.gather(*(batcher.submit(n) for n in (1, -1, 2)), return_exceptions=True)
    assert [answers[0], answers[2]] == [2, 4]
    assert isinstance(answers[1], ValueError)
    assert str(answers[1]) == "no -1"


async def test_a_run_that_fails_fails_every_item_of_its_batch_and_the_next_batch_goes_on() -> None:
    failing = True

    async def run(items: Sequence[int]) -> list[int | Exception]:
        if failing:
            raise OSError("away")
        return list(items)

    batcher = Batcher(run)
    answers = await asyncio.gather(batcher.submit(1), batcher.submit(2), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["away", "away"]
    failing = False
    assert await batcher.submit(3) == 3


async def test_a_run_that_answers_too_few_fails_its_items() -> None:
    async def run(items: Sequence[int]) -> list[int | Exception]:
        return [*items[1:]]

    batcher = Batcher(run)
    answers = await asyncio.gather(batcher.submit(1), batcher.submit(2), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["2 items got 1 answers"] * 2


async def test_a_caller_that_gives_up_leaves_its_neighbours_their_answers() -> None:
    run = Recorder(open=False)
    batcher = Batcher(run)
    impatient, patient = asyncio.ensure_future(batcher.submit(1)), asyncio.ensure_future(batcher.submit(2))
    await turns()
    impatient.cancel()
    await turns()
    run.gate.set()
    assert await patient == 4
    assert impatient.cancelled()


async def test_drain_waits_for_every_item_added_before() -> None:
    run = Recorder(open=False)
    batcher = Batcher(run, max_items=2)
    futures = [batcher.submit_soon(n) for n in range(5)]
    draining = asyncio.ensure_future(batcher.drain())
    await turns()
    assert not draining.done()
    run.gate.set()
    await draining
    assert [future.result() for future in futures] == [0, 2, 4, 6, 8]


async def test_drain_that_meets_a_batch_at_its_end_lets_it_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """From Python 3.12 on, waiting for tasks that have ended is no turn of the loop."""
    gather, rounds = asyncio.gather, itertools.count()

    def gather_at_once(*tasks: asyncio.Task[None], return_exceptions: bool) -> asyncio.Future[list[None]]:
        assert next(rounds) < 10, "it waits without letting anything happen"
        if not all(task.done() for task in tasks):
            return gather(*tasks, return_exceptions=return_exceptions)  # type: ignore[return-value]
        ended = asyncio.get_running_loop().create_future()
        ended.set_result([])
        return ended

    monkeypatch.setattr(asyncio, "gather", gather_at_once)
    batcher = Batcher(Recorder())
    assert await batcher.submit(1) == 2
    assert batcher._running
    await batcher.drain()


async def test_drain_of_an_empty_batcher_returns_at_once() -> None:
    await asyncio.wait_for(Batcher(Recorder()).drain(), 5)


async def test_a_cancelled_run_cancels_its_items_and_frees_the_place() -> None:
    cancelled = True

    async def run(items: Sequence[int]) -> list[int | Exception]:
        if cancelled:
            raise asyncio.CancelledError
        return list(items)

    batcher = Batcher(run)
    with pytest.raises(asyncio.CancelledError):
        await batcher.submit_soon(1)
    cancelled = False
    assert await batcher.submit(2) == 2
