"""Dead letters from the command line: real queues, real processes, a plain SQS client that lets messages die."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from penstock.cli.app import app
from tests.acceptance.conftest import RunningStack, penstock, running

MAX_RECEIVES = 5


def call(stack: RunningStack, *arguments: str) -> Any:
    return json.loads(penstock(*arguments, "--json", "--data-dir", str(stack.data_dir)))


def run(stack: RunningStack, *arguments: str) -> Result:
    """A command that may fail."""
    return CliRunner().invoke(app, [*arguments, "--data-dir", str(stack.data_dir)])


def dead_queue(stack: RunningStack, queue: str) -> str:
    return str(stack.state["queues"][queue]) + "-dlq"


def let_die(stack: RunningStack, queue: str, count: int) -> None:
    """Receive what is in a queue again and again, as by workers that die of it, until SQS gives it up."""
    sqs, url = stack.sqs(), stack.state["queues"][queue]

    def waiting() -> int:
        names = ["ApproximateNumberOfMessages"]
        found = sqs.get_queue_attributes(QueueUrl=dead_queue(stack, queue), AttributeNames=names)
        return int(found["Attributes"][names[0]])

    def receive() -> bool:
        reply = sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10, VisibilityTimeout=0)
        return not reply.get("Messages") and waiting() >= count

    stack.wait_for(receive, what=f"{count} dead letters")


@pytest.fixture(scope="module")
def stack(module_data_path: Path) -> Iterator[RunningStack]:
    """A stack without workers, whose repair leaves the tasks of a message that died alone for the while."""
    with running(
        module_data_path / "dead", "--one-process", "--workers", "0", env={"PENSTOCK_STALE_AFTER_SECONDS": "600"}
    ) as up:
        yield up


def test_an_operator_finds_reads_replays_and_purges_dead_letters(stack: RunningStack) -> None:
    requests = [
        {"jsonrpc": "2.0", "method": "enqueue", "params": {"action": "echo", "payload": {"n": n}}, "id": n}
        for n in range(3)
    ]
    ids = sorted(reply["result"]["id"] for reply in stack.post(requests))
    stack.wait_for(
        lambda: all(task["state"] == "ACQUIRED" for task in stack.rpc("status", {"ids": ids})), what="the claims"
    )
    let_die(stack, "outbound", 3)

    counted = {row["queue"]: row["messages"] for row in call(stack, "dlq", "list")["queues"]}
    assert counted == {"inbound": 0, "outbound": 3, "results": 0}, (
        call(stack, "dlq", "list", "outbound"),
        stack.describe(),
    )
    page = call(stack, "dlq", "list", "outbound")
    assert (page["seen"], page["total"]) == (3, 3)
    assert sorted(int(message["first"][0].split()[1].split(":")[0]) for message in page["messages"]) == ids
    assert all(message["receives"] > MAX_RECEIVES for message in page["messages"])
    first = next(message for message in page["messages"] if message["first"][0].split()[1].startswith(f"{ids[0]}:"))
    text = run(stack, "dlq", "list", "outbound").stdout
    assert first["id"] in text
    assert "1 of 1" in text
    shown = run(stack, "dlq", "show", "outbound", first["id"])
    assert shown.exit_code == 0
    assert '"method":"echo"' in shown.stdout
    assert "ACQUIRED" in shown.stdout

    assert stack.rpc("cancel", {"id": ids[0]})["state"] == "CANCELLED"
    replayed = call(stack, "dlq", "replay", "outbound", "--all")
    assert (replayed["replayed"], replayed["dropped"], replayed["stale"]) == (2, 1, 1)
    assert call(stack, "dlq", "list", "outbound")["messages"] == []
    sqs, url = stack.sqs(), stack.state["queues"]["outbound"]
    received = sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10).get("Messages", [])
    assert sorted(int(json.loads(message["Body"])["id"].split(":")[0]) for message in received) == ids[1:]

    for n in range(60):
        sqs.send_message(QueueUrl=dead_queue(stack, "results"), MessageBody=f'{{"n":{n}}}')
    refused = run(stack, "dlq", "purge", "results", "--all")
    assert refused.exit_code == 2
    assert "refusing to delete 60 messages of results-dlq without confirmation" in " ".join(
        refused.stderr.replace("│", " ").split()
    )
    assert call(stack, "dlq", "purge", "results", "--all", "--yes")["purged"] == 60
    assert run(stack, "dlq", "show", "results", "no-such-id").exit_code == 1


def test_a_dead_inbound_message_is_accepted_once_however_often_it_is_replayed(stack: RunningStack) -> None:
    body = {"jsonrpc": "2.0", "method": "enqueue", "params": {"action": "came_late", "delay": 3600}}
    sqs = stack.sqs()
    sent = sqs.send_message(QueueUrl=dead_queue(stack, "inbound"), MessageBody=json.dumps(body))["MessageId"]
    (message,) = call(stack, "dlq", "list", "inbound")["messages"]
    assert (message["id"], message["accepted"]) == (sent, False)
    assert call(stack, "dlq", "replay", "inbound", sent)["replayed"] == 1
    stack.wait_for(lambda: stack.rpc("list", {"action": "came_late"})["tasks"], what="the task")
    # What a replay that was killed between its sending and its deletion leaves behind.
    attributes = {"penstock_original_id": {"DataType": "String", "StringValue": sent}}
    for _ in range(2):
        sqs.send_message(
            QueueUrl=dead_queue(stack, "inbound"), MessageBody=json.dumps(body), MessageAttributes=attributes
        )
    assert call(stack, "dlq", "replay", "inbound", "--all")["dropped"] == 2
    assert len(stack.rpc("list", {"action": "came_late"})["tasks"]) == 1


def test_rejected_messages_are_shown_and_retried_by_command(stack: RunningStack) -> None:
    queue = stack.state["queues"]["inbound"]
    for n in range(3):
        stack.sqs().send_message(QueueUrl=queue, MessageBody=f'{{"n": {n}}}')
    listed = stack.wait_for(
        lambda: (found := stack.rpc("rejected.list", {"source": "inbound"})["rejected"]) and len(found) == 3 and found
    )
    assert call(stack, "rejected", "show", str(listed[0]["id"]))["body"] == listed[0]["body"]
    assert listed[0]["body"] in run(stack, "rejected", "show", str(listed[0]["id"])).stdout
    assert call(stack, "rejected", "list", "--source", "results")["rejected"] == []
    retried = run(stack, "rejected", "retry", "--all", "--source", "inbound", "--json")
    assert retried.exit_code == 1
    assert len(json.loads(retried.stdout)["still_rejected"]) == 3
    assert call(stack, "rejected", "purge", "--all")["purged"] == 3
