"""A worker program at two queues of its own, and the endpoint that it talks to, which records its calls."""

import asyncio
import itertools
import json
import os
import secrets
import shlex
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

import aiohttp
from aiohttp import web

from penstock.brokers.sqs import SqsTransport
from penstock.local.children import Child, Output
from penstock.local.service import HOST, open_log
from penstock.local.sqs import REGION, EmbeddedSqs
from penstock.payloads.codec import PayloadCodec, aad_of
from penstock.protocol.errors import METHOD_NOT_FOUND, PayloadLost, StackError
from penstock.protocol.fence import ClaimKey, Fence
from penstock.protocol.message_attributes import WORKER_ATTRIBUTE
from penstock.protocol.reports import Failed, Succeeded, Suspended, Waiting, decode_reports
from penstock.protocol.requests import encode_call, join_batch
from penstock.settings.model import Settings, load_settings
from penstock.settings.payload_texts import new_key

BUCKET = "payloads"
_OWN_HEADERS = {"connection", "content-length", "transfer-encoding", "content-encoding", "date", "server"}


class Reported(NamedTuple):
    """A decoded entry that the results queue accepted, and when by the monotonic clock."""

    report: Any  # a Report; checks choose by its class
    seconds: float


class Traffic:
    """What a program has done with its two queues."""

    def __init__(self) -> None:
        self.fence = Fence([ClaimKey(secrets.token_bytes(16))])
        # The operation, a message's id and the time; a visibility timeout of 0 is the operation `release`.
        self.calls: list[tuple[str, str, float]] = []
        self.reported: list[Reported] = []
        self.refuses = False  # whether the results queue does
        self.refused = 0  # how often it has
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
                reports = decode_reports(entry["MessageBody"], batch_limit=10_000, worker=named, fence=self.fence)
                self.reported += [Reported(report, now) for report in reports]
            elif "ReceiptHandle" in entry:
                ends = "delete" if operation.startswith("DeleteMessage") else "release"
                name = "extend" if entry.get("VisibilityTimeout") else ends
                self.calls.append((name, self._messages.get(entry["ReceiptHandle"], ""), now))


class Endpoint(AsyncExitStack):
    """SQS, and S3's GetObject for one bucket, on one port. Calls are passed on with the Host that they came under,
    which queue URLs are made of. Programs must speak SQS's JSON protocol, as the SDKs of AWS do since 2023."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.sqs = EmbeddedSqs(folder)
        self.payload_key = new_key()
        self.codec = PayloadCodec(load_settings(payload_keys=[self.payload_key], payload_bucket=None))
        self.objects: dict[str, bytes] = {}
        self.url = ""
        self.traffic: defaultdict[str, Traffic] = defaultdict(Traffic)  # by queue
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        await self.sqs.start_async()
        self.callback(self.sqs.stop)
        self._session = await self.enter_async_context(aiohttp.ClientSession())
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_post("/{path:.*}", self._call)
        app.router.add_get("/{path:.*}", self._object)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        self.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, HOST, 0).start()
        self.url = f"http://{HOST}:{runner.addresses[0][1]}"
        return self

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
            raise web.HTTPNotFound(text="<Error><Code>NoSuchKey</Code></Error>", content_type="application/xml")
        return web.Response(body=data, headers={"ETag": '"1"'})


VISIBILITY_SECONDS, HEARTBEAT_SECONDS, GRACE_SECONDS = 4, 1, 5
_STARTS = 20  # of one program, before it is given up
_task_ids = itertools.count(1)


class Broken(Exception):
    """A rule that the program does not keep, and how that was seen."""


class Unsupported(Exception):
    """A feature that the program does not have."""


class Task(NamedTuple):
    """A task in the outbound queue. text: of its request."""

    task_id: int
    claim: int
    text: str


class Sent(NamedTuple):
    message_id: str
    tasks: Sequence[Task]


class Station:
    """A program, its two queues and its log. timeout: seconds for anything that a check waits for."""

    def __init__(self, endpoint: Endpoint, name: str, command: str, timeout: float) -> None:
        self.endpoint = endpoint
        self.traffic = endpoint.traffic[f"{name}-results"] = endpoint.traffic[f"{name}-outbound"]
        self._name, self._timeout = name, timeout
        self._log_path = endpoint.sqs.data_dir / f"{name}.log"
        self._program = Child(name, shlex.split(command), {}, 0)
        settings = {
            "sqs_endpoint_url": endpoint.sqs.url, "sqs_access_key": f"{endpoint.sqs.access_key_id}:-",
            "aws_region": REGION, "sqs_client": "sdk", "visibility_timeout_seconds": VISIBILITY_SECONDS,
            "receive_wait_seconds": 0,
        }  # fmt: skip
        self._transport = SqsTransport(Settings.model_validate(settings))
        self._outbound_url = ""
        self._running: asyncio.Task[None]
        self._stopping = False

    async def __aenter__(self) -> Self:
        urls = await self._transport.make_queues({label: f"{self._name}-{label}" for label in ("outbound", "results")})
        self._outbound_url = urls["outbound"]
        key, here = self.endpoint.sqs.access_key_id, self.endpoint.url
        seen = {label: url.replace(self.endpoint.sqs.url, here) for label, url in urls.items()}
        # Where the endpoint is, for Penstock's workers and for AWS's SDKs.
        self._program.env = {
            **os.environ,
            "AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": key, "AWS_REGION": REGION, "AWS_DEFAULT_REGION": REGION,
            "AWS_ENDPOINT_URL_SQS": here, "AWS_EC2_METADATA_DISABLED": "true", "PENSTOCK_AWS_REGION": REGION,
            "PENSTOCK_SQS_ENDPOINT_URL": here, "PENSTOCK_PAYLOAD_S3_ENDPOINT_URL": here,
            "PENSTOCK_PAYLOAD_BUCKET": f"s3://{BUCKET}", "PENSTOCK_PAYLOAD_KEYS": self.endpoint.payload_key,
            "PENSTOCK_OUTBOUND_QUEUE": seen["outbound"], "PENSTOCK_RESULTS_QUEUE": seen["results"],
            "PENSTOCK_VISIBILITY_TIMEOUT_SECONDS": str(VISIBILITY_SECONDS),
            "PENSTOCK_HEARTBEAT_SECONDS": str(HEARTBEAT_SECONDS), "PENSTOCK_GRACE_SECONDS": str(GRACE_SECONDS),
        }  # fmt: skip
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        self.kill()
        await asyncio.wait([self._running])
        await self._transport.close()

    # The program

    def start(self) -> None:
        """Start the program, and again whenever it ends on its own, as a supervisor of processes does."""
        self._stopping = False
        self._running = asyncio.create_task(self._run(), name=f"program-{self._name}")

    async def _run(self) -> None:
        for _ in range(_STARTS):
            with open_log(self._log_path) as log:
                try:
                    await self._program.run_once(Output(log, colour=False), lambda: None)
                except OSError as exc:
                    raise StackError(f"{self._program.command[0]} cannot be started: {exc.strerror}") from None
            if self._stopping:
                return
            await asyncio.sleep(0.3)
        raise StackError(f"the worker ended {_STARTS} times; its output is in {self._log_path}")

    def kill(self) -> None:
        """SIGKILL; unless it is stopping, the program is started again."""
        self._program.signal(signal.SIGKILL)

    async def stop(self) -> None:
        """SIGTERM, to the program alone. Raises Broken if it does not end in time, with the exit code 0."""
        self._stopping = True
        self._program.signal(signal.SIGTERM)
        done, _ = await asyncio.wait([self._running], timeout=GRACE_SECONDS + 3)
        if not done:
            self.kill()  # it must take nothing from the one that is started next
            await asyncio.wait([self._running])
            raise Broken(f"it had not ended {GRACE_SECONDS + 3} s after SIGTERM")
        if (code := self._program.exit_codes[-1]) != 0:
            raise Broken(f"after SIGTERM it ended with the exit code {code} instead of 0")

    # Tasks

    def task(self, action: str, params: Any, *, journal: str | None = None, of: Task | None = None) -> Task:
        """A request. params: JSON, or text that is sealed. of: a task of which this is the next attempt."""
        task_id, claim = (next(_task_ids), 1) if of is None else (of.task_id, of.claim + 1)
        text = params if isinstance(params, str) else json.dumps(params, ensure_ascii=False)
        claim_id = self.traffic.fence.name(task_id, claim)
        return Task(task_id, claim, encode_call(task_id, claim, action, text, claim_id=claim_id, journal=journal))

    async def send(self, *tasks: Task, body: str | None = None, **attributes: str) -> Sent:
        """Send tasks as one message: a batch if there are several. body: instead of theirs."""
        if body is None:
            body = tasks[0].text if len(tasks) == 1 else join_batch([task.text for task in tasks])
        typed = {name: {"DataType": "String", "StringValue": value} for name, value in attributes.items()}
        client = await self._transport.client()
        sent = await client.send_message(QueueUrl=self._outbound_url, MessageBody=body, MessageAttributes=typed)
        return Sent(sent["MessageId"], tasks)

    async def call(self, action: str, params: Any, **attributes: str) -> tuple[Sent, Reported]:
        """Send one task, and wait for the report that ends its attempt."""
        sent = await self.send(self.task(action, params), **attributes)
        return sent, await self.outcome(sent.tasks[0])

    async def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait for something in the traffic; returns what the condition does. Raises Broken after the timeout."""
        deadline = time.monotonic() + self._timeout
        while not (found := condition()):
            if time.monotonic() > deadline:
                raise Broken(f"{what} within {self._timeout:g} s")
            if self._running.done():
                self._running.result()  # raises why the program is not started again
            await asyncio.sleep(0.05)
        return found

    async def received(self, sent: Sent, times: int = 1) -> None:
        await self.until(
            lambda: len(self.traffic.times_of("receive", sent.message_id)) >= times,
            f"its message was not received {times} times",
        )

    async def deleted(self, sent: Sent) -> None:
        """Wait until a message is deleted. Raises Broken if that was before its answers."""
        times = await self.until(
            lambda: self.traffic.times_of("delete", sent.message_id), "the message was answered, and not deleted"
        )
        for task in sent.tasks:
            outcomes = self.outcomes_of(task)
            if not outcomes or outcomes[0].seconds > times[0]:
                raise Broken("the message was deleted before the results queue had the answers")

    def reports_of(self, task: Task, *kinds: type) -> list[Reported]:
        """Reports of these kinds on this attempt of a task, in the order in which the queue accepted them."""
        of_kind = (reported for reported in self.traffic.reported if isinstance(reported.report, kinds))
        return [one for one in of_kind if (one.report.task_id, one.report.claim) == task[:2]]

    def outcomes_of(self, task: Task) -> list[Reported]:
        return self.reports_of(task, Succeeded, Failed, Suspended, Waiting)

    async def outcome(self, task: Task) -> Reported:
        """The first report that ends the attempt."""
        found: list[Reported] = await self.until(lambda: self.outcomes_of(task), "no answer")
        return found[0]

    def succeeded(self, reported: Reported) -> Succeeded:
        """Raises Broken for another outcome, Unsupported for an action that the program does not have."""
        report = reported.report
        if isinstance(report, Succeeded):
            return report
        if not isinstance(report, Failed):
            raise Broken(f"the attempt ended with {type(report).__name__.lower()}")
        error = json.loads(report.error)
        if error["code"] == METHOD_NOT_FOUND:
            raise Unsupported("it has no such action")
        raise Broken(f"it answered with the error {error['code']}: {str(error.get('message'))[:200]}")

    async def expect(self, wanted: Any, reported: Reported) -> None:
        """Raises Broken for another result, Unsupported for an action that the program does not have."""
        succeeded = self.succeeded(reported)
        try:
            value = json.loads(await self.endpoint.codec.load(succeeded.result, aad_of("result", succeeded.task_id)))
        except PayloadLost as exc:
            raise Broken(f"the result cannot be decrypted: {exc}") from None
        if value != wanted:
            raise Broken(f"the result is {json.dumps(value)[:200]} instead of {json.dumps(wanted)[:200]}")
