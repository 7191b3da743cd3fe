"""The program that runs as the embedded SQS: ministack in one process, its messages saved while they change.

`python -m penstock.local.sqs_server HOST PORT`. ministack's own launchers either start a second process, which would
outlive a killed first one, or listen on every address; and they save only on a graceful stop.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from typing import Any

from hypercorn.asyncio import serve
from hypercorn.config import Config

SAVE_PAUSE_SECONDS = 2.0
SAVE_SHARE = 0.05  # saving blocks the loop, so at the most this share of the time goes into it
_QUIET = (b"ReceiveMessage", b"GetQueueUrl", b"GetQueueAttributes", b"ListQueues")


class SavedApp:
    """ministack's ASGI app, noting whether a request may have changed messages since the last save."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.changed = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)
        if scope["type"] == "http" and scope["method"] == "POST":
            target = dict(scope["headers"]).get(b"x-amz-target", b"")
            if not target.endswith(_QUIET):
                self.changed = True

    async def keep_saving(self) -> None:
        """Save when something has changed, seldom enough that saving stays a small share of the time."""
        from ministack.core.persistence import save_state
        from ministack.services import sqs

        pause = SAVE_PAUSE_SECONDS
        while True:
            await asyncio.sleep(pause)
            if self.changed:
                self.changed = False
                began = time.perf_counter()
                try:
                    save_state("sqs", sqs.get_state())
                except RuntimeError:  # changed by one of ministack's threads in the middle of the copy
                    self.changed = True
                pause = max(SAVE_PAUSE_SECONDS, (time.perf_counter() - began) / SAVE_SHARE)


async def run(host: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT; the app then saves everything in its own shutdown."""
    from ministack.app import app

    # At its end the app imports this service only to stop it, which costs a second; it takes a failed import lightly.
    sys.modules["ministack.services.transfer"] = None  # type: ignore[assignment]
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    config = Config()
    config.bind = [f"{host}:{port}"]
    config.keep_alive_timeout = 75
    config.graceful_timeout = 1  # a long poll is not worth waiting for
    config.loglevel = "WARNING"
    config.errorlog = "-"
    saved = SavedApp(app)
    saving = asyncio.create_task(saved.keep_saving(), name="save")
    saving.add_done_callback(lambda task: stop.set())  # saving that broke must not go unnoticed
    try:
        await serve(saved, config, shutdown_trigger=stop.wait)
    finally:
        if saving.done() and not saving.cancelled():
            saving.result()
        saving.cancel()


def main() -> None:
    host, port = sys.argv[1], int(sys.argv[2])
    try:
        import uvloop
    except ImportError:
        asyncio.run(run(host, port))
    else:
        uvloop.run(run(host, port))


if __name__ == "__main__":
    main()
