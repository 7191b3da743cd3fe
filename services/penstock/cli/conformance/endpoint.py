"""What a worker program talks to: an embedded SQS behind a proxy that records its calls, and objects in memory."""

import json
import secrets
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

import aiohttp
from aiohttp import web

from penstock.local.service import HOST
from penstock.local.sqs import REGION, EmbeddedSqs
from penstock.protocol.fence import ClaimKey, Fence
from penstock.protocol.message_attributes import WORKER_ATTRIBUTE
from penstock.protocol.reports import decode_reports

BUCKET = "payloads"
_OWN_HEADERS = {"connection", "content-length", "transfer-encoding", "content-encoding", "date", "server"}
_ENTRIES_LIMIT = 10_000
_BODY_LIMIT_BYTES = 64 * 1024 * 1024


class Reported(NamedTuple):
    """A decoded entry that the results queue accepted, and when by the monotonic clock."""

    report: Any  # a Report; checks choose by its class
    seconds: float


class Traffic:
    """What a program has done with its two queues.

    calls: the operation, a message's id and the time; a visibility timeout of 0 is the operation ``release``.
    refuses: the results queue refuses messages. refused: how often it has.
    """

    def __init__(self) -> None:
        self.fence = Fence([ClaimKey(secrets.token_bytes(16))])
        self.calls: list[tuple[str, str, float]] = []
        self.reported: list[Reported] = []
        self.refuses = False
        self.refused = 0
        self._messages: dict[str, str] = {}  # ids by receipt

    def times_of(self, operation: str, message_id: str) -> list[float]:
        return [seconds for name, one, seconds in self.calls if (name, one) == (operation, message_id)]

    def note(self, operation: str, call: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        now = time.monotonic()
        for message in answer.get("Messages", ()):
            self._messages[message["ReceiptHandle"]] = message["MessageId"]
            self.calls.append(("receive", message["MessageId"], now))
        for entry in call.get("Entries", [call]):
            if operation.startswith("SendMessage"):
                named = entry.get("MessageAttributes", {}).get(WORKER_ATTRIBUTE, {}).get("StringValue")
                reports = decode_reports(
                    entry["MessageBody"], batch_limit=_ENTRIES_LIMIT, worker=named, fence=self.fence
                )
                self.reported += [Reported(report, now) for report in reports]
            elif "ReceiptHandle" in entry:
                ends = "delete" if operation.startswith("DeleteMessage") else "release"
                name = "extend" if entry.get("VisibilityTimeout") else ends
                self.calls.append((name, self._messages.get(entry["ReceiptHandle"], ""), now))


class Endpoint:
    """SQS, and S3's GetObject for one bucket, on one port; an asynchronous context manager.

    Calls are passed on with the Host that they came under, which queue URLs are made of. Programs must speak SQS's JSON
    protocol, as the SDKs of AWS do since 2023.
    """

    def __init__(self, folder: Path) -> None:
        self.sqs = EmbeddedSqs(folder)
        self.objects: dict[str, bytes] = {}
        self.url = ""
        self.traffic: defaultdict[str, Traffic] = defaultdict(Traffic)  # by queue
        self._stack = AsyncExitStack()
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        await self.sqs.start_async()
        self._stack.callback(self.sqs.stop)
        self._session = await self._stack.enter_async_context(aiohttp.ClientSession())
        app = web.Application(client_max_size=_BODY_LIMIT_BYTES)
        app.router.add_post("/{path:.*}", self._call)
        app.router.add_get("/{path:.*}", self._object)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, HOST, 0).start()
        self.url = f"http://{HOST}:{runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def environment(self) -> dict[str, str]:
        """Where the endpoint is, for Penstock's workers and for AWS's SDKs."""
        key = self.sqs.access_key_id
        return {
            "AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": key, "AWS_REGION": REGION, "AWS_DEFAULT_REGION": REGION,
            "AWS_ENDPOINT_URL_SQS": self.url, "AWS_EC2_METADATA_DISABLED": "true", "PENSTOCK_AWS_REGION": REGION,
            "PENSTOCK_SQS_ENDPOINT_URL": self.url, "PENSTOCK_PAYLOAD_S3_ENDPOINT_URL": self.url,
            "PENSTOCK_PAYLOAD_BUCKET": f"s3://{BUCKET}",
        }  # fmt: skip

    async def _call(self, request: web.Request) -> web.Response:
        body = await request.read()
        operation = request.headers.get("X-Amz-Target", "").rpartition(".")[2]
        call = json.loads(body)
        traffic = self.traffic[str(call.get("QueueUrl", "")).rpartition("/")[2]]
        is_send = operation.startswith("SendMessage")
        if is_send and traffic.refuses:
            traffic.refused += 1
            refusal = {"__type": "com.amazonaws.sqs#ServiceUnavailable", "message": "refused for a check"}
            return web.json_response(refusal, status=503, content_type="application/x-amz-json-1.0")
        if not is_send:  # a deletion counts from when it is asked for
            traffic.note(operation, call, {})
        headers = {name: value for name, value in request.headers.items() if name.lower() != "content-length"}
        async with self._session.post(f"{self.sqs.url}{request.path}", data=body, headers=headers) as reply:
            answer = await reply.read()
            if reply.status == 200 and (is_send or operation == "ReceiveMessage"):
                traffic.note(operation, call, json.loads(answer))
            passed = {name: value for name, value in reply.headers.items() if name.lower() not in _OWN_HEADERS}
            return web.Response(status=reply.status, body=answer, headers=passed)

    async def _object(self, request: web.Request) -> web.Response:
        data = self.objects.get(request.path.removeprefix(f"/{BUCKET}/"))
        if data is None:
            return web.Response(
                status=404, text="<Error><Code>NoSuchKey</Code></Error>", content_type="application/xml"
            )
        return web.Response(body=data, headers={"ETag": '"1"'})
