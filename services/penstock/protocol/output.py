"""Output of a task: log lines and chunks, as workers report them and as they are stored."""

from collections.abc import Sequence
from typing import Annotated, Literal, get_args

import msgspec

from penstock.protocol.journal import Count, EpochSeconds
from penstock.protocol.json_text import ABSENT, escape_for_sqs
from penstock.protocol.sealed import SEALED_ENCODING, Reference, decode_sealed, is_sealed

OutputMode = Literal["off", "chunks", "logs", "prints"]
"""What a task gives out: nothing, what its handler emits, its log lines too, or what it prints too."""

MODES: tuple[OutputMode, ...] = get_args(OutputMode)
PRINT = "print"  # level of a printed line


class OutputEntry(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """A log line, with level and text, or a chunk. at: by the worker's clock, in epoch seconds."""

    at: EpochSeconds
    level: Annotated[str, msgspec.Meta(max_length=20)] | None = None
    logger: Annotated[str, msgspec.Meta(max_length=200)] | None = None
    text: str | None = None
    chunk: msgspec.Raw = ABSENT

    @property
    def is_chunk(self) -> bool:
        return bool(bytes(self.chunk))


class OutputPart(msgspec.Struct, frozen=True, gc=False):
    """A notification's part. number: in its attempt. entries: JSON text of a list, or sealed. dropped: by its end."""

    id: str
    number: Count
    entries: msgspec.Raw
    dropped: Count = 0
    encoding: str | None = None


_encode = msgspec.json.Encoder().encode
decode_entries = msgspec.json.Decoder(list[OutputEntry]).decode
"""Entries as they are stored, opened. Raises ValueError."""


def encode_entries(entries: Sequence[OutputEntry]) -> str:
    """JSON text in characters that SQS accepts."""
    try:
        text = _encode(entries).decode()
    except UnicodeEncodeError:  # half a surrogate pair
        text = _encode([_cleaned(entry) for entry in entries]).decode()
    return escape_for_sqs(text)


def _cleaned(entry: OutputEntry) -> OutputEntry:
    text, logger = (given and given.encode("utf-8", "replace").decode() for given in (entry.text, entry.logger))
    return msgspec.structs.replace(entry, text=text, logger=logger)


def encode_output(claim_id: str, number: int, entries: str, dropped: int) -> str:
    """The notification of a part. entries: of `encode_entries`, or sealed."""
    more = f',"dropped":{dropped}' if dropped else ""
    if is_sealed(entries):
        more += f',"encoding":"{SEALED_ENCODING}"'
    params = f'{{"id":"{claim_id}","number":{number},"entries":{entries}{more}}}'
    return f'{{"jsonrpc":"2.0","method":"output","params":{params}}}'


def decode_part(raw: msgspec.Raw) -> tuple[OutputPart, str]:
    """A part, and its entries as they are stored. Raises ValueError."""
    part = msgspec.json.decode(raw, type=OutputPart)
    text = bytes(part.entries).decode()
    if part.encoding is not None:
        if part.encoding != SEALED_ENCODING or not is_sealed(text) or isinstance(decode_sealed(text), Reference):
            raise ValueError(f"the output has an unknown encoding, {part.encoding[:40]!r}")
        return part, text
    for entry in decode_entries(text):
        if entry.is_chunk == (entry.text is not None):
            raise ValueError("an entry of the output has a text or a chunk, not both or neither")
    return part, text


class Shown(msgspec.Struct, frozen=True):
    """A stored part. entries: opened; None if they cannot be read, and ``unread`` says why."""

    claim: int
    number: int
    entries: Sequence[OutputEntry]
    dropped: int
    unread: str | None = None


_Place = tuple[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)], Count, Count]
_decode_seen = msgspec.json.Decoder(tuple[list[_Place], list[_Place]]).decode


class Seen:
    """Which entries of a task a reader has: ranges of parts by claim, and parts of which it has the first entries.

    As text, ``[[[7,1,3],[8,1,1]],[[8,2,4]]]`` has the parts 1 to 3 of claim 7, part 1 of claim 8, and of its part 2
    four entries.
    """

    _MOST_RANGES = 50  # in the text; what the oldest claims of more gave out is sent again

    def __init__(self, text: str = "") -> None:
        """Raises ValueError."""
        self.ranges, partly = _decode_seen(text) if text else ([], [])
        self._partly = {(claim, number): count for claim, number, count in partly}
        if len(self.ranges) + len(partly) > 2 * self._MOST_RANGES:
            raise ValueError("it has too many ranges")

    def __str__(self) -> str:
        partly = [(*place, count) for place, count in self._partly.items()]
        return msgspec.json.encode((self.ranges[-self._MOST_RANGES :], partly)).decode()

    def count(self, claim: int, number: int) -> int:
        """How many entries of a part that is not complete the reader has."""
        return self._partly.get((claim, number), 0)

    def add(self, claim: int, number: int, count: int, of: int) -> None:
        """Note that the reader has so many entries of a part, which has ``of``."""
        if count < of:
            self._partly[claim, number] = count
            return
        self._partly.pop((claim, number), None)
        joined: list[tuple[int, int, int]] = []
        for one in sorted([*self.ranges, (claim, number, number)]):
            if joined and joined[-1][0] == one[0] and joined[-1][2] + 1 >= one[1]:
                joined[-1] = (one[0], joined[-1][1], max(joined[-1][2], one[2]))
            else:
                joined.append(one)
        self.ranges = joined
