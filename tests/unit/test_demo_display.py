"""What the demo says while nothing settles."""

from __future__ import annotations

import pytest

from examples.export import display
from examples.export.display import Display, Snapshot


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ({"ACQUIRED": 6, "ERROR": 1}, "6 tasks are with a worker; one that died is given up 120 s after its last sign"),
        ({"ACQUIRED": 1}, "1 task is with a worker; one that died is given up 120 s after its last sign"),
        ({"ERROR": 2, "SCHEDULED": 3}, "failed tasks wait for their next attempt"),
        ({"SCHEDULED": 3}, "tasks wait for the scheduler"),
        ({"SUCCESS": 3}, "messages wait for the submitter"),
    ],
)
def test_a_snapshot_says_what_it_waits_for(states: dict[str, int], said: str) -> None:
    assert Snapshot(states, 0).waits_for(120.0) == said


def test_the_display_says_so_once_nothing_has_settled_for_a_while(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(display, "time", clock)
    with Display(10, 120.0) as shown:
        for seconds, settled in ((0, 4), (4, 4), (2, 4), (2, 9), (6, 9), (9, 10)):
            clock.now += seconds
            shown.show(Snapshot({"SUCCESS": settled, "ACQUIRED": 10 - settled} if settled < 10 else {"SUCCESS": 10}, 0))
    said = ["with a worker" in line for line in capsys.readouterr().out.splitlines()]
    assert said == [False, False, True, False, True, False]
