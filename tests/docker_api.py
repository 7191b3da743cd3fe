"""As much of the API of Docker as `docker build` and `docker run --detach` ask of it; it records each request."""

from __future__ import annotations

import io
import json
import socketserver
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

_VERSION = "1.44"


class Daemon:
    """images: what each was built from, by its tag. containers: what they were made with; those that were started."""

    def __init__(self) -> None:
        self.images: dict[str, list[str]] = {}
        self.containers: list[dict[str, Any]] = []
        self.started: list[int] = []

    def post(self, path: str, query: dict[str, list[str]], body: bytes) -> tuple[int, dict[str, Any]]:
        parts = path.strip("/").split("/")[1:]  # without the version
        match parts:
            case ["build"]:
                with tarfile.open(fileobj=io.BytesIO(body)) as archive:
                    self.images[query["t"][0]] = archive.getnames()
                return 200, {"stream": "built\n"}
            case ["containers", "create"]:
                asked = json.loads(body)
                if asked["Image"] not in self.images:
                    return 404, {"message": f"No such image: {asked['Image']}"}
                self.containers.append(asked)
                return 201, {"Id": str(len(self.containers) - 1), "Warnings": []}
            case ["containers", number, "start"]:
                self.started.append(int(number))
                return 204, {}
        return 404, {"message": f"{path} is not stood in for"}


@contextmanager
def serving(daemon: Daemon, address: Path) -> Iterator[str]:
    """Serve it on a socket at ``address``; gives what DOCKER_HOST is to be."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self, code: int, body: dict[str, Any]) -> None:
            raw = json.dumps(body).encode() if body else b""
            self.send_response(code)
            self.send_header("Api-Version", _VERSION)
            self.send_header("Ostype", "linux")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(raw)

        def do_HEAD(self) -> None:
            self._answer(200, {})

        def do_GET(self) -> None:
            self._answer(404, {"message": f"{self.path} is not stood in for"})

        def do_POST(self) -> None:
            url = urlsplit(self.path)
            self._answer(*daemon.post(url.path, parse_qs(url.query), self._body()))

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            whole = b""
            while size := int(self.rfile.readline(), 16):
                whole += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return whole

        def address_string(self) -> str:
            return "docker"  # a socket of this kind has no address of who calls

        def log_message(self, *_: Any) -> None:
            pass

    class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
        daemon_threads = True

    server = Server(str(address), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="docker")
    thread.start()
    try:
        yield f"unix://{address}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
