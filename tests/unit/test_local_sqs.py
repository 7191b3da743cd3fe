"""The embedded SQS: queues and messages outlive a stop, and all but the newest a crash."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore.config import Config

from penstock.local.service import HOST, PortTaken, free_port, is_free
from penstock.local.sqs import REGION, EmbeddedSqs
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


def client(server: EmbeddedSqs) -> Any:
    session = botocore.session.get_session()
    return session.create_client(
        "sqs", endpoint_url=server.url, region_name=REGION, config=Config(retries={"total_max_attempts": 1})
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

    moved = make(port=free_port())
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


def test_taken_port_that_was_asked_for_is_named_in_the_error(make: Make) -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PortTaken, match=f"port {port} is taken"):
            make(port=port).start()
