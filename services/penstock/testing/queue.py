"""A queue in the memory of this process, by the rules of SQS: visibility timeout, receipts, dead letters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from penstock.brokers.base import Depth, Limits, Message, Outgoing, SendReport
from penstock.brokers.sqs import LIMITS


@dataclass(slots=True)
class Stored:
    """A message in the queue; times are seconds of the queue's clock."""

    id: str
    sent: Outgoing
    sent_at: float
    visible_at: float
    receipt: str = ""
    receives: int = 0


class MemoryQueue:
    """As the contract of ``brokers.base.Queue``. now: epoch seconds. number: distinct, of each message and delivery."""

    def __init__(
        self, label: str, now: Callable[[], float], *, limits: Limits = LIMITS, number: Callable[[], int] | None = None
    ) -> None:
        self.label = label
        self.limits = limits
        self.messages: list[Stored] = []
        self.dead: list[Stored] = []
        self._now = now
        self._number = number or partial(next, count(1))

    async def send(self, messages: Sequence[Outgoing]) -> SendReport:
        for message in messages:
            self.put(message)
        return SendReport([], None)

    def put(self, message: Outgoing, late_seconds: float = 0.0) -> None:
        now = self._now()
        self.messages.append(Stored(f"m{self._number()}", message, now, now + late_seconds))

    async def receive(self, *, wait_seconds: int, visibility_seconds: int) -> list[Message]:
        """As the contract, but without a wait: in a test, what is to come is there, or needs another pass."""
        return self.take(self.visible()[: self.limits.max_call_messages], visibility_seconds)

    def visible(self) -> list[Stored]:
        now = self._now()
        return [one for one in self.messages if one.visible_at <= now]

    def take(self, ready: Sequence[Stored], seconds: float) -> list[Message]:
        """Deliver stored messages, or make them dead letters."""
        received = []
        for stored in ready:
            if stored.receives >= self.limits.max_receives:
                self.messages.remove(stored)
                self.dead.append(stored)
                continue
            stored.receives += 1
            stored.receipt = f"{stored.id}/{self._number()}"
            stored.visible_at = self._now() + seconds
            sent, attributes = stored.sent, {**stored.sent.attributes}
            received.append(
                Message(stored.id, stored.receipt, sent.body, stored.receives, stored.sent_at, attributes, sent.group)
            )
        return received

    async def delete(self, messages: Sequence[Message]) -> list[Message]:
        for message in messages:
            if (stored := self.find(message)) is not None:  # else it was deleted, or received again: no error either
                self.messages.remove(stored)
        return []

    async def extend(self, messages: Sequence[Message], seconds: int) -> list[Message]:
        return [message for message in messages if not self.hide(self.find(message), seconds)]

    def hide(self, stored: Stored | None, seconds: float) -> bool:
        """Hide a leased message for longer; False when its lease has ended."""
        if stored is None or stored.visible_at <= self._now():
            return False
        stored.visible_at = self._now() + seconds
        return True

    async def release(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if (stored := self.find(message)) is not None:
                self.show(stored)

    def show(self, stored: Stored) -> None:
        stored.visible_at = self._now()

    def find(self, message: Message) -> Stored | None:
        """The stored message of the latest receipt."""
        return next((one for one in self.messages if one.receipt == message.receipt), None)

    async def depth(self) -> Depth:
        visible = len(self.visible())
        return Depth(visible, len(self.messages) - visible, 0)
