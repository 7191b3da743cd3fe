"""Where a test takes the place of the api, the database's enqueue function and the inbound queue."""

from collections.abc import Sequence
from typing import Any, Protocol


class Substitute(Protocol):
    """What answers instead. It may be called from any thread, and blocks."""

    def answer(self, body: str) -> Any:
        """The parsed answer of the api to a body of JSON-RPC requests."""

    def enqueue(self, entries: str) -> list[tuple[int, str, bool, bool | None]] | None:
        """Rows of `penstock_enqueue_many` for its argument; None to ask the caller's connection as usual."""

    def settle(self, claim_id: str, result: str) -> bool | None:
        """The answer of `penstock_settle`; None to ask the caller's connection as usual."""

    def send(self, bodies: Sequence[str]) -> None:
        """Take bodies of the inbound queue."""


substitute: Substitute | None = None
"""Set during a test, None everywhere else."""
