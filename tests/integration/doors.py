"""What tests of the processes put into queues and read back, and ways to take a dependency away for a while."""

from __future__ import annotations

import http.client
import json
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from penstock.brokers.base import Message, Outgoing, Queue
from penstock.db.pool import Store
from penstock.local.postgres import EmbeddedPostgres
from penstock.runtime import metrics
from tests.conftest import SQS_ACCESS_KEY_ID


def no_routes(name: str, label: str) -> Queue:
    """For schedulers that are not to open any queue."""
    raise AssertionError(f"queue {name!r} of {label} was asked for")


def request(method: str, params: Any, **more: Any) -> str:
    """A JSON-RPC request as text."""
    return json.dumps({"jsonrpc": "2.0", "method": method, "params": params, **more})


async def put(queue: Queue, *bodies: str) -> None:
    """Send bodies, all of which the queue must take."""
    report = await queue.send([Outgoing(body) for body in bodies])
    assert report.failed == [], report.reason


async def take(queue: Queue, *, visibility_seconds: int = 30) -> list[Message]:
    """Receive until the queue has nothing more to give."""
    messages: list[Message] = []
    while more := await queue.receive(wait_seconds=0, visibility_seconds=visibility_seconds):
        messages += more
    return messages


async def rejected(store: Store) -> list[tuple[str, str, str]]:
    """What is kept as rejected, oldest first: (source, body, reason)."""
    async with store.session() as session:
        rows = await session.fetch("list_rejected_page", None, 1000, None, 10**9)
    return [(row["source"], row["body"].decode("utf-8", "surrogatepass"), row["reason"]) for row in reversed(rows)]


def sample(name: str, **labels: str) -> float:
    """A metric's value now, 0 where it has none yet."""
    return metrics.REGISTRY.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def postgres_away(postgres: EmbeddedPostgres, database_url: str) -> AsyncIterator[None]:
    """Inside the block no program is connected to the database, and none can connect."""
    name = urlsplit(database_url).path.removeprefix("/")
    postgres.execute(f'alter database "{name}" allow_connections false')
    postgres.execute(f"select pg_terminate_backend(pid, 10000) from pg_stat_activity where datname = '{name}'")
    try:
        yield
    finally:
        postgres.execute(f'alter database "{name}" allow_connections true')


Forward = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]
Hook = Callable[[str, dict[str, Any], Forward], tuple[int, dict[str, Any]]]


class Cut(Exception):
    """Raised by a hook: the caller's connection is reset without a reply."""


@dataclass
class SqsProxy:
    """Stands before the real endpoint: notes every call and lets ``hook`` answer in its place.

    keys: the access keys that are good, None for any; others are answered as expired.
    """

    url: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    hook: Hook | None = None
    keys: set[str] | None = None

    def entries(self, operation: str) -> list[list[dict[str, Any]]]:
        """The entries of each batch call of that operation."""
        return [request["Entries"] for name, request in self.calls if name == operation]


@contextmanager
def sqs_proxy(endpoint_url: str) -> Iterator[SqsProxy]:
    """Run a proxy before the endpoint."""
    proxy = SqsProxy()
    target = urlsplit(endpoint_url).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            operation = self.headers["X-Amz-Target"].rpartition(".")[2]

            def forward(request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
                headers = {k: v for k, v in self.headers.items() if k.lower() != "content-length"}
                if proxy.keys is not None:  # any of them is good here, one at the endpoint
                    headers["Authorization"] = headers["Authorization"].replace(key, SQS_ACCESS_KEY_ID, 1)
                connection = http.client.HTTPConnection(target, timeout=30)
                try:
                    connection.request("POST", self.path, json.dumps(request), headers)
                    reply = connection.getresponse()
                    return reply.status, json.loads(reply.read() or b"{}")
                finally:
                    connection.close()

            proxy.calls.append((operation, body))
            key = self.headers["Authorization"].partition("Credential=")[2].partition("/")[0]
            try:
                if proxy.keys is not None and key not in proxy.keys:
                    status, reply = 403, {"__type": "ExpiredToken", "message": "The security token is expired"}
                else:
                    status, reply = proxy.hook(operation, body, forward) if proxy.hook else forward(body)
            except Cut:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
                self.connection.close()
                return
            text = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/x-amz-json-1.0")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="sqs-proxy", daemon=True)
    thread.start()
    proxy.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
