"""What results about messages look like: the rejected, and those of dead-letter queues; see views for the style."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from penstock.protocol.task import State
from penstock.protocol.views import Instant, about, timestamp


class Rejected(msgspec.Struct, frozen=True):
    id: int
    source: Literal["inbound", "results"]
    body: Annotated[str, about("As it came; bytes that are not UTF-8 are written as \\xNN.")]
    reason: str
    at: Instant


class RejectedPage(msgspec.Struct, frozen=True):
    rejected: list[Rejected]
    cursor: Annotated[str | None, about("Pass it on for the next page; null at the end.")]


_NEXT = about("With `limit`: where the next page begins; null at the end, and with `ids`.")


class StillRejected(msgspec.Struct, frozen=True):
    id: Annotated[int, about("Another id than before where a part was accepted and the rest is a new record.")]
    reason: str


class Replayed(msgspec.Struct, frozen=True):
    retried: Annotated[int, about("Records that were accepted whole and are gone.")]
    still_rejected: list[StillRejected]
    unknown: Annotated[list[int], about("Ids of no record, or of one that somebody else is retrying.")]
    cursor: Annotated[str | None, _NEXT]


class Purged(msgspec.Struct, frozen=True):
    purged: int
    cursor: Annotated[str | None, _NEXT]


class DeadLetterQueue(msgspec.Struct, frozen=True):
    """Approximate counts of one dead-letter queue; null where the api cannot use it."""

    queue: Literal["inbound", "outbound", "results"]
    messages: Annotated[int | None, about("All that there are.")]
    held: Annotated[int | None, about("Those of them that somebody is looking at; null where the queue does not tell.")]


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
        about("Inbound: true when it was accepted already, so that a replay adds nothing; null when nobody can tell."),
    ]
    problem: Annotated[str | None, about("Why it, or an entry among the first, is of no use.")]


class DeadMessages(msgspec.Struct, frozen=True):
    messages: Annotated[list[DeadMessage], about("In no order: the queue has none.")]
    seen: Annotated[int, about("Messages looked at.")]
    total: Annotated[int, about("Messages in the queue, approximately.")]
    held: Annotated[int, about("Those of them that somebody else is looking at, approximately.")]


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


def rejected(row: Any) -> Rejected:
    """A row of the statement ``list_rejected``."""
    body = bytes(row["body"]).decode("utf-8", "backslashreplace")
    return Rejected(row["id"], row["source"], body, row["reason"], timestamp(row["at"]))
