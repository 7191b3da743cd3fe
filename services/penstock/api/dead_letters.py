"""Dead-letter queues: counted, looked at, sent again, emptied (decisions/010).

A message leaves its dead-letter queue only after it was sent again, and a repeated replay is harmless. What no longer
has its claim is not sent, since its results would be ignored.
"""

import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from time import monotonic
from typing import Annotated, Any, get_args

import msgspec

from penstock.api.context import ApiContext
from penstock.api.params import DlqListParams, DlqShowParams, QueueName, ReplayDead, WhichDead
from penstock.brokers.base import ORIGINAL_ID_ATTRIBUTE, Message, Outgoing, Queue
from penstock.methods.inbound import accept_inbound, is_change, read_inbound, take_in
from penstock.methods.table import API_ONLY, read_command
from penstock.protocol import errors, reports
from penstock.protocol.api_key import Permission
from penstock.protocol.json_text import body_bytes, entry_text
from penstock.protocol.message_attributes import worker_of
from penstock.protocol.method import NoParams, Scope, method
from penstock.protocol.record import Record
from penstock.protocol.requests import Invalid, decode_request, parse_claim_id, split_body
from penstock.protocol.task import NewTask, State
from penstock.protocol.tenant import stored_key
from penstock.protocol.views import about, timestamp
from penstock.runtime.logs import log
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX
from penstock.settings.model import Settings
from penstock.tasks import enqueue, settle
from penstock.tasks.params import CancelParams, RescheduleParams, RetryParams

LEASE_SECONDS = 60  # until a message comes back if this process dies
LOOK_SECONDS = 12.0  # of one call to the api, well within what its caller waits and what a message is held


@dataclass(slots=True)
class LeasedMessages:
    """Messages that only this caller sees until the block of :func:`_lease` ends.

    ``total`` and ``elsewhere``: messages in the queue, and those of them held by others, as counted at the beginning
    where the queue counts them; its counts are approximate. ``held``: messages taken and not removed, by id.
    """

    _queue: Queue
    _total: int
    elsewhere: int
    held: dict[str, Message] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    _ends_at: float = field(default_factory=lambda: monotonic() + LOOK_SECONDS)

    @property
    def seen(self) -> int:
        return len(self.held) + len(self.removed)

    @property
    def total(self) -> int:
        return max(self._total, self.seen + self.elsewhere)

    async def take(self) -> list[Message]:
        """A few messages not seen before; none at the end of the queue or of the time. Raises QueueAway."""
        while monotonic() < self._ends_at:
            with _reported(self._queue.label):
                # A wait makes SQS ask all its servers; without one it may say that there is nothing where there is.
                messages = await self._queue.receive(wait_seconds=1, visibility_seconds=LEASE_SECONDS)
            if not messages:
                break
            if again := [message for message in messages if message.id in self.removed]:
                await self._queue.delete(again)  # its first deletion came too late for the queue
            fresh = [message for message in messages if message.id not in self.held.keys() | self.removed]
            left = [message for message in messages if message.id not in self.removed]
            self.held |= {message.id: replace(message, body="") for message in left}  # giving back needs the receipt
            if fresh:
                return fresh
        return []

    async def remove(self, messages: Sequence[Message]) -> None:
        """Delete from the queue; those that could not be deleted are still held."""
        left = await self._queue.delete([self.held[message.id] for message in messages])
        for message_id in {message.id for message in messages} - {message.id for message in left}:
            del self.held[message_id]
            self.removed.add(message_id)

    def not_seen(self, ids: Iterable[str]) -> list[str]:
        return [wanted for wanted in dict.fromkeys(ids) if wanted not in self.held.keys() | self.removed]


@asynccontextmanager
async def _lease(context: ApiContext, queue: QueueName) -> AsyncIterator[LeasedMessages]:
    """Take dead letters of a queue; those not removed are released when the block ends. Raises QueueAway."""
    dead = _queue(context, queue + DEAD_LETTER_SUFFIX)
    with _reported(dead.label):
        depth = await dead.depth()
    leased = LeasedMessages(dead, depth.total, depth.in_flight or 0)
    try:
        yield leased
    finally:
        await dead.release(list(leased.held.values()))


@contextmanager
def _reported(label: str) -> Iterator[None]:
    """Raise QueueAway to the caller for a queue that is unavailable; the reason goes to the log alone."""
    try:
        yield
    except errors.Unavailable as exc:
        reference = secrets.token_hex(8)
        log.warning("queue_away", queue=label, reason=str(exc), ref=reference)
        raise errors.QueueAway(label, reference) from exc


_FIRST_SHOWN = 3
_RECEIPT_SHARE = 0.95  # of its retention after which a receipt is no longer counted on, for clocks that differ
_SHOWN_CHARS = 100
_LATEST_SECONDS = 253_402_300_799  # the end of the year 9999
_NEVER_TAKEN = "the queue will never take it: purge it once you have seen it"
_ONLY_ANSWERS = "it only answers, and a queue has no way back"
_KINDS = {
    reports.Succeeded: "result", reports.SharedResult: "shared_result", reports.Failed: "error",
    reports.Progress: "progress", reports.Waiting: "wait", reports.Stepped: "step", reports.Suspended: "suspend",
    reports.Output: "output", reports.RunTimes: "run_times", reports.Announced: "announce",
}  # fmt: skip


@dataclass(slots=True)
class Entry:
    what: str  # action, method or kind of report
    task_ids: Sequence[int] = ()  # several of a shared result
    claim: int | None = None
    attempt: int | None = None  # instead of the claim, in the legacy result id
    key: tuple[str, str] | None = None  # action and unique key of a task to be added
    problem: str | None = None  # why it is of no use
    current: bool | None = None  # whether its claim or attempt holds a task of it now; None if it names none

    @property
    def task_id(self) -> int | None:
        """Its task, if it has one."""
        return self.task_ids[0] if len(self.task_ids) == 1 else None

    @property
    def shown(self) -> str:
        """A few words for a list."""
        if self.task_id is None:
            return self.what
        claim = "" if self.claim is None else f":{self.claim}"
        return f"{self.what} {self.task_id}{claim}".lstrip()


class Contents:
    """One message: the texts of its entries, of which up to ``limit`` are read.

    accepted: whether an inbound message was accepted before; None where its receipt may be gone, and of other queues.
    outgoing, obstacle: what is sent of it again, and why it stays in its queue.
    """

    def __init__(self, queue: str, message: Message, settings: Settings, limit: int | None) -> None:
        self.queue = queue
        self.message = message
        self.accepted: bool | None = None
        self.outgoing: Sequence[Outgoing] = ()
        self.obstacle: str | None = None
        self._settings = settings
        self._problem: str | None = None
        self.texts: Sequence[str | msgspec.Raw] = []
        try:
            batch_limit = settings.batch_limit if queue == "inbound" else settings.packed_limit
            _, self.texts = split_body(message.body, batch_limit=batch_limit)
        except errors.RpcError as exc:
            self._problem = exc.message
        self.entries = [self._read(text) for text in self.texts[:limit]]

    def problem(self, first: int | None = None) -> str | None:
        """Why the body as a whole is of no use, or one of the first entries."""
        return self._problem or next((entry.problem for entry in self.entries[:first] if entry.problem), None)

    def _read(self, text: str | msgspec.Raw) -> Entry:
        if self.queue == "results":
            report = reports.decode_report(text, bare_ids=True, worker=worker_of(self.message.attributes))
            if isinstance(report, reports.Unreadable):
                return Entry("", problem=report.reason)
            kind = _KINDS[type(report)]
            if isinstance(report, reports.RunTimes | reports.Announced):
                return Entry(kind)
            task_ids = report.task_ids if isinstance(report, reports.SharedResult) else [report.task_id]
            return Entry(kind, task_ids, report.claim, getattr(report, "attempt", None))
        request = decode_request(text, may_be_sealed=self.queue == "outbound")
        if isinstance(request, Invalid):
            return Entry("", problem=request.error.message)
        if self.queue == "inbound":
            return _read_inbound(request.method, bytes(request.params), self._settings)
        action = request.method[:_SHOWN_CHARS]
        try:
            claim_id = parse_claim_id(msgspec.json.decode(bytes(request.id), type=str))
        except ValueError:
            claim_id = None
        if claim_id is None:
            return Entry(action, problem="its id is not <task id>:<claim>")
        return Entry(action, [claim_id.task_id], claim_id.claim)


def _read_inbound(method: str, params: bytes, settings: Settings) -> Entry:
    try:
        command = read_command(method, params, settings)
    except errors.RpcError as exc:
        return Entry(method[:_SHOWN_CHARS], problem=_ONLY_ANSWERS if method.startswith(API_ONLY) else exc.message)
    except Exception:
        log.exception("request_not_read", method=method[:_SHOWN_CHARS])  # it must not hide the others
        return Entry(method[:_SHOWN_CHARS], problem="it cannot be read: the log of the api says why")
    match command:
        case NewTask():
            unique = command.unique_key
            key = None if unique is None else (command.action, stored_key(command.tenant, unique))
            return Entry(command.action, key=key)
        case CancelParams() | RetryParams() | RescheduleParams():
            return Entry(method, [int(command.id)])
    return Entry(method, problem=None if is_change(method, command) else _ONLY_ANSWERS)


async def _read_contents(
    context: ApiContext, queue: str, messages: Iterable[Message], limit: int | None = None
) -> list[Contents]:
    """The contents of messages, up to so many entries of each, with what Postgres knows of them now."""
    settings = context.settings
    contents = [Contents(queue, message, settings, limit) for message in messages]
    if queue == "inbound":  # a request names no claim
        given = [one.message.original_id for one in contents], [one.message.sent_at for one in contents]
        async with context.session() as session:
            kept_seconds = settings.retention_receipts_seconds * _RECEIPT_SHARE
            rows = await session.fetch("find_accepted", *given, kept_seconds)
        for content, row in zip(contents, rows, strict=True):
            content.accepted = row["accepted"]
        return contents
    entries = [entry for content in contents for entry in content.entries]
    if not entries:
        return contents
    async with context.session() as session:
        claims = await settle.read_attempts(
            session, {(one, entry.claim) for entry in entries if entry.claim is not None for one in entry.task_ids}
        )
        attempts = await settle.find_claims(
            session,
            {(one, entry.attempt) for entry in entries if entry.attempt is not None for one in entry.task_ids},
        )
    for entry in entries:
        if entry.claim is not None:
            entry.current = any((one, entry.claim) in claims for one in entry.task_ids)
        elif entry.attempt is not None:
            entry.current = any((one, entry.attempt) in attempts for one in entry.task_ids)
    return contents


class DeadLetterQueue(Record):
    """Approximate counts of one dead-letter queue; null where the api cannot use it."""

    queue: QueueName
    messages: Annotated[int | None, about("All that there are.")]
    held: Annotated[int | None, about("Messages in flight to any reader; null if the queue does not report it.")]


class DeadLetterQueues(Record):
    queues: list[DeadLetterQueue]


class DeadMessage(Record):
    id: str
    sent_at: Annotated[str | None, about("When it was first sent, by the queue's clock.")]
    receives: Annotated[int, about("How often it was received, looks such as this included.")]
    bytes: Annotated[int, about("Of its body.")]
    entries: Annotated[int, about("Requests or responses in it; 0 when it cannot be read.")]
    first: Annotated[list[str], about("The first few of them: action or kind, then task id and claim.")]
    current: Annotated[
        int | None, about("Entries whose claim holds a task now; null for the inbound queue, which has no claims.")
    ]
    stale: Annotated[
        int | None,
        about("Entries whose claim holds no task any more: ignored, except steps and output, which are kept."),
    ]
    accepted: Annotated[
        bool | None,
        about("Inbound: true if it was accepted already, so that a replay adds nothing; null: not known."),
    ]
    problem: Annotated[str | None, about("Why it, or an entry among the first, is of no use.")]


class DeadMessages(Record):
    messages: Annotated[list[DeadMessage], about("In no order: the queue has none.")]
    seen: Annotated[int, about("Messages looked at.")]
    total: Annotated[int, about("Messages in the queue, approximately.")]
    held: Annotated[int, about("Messages in flight to another reader, approximately.")]


class DeadEntry(Record):
    what: Annotated[str, about("The action, the method, or result, error, progress.")]
    task_id: Annotated[
        int | None,
        about(
            "Its task; of a new one with a unique key, the task that has the key; null for a result of several tasks."
        ),
    ]
    claim: int | None
    state: Annotated[State | None, about("The task's state now; null when there is no such task, or several.")]
    current: Annotated[bool | None, about("Whether its claim holds the task now, or one of several.")]
    problem: str | None


class DeadMessageDetail(DeadMessage):
    body: Annotated[str, about("As it came; bytes that are not UTF-8 are written as \\xNN.")]
    attributes: dict[str, str]
    contents: list[DeadEntry]


class NotReplayed(Record):
    id: str
    reason: str


class DeadReplayed(Record):
    replayed: Annotated[int, about("Messages sent again, whole or in part, and gone from the dead-letter queue.")]
    dropped: Annotated[int, about("Messages of which nothing was left to be sent, and gone likewise.")]
    entries: Annotated[int, about("Entries sent again.")]
    stale: Annotated[int, about("Entries left out because their claim holds no task any more.")]
    left: Annotated[list[NotReplayed], about("Messages still in the dead-letter queue, and why.")]
    unknown: Annotated[list[str], about("Ids of no message that was seen.")]
    seen: int
    total: int


class DeadPurged(Record):
    purged: int
    unknown: Annotated[list[str], about("Ids of no message that was seen.")]
    seen: int
    total: int


@method("dlq.stats", permission=Permission.READ, scope=Scope.CLOSED)
async def count(context: ApiContext, _given: NoParams) -> DeadLetterQueues:
    """Count the messages of each dead-letter queue."""
    counted = []
    for label in get_args(QueueName):
        name = label + DEAD_LETTER_SUFFIX
        found: tuple[int | None, int | None] = None, None
        with suppress(errors.QueueAway), _reported(name):
            depth = await _queue(context, name).depth()
            found = depth.total, depth.in_flight
        counted.append(DeadLetterQueue(queue=label, messages=found[0], held=found[1]))
    return DeadLetterQueues(queues=counted)


@method("dlq.list", permission=Permission.READ, scope=Scope.CLOSED, errors=(errors.QueueAway,))
async def list_(context: ApiContext, command: DlqListParams) -> DeadMessages:
    """List messages of a dead-letter queue, with what Postgres knows of them; they stay where they are."""
    shown: list[DeadMessage] = []
    # A request names no claim, so of the inbound queue the first few entries are enough.
    first = _FIRST_SHOWN if command.queue == "inbound" else None
    async with _lease(context, command.queue) as leased:
        while len(shown) < command.limit and (messages := await leased.take()):
            shown += map(_describe, await _read_contents(context, command.queue, messages, first))
    return DeadMessages(messages=shown[: command.limit], seen=leased.seen, total=leased.total, held=leased.elsewhere)


@method("dlq.show", permission=Permission.READ, scope=Scope.CLOSED, errors=(errors.MessageNotFound, errors.QueueAway))
async def show(context: ApiContext, command: DlqShowParams) -> DeadMessageDetail:
    """Show a message of a dead-letter queue whole, with the state of each task in it; it stays in the queue."""
    async with _lease(context, command.queue) as leased:
        while messages := await leased.take():
            for message in messages:
                if message.id == command.id:
                    return await _describe_whole(context, command.queue, message)
    elsewhere = f", {leased.elsewhere} of them held by another caller" if leased.elsewhere else ""
    looked_at = f"{leased.seen} of about {leased.total} were looked at{elsewhere}"
    raise errors.MessageNotFound(command.id, f" in {command.queue}{DEAD_LETTER_SUFFIX}: {looked_at}")


@method("dlq.replay", permission=Permission.ADMIN, scope=Scope.CLOSED, errors=(errors.QueueAway,))
async def replay(context: ApiContext, command: ReplayDead) -> DeadReplayed:
    """Send messages again and take them from the dead-letter queue; doing so twice does nothing twice."""
    queue = _queue(context, command.queue)
    limit = None if command.queue == "outbound" else 0  # what is sent whole need not be read
    counts = Counter(replayed=0, dropped=0, entries=0, stale=0)
    left: list[NotReplayed] = []
    async with _lease(context, command.queue) as leased:
        async for messages in _choose(leased, command):
            contents = await _read_contents(context, command.queue, messages, limit)
            for content in contents:
                content.outgoing, content.obstacle = _plan(content, force=command.force)
            await _send(context, queue, contents)
            sent = [content for content in contents if content.obstacle is None]
            await leased.remove([content.message for content in sent])
            for content in sent:
                stale = sum(not entry.current for entry in content.entries)
                counts.update(entries=len(content.texts) - stale if content.outgoing else 0, stale=stale)
                if content.message.id in leased.held:
                    content.obstacle = "sent again, but could not be deleted here: replay it once more"
                else:
                    counts["replayed" if content.outgoing else "dropped"] += 1
            left += [
                NotReplayed(id=one.message.id, reason=one.obstacle) for one in contents if one.obstacle is not None
            ]
    log.info("dead_letters_replayed", queue=command.queue, **counts, left=len(left))
    return DeadReplayed(
        **counts, left=left, unknown=leased.not_seen(command.ids or ()), seen=leased.seen, total=leased.total
    )


@method("dlq.purge", permission=Permission.ADMIN, scope=Scope.CLOSED, errors=(errors.QueueAway,))
async def purge(context: ApiContext, command: WhichDead) -> DeadPurged:
    """Delete messages of a dead-letter queue permanently."""
    async with _lease(context, command.queue) as leased:
        async for messages in _choose(leased, command):
            await leased.remove(messages)
    log.info("dead_letters_purged", queue=command.queue, purged=len(leased.removed))
    return DeadPurged(
        purged=len(leased.removed), unknown=leased.not_seen(command.ids or ()), seen=leased.seen, total=leased.total
    )


def _queue(context: ApiContext, name: str) -> Queue:
    with _reported(name):
        if name not in context.queues:
            raise errors.Unavailable("the api was started without it")
        return context.queues[name]


async def _choose(leased: LeasedMessages, command: WhichDead) -> AsyncIterator[list[Message]]:
    """The messages of the ids, or so many that no more than ``limit`` are removed by the caller."""
    left = set(command.ids or ())
    while left if command.limit is None else len(leased.removed) < command.limit:
        messages = await leased.take()
        if not messages:
            return
        if command.limit is not None:
            yield messages[: command.limit - len(leased.removed)]
        elif wanted := [message for message in messages if message.id in left]:
            left -= {message.id for message in wanted}
            yield wanted


def instant_of(sent_at: float | None) -> str | None:
    """The sender's time for display; None for one that no calendar has."""
    if sent_at is None or not 0 <= sent_at <= _LATEST_SECONDS:
        return None
    return timestamp(datetime.fromtimestamp(sent_at, UTC))


def _describe(content: Contents) -> DeadMessage:
    message = content.message
    names_claims = content.queue != "inbound"
    standing = [entry.current for entry in content.entries]
    return DeadMessage(
        id=message.id,
        sent_at=instant_of(message.sent_at),
        receives=message.receive_count,
        bytes=len(body_bytes(message.body)),
        entries=len(content.texts),
        first=[entry.shown for entry in content.entries[:_FIRST_SHOWN]],
        current=standing.count(True) if names_claims else None,
        stale=standing.count(False) if names_claims else None,
        accepted=content.accepted,
        problem=content.problem(_FIRST_SHOWN),
    )


async def _describe_whole(context: ApiContext, label: str, message: Message) -> DeadMessageDetail:
    (content,) = await _read_contents(context, label, [message])
    tasks: Sequence[Any] = []
    if content.entries:
        columns = zip(*((entry.task_id, *(entry.key or (None, None))) for entry in content.entries), strict=True)
        async with context.session() as session:
            tasks = await session.fetch("find_tasks_of_entries", *map(list, columns))
    contents = [
        DeadEntry(
            what=entry.what,
            task_id=task_id,
            claim=entry.claim,
            state=state,
            current=entry.current,
            problem=entry.problem,
        )
        for entry, (task_id, state) in zip(content.entries, tasks, strict=True)
    ]
    body = body_bytes(message.body).decode("utf-8", "backslashreplace")
    return DeadMessageDetail(**_describe(content), body=body, attributes=dict(message.attributes), contents=contents)


def _plan(content: Contents, *, force: bool) -> tuple[Sequence[Outgoing], str | None]:
    """What to send of a message, and why it stays where it is."""
    message, attributes = content.message, content.message.attributes
    if content.queue == "outbound":
        problem = content.problem()
        if problem is not None:
            return [], f"it holds what no worker understands ({problem}): purge it"
        # Each entry that still counts goes in a message of its own: one of them may have killed its workers.
        entries = zip(content.texts, content.entries, strict=True)
        texts = [entry_text(text) for text, entry in entries if entry.current]
        return [Outgoing(text, attributes, message.group) for text in texts], None
    if content.queue == "inbound":
        if content.accepted:
            return [], None
        if content.accepted is None and not force:
            return [], "it is older than receipts are kept, so its tasks may have been added before: force sends it"
        attributes = {**attributes, ORIGINAL_ID_ATTRIBUTE: message.original_id}
    return [Outgoing(message.body, attributes, message.group)], None


async def _send(context: ApiContext, queue: Queue, contents: Sequence[Contents]) -> None:
    """Send what is planned; a message of which not everything went gains an obstacle."""
    sent = [(content, outgoing) for content in contents for outgoing in content.outgoing]
    report = await queue.send([outgoing for _, outgoing in sent])
    for position in report.failed:
        content, _ = sent[position]
        if position not in report.refused:
            content.obstacle = "the queue did not take it: try again later"
        elif queue.label == "inbound":
            content.obstacle = await _accept_here(context, content.message)
        else:
            content.obstacle = _NEVER_TAKEN


async def _accept_here(context: ApiContext, message: Message) -> str | None:
    """Do the submitter's work on a message too full to carry its first id as well; returns why it cannot be done."""
    inbound = read_inbound(message.body, context.settings)
    try:
        await take_in(inbound, context.store.codec, context.settings, context.store.session)
        async with context.store.transaction() as session:
            if await enqueue.record_receipts(session, [message.original_id]):
                await accept_inbound(session, inbound, context.settings, source="replay")
                await enqueue.insert_rejected(session, "inbound", inbound.refused)
    except errors.Refused as exc:
        log.warning("message_refused", message_id=message.id, reason=str(exc))
        return _NEVER_TAKEN
    except (errors.Locked, errors.PayloadUnavailable) as exc:  # which the messages behind it need not wait for
        return f"{exc}: try again later"
    context.wake()
    return None
