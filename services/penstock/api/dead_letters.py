"""Dead-letter queues: counted, looked at, sent again, emptied.

SQS cannot be browsed, so a look is a receive; see :mod:`penstock.api.dead_letter_browser`. A message leaves its
dead-letter queue only after it was sent again, so a replay that is cut off is repeated in part, and a
repeated replay is harmless:

- inbound: the message carries its first id, by whose receipt the submitter knows it;
- outbound: what still has its claim is sent again, what has not is dropped, since its results would be ignored;
- results: the claim, once more, decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, get_args

import msgspec

from penstock.api.dead_letter_browser import Hold, hold, queue_away
from penstock.api.message_contents import Contents, Entry, find_current, find_states, find_tasks, is_current
from penstock.api.message_views import (
    DeadEntry,
    DeadLetterQueue,
    DeadLetterQueues,
    DeadMessage,
    DeadMessageDetail,
    DeadMessages,
    DeadPurged,
    DeadReplayed,
    NotReplayed,
)
from penstock.brokers.base import ORIGINAL_ID_ATTRIBUTE, Message, Outgoing, Queue
from penstock.db.notify import Notifier
from penstock.db.pool import Store
from penstock.db.session import Session
from penstock.methods.inbound import accept_inbound, read_inbound, take_in
from penstock.protocol.errors import MessageNotFound, Refused, Unavailable
from penstock.protocol.json_text import utf8_size
from penstock.protocol.views import timestamp
from penstock.runtime.logs import get_logger
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX
from penstock.settings.model import Settings
from penstock.tasks import enqueue
from penstock.tasks.commands import ListDead, PurgeDead, ReplayDead, ShowDead
from penstock.tasks.params import QueueName
from penstock.tasks.records import Pair

_QUEUES: tuple[Literal["inbound", "outbound", "results"], ...] = get_args(QueueName)
_FIRST_SHOWN = 3
_RECEIPT_SHARE = 0.95  # of its retention after which a receipt is no longer counted on, for clocks that differ

log = get_logger()


class DeadLetters:
    """What operators do with dead-letter queues.

    session: opens a session for reading. queues: the three queues by label; dead_letters: their dead-letter queues by
    label and suffix. Every method raises QueueAway for a queue that is missing there, or cannot be used, and
    Unavailable while Postgres is away.
    """

    def __init__(
        self,
        *,
        store: Store,
        session: Callable[[], AbstractAsyncContextManager[Session]],
        notifier: Notifier,
        queues: Mapping[str, Queue],
        dead_letters: Mapping[str, Queue],
        settings: Settings,
    ) -> None:
        self._store = store
        self._session = session
        self._notifier = notifier
        self._queues = queues
        self._dead = {label.removesuffix(DEAD_LETTER_SUFFIX): queue for label, queue in dead_letters.items()}
        self._settings = settings

    async def count(self) -> DeadLetterQueues:
        """How much is in each; one that cannot be used keeps no other from being counted."""
        counted = []
        for label in _QUEUES:
            try:
                depth = await self._dead_queue(label).depth()
            except Unavailable as exc:
                queue_away(label + DEAD_LETTER_SUFFIX, str(exc))
                counted.append(DeadLetterQueue(label, None, None))
            else:
                counted.append(DeadLetterQueue(label, depth.total, depth.in_flight))
        return DeadLetterQueues(counted)

    async def browse(self, command: ListDead) -> DeadMessages:
        """Some messages, in no order."""
        shown: list[DeadMessage] = []
        async with hold(self._dead_queue(command.queue)) as held:
            while len(shown) < command.limit and (messages := await held.take()):
                shown += await self._describe(command.queue, messages)
        return DeadMessages(shown[: command.limit], held.seen, held.total, held.elsewhere)

    async def show(self, command: ShowDead) -> DeadMessageDetail:
        """One message whole, with what its tasks are now. Raises MessageNotFound."""
        async with hold(self._dead_queue(command.queue)) as held:
            while messages := await held.take():
                for message in messages:
                    if message.id == command.id:
                        return await self._describe_whole(command.queue, message)
        raise MessageNotFound(command.id, f"in {command.queue}{DEAD_LETTER_SUFFIX}: {_how_far(held)}")

    async def replay(self, command: ReplayDead) -> DeadReplayed:
        """Send messages again and take them from the dead-letter queue."""
        dead, queue = self._dead_queue(command.queue), self._queue(command.queue)
        done = _Done()
        async with hold(dead) as held:
            while wanted := await _next(held, command.which, done.handled, done.replayed + done.dropped):
                await self._replay(command, wanted, queue, held, done)
        unknown = _unknown(command.which, done.handled)
        if done.added:
            self._notifier.wake()
        log.info(
            "dead_letters_replayed", queue=command.queue, replayed=done.replayed, dropped=done.dropped,
            entries=done.entries, stale=done.stale, left=len(done.left),
        )  # fmt: skip
        return DeadReplayed(
            done.replayed, done.dropped, done.entries, done.stale, done.left, unknown, held.seen, held.total
        )

    async def purge(self, command: PurgeDead) -> DeadPurged:
        """Delete messages for good."""
        handled: set[str] = set()
        purged = 0
        async with hold(self._dead_queue(command.queue)) as held:
            while messages := await _next(held, command.which, handled, purged):
                handled |= {message.id for message in messages}
                purged += len(messages) - len(await held.remove(messages))
        log.info("dead_letters_purged", queue=command.queue, purged=purged)
        return DeadPurged(purged, _unknown(command.which, handled), held.seen, held.total)

    def _dead_queue(self, label: str) -> Queue:
        return _found(self._dead, label, label + DEAD_LETTER_SUFFIX)

    def _queue(self, label: str) -> Queue:
        return _found(self._queues, label, label)

    # Looking

    async def _describe(self, label: str, messages: Sequence[Message]) -> list[DeadMessage]:
        contents = [Contents(label, message, self._settings) for message in messages]
        firsts = [content.entries(_FIRST_SHOWN) for content in contents]
        entries = firsts if label == "inbound" else [content.entries() for content in contents]
        async with self._session() as session:
            current = await find_current(session, [entry for some in entries for entry in some])
            accepted = await self._find_accepted(session, label, messages)
        return [
            DeadMessage(**_summary(label, message, content, first, every, current, accepted))
            for message, content, first, every in zip(messages, contents, firsts, entries, strict=True)
        ]

    async def _describe_whole(self, label: str, message: Message) -> DeadMessageDetail:
        content = Contents(label, message, self._settings)
        entries = content.entries()
        async with self._session() as session:
            current = await find_current(session, entries)
            accepted = await self._find_accepted(session, label, [message])
            tasks = await find_tasks(session, entries)
            ids = [entry.task_id if entry.key is None else tasks.get(entry.key) for entry in entries]
            states = await find_states(session, (task_id for task_id in ids if task_id is not None))
        return DeadMessageDetail(
            **_summary(label, message, content, entries[:_FIRST_SHOWN], entries, current, accepted),
            body=message.body,
            attributes=dict(message.attributes),
            contents=[
                DeadEntry(
                    entry.what,
                    task_id,
                    entry.claim,
                    None if task_id is None else states.get(task_id),
                    is_current(entry, current),
                    entry.problem,
                )
                for entry, task_id in zip(entries, ids, strict=True)
            ],
        )

    async def _find_accepted(self, session: Session, label: str, messages: Sequence[Message]) -> dict[str, bool | None]:
        """By message id, whether an inbound message was accepted before; None where its receipt may be gone."""
        if label != "inbound":
            return {}
        ids = [message.original_id for message in messages]
        receipts = {row["message_id"] for row in await session.fetch("find_receipts", ids)}
        kept = timedelta(seconds=self._settings.retention_receipts_seconds * _RECEIPT_SHARE)
        horizon: datetime = await session.value("read_clock") - kept
        return {
            message.id: True if message.original_id in receipts else False if _sent_after(message, horizon) else None
            for message in messages
        }

    # Sending again

    async def _replay(
        self, command: ReplayDead, messages: Sequence[Message], queue: Queue, held: Hold, done: _Done
    ) -> None:
        """Of a few messages, send what is worth it, and remove those of which everything was sent."""
        async with self._session() as session:
            if command.queue == "inbound":
                accepted = await self._find_accepted(session, command.queue, messages)
                parcels = [
                    _inbound_parcel(message, self._count(command.queue, message), accepted[message.id], command.force)
                    for message in messages
                ]
            elif command.queue == "outbound":
                contents = [Contents(command.queue, message, self._settings) for message in messages]
                entries = [content.entries() for content in contents]
                current = await find_current(session, [entry for some in entries for entry in some])
                parcels = [
                    _outbound_parcel(message, content, some, current)
                    for message, content, some in zip(messages, contents, entries, strict=True)
                ]
            else:
                parcels = [
                    _Parcel(
                        message,
                        [Outgoing(message.body, message.attributes, message.group)],
                        entries=self._count(command.queue, message),
                    )
                    for message in messages
                ]
        unsent = await self._send(queue, parcels, done)
        finished = [parcel for parcel in parcels if parcel.obstacle is None and parcel.message.id not in unsent]
        undeleted = {message.id for message in await held.remove([parcel.message for parcel in finished])}
        for parcel in parcels:
            message_id = parcel.message.id
            done.handled.add(message_id)
            reason = parcel.obstacle or unsent.get(message_id)
            if reason is not None:
                done.left.append(NotReplayed(message_id, reason))
                continue
            done.entries += parcel.entries
            done.stale += parcel.stale
            if message_id in undeleted:
                done.left.append(
                    NotReplayed(message_id, "sent again, but could not be deleted here: replay it once more")
                )
            elif parcel.outgoing:
                done.replayed += 1
            else:
                done.dropped += 1

    async def _send(self, queue: Queue, parcels: Sequence[_Parcel], done: _Done) -> dict[str, str]:
        """Send; returns, by message id, why not everything of a message went."""
        owners = [parcel for parcel in parcels if parcel.obstacle is None for _ in parcel.outgoing]
        sent = [outgoing for parcel in parcels if parcel.obstacle is None for outgoing in parcel.outgoing]
        report = await queue.send(sent)
        unsent: dict[str, str] = {}
        for position in report.failed:
            message = owners[position].message
            if position not in report.refused:
                unsent[message.id] = "the queue did not take it: try again later"
            elif queue.label == "inbound" and await self._accept_here(message):
                done.added = True
            else:
                unsent[message.id] = "the queue will never take it: purge it once you have seen it"
        return unsent

    def _count(self, label: str, message: Message) -> int:
        return len(Contents(label, message, self._settings).texts)

    async def _accept_here(self, message: Message) -> bool:
        """Do the submitter's work on a message too full to carry its first id as well."""
        inbound = read_inbound(message.body, self._settings)
        await take_in(inbound, self._store.codec, self._settings, self._store.session)
        try:
            async with self._store.transaction() as session:
                if await enqueue.record_receipts(session, [message.original_id]):
                    await accept_inbound(session, inbound, self._settings, source="replay")
                    await enqueue.insert_rejected(session, "inbound", inbound.refused)
        except Refused as exc:
            log.warning("message_refused", message_id=message.id, reason=str(exc))
            return False
        return True


@dataclass(frozen=True, slots=True)
class _Parcel:
    """A dead message and what is to be sent of it. ``obstacle``: why it stays where it is."""

    message: Message
    outgoing: Sequence[Outgoing] = ()
    entries: int = 0
    stale: int = 0
    obstacle: str | None = None


@dataclass(slots=True)
class _Done:
    """A replay so far. ``handled``: ids of the messages dealt with. ``added``: tasks were added by this process."""

    replayed: int = 0
    dropped: int = 0
    entries: int = 0
    stale: int = 0
    added: bool = False
    left: list[NotReplayed] = field(default_factory=list)
    handled: set[str] = field(default_factory=set)


def _inbound_parcel(message: Message, entries: int, accepted: bool | None, force: bool) -> _Parcel:
    if accepted:
        return _Parcel(message)
    if accepted is None and not force:
        return _Parcel(
            message,
            obstacle="it is older than receipts are kept, so its tasks may have been added before: force sends it",
        )
    attributes = {**message.attributes, ORIGINAL_ID_ATTRIBUTE: message.original_id}
    return _Parcel(message, [Outgoing(message.body, attributes, message.group)], entries=entries)


def _outbound_parcel(message: Message, content: Contents, entries: Sequence[Entry], current: set[Pair]) -> _Parcel:
    """Each entry that still counts, in a message of its own: one of them may have killed its workers."""
    problem = content.problem or next((entry.problem for entry in entries if entry.problem is not None), None)
    if problem is not None:
        return _Parcel(message, obstacle=f"it holds what no worker understands ({problem}): purge it")
    outgoing = [
        Outgoing(_text(text), message.attributes, message.group)
        for text, entry in zip(content.texts, entries, strict=True)
        if is_current(entry, current)
    ]
    return _Parcel(message, outgoing, entries=len(outgoing), stale=len(entries) - len(outgoing))


def _text(entry: str | msgspec.Raw) -> str:
    return entry if isinstance(entry, str) else bytes(entry).decode("utf-8")


async def _next(held: Hold, which: Sequence[str] | int, handled: set[str], gone: int) -> list[Message]:
    """Messages to deal with next: of the ids that are left, or so many that no more than the number will be gone."""
    if isinstance(which, int):
        messages = await held.take() if gone < which else []
        return messages[: which - gone]
    left = set(which) - handled
    while left and (messages := await held.take()):
        wanted = [message for message in messages if message.id in left]
        if wanted:
            return wanted
    return []


def _unknown(which: Sequence[str] | int, handled: set[str]) -> list[str]:
    return [] if isinstance(which, int) else [wanted for wanted in dict.fromkeys(which) if wanted not in handled]


def _how_far(held: Hold) -> str:
    elsewhere = f", {held.elsewhere} of them held by somebody else" if held.elsewhere else ""
    return f"{held.seen} of about {held.total} were looked at{elsewhere}"


def _found(queues: Mapping[str, Queue], label: str, name: str) -> Queue:
    queue = queues.get(label)
    if queue is None:
        raise queue_away(name, "the api was started without it")
    return queue


def _sent_after(message: Message, instant: datetime) -> bool:
    return message.sent_at is not None and datetime.fromtimestamp(message.sent_at, UTC) > instant


def _summary(
    label: str,
    message: Message,
    content: Contents,
    first: Sequence[Entry],
    entries: Sequence[Entry],
    current: set[Pair],
    accepted: Mapping[str, bool | None],
) -> dict[str, Any]:
    """The members of a DeadMessage."""
    standing = [] if label == "inbound" else [is_current(entry, current) for entry in entries]
    problem = content.problem or next((entry.problem for entry in first if entry.problem is not None), None)
    return {
        "id": message.id,
        "sent_at": None if message.sent_at is None else timestamp(datetime.fromtimestamp(message.sent_at, UTC)),
        "receives": message.receive_count,
        "bytes": utf8_size(message.body),
        "entries": len(content.texts),
        "first": [entry.shown for entry in first],
        "current": None if label == "inbound" else standing.count(True),
        "stale": None if label == "inbound" else standing.count(False),
        "accepted": accepted.get(message.id),
        "problem": problem,
    }
