"""The program that runs as the embedded SQS: ministack in one process, its messages saved while they change.

`python -m penstock.local.sqs_server DESCRIPTOR`, of a listening socket that its parent holds. ministack's own launchers
either start a second process, which would outlive a killed first one, or listen on every address; and they save only
on a graceful stop.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Generator, MutableMapping
from contextlib import contextmanager
from typing import Any

import uvicorn

from penstock.local.sqs_guard import ACCESS_KEY_ID, GuardedApp

SAVE_PAUSE_SECONDS = 2.0
SAVE_SHARE = 0.05  # saving blocks the loop, so at most this share of the time goes into it
_LOOK_SECONDS = 0.25  # between two looks for messages that became visible by time
_QUIET = (b"ReceiveMessage", b"GetQueueUrl", b"GetQueueAttributes", b"ListQueues")


class WakingApp:
    """An SQS endpoint's ASGI app whose long polls end when a message comes, where ministack looks every 100 ms.

    A long poll is passed on as looks without a wait; between two of them it waits for a message to be sent. A message
    that becomes visible again by time is found by looking now and then.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._sent = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        target = _target(scope)
        if target.endswith(b"ReceiveMessage"):
            await self._receive(scope, receive, send)
            return
        await self._app(scope, receive, send)
        if target.endswith((b"SendMessage", b"SendMessageBatch", b"ChangeMessageVisibilityBatch")):
            self._sent.set()
            self._sent = asyncio.Event()  # those who wait hold the old one

    async def _receive(self, scope: Any, receive: Any, send: Any) -> None:
        body = await _read(receive)
        try:
            asked = json.loads(body)
            wait_seconds = float(asked.get("WaitTimeSeconds") or 0)
        except (ValueError, AttributeError, TypeError):
            wait_seconds = 0.0  # the app answers what is wrong with it
        if not 0 < wait_seconds <= 20:
            await self._app(scope, _replay(body, receive), send)
            return
        look = json.dumps(asked | {"WaitTimeSeconds": 0}).encode()
        headers = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
        look_scope = {**scope, "headers": [*headers, (b"content-length", str(len(look)).encode())]}
        deadline = time.monotonic() + wait_seconds
        gone = asyncio.ensure_future(receive())  # the next event is that the caller has left
        try:
            while True:
                sent = self._sent
                answer: list[MutableMapping[str, Any]] = []
                await self._app(look_scope, _replay(look, _never), _collect(answer))
                left = deadline - time.monotonic()
                if left <= 0 or b"".join(part.get("body", b"") for part in answer) != b"{}":
                    break
                await _first(sent.wait(), gone, seconds=min(left, _LOOK_SECONDS))
                if gone.done():
                    return  # with what it would have received left for others
        finally:
            gone.cancel()
        for part in answer:
            await send(part)


def _target(scope: Any) -> bytes:
    if scope["type"] != "http" or scope["method"] != "POST":
        return b""
    target: bytes = dict(scope["headers"]).get(b"x-amz-target", b"")
    return target


async def _read(receive: Any) -> bytes:
    parts = []
    while True:
        event = await receive()
        parts.append(event.get("body", b""))
        if not event.get("more_body"):
            return b"".join(parts)


def _replay(body: bytes, rest: Any) -> Any:
    events = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return events.pop() if events else await rest()

    return receive


async def _never() -> Any:
    await asyncio.Event().wait()


def _collect(answer: list[MutableMapping[str, Any]]) -> Any:
    async def send(part: MutableMapping[str, Any]) -> None:
        answer.append(part)

    return send


async def _first(wait: Any, other: asyncio.Future[Any], *, seconds: float) -> None:
    waiting = asyncio.ensure_future(wait)
    try:
        await asyncio.wait((waiting, other), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


class SavedApp:
    """ministack's ASGI app, noting whether a request may have changed messages since the last save."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.changed = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)
        if scope["type"] == "http" and scope["method"] == "POST" and not _target(scope).endswith(_QUIET):
            self.changed = True

    async def keep_saving(self) -> None:
        """Save when something has changed, rarely enough that saving stays a small share of the time."""
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


async def run(listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT; the app then saves everything in its own shutdown."""
    from ministack.app import app

    # At its end the app imports this service only to stop it, which costs a second; it takes a failed import lightly.
    sys.modules["ministack.services.transfer"] = None  # type: ignore[assignment]
    saved = SavedApp(WakingApp(app))
    server = _Server(
        uvicorn.Config(
            GuardedApp(saved, os.environ.pop(ACCESS_KEY_ID)),
            lifespan="on",
            log_level="warning",
            access_log=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=1,  # a long poll is not worth waiting for
        )
    )

    def stop(*_: object) -> None:
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    saving = asyncio.create_task(saved.keep_saving(), name="save")
    saving.add_done_callback(stop)  # saving that broke must not go unnoticed
    try:
        await server.serve(sockets=[listener])
    finally:
        if saving.done() and not saving.cancelled():
            saving.result()
        saving.cancel()


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """The signals are ours: a server asked to stop has done its work and leaves with 0."""
        yield


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    try:
        import uvloop
    except ImportError:
        asyncio.run(run(listener))
    else:
        uvloop.run(run(listener))


if __name__ == "__main__":
    main()
