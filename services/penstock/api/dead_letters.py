"""Dead-letter queues: counted, looked at, sent again, emptied.

SQS cannot be browsed, so a look is a receive; see :mod:`penstock.api.dead_letter_browser`. A message leaves its
dead-letter queue only after it was sent again, so a replay that is cut off is repeated in part, and a
repeated replay is harmless:

- inbound: the message carries its first id, by whose receipt the submitter knows it;
- outbound: what still has its claim is sent again, what has not is dropped, since its results would be ignored;
- results: the claim, once more, decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal, get_args

import msgspec

from penstock.api.context import ApiContext
from penstock.api.dead_letter_browser import LeasedMessages, lease_messages, queue_away
from penstock.api.message_contents import Contents, Entry, find_current, find_states, find_tasks, is_current
from penstock.brokers.base import ORIGINAL_ID_ATTRIBUTE, Message, Outgoing, Queue
from penstock.db.session import Session
from penstock.methods.inbound import accept_inbound, read_inbound, take_in
from penstock.protocol.api_key import Permission
from penstock.protocol.checks import CONTROL, MAX_IDS, MAX_LIST, read_limit
from penstock.protocol.errors import InvalidParams, MessageNotFound, QueueAway, Refused, Unavailable
from penstock.protocol.json_text import entry_text, utf8_size
from penstock.protocol.method import NoParams, Scope, method
from penstock.protocol.task import State
from penstock.protocol.views import about, timestamp
from penstock.runtime.logs import get_logger
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX
from penstock.tasks import enqueue
from penstock.tasks.records import Pair

QueueName = Literal["inbound", "outbound", "results"]

MESSAGE_ID_MAX_CHARS = 100
_QUEUES: tuple[QueueName, ...] = get_args(QueueName)
_FIRST_SHOWN = 3
_RECEIPT_SHARE = 0.95  # of its retention after which a receipt is no longer counted on, for clocks that differ

log = get_logger()


class DeadLetterQueue(msgspec.Struct, frozen=True):
    """Approximate counts of one dead-letter queue; null where the api cannot use it."""

    queue: Literal["inbound", "outbound", "results"]
    messages: Annotated[int | None, about("All that there are.")]
    held: Annotated[int | None, about("Messages in flight to any reader; null if the queue does not report it.")]


class DeadLetterQueues(msgspec.Struct, frozen=True):
    queues: list[DeadLetterQueue]


class DeadMessage(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    sent_at: Annotated[str | None, about("When it was first sent, by the queue's clock.")]
    receives: Annotated[int, about("How often it was received, looks such as this included.")]
    bytes: Annotated[int, about("Of its body.")]
    entries: Annotated[int, about("Requests or responses in it; 0 when it cannot be read.")]
    first: Annotated[list[str], about("The first few of them: action or kind, then task id and claim.")]
    current: Annotated[
        int | None, about("Entries whose claim holds its task now; null for the inbound queue, which has no claims.")
    ]
    stale: Annotated[
        int | None, about("Entries whose claim holds no task any more: whatever comes of them is ignored.")
    ]
    accepted: Annotated[
        bool | None,
        about("Inbound: true if it was accepted already, so that a replay adds nothing; null: not known."),
    ]
    problem: Annotated[str | None, about("Why it, or an entry among the first, is of no use.")]


class DeadMessages(msgspec.Struct, frozen=True):
    messages: Annotated[list[DeadMessage], about("In no order: the queue has none.")]
    seen: Annotated[int, about("Messages looked at.")]
    total: Annotated[int, about("Messages in the queue, approximately.")]
    held: Annotated[int, about("Messages in flight to another reader, approximately.")]


class DeadEntry(msgspec.Struct, frozen=True):
    what: Annotated[str, about("The action, the method, or result, error, progress.")]
    task_id: Annotated[int | None, about("Its task; of a new one with a unique key, the task that has the key.")]
    claim: int | None
    state: Annotated[State | None, about("The task's state now; null when there is no such task.")]
    current: Annotated[bool | None, about("Whether its claim holds the task now.")]
    problem: str | None


class DeadMessageDetail(DeadMessage, frozen=True, kw_only=True):
    body: str
    attributes: dict[str, str]
    contents: list[DeadEntry]


class NotReplayed(msgspec.Struct, frozen=True):
    id: str
    reason: str


class DeadReplayed(msgspec.Struct, frozen=True):
    replayed: Annotated[int, about("Messages sent again, whole or in part, and gone from the dead-letter queue.")]
    dropped: Annotated[int, about("Messages of which nothing was left to be sent, and gone likewise.")]
    entries: Annotated[int, about("Entries sent again.")]
    stale: Annotated[int, about("Entries left out because their claim holds no task any more.")]
    left: Annotated[list[NotReplayed], about("Messages still in the dead-letter queue, and why.")]
    unknown: Annotated[list[str], about("Ids of no message that was seen.")]
    seen: int
    total: int


class DeadPurged(msgspec.Struct, frozen=True):
    purged: int
    unknown: Annotated[list[str], about("Ids of no message that was seen.")]
    seen: int
    total: int


_Queue = Annotated[QueueName, about("The queue whose dead-letter queue is meant.")]
_Ids = Annotated[list[str] | None, about(f"From dlq.list; 1 to {MAX_IDS}.")]
_Limit = Annotated[int | None, about(f"Instead of ids: any messages, up to this many; 1 to {MAX_LIST}.")]


@method("dlq.stats", permission=Permission.READ, scope=Scope.CLOSED)
async def count(context: ApiContext, _given: NoParams) -> DeadLetterQueues:
    """Count the messages of each dead-letter queue."""
    counted = []
    for label in _QUEUES:
        try:
            depth = await _dead_queue(context, label).depth()
        except Unavailable as exc:
            queue_away(label + DEAD_LETTER_SUFFIX, str(exc))
            counted.append(DeadLetterQueue(label, None, None))
        else:
            counted.append(DeadLetterQueue(label, depth.total, depth.in_flight))
    return DeadLetterQueues(counted)


class DlqListParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    queue: _Queue
    limit: Annotated[int, about(f"Maximum number of messages; 1 to {MAX_LIST}.")] = 50


def _read_list(given: DlqListParams) -> DlqListParams:
    read_limit(given.limit)
    return given


@method("dlq.list", permission=Permission.READ, scope=Scope.CLOSED, errors=(QueueAway,), read=_read_list)
async def list_(context: ApiContext, command: DlqListParams) -> DeadMessages:
    """List messages of a dead-letter queue, with what Postgres knows of them; they stay where they are."""
    shown: list[DeadMessage] = []
    async with lease_messages(_dead_queue(context, command.queue)) as leased:
        while len(shown) < command.limit and (messages := await leased.take()):
            shown += await _describe(context, command.queue, messages)
    return DeadMessages(shown[: command.limit], leased.seen, leased.total, leased.elsewhere)


class DlqShowParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    queue: _Queue
    id: Annotated[str, about("From dlq.list.")]


def _read_show(given: DlqShowParams) -> DlqShowParams:
    _check_message_id(given.id, "id")
    return given


@method(
    "dlq.show", permission=Permission.READ, scope=Scope.CLOSED, errors=(MessageNotFound, QueueAway), read=_read_show
)  # fmt: skip
async def show(context: ApiContext, command: DlqShowParams) -> DeadMessageDetail:
    """Show one of them whole, with what each task in it is now."""
    async with lease_messages(_dead_queue(context, command.queue)) as leased:
        while messages := await leased.take():
            for message in messages:
                if message.id == command.id:
                    return await _describe_whole(context, command.queue, message)
    raise MessageNotFound(command.id, f"in {command.queue}{DEAD_LETTER_SUFFIX}: {_how_far(leased)}")


class DlqReplayParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    queue: _Queue
    ids: _Ids = None
    limit: _Limit = None
    force: Annotated[bool, about("Also inbound messages too old to know whether they were accepted before.")] = False


@dataclass(frozen=True, slots=True)
class ReplayDead:
    """``which``: ids of messages, or how many at most. ``force``: those too that may have been accepted before."""

    queue: QueueName
    which: list[str] | int
    force: bool


def _read_replay(given: DlqReplayParams) -> ReplayDead:
    return ReplayDead(given.queue, _read_which(given.ids, given.limit), given.force)


@method("dlq.replay", permission=Permission.ADMIN, scope=Scope.CLOSED, errors=(QueueAway,), read=_read_replay)
async def replay(context: ApiContext, command: ReplayDead) -> DeadReplayed:
    """Send messages again and take them from the dead-letter queue; doing so twice does nothing twice."""
    dead, queue = _dead_queue(context, command.queue), _found(context.queues, command.queue, command.queue)
    done = _Done()
    async with lease_messages(dead) as leased:
        while wanted := await _next(leased, command.which, done.handled, done.replayed + done.dropped):
            await _replay(context, command, wanted, queue, leased, done)
    unknown = _unknown(command.which, done.handled)
    if done.added:
        context.wake()
    log.info(
        "dead_letters_replayed", queue=command.queue, replayed=done.replayed, dropped=done.dropped,
        entries=done.entries, stale=done.stale, left=len(done.left),
    )  # fmt: skip
    return DeadReplayed(
        done.replayed, done.dropped, done.entries, done.stale, done.left, unknown, leased.seen, leased.total
    )


class DlqPurgeParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    queue: _Queue
    ids: _Ids = None
    limit: _Limit = None


@dataclass(frozen=True, slots=True)
class PurgeDead:
    """``which`` as in ReplayDead."""

    queue: QueueName
    which: list[str] | int


def _read_purge(given: DlqPurgeParams) -> PurgeDead:
    return PurgeDead(given.queue, _read_which(given.ids, given.limit))


@method("dlq.purge", permission=Permission.ADMIN, scope=Scope.CLOSED, errors=(QueueAway,), read=_read_purge)
async def purge(context: ApiContext, command: PurgeDead) -> DeadPurged:
    """Delete messages of a dead-letter queue permanently."""
    handled: set[str] = set()
    purged = 0
    async with lease_messages(_dead_queue(context, command.queue)) as leased:
        while messages := await _next(leased, command.which, handled, purged):
            handled |= {message.id for message in messages}
            purged += len(messages) - len(await leased.remove(messages))
    log.info("dead_letters_purged", queue=command.queue, purged=purged)
    return DeadPurged(purged, _unknown(command.which, handled), leased.seen, leased.total)


def _read_which(ids: list[str] | None, limit: int | None) -> list[str] | int:
    if (ids is None) == (limit is None):
        raise InvalidParams("ids", "or limit must be given, not both")
    if ids is None:
        assert limit is not None
        return read_limit(limit)
    if not 1 <= len(ids) <= MAX_IDS:
        raise InvalidParams("ids", f"must hold 1 to {MAX_IDS} ids, not {len(ids)}")
    for position, value in enumerate(ids):
        _check_message_id(value, f"ids[{position}]")
    return ids


def _check_message_id(value: str, name: str) -> None:
    if not 1 <= len(value) <= MESSAGE_ID_MAX_CHARS or CONTROL.search(value):
        raise InvalidParams(name, f"must be a message's id, of 1 to {MESSAGE_ID_MAX_CHARS} characters")


def _dead_queue(context: ApiContext, label: str) -> Queue:
    return _found(context.dead_letters, label, label + DEAD_LETTER_SUFFIX)


async def _describe(context: ApiContext, label: str, messages: Sequence[Message]) -> list[DeadMessage]:
    contents = [Contents(label, message, context.settings) for message in messages]
    firsts = [content.entries(_FIRST_SHOWN) for content in contents]
    entries = firsts if label == "inbound" else [content.entries() for content in contents]
    async with context.session() as session:
        current = await find_current(session, [entry for some in entries for entry in some])
        accepted = await _find_accepted(context, session, label, messages)
    return [
        DeadMessage(**_summary(label, message, content, first, every, current, accepted))
        for message, content, first, every in zip(messages, contents, firsts, entries, strict=True)
    ]


async def _describe_whole(context: ApiContext, label: str, message: Message) -> DeadMessageDetail:
    content = Contents(label, message, context.settings)
    entries = content.entries()
    async with context.session() as session:
        current = await find_current(session, entries)
        accepted = await _find_accepted(context, session, label, [message])
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


async def _find_accepted(
    context: ApiContext, session: Session, label: str, messages: Sequence[Message]
) -> dict[str, bool | None]:
    """By message id, whether an inbound message was accepted before; None where its receipt may be gone."""
    if label != "inbound":
        return {}
    ids = [message.original_id for message in messages]
    receipts = {row["message_id"] for row in await session.fetch("find_receipts", ids)}
    kept = timedelta(seconds=context.settings.retention_receipts_seconds * _RECEIPT_SHARE)
    horizon: datetime = await session.value("read_clock") - kept
    return {
        message.id: True if message.original_id in receipts else False if _sent_after(message, horizon) else None
        for message in messages
    }


async def _replay(
    context: ApiContext,
    command: ReplayDead,
    messages: Sequence[Message],
    queue: Queue,
    leased: LeasedMessages,
    done: _Done,
) -> None:
    """Of a few messages, send what is worth it, and remove those of which everything was sent."""
    contents = [Contents(command.queue, message, context.settings) for message in messages]
    async with context.session() as session:
        resends = await _plan(context, session, command, messages, contents)
    unsent = await _send(context, queue, resends, done)
    finished = [resend.message for resend in resends if resend.obstacle is None and resend.message.id not in unsent]
    undeleted = {message.id for message in await leased.remove(finished)}
    for resend in resends:
        message_id = resend.message.id
        done.handled.add(message_id)
        reason = resend.obstacle or unsent.get(message_id)
        if reason is not None:
            done.left.append(NotReplayed(message_id, reason))
            continue
        done.entries += resend.entries
        done.stale += resend.stale
        if message_id in undeleted:
            done.left.append(NotReplayed(message_id, "sent again, but could not be deleted here: replay it once more"))
        elif resend.outgoing:
            done.replayed += 1
        else:
            done.dropped += 1


async def _plan(
    context: ApiContext,
    session: Session,
    command: ReplayDead,
    messages: Sequence[Message],
    contents: Sequence[Contents],
) -> list[_Resend]:
    if command.queue == "inbound":
        accepted = await _find_accepted(context, session, command.queue, messages)
        return [
            _resend_inbound(message, len(content.texts), accepted[message.id], command.force)
            for message, content in zip(messages, contents, strict=True)
        ]
    if command.queue == "outbound":
        entries = [content.entries() for content in contents]
        current = await find_current(session, [entry for some in entries for entry in some])
        return [
            _resend_outbound(message, content, some, current)
            for message, content, some in zip(messages, contents, entries, strict=True)
        ]
    return [
        _Resend(message, [Outgoing(message.body, message.attributes, message.group)], entries=len(content.texts))
        for message, content in zip(messages, contents, strict=True)
    ]


async def _send(context: ApiContext, queue: Queue, resends: Sequence[_Resend], done: _Done) -> dict[str, str]:
    """Send; returns, by message id, why not everything of a message went."""
    sent = [(resend.message, outgoing) for resend in resends if resend.obstacle is None for outgoing in resend.outgoing]
    report = await queue.send([outgoing for _, outgoing in sent])
    unsent: dict[str, str] = {}
    for position in report.failed:
        message, _ = sent[position]
        if position not in report.refused:
            unsent[message.id] = "the queue did not take it: try again later"
        elif queue.label == "inbound" and await _accept_here(context, message):
            done.added = True
        else:
            unsent[message.id] = "the queue will never take it: purge it once you have seen it"
    return unsent


async def _accept_here(context: ApiContext, message: Message) -> bool:
    """Do the submitter's work on a message too full to carry its first id as well."""
    inbound = read_inbound(message.body, context.settings)
    await take_in(inbound, context.store.codec, context.settings, context.store.session)
    try:
        async with context.store.transaction() as session:
            if await enqueue.record_receipts(session, [message.original_id]):
                await accept_inbound(session, inbound, context.settings, source="replay")
                await enqueue.insert_rejected(session, "inbound", inbound.refused)
    except Refused as exc:
        log.warning("message_refused", message_id=message.id, reason=str(exc))
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Resend:
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


def _resend_inbound(message: Message, entries: int, accepted: bool | None, force: bool) -> _Resend:
    if accepted:
        return _Resend(message)
    if accepted is None and not force:
        return _Resend(
            message,
            obstacle="it is older than receipts are kept, so its tasks may have been added before: force sends it",
        )
    attributes = {**message.attributes, ORIGINAL_ID_ATTRIBUTE: message.original_id}
    return _Resend(message, [Outgoing(message.body, attributes, message.group)], entries=entries)


def _resend_outbound(message: Message, content: Contents, entries: Sequence[Entry], current: set[Pair]) -> _Resend:
    """Each entry that still counts, in a message of its own: one of them may have killed its workers."""
    problem = content.problem or next((entry.problem for entry in entries if entry.problem is not None), None)
    if problem is not None:
        return _Resend(message, obstacle=f"it holds what no worker understands ({problem}): purge it")
    outgoing = [
        Outgoing(entry_text(text), message.attributes, message.group)
        for text, entry in zip(content.texts, entries, strict=True)
        if is_current(entry, current)
    ]
    return _Resend(message, outgoing, entries=len(outgoing), stale=len(entries) - len(outgoing))


async def _next(leased: LeasedMessages, which: Sequence[str] | int, handled: set[str], gone: int) -> list[Message]:
    """Messages to deal with next: of the ids that are left, or so many that no more than the number will be gone."""
    if isinstance(which, int):
        messages = await leased.take() if gone < which else []
        return messages[: which - gone]
    left = set(which) - handled
    while left and (messages := await leased.take()):
        wanted = [message for message in messages if message.id in left]
        if wanted:
            return wanted
    return []


def _unknown(which: Sequence[str] | int, handled: set[str]) -> list[str]:
    return [] if isinstance(which, int) else [wanted for wanted in dict.fromkeys(which) if wanted not in handled]


def _how_far(leased: LeasedMessages) -> str:
    elsewhere = f", {leased.elsewhere} of them held by another caller" if leased.elsewhere else ""
    return f"{leased.seen} of about {leased.total} were looked at{elsewhere}"


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
