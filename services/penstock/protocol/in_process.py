"""Where a test takes the place of the api, the database's enqueue function and the inbound queue."""

from collections.abc import Sequence
from typing import Any, Protocol


class Substitute(Protocol):
    """What answers instead. It may be called from any thread, and blocks."""

    def answer(self, body: str) -> Any:
        """The parsed answer of the api to a body of JSON-RPC requests."""

    def ask(self, verb: str, arguments: Sequence[Any]) -> Sequence[Any] | None:
        """Rows of `penstock_enqueue_many` or, with settle, `penstock_settle`; None to ask the caller's connection."""

    def send(self, bodies: Sequence[str]) -> None:
        """Take bodies of the inbound queue."""


substitute: Substitute | None = None
"""Set during a test, None everywhere else."""
