"""The embedded SQS: queues and messages outlive a stop, and all but the newest a crash."""

from __future__ import annotations

import hashlib
import http.client
import os
import signal
import socket
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import botocore.session
import psutil
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from penstock.local.service import HOST, free_port, is_free
from penstock.local.sqs import EMULATOR, REGION, EmbeddedSqs, authorization, emulator_folder, fetch
from penstock.protocol.errors import StackError
from tests.waiting import wait_until

Make = Callable[..., EmbeddedSqs]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Endpoints over one folder, one at a time, stopped at the test's end."""
    made: list[EmbeddedSqs] = []

    def build(**arguments: int) -> EmbeddedSqs:
        made.append(EmbeddedSqs(tmp_path / "with space" / "sqs", **arguments))
        return made[-1]

    yield build
    for server in made:
        server.stop()


def client(server: EmbeddedSqs, key_id: str | None = None) -> Any:
    session = botocore.session.get_session()
    return session.create_client(
        "sqs",
        endpoint_url=server.url,
        region_name=REGION,
        config=Config(retries={"total_max_attempts": 1}),
        aws_access_key_id=server.access_key_id if key_id is None else key_id,
        aws_secret_access_key="any",
    )


def bodies(server: EmbeddedSqs, queue_url: str) -> set[str]:
    reply = client(server).receive_message(QueueUrl=queue_url, MaxNumberOfMessages=10, VisibilityTimeout=0)
    return {message["Body"] for message in reply.get("Messages", ())}


def test_messages_survive_a_stop_and_are_found_under_the_new_port(make: Make) -> None:
    server = make()
    server.start()
    url = client(server).create_queue(QueueName="q")["QueueUrl"]
    assert url.startswith(server.url)
    for number in range(3):
        client(server).send_message(QueueUrl=url, MessageBody=f"zß水 {number}")
    server.stop()
    assert server.returncode == 0

    (server.data_dir / "port").write_text(str(free_port()))
    moved = make()
    moved.start()
    url = client(moved).get_queue_url(QueueName="q")["QueueUrl"]
    assert url.startswith(moved.url)
    assert bodies(moved, url) == {f"zß水 {number}" for number in range(3)}


def test_same_port_is_taken_again_while_it_is_free(make: Make) -> None:
    first = make()
    first.start()
    first.stop()
    second = make()
    second.start()
    assert second.url == first.url


def test_saved_messages_are_there_after_kill_9(make: Make) -> None:
    server = make()
    server.start()
    url = client(server).create_queue(QueueName="q")["QueueUrl"]
    client(server).send_message(QueueUrl=url, MessageBody="held")
    saved = server.state_dir / "sqs.json"
    wait_until(lambda: saved.exists() and "held" in saved.read_text(), "the message to be saved")
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: server.pid is None, "the process to end")

    server.start()

    assert bodies(server, url) == {"held"}


def test_messages_are_readable_by_nobody_else(make: Make) -> None:
    server = make()
    server.start()
    assert server.state_dir.stat().st_mode & 0o077 == 0


def test_port_is_held_and_calls_wait_while_the_process_is_away(make: Make) -> None:
    server = make()
    server.start()
    url = client(server).create_queue(QueueName="q")["QueueUrl"]
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: server.pid is None, "the process to end")

    assert not is_free(server.port)
    with ThreadPoolExecutor() as pool:
        call = pool.submit(client(server).list_queues)
        server.start()
        assert "ResponseMetadata" in call.result(timeout=60)
    assert server.url in url

    server.stop()
    assert is_free(server.port)


def test_the_port_is_named_in_the_error_where_another_program_has_it_at_a_restart(make: Make) -> None:
    server = make()
    server.start()
    server.stop()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections to the stopped server linger
        other.bind((HOST, server.port))
        other.listen()
        with pytest.raises(StackError, match=f"port {server.port} is taken"):
            server.start()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedSqs]:
    """One endpoint for tests that leave it unchanged."""
    server = EmbeddedSqs(tmp_path_factory.mktemp("guarded"))
    server.start()
    yield server
    server.stop()


def ask(server: EmbeddedSqs, method: str, path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    """A request that is signed with the right key, but for what the headers say."""
    sent = {"Authorization": authorization(server.access_key_id), "Content-Type": "application/x-www-form-urlencoded"}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection = http.client.HTTPConnection(HOST, server.port, timeout=30)
    try:
        connection.request(method, path, "Action=ListQueues" if method == "POST" else None, sent)
        reply = connection.getresponse()
        return reply.status, reply.read(), {name.lower(): value for name, value in reply.getheaders()}
    finally:
        connection.close()


def test_a_program_with_the_access_key_is_served(guarded: EmbeddedSqs) -> None:
    for host in (f"127.0.0.1:{guarded.port}", "localhost", "[::1]:80"):
        assert ask(guarded, "POST", "/", Host=host)[0] == 200


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("POST", {"Origin": "https://evil.example"}),
        ("POST", {"Origin": "null"}),
        ("POST", {"Referer": "https://evil.example/page"}),
        ("POST", {"Sec_Fetch_Site": "cross-site"}),
        ("POST", {"Sec_Fetch_Site": "none"}),
        ("OPTIONS", {"Origin": "https://evil.example", "Access_Control_Request_Method": "POST"}),
        ("GET", {"Sec_Fetch_Site": "same-origin"}),
    ],
)
def test_what_a_page_in_a_browser_sends_is_refused_and_not_made_readable_for_it(
    guarded: EmbeddedSqs, method: str, headers: dict[str, str]
) -> None:
    status, body, answered = ask(guarded, method, "/", **headers)
    assert status == 403
    assert b"web pages" in body
    assert not [name for name in answered if name.startswith("access-control")]


@pytest.mark.parametrize(
    "host", ["rebound.evil.example", "127.0.0.1.evil.example", "10.0.0.1:80", "localhost.evil", ""]
)
def test_another_host_name_is_refused(guarded: EmbeddedSqs, host: str) -> None:
    assert ask(guarded, "POST", "/", Host=host)[0] == 403


@pytest.mark.parametrize(
    "header", ["", "Bearer x", "AWS4-HMAC-SHA256 Credential=", authorization("penstock"), authorization("")]
)
def test_a_request_without_the_access_key_is_refused(guarded: EmbeddedSqs, header: str) -> None:
    status, body, _ = ask(guarded, "POST", "/", Authorization=header)
    assert status == 403
    assert b"penstock env" in body


@pytest.mark.parametrize(
    "path", ["/_ministack/reset", "/_ministack/config", "/_ministack/sqs/messages", "/_localstack/health"]
)
def test_of_the_paths_of_the_emulator_only_the_health_check_is_served(guarded: EmbeddedSqs, path: str) -> None:
    for method in ("GET", "POST"):
        assert ask(guarded, method, path)[0] == 403
    assert ask(guarded, "GET", "/_ministack/health")[0] == 200
    assert ask(guarded, "GET", "/_ministack/health", Authorization="")[0] == 403


def test_a_client_with_another_key_is_told_where_to_find_it(guarded: EmbeddedSqs) -> None:
    with pytest.raises(ClientError, match=r"InvalidClientTokenId.*penstock env"):
        client(guarded, "AKIDEXAMPLE").list_queues()


def test_the_access_key_is_random_and_not_on_the_command_line(guarded: EmbeddedSqs, tmp_path: Path) -> None:
    other = EmbeddedSqs(tmp_path)
    assert len(guarded.access_key_id) >= 32
    assert guarded.access_key_id != other.access_key_id
    assert guarded.pid is not None
    assert guarded.access_key_id not in " ".join(psutil.Process(guarded.pid).cmdline())


# Fetching the emulator


@pytest.fixture
def requirement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with one module, in a folder that stands for the index; it requires what there is not."""
    wheel = tmp_path / "sample-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("sample/__init__.py", "")
        archive.writestr("sample-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(
            "sample-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: sample\nVersion: 1\nRequires-Dist: none-such\n"
        )
        archive.writestr("sample-1.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return f"sample==1 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}"


def test_the_emulator_is_fetched_without_its_requirements(requirement: str, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "sample"
    fetch(requirement, folder)
    assert (folder / "sample" / "__init__.py").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["sample"]


def test_another_file_than_the_expected_one_is_not_taken(requirement: str, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "sample"
    with pytest.raises(StackError, match=r"(?s)cannot be fetched: .*pip install --no-deps sample==1\), or pass --sqs"):
        fetch(requirement[:-4] + "0000", folder)
    assert not folder.exists()


def test_the_release_that_is_fetched_is_the_one_of_the_tests() -> None:
    assert f"ministack=={metadata.version('ministack')}" == EMULATOR
    assert emulator_folder() == ""
