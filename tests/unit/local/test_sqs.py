"""The embedded SQS: queues and messages outlive a stop, and a kill at any moment."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import signal
import socket
import time
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


def client(server: EmbeddedSqs, key_id: str | None = None, *, region: str = REGION) -> Any:
    session = botocore.session.get_session()
    return session.create_client(
        "sqs",
        endpoint_url=server.url,
        region_name=region,
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
        client(server, region="eu-central-1").send_message(QueueUrl=url, MessageBody=f"zß水 {number}")
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


def kill(server: EmbeddedSqs) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: server.pid is None, "the process to end")


def restart(server: EmbeddedSqs) -> None:
    kill(server)
    server.start()


def send(server: EmbeddedSqs, url: str, *texts: str) -> None:
    entries = [{"Id": str(number), "MessageBody": text} for number, text in enumerate(texts)]
    assert not client(server).send_message_batch(QueueUrl=url, Entries=entries).get("Failed")


def receive(server: EmbeddedSqs, url: str, seconds: int) -> dict[str, str]:
    """Receipt handles, by body."""
    reply = client(server).receive_message(QueueUrl=url, MaxNumberOfMessages=10, VisibilityTimeout=seconds)
    return {message["Body"]: message["ReceiptHandle"] for message in reply.get("Messages", ())}


def test_a_kill_right_after_the_answer_loses_nothing_and_brings_nothing_back(make: Make) -> None:
    server = make()
    server.start()
    url = client(server).create_queue(QueueName="q")["QueueUrl"]
    client(server).send_message(QueueUrl=url, MessageBody="zß水\n")
    send(server, url, "hidden", "deleted", "deleted with others", "shown again")
    held = receive(server, url, 600)
    client(server).delete_message(QueueUrl=url, ReceiptHandle=held["deleted"])
    client(server).delete_message_batch(
        QueueUrl=url,
        Entries=[{"Id": "0", "ReceiptHandle": held["deleted with others"]}, {"Id": "1", "ReceiptHandle": "unknown"}],
    )
    shown = [held["shown again"], held["zß水\n"]]
    client(server).change_message_visibility(QueueUrl=url, ReceiptHandle=shown[0], VisibilityTimeout=0)
    client(server).change_message_visibility_batch(
        QueueUrl=url, Entries=[{"Id": "0", "ReceiptHandle": shown[1], "VisibilityTimeout": 0}]
    )
    restart(server)
    restart(server)  # what was repeated at the first start is not repeated at the second one

    assert receive(server, url, 0).keys() == {"shown again", "zß水\n"}
    client(server).change_message_visibility(QueueUrl=url, ReceiptHandle=held["hidden"], VisibilityTimeout=0)
    assert bodies(server, url) == {"shown again", "zß水\n", "hidden"}


def test_receives_are_counted_across_kills_up_to_the_dead_letter_queue(make: Make) -> None:
    server = make()
    server.start()
    dead = client(server).create_queue(QueueName="dead")["QueueUrl"]
    policy = {"deadLetterTargetArn": f"arn:aws:sqs:{REGION}:000000000000:dead", "maxReceiveCount": "2"}
    attributes = {"RedrivePolicy": json.dumps(policy)}
    url = client(server).create_queue(QueueName="q", Attributes=attributes)["QueueUrl"]
    send(server, url, "poison")
    for _ in range(2):
        assert bodies(server, url) == {"poison"}
        restart(server)
    assert bodies(server, url) == set()
    restart(server)
    held = receive(server, dead, 600)
    client(server).delete_message(QueueUrl=dead, ReceiptHandle=held.pop("poison"))
    restart(server)
    assert bodies(server, dead) == set()


def test_what_was_held_when_another_died_is_still_held_after_a_kill(make: Make) -> None:
    server = make()
    server.start()
    dead = client(server).create_queue(QueueName="dead")["QueueUrl"]
    policy = {"deadLetterTargetArn": f"arn:aws:sqs:{REGION}:000000000000:dead", "maxReceiveCount": "1"}
    url = client(server).create_queue(QueueName="q", Attributes={"RedrivePolicy": json.dumps(policy)})["QueueUrl"]
    send(server, url, "held")
    held = receive(server, url, 4)["held"]
    send(server, url, "poison")
    assert bodies(server, url) == {"poison"}
    assert bodies(server, url) == set()  # moves it
    client(server).change_message_visibility(QueueUrl=url, ReceiptHandle=held, VisibilityTimeout=600)
    time.sleep(4)
    restart(server)
    assert bodies(server, dead) == {"poison"}


def test_a_fifo_queue_knows_its_duplicates_after_a_kill_and_goes_on_counting(make: Make) -> None:
    server = make()
    server.start()
    url = client(server).create_queue(QueueName="q.fifo", Attributes={"FifoQueue": "true"})["QueueUrl"]

    def send_as(name: str) -> Any:
        given = {"MessageBody": name, "MessageGroupId": "g", "MessageDeduplicationId": name}
        return client(server).send_message(QueueUrl=url, **given)["SequenceNumber"]

    first = send_as("first")
    for handle in receive(server, url, 600).values():
        client(server).delete_message(QueueUrl=url, ReceiptHandle=handle)
    restart(server)
    assert send_as("first") == first
    assert send_as("second") > first
    assert bodies(server, url) == {"second"}


def test_a_stop_then_a_kill_do_not_repeat_what_was_deleted(make: Make) -> None:
    server = make()
    server.start()
    url = client(server).create_queue(QueueName="q")["QueueUrl"]
    send(server, url, "first", "second")
    held = receive(server, url, 600)
    client(server).delete_message(QueueUrl=url, ReceiptHandle=held["first"])
    server.stop()
    server.start()
    client(server).change_message_visibility(QueueUrl=url, ReceiptHandle=held["second"], VisibilityTimeout=0)
    restart(server)
    assert bodies(server, url) == {"second"}


def test_purged_and_deleted_queues_stay_empty_after_a_kill(make: Make) -> None:
    server = make()
    server.start()
    urls = [client(server).create_queue(QueueName=name)["QueueUrl"] for name in ("purged", "gone")]
    for url in urls:
        send(server, url, "old")
    client(server).purge_queue(QueueUrl=urls[0])
    client(server).delete_queue(QueueUrl=urls[1])
    send(server, urls[0], "new")
    client(server).set_queue_attributes(QueueUrl=urls[0], Attributes={"VisibilityTimeout": "77"})
    for end in (kill, EmbeddedSqs.stop):  # what a stop has written is not spoilt by what the journal holds
        end(server)
        server.start()
        assert bodies(server, urls[0]) == {"new"}
        assert client(server).list_queues()["QueueUrls"] == [urls[0]]
        found = client(server).get_queue_attributes(QueueUrl=urls[0], AttributeNames=["VisibilityTimeout"])
        assert found["Attributes"] == {"VisibilityTimeout": "77"}
        client(server).purge_queue(QueueUrl=urls[0])
        send(server, urls[0], "new")


def test_a_line_that_a_kill_cut_off_harms_no_other(make: Make) -> None:
    server = make()
    server.start()
    url = client(server).create_queue(QueueName="q")["QueueUrl"]
    send(server, url, "before")
    kill(server)
    with (server.state_dir / "sqs.journal").open("ab") as journal:
        journal.write(b'\n["sent","arn:aws:sqs:us-ea')
    server.start()
    send(server, url, "after")
    restart(server)
    assert bodies(server, url) == {"before", "after"}


def test_a_long_journal_gives_way_to_a_snapshot(make: Make) -> None:
    server = make()
    server.start()
    url = client(server).create_queue(QueueName="q")["QueueUrl"]
    for number in range(40):
        client(server).send_message(QueueUrl=url, MessageBody=f"{number} {'x' * 1_000_000}")
    assert (server.state_dir / "sqs.journal").stat().st_size < 21 * 2**20
    restart(server)
    counted = client(server).get_queue_attributes(QueueUrl=url, AttributeNames=["ApproximateNumberOfMessages"])
    assert counted["Attributes"]["ApproximateNumberOfMessages"] == "40"


def test_messages_are_readable_by_nobody_else(make: Make) -> None:
    server = make()
    server.start()
    assert server.state_dir.stat().st_mode & 0o077 == 0


def test_port_is_held_and_calls_wait_while_the_process_is_away(make: Make) -> None:
    server = make()
    server.start()
    url = client(server).create_queue(QueueName="q")["QueueUrl"]
    kill(server)

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
    ("body", "refused"),
    [
        (r'"tab\t and newline\n, zß水 \ud83d\ude00 \u00a0"', None), (r'"\u0001"', "InvalidMessageContents"),
        (r'"\ufffe"', "InvalidMessageContents"), (r'"half a pair \ud800"', "InvalidMessageContents"),
        ('""', "MissingParameter"), ('"cut off', "QueueDoesNotExist"),
    ],
)  # fmt: skip
def test_a_body_is_taken_as_it_is_or_refused(guarded: EmbeddedSqs, body: str, refused: str | None) -> None:
    url = client(guarded).create_queue(QueueName="bodies")["QueueUrl"]
    call = f'{{"QueueUrl":"{url}","MessageBody":{body}}}'
    headers = {"Authorization": authorization(guarded.access_key_id), "X-Amz-Target": "AmazonSQS.SendMessage"}
    connection = http.client.HTTPConnection(HOST, guarded.port, timeout=30)
    connection.request("POST", "/", call.encode(), headers)
    reply = connection.getresponse()
    told = reply.read().decode()
    connection.close()
    if refused is None:
        assert reply.status == 200, told
        assert bodies(guarded, url) == {json.loads(body)}
    else:
        assert reply.status == 400, told
        assert re.search(refused, told), told


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
