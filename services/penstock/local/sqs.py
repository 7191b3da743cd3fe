"""An embedded SQS: ministack's SQS, alone, as a child process on a loopback port."""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

from penstock.errors import StackError
from penstock.local.service import HOST, Launch, Service, python_path

REGION = "us-east-1"
_HEALTH = "/_ministack/health"
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class EmbeddedSqs(Service):
    """SQS protocol on 127.0.0.1, any credentials, region us-east-1 (queues of other regions are other queues).

    data_dir: holds `state` (queues and messages) and `sqs.log`.
    Durability: messages live in memory. They are written on a graceful stop, and every few seconds while they change;
    so after a kill -9 the last seconds are lost, and messages deleted in them come back. Postgres, not this, is what
    keeps tasks; AWS SQS loses nothing.
    """

    name = "sqs"

    def __init__(self, data_dir: Path, *, port: int | None = None) -> None:
        super().__init__(data_dir, port=port)
        self.state_dir = self.data_dir / "state"

    @property
    def url(self) -> str:
        """The endpoint URL."""
        return f"http://{HOST}:{self.port}"

    def prepare(self) -> None:
        try:
            import ministack  # noqa: F401
        except ImportError as exc:
            raise StackError(
                "the embedded SQS is not installed: pip install 'penstock[local]', or pass --sqs-endpoint-url"
            ) from exc
        self.state_dir.mkdir(parents=True, exist_ok=True)
        self.state_dir.chmod(0o700)  # messages hold payloads

    def launch(self) -> Launch:
        mine = ("MINISTACK_", "LOCALSTACK_", "PENSTOCK_")
        env = {name: value for name, value in os.environ.items() if not name.startswith(mine)}
        env |= {
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
        }
        return Launch([sys.executable, "-m", "penstock.local.sqs_server", HOST, str(self.port)], env, self.data_dir)

    def is_ready(self) -> bool:
        if self.pid is None:
            return False
        try:
            with _direct.open(self.url + _HEALTH, timeout=2) as response:
                return bool(response.status == 200) and self.pid is not None
        except (OSError, urllib.error.URLError):
            return False
