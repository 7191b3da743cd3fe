"""Memory of the requests being served: bytes of bodies and answers, counted for each and for the whole process."""

from contextvars import ContextVar
from typing import Any

from penstock.protocol.errors import InvalidParams, Overloaded

ANSWER_BYTES = 8 * 1024 * 1024  # of one body's results, payloads and errors; the last one may go beyond
IDS_LIMIT = 10_000  # of tasks in one body
_FREE_BYTES = 16 * 1024  # of each request are not counted: a process that is full still answers small ones


class Budget:
    """Bytes that all requests of one process may hold at once."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.held_bytes = 0

    def take(self, size: int) -> None:
        """Raises Overloaded."""
        if size > 0 and self.held_bytes + size > self._limit_bytes:
            raise Overloaded
        self.held_bytes += size

    def counting(self, app: Any) -> Any:
        """The ASGI application, with a load for each request, whose memory is released when its answer is sent."""

        async def counted(scope: Any, receive: Any, send: Any) -> None:
            load = Load(self)
            token = _load.set(load)
            try:
                await app(scope, receive, send)
            finally:
                _load.reset(token)
                load.release()

        return counted


class Load:
    """The memory of one request. caller: whose rate counts. age_seconds: of the oldest data read; None: no replica."""

    __slots__ = ("_budget", "_counted", "age_seconds", "answered", "caller", "held", "ids")

    def __init__(self, budget: Budget | None = None) -> None:
        self._budget = budget
        self.held = self.answered = self.ids = self._counted = 0
        self.caller: str | None = None
        self.age_seconds: float | None = None

    def aged(self, seconds: float) -> None:
        """Note the age of data for the answer."""
        self.age_seconds = max(seconds, self.age_seconds or 0.0)

    def hold(self, size: int) -> None:
        """Count bytes until the request has ended. Raises Overloaded when the process has no room."""
        counted = max(0, self.held + size - _FREE_BYTES)
        if self._budget is not None:
            self._budget.take(counted - self._counted)
        self.held += size
        self._counted = counted

    def release(self) -> None:
        """The request has ended: what is held from now on is not counted."""
        self.hold(-self.held)
        self._budget = None

    def answer(self, size: int) -> bool:
        """Count bytes of the answer; False, without counting them, once it is full. Raises Overloaded."""
        if self.answered >= ANSWER_BYTES:
            return False
        self.hold(size)
        self.answered += size
        return True

    @property
    def room_bytes(self) -> int:
        return max(0, ANSWER_BYTES - self.answered)

    def renew(self) -> None:
        """Begin another answer of a stream: the one before is sent."""
        self.hold(-self.held)
        self.answered = self.ids = 0

    def ask(self, ids: int) -> None:
        """Count tasks that the body asks for. Raises InvalidParams."""
        self.ids += ids
        if self.ids > IDS_LIMIT:
            raise InvalidParams("ids", f"of one body are more than {IDS_LIMIT}; send several")


_load: ContextVar[Load | None] = ContextVar("load", default=None)


def in_hand() -> Load:
    """The load of the current request; outside of one, a new one without a budget."""
    return _load.get() or Load()
