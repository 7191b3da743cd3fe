"""Who may call the embedded SQS: programs that know its access key id, and no page in a browser on this machine."""

from __future__ import annotations

import hmac
import json
import re
from typing import Any

ACCESS_KEY_ID = "PENSTOCK_EMBEDDED_SQS_ACCESS_KEY_ID"  # environment variable of the child
HEALTH = "/_ministack/health"
# Browsers send at least one of these with what a page asks for; no SDK sends any.
_OF_BROWSERS = (b"origin", b"referer", b"sec-fetch-site")
_LOOPBACK = re.compile(rb"(?:localhost|127(?:\.\d{1,3}){3}|\[::1\])(?::\d{1,5})?", re.IGNORECASE)
_CREDENTIAL = re.compile(rb"AWS4-HMAC-SHA256 Credential=([^/,\s]+)/")


def authorization(access_key_id: str) -> str:
    """An Authorization header that the guard takes; the signature itself is not checked."""
    return f"AWS4-HMAC-SHA256 Credential={access_key_id}/"


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
            await _refuse(send, *refusal)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Any) -> tuple[str, str] | None:
        """Error code and message; None for a request that may pass."""
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


async def _refuse(send: Any, code: str, message: str) -> None:
    body = json.dumps({"__type": f"com.amazonaws.sqs#{code}", "message": message}).encode()
    headers = [(b"content-type", b"application/x-amz-json-1.0"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": body})
