"""The embedded SQS, `python -m penstock.local.sqs_server DESCRIPTOR`, of a listening socket that its parent holds.

ministack's own launchers start a second process, which would outlive a killed first one, or listen on every address;
and they save messages only on a graceful stop.
"""

import asyncio
import hmac
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import MutableMapping
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from penstock.local.sqs import ACCESS_KEY_ID, HEALTH

SAVE_PAUSE_SECONDS = 2.0
SAVE_SHARE = 0.05  # saving blocks the loop, so at most this share of the time goes into it
_LOOK_SECONDS = 0.25  # between two looks for messages that became visible by time
_QUIET = (b"ReceiveMessage", b"GetQueueUrl", b"GetQueueAttributes", b"ListQueues")
# Browsers send at least one of these with what a page asks for; no SDK sends any.
_OF_BROWSERS = (b"origin", b"referer", b"sec-fetch-site")
_LOOPBACK = re.compile(rb"(?:localhost|127(?:\.\d{1,3}){3}|\[::1\])(?::\d{1,5})?", re.IGNORECASE)
_CREDENTIAL = re.compile(rb"AWS4-HMAC-SHA256 Credential=([^/,\s]+)/")


class GuardedApp:
    """An ASGI app that answers 403 to requests of web pages, of other hosts' names, or without the access key id.

    Of ministack's own paths, which read and reset everything, only the health check is let through.
    """

    def __init__(self, app: Any, access_key_id: str) -> None:
        self._app = app
        self._access_key_id = access_key_id.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":  # a WebSocket, which SQS has not
            await send({"type": "websocket.close", "code": 1008})
        elif (refusal := self._refusal(scope)) is not None:
            code, message = refusal
            answer = {"__type": f"com.amazonaws.sqs#{code}", "message": message}
            await JSONResponse(answer, 403, media_type="application/x-amz-json-1.0")(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Any) -> tuple[str, str] | None:
        headers = dict(scope["headers"])
        if any(name in headers for name in _OF_BROWSERS):
            return "AccessDeniedException", "the embedded SQS does not serve web pages"
        if not _LOOPBACK.fullmatch(headers.get(b"host", b"")):
            return "AccessDeniedException", "the embedded SQS is served under loopback names only"
        found = _CREDENTIAL.match(headers.get(b"authorization", b""))
        if found is None or not hmac.compare_digest(found[1], self._access_key_id):
            return (
                "InvalidClientTokenId",
                "the embedded SQS takes the access key of its own start only: `penstock env` prints it",
            )
        if scope["path"].startswith("/_") and scope["path"] != HEALTH:
            return "AccessDeniedException", f"of the emulator's own paths only {HEALTH} is served"
        return None


class SqsApp:
    """ministack's ASGI app, whose long polls end when a message is sent; ministack itself looks every 100 ms.

    A long poll is passed on as looks without a wait, now and then also for messages that become visible by time.
    changed: a request may have changed messages since the last save.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._sent = asyncio.get_running_loop().create_future()
        self.changed = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_call = scope["type"] == "http" and scope["method"] == "POST"
        target: bytes = dict(scope["headers"]).get(b"x-amz-target", b"") if is_call else b""
        if target.endswith(b"ReceiveMessage"):
            await self._receive(scope, receive, send)
            return
        await self._app(scope, receive, send)
        self.changed |= is_call and not target.endswith(_QUIET)
        if target.endswith((b"SendMessage", b"SendMessageBatch", b"ChangeMessageVisibilityBatch")):
            self._sent.set_result(None)
            self._sent = asyncio.get_running_loop().create_future()  # those who wait hold the old one

    async def _receive(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            return
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
        answer: list[MutableMapping[str, Any]] = []

        async def collect(part: MutableMapping[str, Any]) -> None:
            answer.append(part)

        try:
            while True:
                sent = self._sent
                answer.clear()
                await self._app(look_scope, _replay(look, asyncio.Event().wait), collect)
                left = deadline - time.monotonic()
                if left <= 0 or b"".join(part.get("body", b"") for part in answer) != b"{}":
                    break
                wait_seconds = min(left, _LOOK_SECONDS)
                await asyncio.wait((sent, gone), timeout=wait_seconds, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    return  # with what it would have received left for others
        finally:
            gone.cancel()
        for part in answer:
            await send(part)

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


def _replay(body: bytes, rest: Any) -> Any:
    events = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return events.pop() if events else await rest()

    return receive


async def run(listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT; the app then saves everything in its own shutdown."""
    from ministack.app import app

    # Asked about each request to a host with a dot; the real one loads a dozen services, and libraries for them.
    gateway: Any = ModuleType("ministack.services.apigateway_v1")
    gateway.resolve_base_path_mapping = lambda host, path: None
    gateway.get_state = lambda: None
    sys.modules[gateway.__name__] = gateway
    # At its end the app imports this service only to stop it, which costs a second; it takes a failed import lightly.
    sys.modules["ministack.services.transfer"] = None  # type: ignore[assignment]
    sqs = SqsApp(app)
    server = uvicorn.Server(
        uvicorn.Config(
            GuardedApp(sqs, os.environ.pop(ACCESS_KEY_ID)),
            lifespan="on",
            log_level="warning",
            access_log=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=1,  # a long poll is not worth waiting for
        )
    )

    # The signals are ours: a server asked to stop has done its work and leaves with 0.
    server.capture_signals = nullcontext  # type: ignore[method-assign,assignment]

    def stop(*_: object) -> None:
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    saving = asyncio.create_task(sqs.keep_saving(), name="save")
    saving.add_done_callback(stop)  # saving that broke must not go unnoticed
    try:
        await server.serve(sockets=[listener])
    finally:
        if saving.done() and not saving.cancelled():
            saving.result()
        saving.cancel()


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
