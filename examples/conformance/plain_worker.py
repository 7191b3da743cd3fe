"""A worker in thirty lines, with nothing but an SQS client; docs/protocol.md has its actions."""

import json
import os
import threading
import time
from typing import Any

import botocore.session

ACTIONS: dict[str, Any] = {
    "conformance.echo": lambda value: value,
    "conformance.fail": lambda message, final: 1 / 0,
    "conformance.sleep": lambda seconds: time.sleep(seconds),
}
OUTBOUND, RESULTS = os.environ["PENSTOCK_OUTBOUND_QUEUE"], os.environ["PENSTOCK_RESULTS_QUEUE"]
SECONDS = int(os.environ.get("PENSTOCK_VISIBILITY_TIMEOUT_SECONDS", "60"))
sqs = botocore.session.get_session().create_client("sqs")


def answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        action, params = ACTIONS[request["method"]], request["params"]
        outcome = {"result": action(*params) if isinstance(params, list) else action(**params)}
    except Exception as exc:
        outcome = {"error": {"code": -32601 if isinstance(exc, KeyError) else -32000, "message": repr(exc)}}
    return {"jsonrpc": "2.0", **outcome, "id": request["id"]}


def keep(handle: str, done: threading.Event) -> None:
    while not done.wait(SECONDS / 3):
        sqs.change_message_visibility(QueueUrl=OUTBOUND, ReceiptHandle=handle, VisibilityTimeout=SECONDS)


while True:
    for message in sqs.receive_message(QueueUrl=OUTBOUND, WaitTimeSeconds=20).get("Messages", []):
        handle, done, body = message["ReceiptHandle"], threading.Event(), json.loads(message["Body"])
        threading.Thread(target=keep, args=(handle, done), daemon=True).start()
        answers = [answer(request) for request in body] if isinstance(body, list) else answer(body)
        sqs.send_message(QueueUrl=RESULTS, MessageBody=json.dumps(answers))
        sqs.delete_message(QueueUrl=OUTBOUND, ReceiptHandle=handle)
        done.set()
