"""What is in a message of a dead-letter queue, and what its tasks are now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from penstock.brokers.base import Message
from penstock.db.session import Session
from penstock.methods.inbound import is_change
from penstock.methods.table import API_ONLY, read_command
from penstock.protocol.errors import RpcError
from penstock.protocol.reports import Failed, Progress, RunTimes, Succeeded, Waiting, decode_report
from penstock.protocol.requests import Invalid, decode_request, parse_claim_id, split_body
from penstock.protocol.task import NewTask, State
from penstock.protocol.tenant import stored_key
from penstock.settings.model import Settings
from penstock.tasks import settle
from penstock.tasks.methods import Cancel, Reschedule, Retry
from penstock.tasks.records import Pair

_SHOWN_CHARS = 100
_ONLY_ANSWERS = "it only answers, and a queue has no way back"


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry. ``what``: action, method or kind of report. ``key``: action and unique key of a task to be added.

    attempt: instead of the claim, in the legacy result id. problem: why it is of no use, or None.
    """

    what: str
    task_id: int | None = None
    claim: int | None = None
    attempt: int | None = None
    key: tuple[str, str] | None = None
    problem: str | None = None

    @property
    def shown(self) -> str:
        """A few words for a list."""
        if self.task_id is None:
            return self.what
        claim = "" if self.claim is None else f":{self.claim}"
        return f"{self.what} {self.task_id}{claim}".lstrip()


class Contents:
    """The entries of one message, each read when asked for. ``problem``: why the body as a whole cannot be read."""

    def __init__(self, queue: str, message: Message, settings: Settings) -> None:
        self._queue = queue
        self._settings = settings
        self.problem: str | None = None
        self.texts: Sequence[str | msgspec.Raw] = []
        try:
            limit = settings.batch_limit if queue == "inbound" else settings.packed_limit
            _, self.texts = split_body(message.body, batch_limit=limit)
        except RpcError as exc:
            self.problem = exc.message

    def entry(self, position: int) -> Entry:
        text = self.texts[position]
        if self._queue == "results":
            return _read_report(text)
        request = decode_request(text)
        if isinstance(request, Invalid):
            return Entry("", problem=request.error.message)
        if self._queue == "outbound":
            return _read_call(request.method, bytes(request.id))
        return _read_inbound(request.method, bytes(request.params), self._settings)

    def entries(self, limit: int | None = None) -> list[Entry]:
        """All of them, or the first so many."""
        return [self.entry(position) for position in range(len(self.texts))[:limit]]


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
        case Cancel(task_id) | Retry(task_id) | Reschedule(task_id):
            return Entry(method, task_id=task_id)
    if is_change(method, command):
        return Entry(method)
    return Entry(method, problem=_ONLY_ANSWERS)


def _read_call(action: str, raw_id: bytes) -> Entry:
    try:
        claim_id = parse_claim_id(msgspec.json.decode(raw_id, type=str))
    except ValueError:
        claim_id = None
    if claim_id is None:
        return Entry(action[:_SHOWN_CHARS], problem="its id is not <task id>:<claim>")
    return Entry(action[:_SHOWN_CHARS], claim_id.task_id, claim_id.claim)


def _read_report(text: str | msgspec.Raw) -> Entry:
    match decode_report(text, bare_ids=True):
        case Succeeded(task_id, claim, attempt, _):
            return Entry("result", task_id, claim, attempt)
        case Failed(task_id, claim, attempt, _, _):
            return Entry("error", task_id, claim, attempt)
        case Progress(task_id, claim, _):
            return Entry("progress", task_id, claim)
        case Waiting(task_id, claim):
            return Entry("wait", task_id, claim)
        case RunTimes():
            return Entry("run_times")
        case unreadable:
            return Entry("", problem=unreadable.reason)


async def find_current(session: Session, entries: Iterable[Entry]) -> set[Pair]:
    """Of these entries' claims, and attempts of legacy result ids, those that hold their task now."""
    listed = [entry for entry in entries if entry.task_id is not None]
    claims = {(entry.task_id, entry.claim) for entry in listed if entry.claim is not None}
    attempts = {(entry.task_id, entry.attempt) for entry in listed if entry.claim is None and entry.attempt is not None}
    found = set(await settle.read_attempts(session, claims))  # type: ignore[arg-type]
    return found | {(pair[0], -pair[1]) for pair in await settle.find_claims(session, attempts)}  # type: ignore[arg-type]


def is_current(entry: Entry, current: set[Pair]) -> bool | None:
    """Whether the entry's claim holds its task; None for an entry that names no claim."""
    if entry.task_id is None or (entry.claim is None and entry.attempt is None):
        return None
    held = entry.claim if entry.claim is not None else -(entry.attempt or 0)  # as find_current writes an attempt
    return (entry.task_id, held) in current


async def find_tasks(session: Session, entries: Sequence[Entry]) -> Mapping[tuple[str, str], int]:
    """The tasks that hold these entries' unique keys."""
    keys = list({entry.key for entry in entries if entry.key is not None})
    if not keys:
        return {}
    rows = await session.fetch("find_unique_tasks", [action for action, _ in keys], [key for _, key in keys])
    return {(row["action"], row["key"]): row["task_id"] for row in rows}


async def find_states(session: Session, task_ids: Iterable[int]) -> dict[int, State]:
    """The states of those tasks that there are."""
    rows = await session.fetch("read_states", list(set(task_ids)))
    return {row["id"]: State(row["state"]) for row in rows}
