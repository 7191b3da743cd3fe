"""The client through the inbound queue for programs without asyncio."""

from collections.abc import Coroutine, Iterable, Mapping
from typing import Any, Self, TypeVar, Unpack

from penstock.client.exchanges import Params, Request
from penstock.client.inbound import InboundClient
from penstock.client.methods import Nothing, ScheduleChanges, WaitAnswers, WorkflowChanges
from penstock.protocol.options import EnqueueOptions
from penstock.runtime.loop_thread import LoopThread
from penstock.settings.model import Settings

T = TypeVar("T")


class SyncInboundClient(WaitAnswers[Nothing]):
    """`InboundClient` with blocking methods, for Django, Flask and scripts; its arguments and errors are the same.

    Use it in a ``with`` block, or call ``close``. It is safe to share between threads, and not across a fork.
    """

    def __init__(
        self,
        queue: str,
        endpoint_url: str | None = None,
        region: str | None = None,
        *,
        access_key: str | None = None,
        transport_url: str | None = None,
        payloads: Settings | None = None,
    ) -> None:
        self._client = InboundClient(
            queue, endpoint_url, region, access_key=access_key, transport_url=transport_url, payloads=payloads
        )
        self._thread = LoopThread("penstock-inbound")
        self.schedules: ScheduleChanges[Nothing] = ScheduleChanges(self._run)
        self.workflows: WorkflowChanges[Nothing] = WorkflowChanges(self._run)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        if self._thread.is_alive():
            self._wait(self._client.close())
            self._thread.stop()

    def enqueue(self, action: str, payload: Any = None, **options: Unpack[EnqueueOptions]) -> None:
        """Send one task; options as in :meth:`Client.enqueue`."""
        self._wait(self._client.enqueue(action, payload, **options))

    def enqueue_many(self, tasks: Iterable[Mapping[str, Any]]) -> int:
        """Send tasks, many in a message; returns their number."""
        return self._wait(self._client.enqueue_many(tasks))

    def send(self, method: str, params: Params) -> None:
        """Send a request of any method that changes something."""
        self._wait(self._client.send(method, params))

    def _run(self, call: Request[Any]) -> None:
        self.send(call.method, call.params)

    def _wait(self, sending: Coroutine[Any, Any, T]) -> T:
        return self._thread.submit(sending).result()
