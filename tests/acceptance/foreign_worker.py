"""A worker that knows nothing of Penstock: a plain SQS client that answers JSON-RPC. Run with the two queues' URLs."""

import json
import sys

import botocore.session


def answer(request: dict) -> dict:
    if request["method"] == "call":  # a service that refuses: run it again later, and nothing else of its limit key
        data = {"snooze": True, "retry_after": 600, "hold": "key"}
        return {"jsonrpc": "2.0", "error": {"code": -32000, "message": "busy", "data": data}, "id": request["id"]}
    if request["method"] != "shout":
        error = {"code": -32601, "message": "Method not found"}
        return {"jsonrpc": "2.0", "error": error, "id": request["id"]}
    return {"jsonrpc": "2.0", "result": request["params"]["text"].upper() + "!", "id": request["id"]}


def main(endpoint: str, outbound: str, results: str) -> None:
    sqs = botocore.session.get_session().create_client("sqs", endpoint_url=endpoint, region_name="us-east-1")
    for action in ("shout", "call"):  # known from now on, for a few minutes
        params = {"worker": "foreign", "action": action, "version": "7", "params": {"type": "object"}}
        announcement = {"jsonrpc": "2.0", "method": "announce", "params": params}
        sqs.send_message(QueueUrl=results, MessageBody=json.dumps(announcement))
    while True:
        reply = sqs.receive_message(QueueUrl=outbound, MaxNumberOfMessages=10, WaitTimeSeconds=1)
        for message in reply.get("Messages", []):
            body = json.loads(message["Body"])
            answers = [answer(request) for request in body] if isinstance(body, list) else answer(body)
            sqs.send_message(QueueUrl=results, MessageBody=json.dumps(answers))
            sqs.delete_message(QueueUrl=outbound, ReceiptHandle=message["ReceiptHandle"])


if __name__ == "__main__":
    main(*sys.argv[1:])
