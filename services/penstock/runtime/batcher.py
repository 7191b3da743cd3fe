"""Calls that arrive while one is under way share the next one."""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


@dataclass(slots=True, eq=False)
class Batcher(Generic[Item, Answer]):
    """Gathers single items into batches. One that finds nothing under way goes at once, later ones form the next batch.

    ``run(items)`` returns one answer per item, in order; an answer that is an exception is raised at its item. If
    ``run`` itself raises, every item of that batch raises it.
    max_items: maximum items in one batch. max_parallel: maximum batches under way.
    """

    run: Callable[[Sequence[Item]], Awaitable[Sequence[Answer | Exception]]]
    max_items: int = field(default=1000, kw_only=True)
    max_parallel: int = field(default=1, kw_only=True)
    _waiting: list[tuple[Item, asyncio.Future[Answer]]] = field(init=False, default_factory=list)
    _running: set[asyncio.Task[None]] = field(init=False, default_factory=set)
    _scheduled: bool = field(init=False, default=False)
    _context: contextvars.Context = field(init=False, default_factory=contextvars.copy_context)

    async def submit(self, item: Item) -> Answer:
        return await self.submit_soon(item)

    def submit_soon(self, item: Item) -> asyncio.Future[Answer]:
        """Add one item; its answer comes by the future."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        self._waiting.append((item, future))
        if not self._scheduled:
            # One turn of the loop later, so that items added in the same turn travel together.
            self._scheduled = True
            loop.call_soon(self._start)
        return future

    async def drain(self) -> None:
        """Wait until every item added so far has its answer."""
        while self._waiting or self._running:
            self._start()
            await asyncio.gather(*self._running, return_exceptions=True)
            await asyncio.sleep(0)  # for _done: gather of tasks that have ended is no turn of the loop from 3.12 on

    def _start(self) -> None:
        self._scheduled = False
        while self._waiting and len(self._running) < self.max_parallel:
            batch = self._waiting[: self.max_items]
            del self._waiting[: self.max_items]
            # It is of many callers, so it belongs to the span and the log fields of none.
            context = self._context.copy()
            task = asyncio.get_running_loop().create_task(self._run_batch(batch), name="batch", context=context)
            self._running.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if self._waiting:
            self._start()

    async def _run_batch(self, batch: list[tuple[Item, asyncio.Future[Answer]]]) -> None:
        raised: BaseException | None = None
        try:
            answers: Sequence[Answer | BaseException] = await self.run([item for item, _ in batch])
            if len(answers) != len(batch):
                raise RuntimeError(f"{len(batch)} items got {len(answers)} answers")
        except BaseException as exc:
            raised = exc
            answers = [exc] * len(batch)
        for (_, future), answer in zip(batch, answers, strict=True):
            if future.done():
                continue  # its caller gave up
            if not isinstance(answer, BaseException):
                future.set_result(answer)
            elif isinstance(answer, asyncio.CancelledError):
                future.cancel()
            else:
                future.set_exception(answer)
        if raised is not None and not isinstance(raised, Exception):
            raise raised
