"""Waiting: what a handler returns whose task is to be settled by an outside event."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

OnTimeout = Literal["retry", "fail"]


@dataclass(frozen=True, slots=True)
class Wait:
    """Made by ``ctx.wait(...)`` and returned by the handler: the task waits for ``token``, and runs no more.

    timeout: seconds, None for PENSTOCK_WAIT_TIMEOUT_SECONDS. on_timeout: "retry", a failed attempt; "fail", the last.
    attempt: the task and the claim that it was made for.
    """

    token: str
    timeout: float | None = None
    on_timeout: OnTimeout = "retry"
    attempt: tuple[int, int] = field(default=(0, 0), repr=False)
