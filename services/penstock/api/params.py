"""Parameters of `rejected.*` and `dlq.*`; without I/O. They raise InvalidParams."""

from typing import Annotated, Literal

import msgspec

from penstock.protocol import checks
from penstock.protocol.checks import ID, IDS, LIMIT, MAX_IDS, MAX_LIST, NUMBERED, Checked, TaskId
from penstock.protocol.errors import InvalidParams
from penstock.protocol.views import CURSOR, about

MESSAGE_ID_MAX_CHARS = 100

Source = Literal["inbound", "results", "kafka-source"]
QueueName = Literal["inbound", "outbound", "results"]

_Queue = Annotated[QueueName, about("The queue whose dead letters are meant: inbound, outbound or results.")]


class ListRejected(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    limit: Annotated[int, about(f"Maximum number of messages; 1 to {MAX_LIST}."), LIMIT] = 50
    cursor: Annotated[str | None, CURSOR, NUMBERED] = None
    source: Annotated[Source | None, about("Only messages from this source.")] = None


class RejectedShowParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: Annotated[TaskId, about("Its id, from rejected.list."), ID]


class WhichRejected(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of `rejected.retry` and `rejected.purge`."""

    ids: Annotated[list[TaskId] | None, about(f"Ids from rejected.list; 1 to {MAX_IDS}."), IDS] = None
    limit: Annotated[int | None, about(f"Instead of ids: the newest, up to this many; 1 to {MAX_LIST}."), LIMIT] = None
    cursor: Annotated[str | None, about("With limit: the cursor of the page before."), NUMBERED] = None
    source: Annotated[Source | None, about("With limit: only messages of this queue.")] = None

    def __post_init__(self) -> None:
        if (self.ids is None) == (self.limit is None):
            raise InvalidParams("ids", "or limit must be given, not both")
        for name in ("cursor", "source"):
            if self.limit is None and getattr(self, name) is not None:
                raise InvalidParams(name, "goes with limit, not with ids")


class DlqListParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    queue: _Queue
    limit: Annotated[int, about(f"Maximum number of messages; 1 to {MAX_LIST}."), LIMIT] = 50


def _check_message_id(value: str, name: str) -> None:
    if not 1 <= len(value) <= MESSAGE_ID_MAX_CHARS or checks.CONTROL.search(value):
        raise InvalidParams(name, f"must be a message's id, of 1 to {MESSAGE_ID_MAX_CHARS} characters")


class DlqShowParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    queue: _Queue
    id: Annotated[str, about("Its id, from dlq.list."), Checked(_check_message_id)]


class WhichDead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of `dlq.purge`, and the first ones of `dlq.replay`."""

    queue: _Queue
    ids: Annotated[list[str] | None, about(f"From dlq.list; 1 to {MAX_IDS}.")] = None
    limit: Annotated[int | None, about(f"Instead of ids: any messages, up to this many; 1 to {MAX_LIST}."), LIMIT] = (
        None
    )

    def __post_init__(self) -> None:
        if (self.ids is None) == (self.limit is None):
            raise InvalidParams("ids", "or limit must be given, not both")
        if self.ids is not None and not 1 <= len(self.ids) <= MAX_IDS:
            raise InvalidParams("ids", f"must hold 1 to {MAX_IDS} ids, not {len(self.ids)}")
        for position, value in enumerate(self.ids or ()):
            _check_message_id(value, f"ids[{position}]")


class ReplayDead(WhichDead, frozen=True, forbid_unknown_fields=True):
    force: Annotated[bool, about("Also inbound messages too old to know whether they were accepted before.")] = False
