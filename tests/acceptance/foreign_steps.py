"""A worker with durable steps, by docs/protocol.md alone. Run with the URLs of two queues, and a log of its steps."""

import json
import os
import sys

import botocore.session

STEPS = ("charge", "reserve", "ship")


def run(request: dict, received: int, report, log) -> dict:
    """Each step once; dies before the last one if the payload says so, and it was not reached before."""
    done = {(step["name"], step.get("repetition", 0)): step["result"] for step in request.get("steps", [])}
    reported = []
    for position, name in enumerate(STEPS):
        if (name, 0) in done:
            continue
        if received > 1:  # steps of the worker that had it before may be on their way
            return {"jsonrpc": "2.0", "method": "suspend", "params": {"id": request["id"], "redelivered": True}}
        if name == request["params"].get("dies_before") and not os.path.exists(log + ".died"):
            open(log + ".died", "w").close()
            os._exit(1)
        with open(log, "a") as file:
            file.write(name + "\n")
        step = {"name": name, "position": position, "result": name.upper()}
        report({"jsonrpc": "2.0", "method": "step", "params": {"id": request["id"], **step}})
        done[name, 0] = step["result"]
        reported.append(step)
    results = [done[name, 0] for name in STEPS]
    return {"jsonrpc": "2.0", "result": results, "id": request["id"], "steps": reported}


def main(endpoint: str, outbound: str, results: str, log: str) -> None:
    sqs = botocore.session.get_session().create_client("sqs", endpoint_url=endpoint, region_name="us-east-1")

    def report(entry: dict) -> None:
        sqs.send_message(QueueUrl=results, MessageBody=json.dumps(entry))

    while True:
        reply = sqs.receive_message(
            QueueUrl=outbound,
            MaxNumberOfMessages=1,
            WaitTimeSeconds=1,
            VisibilityTimeout=2,
            AttributeNames=["ApproximateReceiveCount"],
        )
        for message in reply.get("Messages", []):
            received = int(message["Attributes"]["ApproximateReceiveCount"])
            body = json.loads(message["Body"])
            for request in body if isinstance(body, list) else [body]:
                report(run(request, received, report, log))
            sqs.delete_message(QueueUrl=outbound, ReceiptHandle=message["ReceiptHandle"])


if __name__ == "__main__":
    main(*sys.argv[1:])
