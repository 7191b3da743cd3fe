"""The simulated clock. Import it before any module of Penstock: they take their clock functions by name.

All clocks, and every source of chance, follows the seed from :func:`install` on.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import queue
import random
import secrets
import socket
import threading
import time
from datetime import UTC, datetime, timedelta

import asyncpg

BEGINNING = datetime(2030, 1, 1, 8, tzinfo=UTC)
_LOADED_WITH_THE_REAL_CLOCK = (asyncio, asyncpg, concurrent.futures, queue, threading)

real_monotonic = time.monotonic
real_urandom = os.urandom


class Clock:
    """Seconds since the beginning of the run."""

    now = 0.0


def install() -> None:
    """Replace the clock functions of this process."""
    epoch = BEGINNING.timestamp()
    time.monotonic = lambda: 1000.0 + Clock.now
    time.perf_counter = lambda: 1000.0 + Clock.now
    time.time = lambda: epoch + Clock.now
    time.time_ns = lambda: round((epoch + Clock.now) * 1e9)
    socket.gethostname = lambda: "simulated"
    os.getpid = lambda: 1


def follow(seed: str) -> None:
    """Begin again, with chance from the seed."""
    Clock.now = 0.0
    random.seed(seed)
    chance = random.Random(f"{seed}: secrets")
    os.urandom = chance.randbytes
    secrets.token_bytes = lambda size=32: chance.randbytes(size)
    secrets.token_hex = lambda size=32: chance.randbytes(size).hex()


def wall() -> datetime:
    """The simulated time, as Postgres is to see it."""
    return BEGINNING + timedelta(seconds=Clock.now)
