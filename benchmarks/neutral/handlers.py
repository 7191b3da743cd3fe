"""The handler of the adapter: synthetic work, and two times for the adapter's percentiles."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time

from penstock import Context, action

# What a handler reports to the adapter: seconds from the enqueue call to its start, and to its end.
TIMES = struct.Struct("<dd")

_WORK_SECONDS = float(os.environ.get("JOB_WORK_MS", "1")) / 1000
_reporting = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
_reporting.setblocking(False)
_pending = bytearray()


@action("bench")
async def bench(ctx: Context, at: float, padding: str) -> None:
    started = time.time()
    if _WORK_SECONDS:
        await asyncio.sleep(_WORK_SECONDS)
    if not _pending:
        asyncio.get_running_loop().call_later(0.05, _report)
    _pending.extend(TIMES.pack(started - at, time.time() - at))


def _report() -> None:
    """Send what has gathered, in datagrams of 4,000 times. What the adapter cannot take is dropped."""
    times = bytes(_pending)
    _pending.clear()
    size = TIMES.size * 4000
    for start in range(0, len(times), size):
        try:
            _reporting.sendto(times[start : start + size], os.environ["PENSTOCK_BENCH_SOCKET"])
        except (BlockingIOError, FileNotFoundError, ConnectionRefusedError):
            return
