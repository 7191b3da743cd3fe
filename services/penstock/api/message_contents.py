"""What is in a message of a dead-letter queue, and what its tasks are now."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from penstock.brokers.base import Message
from penstock.db.session import Session
from penstock.methods.inbound import is_change
from penstock.methods.table import API_ONLY, read_command
from penstock.protocol.errors import RpcError
from penstock.protocol.reports import Failed, Progress, RunTimes, Succeeded, Unreadable, Waiting, decode_report
from penstock.protocol.requests import Invalid, decode_request, parse_claim_id, split_body
from penstock.protocol.task import NewTask, State
from penstock.protocol.tenant import stored_key
from penstock.settings.model import Settings
from penstock.tasks import settle
from penstock.tasks.params import CancelParams, RescheduleParams, RetryParams

_SHOWN_CHARS = 100
_ONLY_ANSWERS = "it only answers, and a queue has no way back"
_KINDS = {Succeeded: "result", Failed: "error", Progress: "progress", Waiting: "wait", RunTimes: "run_times"}


@dataclass(slots=True)
class Entry:
    what: str  # action, method or kind of report
    task_id: int | None = None
    claim: int | None = None
    attempt: int | None = None  # instead of the claim, in the legacy result id
    key: tuple[str, str] | None = None  # action and unique key of a task to be added
    problem: str | None = None  # why it is of no use
    current: bool | None = None  # whether its claim or attempt holds its task now; None if it names none

    @property
    def shown(self) -> str:
        """A few words for a list."""
        if self.task_id is None:
            return self.what
        claim = "" if self.claim is None else f":{self.claim}"
        return f"{self.what} {self.task_id}{claim}".lstrip()


class Contents:
    """One message: the texts of its entries, of which up to ``limit`` are read."""

    def __init__(self, queue: str, message: Message, settings: Settings, limit: int | None = None) -> None:
        self.message = message
        self._queue = queue
        self._settings = settings
        self._problem: str | None = None
        self.texts: Sequence[str | msgspec.Raw] = []
        try:
            batch_limit = settings.batch_limit if queue == "inbound" else settings.packed_limit
            _, self.texts = split_body(message.body, batch_limit=batch_limit)
        except RpcError as exc:
            self._problem = exc.message
        self.entries = [self._read(text) for text in self.texts[:limit]]

    def problem(self, first: int | None = None) -> str | None:
        """Why the body as a whole is of no use, or one of the first entries."""
        return self._problem or next((entry.problem for entry in self.entries[:first] if entry.problem), None)

    def _read(self, text: str | msgspec.Raw) -> Entry:
        if self._queue == "results":
            report = decode_report(text, bare_ids=True)
            if isinstance(report, Unreadable):
                return Entry("", problem=report.reason)
            task_id, claim = getattr(report, "task_id", None), getattr(report, "claim", None)
            return Entry(_KINDS[type(report)], task_id, claim, getattr(report, "attempt", None))
        request = decode_request(text)
        if isinstance(request, Invalid):
            return Entry("", problem=request.error.message)
        if self._queue == "inbound":
            return _read_inbound(request.method, bytes(request.params), self._settings)
        action = request.method[:_SHOWN_CHARS]
        try:
            claim_id = parse_claim_id(msgspec.json.decode(bytes(request.id), type=str))
        except ValueError:
            claim_id = None
        if claim_id is None:
            return Entry(action, problem="its id is not <task id>:<claim>")
        return Entry(action, claim_id.task_id, claim_id.claim)


def _read_inbound(method: str, params: bytes, settings: Settings) -> Entry:
    try:
        command = read_command(method, params, settings)
    except RpcError as exc:
        return Entry(method[:_SHOWN_CHARS], problem=_ONLY_ANSWERS if method.startswith(API_ONLY) else exc.message)
    match command:
        case NewTask():
            unique = command.unique_key
            key = None if unique is None else (command.action, stored_key(command.tenant, unique))
            return Entry(command.action, key=key)
        case CancelParams() | RetryParams() | RescheduleParams():
            return Entry(method, task_id=int(command.id))
    return Entry(method, problem=None if is_change(method, command) else _ONLY_ANSWERS)


async def read_contents(
    session: Session, settings: Settings, queue: str, messages: Iterable[Message], limit: int | None = None
) -> list[Contents]:
    """The contents of messages, up to so many entries of each, with whether their claims hold their tasks now."""
    contents = [Contents(queue, message, settings, limit) for message in messages]
    entries = [entry for content in contents for entry in content.entries]
    claims = await settle.read_attempts(
        session, {(one.task_id, one.claim) for one in entries if one.task_id is not None and one.claim is not None}
    )
    attempts = await settle.find_claims(
        session, {(one.task_id, one.attempt) for one in entries if one.task_id is not None and one.attempt is not None}
    )
    for entry in entries:
        if entry.claim is not None:
            entry.current = (entry.task_id, entry.claim) in claims
        elif entry.attempt is not None:
            entry.current = (entry.task_id, entry.attempt) in attempts
    return contents


async def find_states(session: Session, entries: Sequence[Entry]) -> list[tuple[int | None, State | None]]:
    """Task and state of each entry; of a task to be added, the one that holds its unique key."""
    keys = list({entry.key for entry in entries if entry.key is not None})
    rows = await session.fetch("find_unique_tasks", *map(list, zip(*keys, strict=True))) if keys else []
    holders = {(row["action"], row["key"]): row["task_id"] for row in rows}
    ids = [entry.task_id if entry.key is None else holders.get(entry.key) for entry in entries]
    rows = await session.fetch("read_states", list({task_id for task_id in ids if task_id is not None}))
    states = {row["id"]: State(row["state"]) for row in rows}
    return [(task_id, states.get(task_id)) for task_id in ids]
