"""The journal of a task: its finished durable steps, as workers report them and as messages carry them."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Self

import msgspec

from penstock.protocol.json_text import ABSENT, escape_for_sqs

STEP_NAME_MAX_CHARS = 200
SLEEP, EVENT = "ctx.sleep", "ctx.event"  # names of the entries of sleeps and events
LONGEST_SLEEP_SECONDS = 10 * 366 * 86_400.0

Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]  # as Postgres keeps it
EpochSeconds = Annotated[float, msgspec.Meta(ge=0, lt=1e11)]
StepKey = tuple[str, int]
"""What identifies a step of a task: its name and repetition."""


class StepPlace(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A step. repetition, position: steps before it, of its name, of any. parallel: others ran, so it may change."""

    name: str
    repetition: Count = 0
    position: Count = 0
    parallel: bool = False

    @property
    def key(self) -> StepKey:
        return self.name, self.repetition

    @property
    def label(self) -> str:
        """As people read it: ``charge``, then ``charge#2``."""
        return self.name if not self.repetition else f"{self.name}#{self.repetition + 1}"


class Entry(StepPlace, frozen=True, omit_defaults=True, kw_only=True):
    """A finished step: its result or its final error, a JSON-RPC error object, as JSON.

    encoding: of a result or error that is sealed. at: when it began, by the worker's clock, in epoch seconds.
    seconds: how long it took. tries: of its function.
    """

    result: msgspec.Raw = ABSENT
    error: msgspec.Raw = ABSENT
    encoding: str | None = None
    at: EpochSeconds | None = None
    seconds: Annotated[float, msgspec.Meta(ge=0, le=LONGEST_SLEEP_SECONDS)] | None = None
    tries: Count = 1

    def __post_init__(self) -> None:
        check_step_name(self.name)
        if bool(bytes(self.result)) == bool(bytes(self.error)):
            raise ValueError(f"the step {self.name!r} has a result or an error, not both or neither")

    @classmethod
    def of(cls, place: StepPlace, text: str, *, is_error: bool = False, **more: Any) -> Self:
        """A step that ended with this JSON text."""
        value: dict[str, Any] = {"error" if is_error else "result": msgspec.Raw(text.encode())}
        return cls(**msgspec.structs.asdict(place), **value, **more)

    @property
    def has_failed(self) -> bool:
        return bool(bytes(self.error))

    @property
    def value(self) -> str:
        return bytes(self.error or self.result).decode()

    def with_value(self, text: str, encoding: str | None) -> Self:
        """The same with its result or error as other text."""
        raw = msgspec.Raw(text.encode())
        changed = {"error": raw} if self.has_failed else {"result": raw}
        return msgspec.structs.replace(self, **changed, encoding=encoding)


decode_entry = msgspec.json.Decoder(Entry).decode
"""A finished step. Raises ValueError."""
_decode_entries = msgspec.json.Decoder(list[Entry]).decode


def decode_entries(raw: msgspec.Raw | bytes | str) -> list[Entry]:
    """The entries of a task, as a message carries them or a response repeats them. Raises ValueError."""
    return _decode_entries(raw) if raw else []


def check_step_name(name: object) -> None:
    """Raises ValueError."""
    if not isinstance(name, str) or not 1 <= len(name) <= STEP_NAME_MAX_CHARS or not name.isprintable():
        raise ValueError(f"a step's name is 1 to {STEP_NAME_MAX_CHARS} printable characters, not {name!r:.100}")


def encode_entry(entry: Entry) -> str:
    return escape_for_sqs(msgspec.json.encode(entry).decode())


def carried(entry: Entry) -> str:
    """The entry as messages carry it: what a later attempt needs."""
    return encode_entry(msgspec.structs.replace(entry, at=None, seconds=None, tries=1))


def journal_text(entries: Iterable[Entry]) -> str | None:
    """The entries as a message carries them, None without any."""
    texts = [carried(entry) for entry in sorted(entries, key=lambda entry: entry.position)]
    return f"[{','.join(texts)}]" if texts else None


def encode_step(claim_id: str, entry: str) -> str:
    """The notification of a finished step. entry: of ``encode_entry``."""
    return f'{{"jsonrpc":"2.0","method":"step","params":{{"id":"{claim_id}",{entry[1:]}}}'


def add_entries(answer: str, entries: Sequence[str]) -> str:
    """A response, or a notification that ends an attempt, with all entries that the attempt has reported."""
    return f'{answer[:-1]},"steps":[{",".join(entries)}]}}'


def read_error(raw: msgspec.Raw | bytes) -> tuple[str, str, dict[str, Any]]:
    """Type, message and data of an error object; raises nothing."""
    try:
        error = msgspec.json.decode(raw)
    except ValueError:
        error = None
    if not isinstance(error, dict):
        return "Error", str(error), {}
    data = error.get("data")
    data = data if isinstance(data, dict) else {}
    return str(data.get("type") or "Error"), str(data.get("message") or error.get("message") or ""), data
