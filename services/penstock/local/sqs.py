"""An embedded SQS: ministack's SQS, alone, as a child process on a loopback port."""

import importlib.util
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from penstock.local.service import HOST, Service, answers, make_private, plain_environment, python_path
from penstock.protocol.errors import StackError, needing
from penstock.runtime.logs import log

REGION = "us-east-1"
ACCESS_KEY_ID = "PENSTOCK_EMBEDDED_SQS_ACCESS_KEY_ID"  # environment variable of the child
HEALTH = "/_ministack/health"
# Not a requirement of penstock[local], since its own pin one release of botocore: docs/decisions/067-packages.md.
EMULATOR = "ministack==1.5.33"
_WHEEL_SHA256 = "36f9158cbe7eb7a3f910ccf1c052c98204511164249b783682f7a96ef56b0bba"
_BACKLOG = 1024  # calls that may wait while the child is down


class EmbeddedSqs(Service):
    """SQS protocol on 127.0.0.1, with one set of queues for all regions that requests are signed for.

    data_dir: holds `state` (queues and messages) and `sqs.log`.
    access_key_id: requests must be signed with it, by any secret; None makes a random one.
    Messages live in memory. Each change is in a file before its call is answered, so a kill -9 loses none.
    The port is held by this process, not by the child: calls wait while the child is down, and no other stack, whose
    queues have the same names, takes the port and with it the messages.
    """

    name = "sqs"

    def __init__(self, data_dir: Path, *, access_key_id: str | None = None) -> None:
        super().__init__(data_dir)
        self.access_key_id = access_key_id or secrets.token_hex(20)
        self.state_dir = self.data_dir / "state"
        self._listener: socket.socket | None = None
        self._emulator = ""

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def prepare(self) -> None:
        self._emulator = emulator_folder()
        make_private(self.data_dir)
        self.state_dir.mkdir(exist_ok=True)
        self.state_dir.chmod(0o700)  # messages hold payloads

    def stop(self, grace_seconds: float = 15) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        super().stop(grace_seconds)

    def launch(self) -> tuple[list[str], dict[str, Any]]:
        if self._listener is None:
            try:
                self._listener = socket.create_server((HOST, self.port), backlog=_BACKLOG)
            except OSError as exc:
                raise StackError(f"port {self.port} is taken; stop what uses it: {exc}") from exc
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
            "PYTHONPATH": os.pathsep.join(filter(None, (python_path(), self._emulator))),
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


def emulator_folder() -> str:
    """The folder to import ministack from, which is fetched once; empty where it is installed. Raises StackError."""
    if importlib.util.find_spec("ministack"):
        return ""
    with needing("the embedded SQS", "local"):
        import defusedxml  # noqa: F401
        import hypercorn  # noqa: F401
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / EMULATOR
    if not folder.is_dir():
        log.info("emulator_fetched_once", package=EMULATOR, folder=str(folder))
        fetch(f"{EMULATOR} --hash=sha256:{_WHEEL_SHA256}", folder)
    return str(folder)


def fetch(requirement: str, folder: Path) -> None:
    """Install a package, without what it requires, into a new folder, by pip or uv. Raises StackError."""
    installer = [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else ["uv", "pip"]
    options = ["--quiet", "--no-deps", "--no-compile", "--only-binary=:all:", "--require-hashes"]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            wanted, target = Path(scratch, "requirements.txt"), Path(scratch, "packages")
            wanted.write_text(requirement, "utf-8")
            command = [*installer, "install", *options, "--target", str(target), "--requirement", str(wanted)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            if not folder.exists():  # else another start was faster
                target.rename(folder)
    except (OSError, subprocess.CalledProcessError) as exc:
        raise StackError(
            f"the embedded SQS cannot be fetched: {(getattr(exc, 'stderr', None) or str(exc)).strip()}\n"
            f"install it (pip install --no-deps {requirement.split()[0]}), or pass --sqs-endpoint-url"
        ) from exc
