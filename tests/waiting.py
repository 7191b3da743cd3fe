"""Waiting for something that another process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], what: str, *, seconds: float = 60) -> None:
    """Return as soon as ``condition()`` is true; fails the test when it stays false."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.02)
