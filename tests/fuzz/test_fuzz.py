"""Every reader of input copes with what went wrong once, and with hundreds of changed inputs; `make fuzz` does more."""

from __future__ import annotations

import random
import resource
from pathlib import Path

import pytest

from tests.fuzz.targets import LONGEST_BYTES, TARGETS, Slow, run

CORPUS = Path(__file__).with_name("corpus")
_INPUTS = 400
_MOST_MEMORY_KB = 200_000
_PIECES = (
    b'"', b"[", b"{", b"}", b",", b"null", b"-1", b"1e999", b"9" * 30, b"\0", b"\\u0000", b"\\ud800", b"\xff", b"{}",
    b'"id":', b"*", b"/", b"-", b"L", b"#", b"@every ", b"@robfig ", b" ", b"[" * 2000, b'{"a":' * 500, b"=" * 300,
)  # fmt: skip


def changed(chance: random.Random, data: bytes) -> bytes:
    for _ in range(chance.randint(1, 6)):
        start, end = sorted((chance.randint(0, len(data)), chance.randint(0, len(data))))
        kind = chance.random()
        if kind < 0.4:
            data = data[:start] + chance.choice(_PIECES) + data[start:]
        elif kind < 0.6:
            data = data[:start] + data[min(end, start + 8) :]
        elif kind < 0.8:
            data = data[:start] + bytes([chance.randrange(256)]) + data[start + 1 :]
        else:
            data = data[:end] + data[start:end] * chance.choice((1, 2, 50)) + data[end:]
    return data[:LONGEST_BYTES]


@pytest.mark.parametrize("name", TARGETS)
def test_changed_inputs_are_read_or_refused(name: str) -> None:
    seeds = [*TARGETS[name][1], *(path.read_bytes() for path in sorted(CORPUS.glob(f"{name}/*")))]
    for seed in seeds:
        run(name, seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    chance = random.Random(name)
    for _ in range(_INPUTS):
        data = changed(chance, chance.choice(seeds))
        try:
            run(name, data)
        except Exception as exc:
            raise AssertionError(f"{data[:500]!r}") from exc
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < _MOST_MEMORY_KB


@pytest.mark.parametrize("name", sorted(set(TARGETS) - {"cron"}))
def test_seeds_are_accepted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed that is refused at once would lead to nothing."""
    target, (seed, *_) = TARGETS[name]
    entered = []
    monkeypatch.setattr("tests.fuzz.targets._decode", lambda text: entered.append(text))
    target(seed)
    assert not any(b'"error"' in text for text in entered if isinstance(text, bytes))


def test_a_slow_reader_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0.0, 3.0))
    monkeypatch.setattr("tests.fuzz.targets.time.process_time", lambda: next(clock))
    with pytest.raises(Slow, match=r"3.0 s for 1 bytes"):
        run("cron", b"*")
