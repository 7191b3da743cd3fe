"""The embedded SQS, `python -m penstock.local.sqs_server DESCRIPTOR`, of a listening socket that its parent holds.

ministack's launchers start a second process, which would outlive a killed first one, or listen on every address, and
save messages only on a graceful stop. Here each change is in a file before its call is answered (decisions/076).
"""

import asyncio
import hmac
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import uvicorn
from ministack.core.persistence import STATE_DIR, save_state
from ministack.services import sqs
from starlette.responses import JSONResponse

from penstock.local.sqs import ACCESS_KEY_ID, HEALTH, REGION
from penstock.runtime.loop_thread import new_loop

# Browsers send at least one of these with what a page asks for; no SDK sends any.
_OF_BROWSERS = (b"origin", b"referer", b"sec-fetch-site")
_LOOPBACK = re.compile(rb"(?:localhost|127(?:\.\d{1,3}){3}|\[::1\])(?::\d{1,5})?", re.IGNORECASE)
_CREDENTIAL = re.compile(rb"AWS4-HMAC-SHA256 Credential=([^/,\s]+)/")
_LEAST_BYTES = 16 * 2**20  # of a journal that is replaced by a new snapshot
_KEPT = ("receipt_handle", "visible_at", "receive_count", "first_receive_at")  # what a receive changes
_READS = {"ReceiveMessage", "GetQueueUrl", "GetQueueAttributes", "ListQueues", "ListQueueTags"}
_OF_MESSAGES = ("SendMessage", "ChangeMessageVisibility", "DeleteMessage", "PurgeQueue", "DeleteQueue")

_collect, _dispatch, _load, _sweep = sqs._collect_msgs, sqs._dispatch, sqs.load_persisted_state, sqs._dlq_sweep


class GuardedApp:
    """An ASGI app that answers 403 to requests of web pages, of other hosts' names, without the access key id, or for
    ministack's own paths, which read and reset everything; of these only the health check is let through."""

    def __init__(self, app: Any, access_key_id: str) -> None:
        self._app = app
        self._access_key_id = access_key_id.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":  # which SQS has not
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] == "http" and (refusal := self._refusal(scope)) is not None:
            code, message = refusal
            answer = {"__type": f"com.amazonaws.sqs#{code}", "message": message}
            await JSONResponse(answer, 403, media_type="application/x-amz-json-1.0")(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Any) -> tuple[str, str] | None:
        headers = dict(scope["headers"])
        if any(name in headers for name in _OF_BROWSERS):
            return "AccessDeniedException", "the embedded SQS does not serve web pages"
        if not _LOOPBACK.fullmatch(headers.get(b"host", b"")):
            return "AccessDeniedException", "the embedded SQS is served under loopback names only"
        found = _CREDENTIAL.match(headers.get(b"authorization", b""))
        if found is None or not hmac.compare_digest(found[1], self._access_key_id):
            return (
                "InvalidClientTokenId",
                "the embedded SQS takes the access key of its own start only: `penstock env` prints it",
            )
        if scope["path"].startswith("/_") and scope["path"] != HEALTH:
            return "AccessDeniedException", f"of the emulator's own paths only {HEALTH} is served"
        return None


class SqsApp:
    """ministack's ASGI app, whose long polls end when a message is sent, or their caller leaves."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._sent = asyncio.get_running_loop().create_future()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        target: bytes = dict(scope.get("headers", ())).get(b"x-amz-target", b"")
        if target.endswith(b"ReceiveMessage"):
            await self._receive(scope, receive, send)
            return
        await self._app(scope, receive, send)
        if target.endswith((b"SendMessage", b"SendMessageBatch", b"ChangeMessageVisibilityBatch")):
            self._sent.set_result(None)
            self._sent = asyncio.get_running_loop().create_future()  # those who wait hold the old one

    async def until_sent(self, seconds: float) -> None:
        """The pause of a long poll between two looks for messages, some of which become visible by time."""
        await asyncio.wait((self._sent,), timeout=seconds)

    async def _receive(self, scope: Any, receive: Any, send: Any) -> None:
        """A call whose caller leaves is cancelled: what it would have received is left for others."""
        events = [await receive()]
        while events[-1].get("more_body"):
            events.append(await receive())

        async def receive_body() -> Any:
            return events.pop(0)

        answering, leaving = asyncio.create_task(self._app(scope, receive_body, send)), asyncio.create_task(receive())
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.wait((answering, leaving))
        if not answering.cancelled():
            answering.result()


def _read_json(text: str | bytes) -> Any:
    with suppress(ValueError):
        return msgspec.json.decode(text)
    return json.loads(text)  # half a surrogate pair, say, to which ministack has an answer of its own


class Journal:
    """The changes since the last snapshot. Nothing is synced: they outlive the process, and not the machine."""

    def __init__(self) -> None:
        self._snapshot = Path(STATE_DIR, "sqs.json")
        self._path = Path(STATE_DIR, "sqs.journal")
        self._file = self._path.open("ab")
        self._lines: list[bytes] = []
        if not self._snapshot.exists():  # ministack loads none otherwise
            self.save()

    def attach(self) -> None:
        """Have ministack's SQS note what it does, and repeat what is noted once it has loaded its file."""
        sqs._collect_msgs, sqs._dispatch, sqs.load_persisted_state = self._receive, self._carry_out, self._restore
        sqs._dlq_sweep = self._move_to_dead_letters

    def _receive(self, queue: Any, most: int, visibility_timeout: int) -> Any:
        messages = _collect(queue, most, visibility_timeout)
        self._note_messages(queue, {message["id"]: {name: message[name] for name in _KEPT} for message in messages})
        return messages

    def _move_to_dead_letters(self, queue: Any) -> None:
        before = queue["messages"]
        _sweep(queue)
        if gone := self._note_gone(queue, before):
            policy = json.loads(queue["attributes"]["RedrivePolicy"])
            dead = sqs._queue_by_arn(policy["deadLetterTargetArn"])
            self._note_messages(dead, {message["id"]: message for message in dead["messages"][-gone:]})

    async def _carry_out(self, action: str, data: Mapping[str, Any], url: str) -> Any:
        queue: Any = sqs._get_q(data.get("QueueUrl", url)) if action.startswith(_OF_MESSAGES) else None
        before = [] if queue is None else [*queue["messages"]]
        answer = await _dispatch(action, data, url)
        match action.removesuffix("Batch"):
            case "SendMessage":  # without the duplicates of a FIFO queue
                self._note_messages(queue, {message["id"]: message for message in queue["messages"][len(before) :]})
            case "ChangeMessageVisibility":
                handles = {entry.get("ReceiptHandle", "") for entry in data.get("Entries", [data])}
                held = [message for message in before if message["receipt_handle"] in handles]
                self._note_messages(queue, {message["id"]: {"visible_at": message["visible_at"]} for message in held})
            case "DeleteMessage" | "PurgeQueue":
                self._note_gone(queue, before)
            case "DeleteQueue":
                self._note_queue(queue, None)
            case _ if action not in _READS:
                queue = sqs._get_q(data.get("QueueUrl") or answer.get("QueueUrl") or url)
                self._note_queue(queue, {name: queue[name] for name in queue.keys() - {"messages", "dedup_cache"}})
        self._write()
        return answer

    def _note_gone(self, queue: Any, before: Sequence[Mapping[str, Any]]) -> int:
        """Note which of the queue's messages are there no more; returns their number."""
        if len(before) == len(queue["messages"]):
            return 0
        left = {message["id"] for message in queue["messages"]}
        gone = [message["id"] for message in before if message["id"] not in left]
        self._note_messages(queue, dict.fromkeys(gone))
        return len(gone)

    def _note_messages(self, queue: Any, changes: Mapping[str, Any]) -> None:
        """By id: a new message whole, members of an old one, None for one that is gone."""
        if changes:
            self._lines.append(msgspec.json.encode(("messages", queue["attributes"]["QueueArn"], changes)))

    def _note_queue(self, queue: Any, members: Mapping[str, Any] | None) -> None:
        """Its members without the messages; None if it is gone."""
        arn = queue["attributes"]["QueueArn"]
        key = *sqs._owner_from_queue_arn(arn), queue["url"]  # among the queues of every account and region
        self._lines.append(msgspec.json.encode(("queue", arn, key, members)))

    def _write(self) -> None:
        if self._lines:
            # The line before may have been cut off by a kill.
            self._file.write(b"\n".join((b"", *self._lines, b"")))
            self._lines.clear()
            self._file.flush()
            size = self._snapshot.stat().st_size if self._snapshot.exists() else 0
            if self._file.tell() > max(_LEAST_BYTES, size):
                self.save()

    def save(self) -> None:
        """Write a snapshot, and empty the journal."""
        before = self._written()
        save_state("sqs", sqs.get_state())
        if self._written() != before:  # a failure is in ministack's log alone
            self._file.seek(0)
            self._file.truncate()

    def _written(self) -> int | None:
        return self._snapshot.stat().st_ino if self._snapshot.exists() else None

    def _restore(self, state: Any) -> None:
        _load(state)
        all_queues = sqs._queues._data
        queues = {queue["attributes"]["QueueArn"]: queue for queue in all_queues.values()}
        messages = {arn: {message["id"]: message for message in queue["messages"]} for arn, queue in queues.items()}
        for line in self._path.read_bytes().splitlines():
            try:
                change = msgspec.json.decode(line)
            except msgspec.DecodeError:  # cut off by a kill before its call was answered, or empty
                continue
            match change:
                case ["queue", arn, key, None]:
                    for known, name in ((all_queues, tuple(key)), (queues, arn), (messages, arn)):
                        known.pop(name, None)
                case ["queue", arn, key, members]:
                    queues[arn] = all_queues.setdefault(tuple(key), {"dedup_cache": {}})
                    queues[arn] |= members
                    messages.setdefault(arn, {})
                case ["messages", arn, changes] if arn in queues:
                    _change_messages(queues[arn], messages[arn], changes)
        for arn, queue in queues.items():
            queue["messages"] = [*messages[arn].values()]
        sqs._queue_name_to_url.clear()
        sqs._rebuild_queue_name_index()
        self.save()


def _change_messages(queue: Any, messages: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for message_id, change in changes.items():
        if change is None:
            messages.pop(message_id, None)
        elif message_id in messages:
            messages[message_id] |= change
        elif "body" in change:  # it is whole
            messages[message_id] = change
            if queue["is_fifo"] and not change["receive_count"]:  # it is to recognise duplicates, and count on behind
                queue["fifo_seq"] = int(change["seq"])
                queue["dedup_cache"][change["dedup_cache_key"]] = {
                    "expire": change["sent_at"] + sqs._DEDUP_WINDOW_S, "id": message_id, "seq": change["seq"],
                }  # fmt: skip


async def run(listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT; the app then saves everything in its own shutdown."""
    import ministack.app as served

    # Asked about each request to a host with a dot; the real one loads a dozen services, and libraries for them.
    gateway: Any = ModuleType("ministack.services.apigateway_v1")
    gateway.resolve_base_path_mapping = lambda host, path: None
    gateway.get_state = lambda: None
    sys.modules[gateway.__name__] = gateway
    # At its end the app imports this service only to stop it, which costs a second; it takes a failed import lightly.
    sys.modules["ministack.services.transfer"] = None  # type: ignore[assignment]
    served.extract_region = lambda *_: REGION  # calls are signed for the one of the user's S3 and RDS
    app = SqsApp(served.app)
    # ministack looks for messages every 100 ms.
    sqs.asyncio = SimpleNamespace(iscoroutine=asyncio.iscoroutine, sleep=app.until_sent)
    # A call has up to 1 MiB of JSON, in which the standard library and a search spend a third of its time.
    forbidden = sqs._INVALID_SQS_CHARS_RE
    sqs._INVALID_SQS_CHARS_RE = SimpleNamespace(
        search=lambda text: None if text.isprintable() else forbidden.search(text)
    )
    sqs.json = SimpleNamespace(
        loads=_read_json, dumps=lambda value: msgspec.json.encode(value).decode(), JSONDecodeError=json.JSONDecodeError
    )
    Journal().attach()
    guarded = GuardedApp(app, os.environ.pop(ACCESS_KEY_ID))
    # A long poll is not worth waiting for.
    config = uvicorn.Config(
        guarded,
        lifespan="on",
        log_level="warning",
        access_log=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    # The signals are ours: a server asked to stop has done its work and leaves with 0.
    server.capture_signals = nullcontext  # type: ignore[method-assign,assignment]
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, setattr, server, "should_exit", True)
    await server.serve(sockets=[listener])


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run(socket.socket(fileno=int(sys.argv[1]))))
