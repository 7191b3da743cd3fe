"""What happens to messages of the embedded SQS is in a file before the call that did it is answered (decisions/076)."""

import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from ministack.core.persistence import STATE_DIR, save_state
from ministack.services import sqs

_LEAST_BYTES = 16 * 2**20  # of a journal that is replaced by a new snapshot
_KEPT = ("id", "receipt_handle", "visible_at", "receive_count", "first_receive_at")  # what a receive changes
_READS = {"ReceiveMessage", "GetQueueUrl", "GetQueueAttributes", "ListQueues", "ListQueueTags"}
_OF_ITS_MESSAGES = {"messages", "dedup_cache"}  # members of a queue

_collect, _dispatch, _load, _sweep = sqs._collect_msgs, sqs._dispatch, sqs.load_persisted_state, sqs._dlq_sweep


class Journal:
    """The changes since the last snapshot. Nothing is synced: they outlive the process, and not the machine."""

    def __init__(self) -> None:
        Path(STATE_DIR).mkdir(parents=True, exist_ok=True)
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
        for message in messages:
            self._note("changed", {name: message[name] for name in _KEPT})
        return messages

    def _move_to_dead_letters(self, queue: Any) -> None:
        count = len(queue["messages"])
        _sweep(queue)
        if len(queue["messages"]) != count:
            self._note("swept", queue["attributes"]["QueueArn"], time.time())

    async def _carry_out(self, action: str, data: Mapping[str, Any], url: str) -> Any:
        gone = sqs._get_q(data.get("QueueUrl", url)) if action == "DeleteQueue" else None
        answer = await _dispatch(action, data, url)
        entries = data.get("Entries", [data])
        match action:
            case "SendMessage" | "SendMessageBatch":
                ids = {sent["MessageId"] for sent in answer.get("Successful", [answer])}
                queue = sqs._get_q(data.get("QueueUrl", url))
                # A duplicate of a FIFO queue has the id of an older message.
                sent = [message for message in queue["messages"][-len(entries) :] if message["id"] in ids]
                self._note("sent", queue["attributes"]["QueueArn"], sent)
            case "DeleteMessage" | "DeleteMessageBatch":
                self._note("deleted", [entry.get("ReceiptHandle", "") for entry in entries])
            case "ChangeMessageVisibility" | "ChangeMessageVisibilityBatch":
                for entry in entries:
                    until = time.time() + int(entry.get("VisibilityTimeout", 30))
                    self._note("hidden", entry.get("ReceiptHandle", ""), until)
            case "PurgeQueue":
                self._note("purged", sqs._get_q(data.get("QueueUrl", url))["attributes"]["QueueArn"])
            case "DeleteQueue":
                self._note("gone", _key(gone))
            case _ if action not in _READS:
                queue = sqs._get_q(data.get("QueueUrl") or answer.get("QueueUrl") or url)
                self._note("queue", _key(queue), {name: queue[name] for name in queue.keys() - _OF_ITS_MESSAGES})
        self._write()
        return answer

    def _note(self, *change: Any) -> None:
        self._lines.append(msgspec.json.encode(change))

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
        queues = {queue["attributes"]["QueueArn"]: queue for queue in sqs._queues._data.values()}
        messages = _by_id(queues)
        holders = {message["receipt_handle"]: message for message in messages.values()}  # None: was never received
        deleted = set()
        for line in self._path.read_bytes().splitlines():
            try:
                kind, *change = msgspec.json.decode(line)
            except msgspec.DecodeError:  # cut off by a kill before its call was answered, or empty
                continue
            match kind:
                case "queue":
                    key, members = change
                    queue = sqs._queues._data.setdefault(tuple(key), {"messages": [], "dedup_cache": {}})
                    queue |= members
                    queues[members["attributes"]["QueueArn"]] = queue
                case "gone" if queue := sqs._queues._data.pop(tuple(change[0]), None):
                    del queues[queue["attributes"]["QueueArn"]]
                    _empty(queue, messages)
                case "purged" if queue := queues.get(change[0]):
                    _empty(queue, messages)
                case "sent" if queue := queues.get(change[0]):
                    new = {message["id"]: message for message in change[1] if message["id"] not in messages}
                    messages |= new
                    queue["messages"].extend(new.values())
                    if queue["is_fifo"]:
                        _know(queue, new.values())
                case "changed" if message := messages.get(change[0]["id"]):
                    holders.pop(message["receipt_handle"], None)
                    message |= change[0]
                    holders[message["receipt_handle"]] = message
                case "swept" if queue := queues.get(change[0]):
                    at = change[1] if len(change) > 1 else time.time()  # earlier versions noted no time
                    sqs.time = SimpleNamespace(time=partial(float, at))  # what was held then may not be now
                    _sweep(queue)
                    sqs.time = time
                    messages = _by_id(queues)  # what moves is copied
                case "hidden" if message := holders.get(change[0]):
                    message["visible_at"] = change[1]
                case "deleted":
                    deleted |= {holders[handle]["id"] for handle in change[0] if handle in holders}
        for queue in queues.values():
            queue["messages"] = [message for message in queue["messages"] if message["id"] not in deleted]
        sqs._queue_name_to_url.clear()
        sqs._rebuild_queue_name_index()
        self.save()


def _by_id(queues: Mapping[str, Any]) -> dict[str, Any]:
    return {message["id"]: message for queue in queues.values() for message in queue["messages"]}


def _know(queue: Any, sent: Iterable[Mapping[str, Any]]) -> None:
    """Have a FIFO queue recognise duplicates of these, and count on behind them, as if they were sent to it now."""
    for message in sent:
        queue["fifo_seq"] = int(message["seq"])
        queue["dedup_cache"][message["dedup_cache_key"]] = {
            "expire": message["sent_at"] + sqs._DEDUP_WINDOW_S, "id": message["id"], "seq": message["seq"],
        }  # fmt: skip


def _key(queue: Any) -> tuple[Any, ...]:
    """Of a queue among all of every account and region."""
    return *sqs._owner_from_queue_arn(queue["attributes"]["QueueArn"]), queue["url"]


def _empty(queue: Any, messages: dict[str, Any]) -> None:
    for message in queue["messages"]:
        messages.pop(message["id"], None)
    queue["messages"] = []
