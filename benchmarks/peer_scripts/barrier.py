"""What the peers' scripts share: where they get their options, the common start, the time of the first handler."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

DATABASE_URL = os.environ["PEER_DATABASE_URL"]
SQS_URL = os.environ["PEER_SQS_URL"]
FOLDER = Path(os.environ["PEER_FOLDER"])
FILL_BATCH = 500

_begun = False


def note_start() -> None:
    """Called by every handler; only a process's first call does something."""
    global _begun
    if not _begun:
        _begun = True
        (FOLDER / f"first.{os.getpid()}").write_text(str(time.time_ns()))


async def wait_for_go() -> None:
    """Everything is imported and connected: say so, and wait for the others."""
    (FOLDER / f"ready.{os.getpid()}").touch()
    while not (FOLDER / "go").exists():  # noqa: ASYNC110 (another process makes it)
        await asyncio.sleep(0.002)


def stop_event() -> asyncio.Event:
    """Set by SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    return stop
