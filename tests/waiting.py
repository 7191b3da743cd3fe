"""Waiting for something that another process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def wait_until(condition: Callable[[], Found], what: str, *, seconds: float = 60) -> Found:
    """What ``condition()`` returns, as soon as that is true; fails the test when it stays false."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.02)
    return found
