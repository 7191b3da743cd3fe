"""The calls to SQS that every task makes, signed and sent without the layers of the SDK, at a fifth of their CPU.

Endpoint, region, credentials, authorities and errors are the SDK's, which makes all other calls (decisions/040).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import random
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qs, quote, urlsplit

import msgspec
from botocore import exceptions
from botocore.credentials import ReadOnlyCredentials
from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies, normalize_url_path

from penstock.protocol.version import __version__
from penstock.runtime.loop_thread import look_up

if TYPE_CHECKING or find_spec("httptools"):  # which there is no build of for every Python
    import httptools

OPERATIONS = {
    "change_message_visibility_batch": "ChangeMessageVisibilityBatch",
    "delete_message_batch": "DeleteMessageBatch",
    "receive_message": "ReceiveMessage",
    "send_message_batch": "SendMessageBatch",
}
USER_AGENT = f"penstock/{__version__}"
CONNECT_SECONDS = 5
_CONTENT_TYPE = "application/x-amz-json-1.0"
_CONNECTIONS = 64
_IDLE_SECONDS = 12.0  # after which a connection is not used again: AWS may be closing it
_TRIES = 2
_LONGEST_PAUSE_SECONDS = 1.0  # before the second, as the SDK's
_PASSING = {
    "BandwidthLimitExceeded", "EC2ThrottledException", "LimitExceededException", "PriorRequestNotComplete",
    "ProvisionedThroughputExceededException", "RequestLimitExceeded", "RequestThrottled", "RequestThrottledException",
    "RequestTimeout", "RequestTimeoutException", "SlowDown", "ThrottledException", "Throttling", "ThrottlingException",
    "TooManyRequestsException", "TransactionInProgressException",
}  # fmt: skip


async def open_direct(session: Any, client: Any, answer_seconds: float) -> DirectCalls | None:
    """Calls as the client makes them; None behind a proxy, and without httptools. Raises botocore's errors."""
    # What a client presigns shows the endpoint and the signing region that its rules come to.
    signed = urlsplit(await client.generate_presigned_url("list_queues"))
    endpoint_url = f"{signed.scheme}://{signed.netloc}{signed.path or '/'}"
    if get_environ_proxies(endpoint_url) or not find_spec("httptools"):
        return None
    _, _, region, service, _ = parse_qs(signed.query)["X-Amz-Credential"][0].rsplit("/", 4)

    async def find_credentials() -> ReadOnlyCredentials:
        found = await session.get_credentials()
        if found is None:
            raise exceptions.NoCredentialsError
        return cast(ReadOnlyCredentials, await found.get_frozen_credentials())

    context = None
    if signed.scheme == "https":
        authorities = session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE")
        context = ssl.create_default_context(cafile=authorities or get_cert_path(True))
    connections = Connections(endpoint_url, context, answer_seconds)
    return DirectCalls(connections, Signer(endpoint_url, region, service), find_credentials)


@dataclass(frozen=True, slots=True)
class DirectCalls:
    """See :func:`open_direct`. A failed call is tried once more if another may succeed, as by the SDK."""

    connections: Connections
    signer: Signer
    credentials: Callable[[], Awaitable[ReadOnlyCredentials]]

    async def call(self, operation: str, **arguments: Any) -> Mapping[str, Any]:
        """Make one of OPERATIONS; returns the members of its answer. Raises botocore's errors."""
        target = OPERATIONS[operation]
        try:
            body = msgspec.json.encode(arguments)
        except UnicodeEncodeError:  # half of a surrogate pair: SQS is to refuse it, and no other message
            body = json.dumps(arguments).encode()
        for tries in range(1, _TRIES + 1):
            headers = self.signer.sign(target, body, await self.credentials(), time.time())
            try:
                status, answered, answer = await self.connections.exchange(headers, body)
            except (exceptions.HTTPClientError, exceptions.ConnectionError) as exc:
                if tries == _TRIES:
                    raise
                if isinstance(exc, _Dropped):
                    continue
            else:
                said = _read_json(answer)
                if status < 300 and said is not None:
                    return said
                if status < 300:
                    raise exceptions.HTTPClientError(error=f"the answer is not of SQS: {answer[:200]!r}")
                error = _error_of(status, answered, said or {}, target)
                is_passing = status in (500, 502, 503, 504) or error.response["Error"]["Code"] in _PASSING
                if tries == _TRIES or not is_passing:
                    raise error
            await asyncio.sleep(random.uniform(0, _LONGEST_PAUSE_SECONDS))
        raise AssertionError("the last try returns or raises")


def _read_json(body: bytes) -> dict[str, Any] | None:
    """The members of an object; None for what is no object."""
    for decode in (msgspec.json.decode, json.loads):  # which takes half a surrogate pair
        with suppress(ValueError):
            read = decode(body or b"{}")
            return read if isinstance(read, dict) else None
    return None


def _error_of(status: int, headers: Mapping[str, str], said: Mapping[str, Any], target: str) -> exceptions.ClientError:
    """The error as the SDK words it."""
    given = headers.get("x-amzn-query-error", "").partition(";")[0] or said.get("__type") or said.get("code")
    code = str(given or status).rpartition("#")[2].partition(":")[0]
    return exceptions.ClientError(
        {
            "Error": {"Code": code, "Message": str(said.get("message") or said.get("Message") or "")},
            "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": dict(headers)},
        },
        target,
    )


# Signature Version 4


class Signer:
    """Signs requests to one endpoint; as botocore's SigV4Auth, with the key of a day computed once."""

    def __init__(self, endpoint_url: str, region: str, service: str) -> None:
        parts = urlsplit(endpoint_url)
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
        has_own_port = parts.port not in (None, {"http": 80, "https": 443}[parts.scheme])
        self.host = f"{host}:{parts.port}" if has_own_port else host
        self._path = quote(normalize_url_path(parts.path), safe="/~")
        self._region, self._service = region, service
        self._begun = lru_cache(maxsize=len(OPERATIONS))(self._begin)
        self._prefix = (
            f"POST {parts.path or '/'} HTTP/1.1\r\nHost: {self.host}\r\nUser-Agent: {USER_AGENT}\r\n"
            f"Content-Type: {_CONTENT_TYPE}\r\n"
        )

    def sign(self, target: str, body: bytes, credentials: ReadOnlyCredentials, now: float) -> str:
        """The head of the request, without Content-Length and the empty line."""
        canonical, text, key, head = self._begun(target, credentials, int(now))
        canonical += hashlib.sha256(body).hexdigest()
        text += hashlib.sha256(canonical.encode()).hexdigest()
        return f"{head}{hmac.digest(key, text.encode(), 'sha256').hex()}\r\n"

    def _begin(self, target: str, credentials: ReadOnlyCredentials, now: int) -> tuple[str, str, bytes, str]:
        """What requests of one operation share for a second: the canonical request, the text to sign, its key, and the
        head, all so far as they do not depend on the body."""
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
        day, token = stamp[:8], credentials.token
        signed = [("content-type", _CONTENT_TYPE), ("host", self.host), ("x-amz-date", stamp)]
        if token:
            signed.append(("x-amz-security-token", token))
        signed += [("x-amz-target", f"AmazonSQS.{target}"), ("x-amzn-query-mode", "true")]
        names = ";".join(name for name, _ in signed)
        lines = "".join(f"{name}:{value}\n" for name, value in signed)
        scope = f"{day}/{self._region}/{self._service}/aws4_request"
        more = "".join(f"{name}: {value}\r\n" for name, value in signed[2:])
        return (
            f"POST\n{self._path}\n\n{lines}\n{names}\n",
            f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n",
            _key_of(credentials.secret_key, day, self._region, self._service),
            f"{self._prefix}{more}Authorization: AWS4-HMAC-SHA256 Credential={credentials.access_key}/{scope}, "
            f"SignedHeaders={names}, Signature=",
        )


@lru_cache(maxsize=8)
def _key_of(secret: str, *scope: str) -> bytes:
    key = f"AWS4{secret}".encode()
    for part in (*scope, "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


# HTTP/1.1


Answer = tuple[int, Mapping[str, str], bytes]  # status, headers by their names in lower case, body


class _Dropped(exceptions.ConnectionClosedError):  # type: ignore[misc]
    """A connection that was used before is closed, without an answer: it may have been closed while it was idle."""


@dataclass(frozen=True, slots=True)
class Connections:
    """Connections to one endpoint, used one request at a time and kept for the next."""

    url: str
    context: ssl.SSLContext | None
    answer_seconds: float
    connect_seconds: float = CONNECT_SECONDS
    _room: asyncio.Semaphore = field(init=False, default_factory=lambda: asyncio.Semaphore(_CONNECTIONS))
    _idle: list[_Connection] = field(init=False, default_factory=list)

    async def exchange(self, head: str, body: bytes) -> Answer:
        """Send a request; ``head`` lacks Content-Length. Raises HTTPClientError, ConnectionError."""
        async with self._room:
            connection = self._take() or await self._connect()
            try:
                request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
                answer = await connection.exchange(request, self.answer_seconds)
            except TimeoutError as exc:
                raise exceptions.ReadTimeoutError(endpoint_url=self.url, error=exc) from exc
            except OSError as exc:
                if connection.is_used and not connection.has_begun:
                    self.close()  # the others may have been closed as well
                    raise _Dropped(endpoint_url=self.url, error=exc) from exc
                raise exceptions.ConnectionClosedError(endpoint_url=self.url, error=exc) from exc
            except ValueError as exc:
                raise exceptions.HTTPClientError(error=f"the answer is not HTTP: {exc}") from exc
            finally:
                connection.release(self._idle)
        return answer

    def _take(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_fresh:
                return connection
            connection.close()
        return None

    async def _connect(self) -> _Connection:
        parts = urlsplit(self.url)
        host, port = parts.hostname or "", parts.port or (443 if self.context else 80)
        tls_name = host if self.context else None
        failure = OSError(f"{host} has no address")
        try:
            async with asyncio.timeout(self.connect_seconds):
                for *_, where in await look_up(host, port, type=socket.SOCK_STREAM):
                    try:
                        _, connection = await asyncio.get_running_loop().create_connection(
                            _Connection, where[0], port, ssl=self.context, server_hostname=tls_name
                        )
                        return connection
                    except OSError as exc:
                        failure = exc
                raise failure
        except TimeoutError as exc:
            raise exceptions.ConnectTimeoutError(endpoint_url=self.url, error=exc) from exc
        except ssl.SSLError as exc:
            raise exceptions.SSLError(endpoint_url=self.url, error=exc) from exc
        except OSError as exc:
            raise exceptions.EndpointConnectionError(endpoint_url=self.url, error=exc) from exc

    def close(self) -> None:
        """Close what is idle."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()


class _Connection(asyncio.Protocol):
    """is_used: it has answered before. has_begun: a part of the answer has come. httptools calls ``on_*``."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Answer] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._body = bytearray()
        self._has_head = False
        self._is_kept = False
        self._idle_since = 0.0
        self.is_used = False
        self.has_begun = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    @property
    def is_fresh(self) -> bool:
        return self._transport is not None and time.monotonic() - self._idle_since < _IDLE_SECONDS

    async def exchange(self, request: bytes, seconds: float) -> Answer:
        """Raises OSError when the connection is closed, ValueError for what is not HTTP, TimeoutError."""
        if self._transport is None:
            raise ConnectionResetError("the connection is closed")
        self.has_begun = self._has_head = self._is_kept = False
        loop = asyncio.get_running_loop()
        self._answer = loop.create_future()
        alarm = loop.call_later(seconds, self._end, TimeoutError())  # asyncio.timeout takes 8 us more
        self._transport.write(request)
        try:
            return await self._answer
        finally:
            alarm.cancel()

    def _end(self, failure: Exception | None = None) -> None:
        """Give the answer, or why there is none, to an exchange that still waits."""
        if self._answer is None or self._answer.done():
            return
        if failure is None:
            self._answer.set_result((self._parser.get_status_code(), self._headers, bytes(self._body)))
        else:
            self._answer.set_exception(failure)

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.close()  # nothing was asked
            return
        self.has_begun = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._is_kept = False
            self._end(ValueError(repr(data[:100])))  # unless it is behind the answer

    def on_message_begin(self) -> None:
        """Of an answer, or of an interim one, which another one follows."""
        self._headers = {}
        self._body.clear()
        self._is_kept = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._has_head = self._parser.get_status_code() >= 200

    def on_body(self, part: bytes) -> None:
        self._body += part

    def on_message_complete(self) -> None:
        if self._has_head and self._answer is not None and not self._answer.done():
            self._is_kept = self._parser.should_keep_alive()
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._has_head and exc is None and not self._headers.keys() & {"content-length", "transfer-encoding"}:
            self._end()  # its end is the body's
        else:
            self._end(exc if isinstance(exc, OSError) else ConnectionResetError("closed by the endpoint"))

    def release(self, idle: list[_Connection]) -> None:
        """After an exchange: keep the connection if it can be used again."""
        if self._is_kept and self._transport is not None:
            self.is_used = True
            self._idle_since = time.monotonic()
            idle.append(self)
        else:
            self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
