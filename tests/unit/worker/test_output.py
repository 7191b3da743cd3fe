"""What a handler's thread adds to its output while the event loop reports it."""

from __future__ import annotations

from collections import deque
from typing import Any

from penstock.protocol.output import OutputEntry
from penstock.settings.model import load_settings
from penstock.worker.output import Outputs


async def test_what_a_thread_adds_in_the_moment_of_a_report_is_in_the_next_one() -> None:
    sent: list[str] = []
    settings = load_settings(task_output="chunks")
    outputs = Outputs(settings, lambda owner, entries, dropped: sent.append(entries), lambda act, *about: act(*about))
    output = outputs.begin("attempt", None)
    assert output is not None
    output.emit(b'"first"')

    class Interrupted(deque[OutputEntry]):
        def append(self, entry: Any, /) -> None:
            """The thread is about to add an entry, and the event loop has its turn."""
            outputs._flush(output)
            super().append(entry)

    output.entries = Interrupted(output.entries)
    output.emit(b'"second"')
    outputs.end(output)
    outputs.close()
    assert ['"first"' in sent[0], '"second"' in sent[1]] == [True, True]
