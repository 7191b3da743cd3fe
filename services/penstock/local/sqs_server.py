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
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import uvicorn
from starlette.responses import JSONResponse

from penstock.local.sqs import ACCESS_KEY_ID, HEALTH, REGION
from penstock.runtime.loop_thread import new_loop

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
    """ministack's ASGI app, whose long polls end when a message is sent, or their caller leaves."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._sent = asyncio.get_running_loop().create_future()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_call = scope["type"] == "http" and scope["method"] == "POST"
        target: bytes = dict(scope["headers"]).get(b"x-amz-target", b"") if is_call else b""
        if target.endswith(b"ReceiveMessage"):
            await self._receive(scope, receive, send)
            return
        await self._app(scope, receive, send)
        if target.endswith((b"SendMessage", b"SendMessageBatch", b"ChangeMessageVisibilityBatch")):
            self._sent.set_result(None)
            self._sent = asyncio.get_running_loop().create_future()  # those who wait hold the old one

    async def until_sent(self, seconds: float) -> None:
        """The pause of a long poll between two looks for messages, some of which become visible by time."""
        await asyncio.wait((self._sent,), timeout=seconds)

    async def _receive(self, scope: Any, receive: Any, send: Any) -> None:
        """A call whose caller leaves is cancelled: what it would have received is left for others."""
        is_read = asyncio.Event()

        async def receive_body() -> Any:
            event = await receive()
            if not event.get("more_body"):
                is_read.set()
            return event

        async def leave() -> None:
            await is_read.wait()
            await receive()

        answering, leaving = asyncio.create_task(self._app(scope, receive_body, send)), asyncio.create_task(leave())
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.wait((answering, leaving))
        if not answering.cancelled():
            answering.result()


def _read_json(text: str | bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return json.loads(text)  # half a surrogate pair, say, to which ministack has an answer of its own


async def run(listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT; the app then saves everything in its own shutdown."""
    import ministack.app as served
    from ministack.services import sqs as service

    from penstock.local.sqs_journal import Journal

    # Asked about each request to a host with a dot; the real one loads a dozen services, and libraries for them.
    gateway: Any = ModuleType("ministack.services.apigateway_v1")
    gateway.resolve_base_path_mapping = lambda host, path: None
    gateway.get_state = lambda: None
    sys.modules[gateway.__name__] = gateway
    # At its end the app imports this service only to stop it, which costs a second; it takes a failed import lightly.
    sys.modules["ministack.services.transfer"] = None  # type: ignore[assignment]
    served.extract_region = lambda *_: REGION  # calls are signed for the one of the user's S3 and RDS
    sqs = SqsApp(served.app)
    # ministack looks for messages every 100 ms.
    service.asyncio = SimpleNamespace(iscoroutine=asyncio.iscoroutine, sleep=sqs.until_sent)
    # A call has up to 1 MiB of JSON, in which the standard library and a search spend a third of its time.
    forbidden = service._INVALID_SQS_CHARS_RE
    service._INVALID_SQS_CHARS_RE = SimpleNamespace(
        search=lambda text: None if text.isprintable() else forbidden.search(text)
    )
    service.json = SimpleNamespace(
        loads=_read_json, dumps=lambda value: msgspec.json.encode(value).decode(), JSONDecodeError=json.JSONDecodeError
    )
    Journal().attach()
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
    await server.serve(sockets=[listener])


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run(listener))


if __name__ == "__main__":
    main()
