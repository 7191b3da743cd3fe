"""An embedded SQS: ministack's SQS, alone, as a child process on a loopback port."""

from __future__ import annotations

import secrets
import socket
import sys
from pathlib import Path
from typing import Any

from penstock.local.service import HOST, PortTaken, Service, answers, make_private, plain_environment, python_path
from penstock.protocol.errors import StackError

REGION = "us-east-1"
ACCESS_KEY_ID = "PENSTOCK_EMBEDDED_SQS_ACCESS_KEY_ID"  # environment variable of the child
HEALTH = "/_ministack/health"
_BACKLOG = 1024  # calls that may wait while the child is down


class EmbeddedSqs(Service):
    """SQS protocol on 127.0.0.1, region us-east-1 (queues of other regions are other queues).

    data_dir: holds `state` (queues and messages) and `sqs.log`.
    access_key_id: requests must be signed with it, by any secret; None makes a random one.
    Messages live in memory. They are written on a graceful stop, and every few seconds while they change; so a kill -9
    loses the last seconds, and messages deleted in them come back.
    The port is held by this process, not by the child: calls wait while the child is down, and no other stack, whose
    queues have the same names, takes the port and with it the messages.
    """

    name = "sqs"

    def __init__(self, data_dir: Path, *, port: int | None = None, access_key_id: str | None = None) -> None:
        super().__init__(data_dir, port=port)
        self.access_key_id = access_key_id or secrets.token_hex(20)
        self.state_dir = self.data_dir / "state"
        self._listener: socket.socket | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def prepare(self) -> None:
        try:
            import ministack  # noqa: F401
        except ImportError as exc:
            raise StackError(
                "the embedded SQS is not installed: pip install 'penstock[local]', or pass --sqs-endpoint-url"
            ) from exc
        make_private(self.data_dir)
        self.state_dir.mkdir(exist_ok=True)
        self.state_dir.chmod(0o700)  # messages hold payloads

    def take_port(self) -> None:
        super().take_port()
        if self._listener is not None:
            return
        listener = socket.socket()
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((HOST, self.port))
            listener.listen(_BACKLOG)
        except OSError as exc:
            listener.close()
            raise PortTaken(f"port {self.port} is taken; name another one or stop what uses it: {exc}") from exc
        self._listener = listener

    def stop(self, grace_seconds: float = 15) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        super().stop(grace_seconds)

    def launch(self) -> tuple[list[str], dict[str, Any]]:
        assert self._listener is not None, "take_port comes first"
        listener = self._listener.fileno()
        env = plain_environment() | {
            # MINISTACK_HOST stays unset and GATEWAY_PORT constant: queue URLs then take host and port from each
            # request, so that saved queues still have right URLs after a start on another port.
            "GATEWAY_PORT": "4566",
            "SERVICES": "sqs",
            "PERSIST_STATE": "1",
            "STATE_DIR": str(self.state_dir),
            "LOG_LEVEL": "WARNING",
            "AUTH": "false",
            "USE_SSL": "0",
            "MINISTACK_REGION": REGION,
            "IOT_MTLS_ENABLED": "0",
            "SFTP_ENABLED": "0",
            # ministack removes Docker containers that it takes for its own leftovers: keep it away from the daemon.
            "DOCKER_HOST": "unix:///nonexistent/docker.sock",
            "PYTHONPATH": python_path(),
            ACCESS_KEY_ID: self.access_key_id,
        }
        command = [sys.executable, "-m", "penstock.local.sqs_server", str(listener)]
        return command, {"env": env, "pass_fds": [listener]}

    def is_ready(self) -> bool:
        if self.pid is None or not answers(self.url + HEALTH, Authorization=authorization(self.access_key_id)):
            return False
        return self.pid is not None  # the listener is ours, and the answer may be of a child that has died since


def authorization(access_key_id: str) -> str:
    """An Authorization header that the endpoint accepts; it does not check the signature itself."""
    return f"AWS4-HMAC-SHA256 Credential={access_key_id}/"
