"""A RabbitMQ for tests: Debian's package, as a private node with folders, ports and an epmd of its own.

``python -m tests.rabbitmq`` runs one alone and prints its URL; it ends with the process.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

# Debian's command on the path is a wrapper that runs all as the user of the system's own node.
_SERVER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
_CTL = Path("/usr/lib/rabbitmq/bin/rabbitmqctl")
_READY_SECONDS = 120.0
_STOP_SECONDS = 60.0
_MAX_MESSAGE_BYTES = 134_217_728  # by default, until RabbitMQ 4
WHY_NOT = (
    None if _SERVER.exists() and shutil.which("epmd") else f"{_SERVER} is not installed: apt install rabbitmq-server"
)


class RabbitMq:
    """One node on 127.0.0.1, user and password guest. ``start`` again after ``stop`` or ``kill``: its messages stay.

    consumer_timeout_seconds: of the broker's, None for its default of half an hour.
    """

    def __init__(self, folder: Path, *, consumer_timeout_seconds: float | None = None) -> None:
        self._folder = folder
        self._name = f"penstock-{secrets.token_hex(4)}@localhost"
        self.port, self._distribution, self._epmd_port = _free_ports(3)
        self._consumer_timeout_seconds = consumer_timeout_seconds
        self._epmd: subprocess.Popen[bytes] | None = None
        self._server: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    def start(self) -> None:
        for name in ("mnesia", "log", "home"):
            (self._folder / name).mkdir(parents=True, exist_ok=True)
        (self._folder / "plugins").write_text("[].\n")
        (self._folder / "rabbitmq.conf").write_text(self._configuration())
        if self._epmd is None:
            epmd = shutil.which("epmd")
            assert epmd is not None
            self._epmd = subprocess.Popen([epmd, "-port", str(self._epmd_port), "-address", "127.0.0.1"])
        with (self._folder / "output").open("ab") as output:
            self._server = subprocess.Popen(
                [_SERVER], env=self._environment(), stdout=output, stderr=output, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + _READY_SECONDS
        while not self._answers():
            assert self._server.poll() is None, f"RabbitMQ does not start:\n{self._last_words()}"
            assert time.monotonic() < deadline, f"RabbitMQ is not there yet:\n{self._last_words()}"
            time.sleep(0.1)

    def stop(self) -> None:
        """An orderly stop of the node."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """kill -9 of the node."""
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        """Stop all that was started."""
        self.kill()
        if self._epmd is not None:
            self._epmd.terminate()
            self._epmd.wait(_STOP_SECONDS)
            self._epmd = None

    def ctl(self, *arguments: str) -> str:
        """Run rabbitmqctl."""
        run = subprocess.run(
            [_CTL, "-q", *arguments], env=self._environment(), capture_output=True, text=True, timeout=120, check=False
        )
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout

    @contextlib.contextmanager
    def messages_of(self, max_bytes: int) -> Iterator[None]:
        """Channels that are opened meanwhile take no larger messages."""
        self.ctl("eval", f"application:set_env(rabbit, max_message_size, {max_bytes}).")
        try:
            yield
        finally:
            self.ctl("eval", f"application:set_env(rabbit, max_message_size, {_MAX_MESSAGE_BYTES}).")

    def _signal(self, number: signal.Signals) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        # The command is a shell script whose children are the node and its helpers.
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family.append(psutil.Process(server.pid))
            family += family[0].children(recursive=True)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                if number == signal.SIGKILL or process.name().startswith("beam"):
                    process.send_signal(number)
        _, left = psutil.wait_procs(family, _STOP_SECONDS)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        server.wait(_STOP_SECONDS)

    def _configuration(self) -> str:
        lines = [
            "log.file.level = warning",
            "disk_free_limit.absolute = 50MB",
            "vm_memory_high_watermark.absolute = 1GB",
        ]
        if self._consumer_timeout_seconds is not None:
            lines.append(f"consumer_timeout = {round(self._consumer_timeout_seconds * 1000)}")
        return "\n".join(lines) + "\n"

    def _environment(self) -> dict[str, str]:
        folder = self._folder
        mine = {name: value for name, value in os.environ.items() if not name.startswith(("RABBITMQ_", "ERL_"))}
        return mine | {
            "HOME": str(folder / "home"),  # of the Erlang cookie
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": self._name,
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._distribution),
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "none"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 2:2 +sbwt none",
        }

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 2) as connection:
                connection.settimeout(2)
                connection.sendall(b"AMQP\x00\x00\x09\x01")
                return bool(connection.recv(1))
        except OSError:
            return False

    def _last_words(self) -> str:
        output = self._folder / "output"
        return output.read_text(errors="replace")[-2000:] if output.exists() else ""


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def rabbitmq_in(parent: Path | None = None, **options: float) -> Iterator[RabbitMq]:
    """A node, running, in a temporary folder; in memory where that can be had, for a node syncs each message."""
    if parent is None and os.access("/dev/shm", os.W_OK | os.X_OK):
        parent = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="penstock-rabbitmq-", dir=parent, ignore_cleanup_errors=True) as folder:
        node = RabbitMq(Path(folder), **options)
        try:
            node.start()
            yield node
        finally:
            node.close()


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitMq]:
    """One RabbitMQ for the run."""
    if WHY_NOT is not None:
        pytest.skip(WHY_NOT)
    with rabbitmq_in() as node:
        yield node


def _main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with rabbitmq_in() as node:
        print(node.url, flush=True)
        signal.pause()


if __name__ == "__main__":
    _main()
