"""What `penstock task show --follow` says of a change, and when it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.cli import task
from penstock.client.results import PollPauses
from penstock.protocol.errors import PenstockError, RateLimited, ResultTimeout, TooManyWaits, Unavailable

TASK: dict[str, Any] = {
    "id": 7, "action": "a", "state": "SCHEDULED", "attempts": 0, "max_attempts": 3, "run_at": "R", "updated_at": "T0",
    "progress": None, "result": None, "error": None, "failures": [], "worker": None,
}  # fmt: skip
FAILURE = {"attempt": 1, "claim": 5, "at": "T2", "worker": None, "error": {"code": -1, "message": "no\nluck"}}


def said(before: dict[str, Any] | None, **now: Any) -> list[str]:
    return [line.split("  task 7  ")[1] for line in task.changes(before, TASK | now)]


def test_each_change_is_a_line_and_no_change_is_none() -> None:
    assert said(None) == ["SCHEDULED, runs at R"]
    assert said(TASK) == []
    assert said(TASK, run_at="S") == ["moved to S"]
    assert said(TASK, state="ACQUIRED", attempts=1) == ["ACQUIRED, attempt 1 of 3"]


def test_progress_is_told_while_it_runs() -> None:
    acquired = TASK | {"state": "ACQUIRED", "attempts": 1}
    told = [*task.changes(acquired, acquired | {"progress": {"percent": 40, "note": "half"}})]
    assert told == ["T0  task 7  40 % half"]
    told = [*task.changes(acquired, acquired | {"progress": {"percent": None, "note": None}})]
    assert told == ["T0  task 7  alive"]


def test_a_failed_attempt_that_fell_between_two_looks_is_told_all_the_same() -> None:
    acquired = TASK | {"state": "ACQUIRED", "attempts": 1}
    again = acquired | {"attempts": 2, "failures": [FAILURE], "updated_at": "T3"}
    assert [*task.changes(acquired, again)] == [
        "T2  task 7  attempt 1 failed: no luck", "T3  task 7  ACQUIRED, attempt 2 of 3",
    ]  # fmt: skip
    assert [*task.changes(again, again)] == []


def test_who_ran_it_is_told_where_it_is_known() -> None:
    acquired = TASK | {"state": "ACQUIRED", "attempts": 1, "worker": "one:7"}
    assert said(None, **acquired) == ["ACQUIRED on one:7, attempt 1 of 3"]
    failed = acquired | {"state": "ERROR", "failures": [FAILURE | {"worker": "one:7"}]}
    assert said(acquired, **failed)[0] == "attempt 1 failed on one:7: no luck"
    assert said(acquired, **acquired | {"state": "SUCCESS", "result": 1}) == ["SUCCESS on one:7: 1"]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        ({"message": "ValueError: no\nluck", "data": {"type": "ValueError"}}, "ValueError: no luck"),
        ({"message": "no luck", "data": {"type": "ValueError"}}, "ValueError: no luck"),
        ({"message": "", "data": {"type": "ValueError"}}, "ValueError"),
        ({"message": "no luck", "data": [1]}, "no luck"),
        ("no luck", "no luck"),
    ],
)
def test_an_error_is_told_in_one_line_with_its_type_once(error: Any, line: str) -> None:
    assert task.error_line(error) == line


@pytest.mark.parametrize(
    ("end", "text"),
    [
        ({"state": "SUCCESS", "result": {"n": 1}}, 'SUCCESS: {"n": 1}'),
        ({"state": "SUCCESS", "result_unread": "it is large"}, "SUCCESS, its result is not shown: it is large"),
        ({"state": "CANCELLED", "reason": "not wanted"}, "CANCELLED: not wanted"),
        ({"state": "CRITICAL_ERROR"}, "failed"),
        ({"state": "WAITING", "waits_for": {"token": "t", "until": "U"}}, "WAITING for an event until U"),
    ],
    ids=["success", "unread", "cancelled", "critical", "waiting"],
)
def test_the_end_is_told_with_what_came_of_it(end: dict[str, Any], text: str) -> None:
    assert said(TASK, **end) == [text]


class Scripted:
    """An api whose answers are given."""

    def __init__(self, *answers: Any) -> None:
        self.answers = [*answers]
        self.asked: list[list[int]] = []

    def events(self, task_id: int, *, follow: bool) -> Iterator[tuple[str, Any]]:
        yield "state", {"state": "ACQUIRED"}
        yield "log", {"at": "T", "claim": 1, "level": "info", "logger": "shop", "text": "charged\x1b[1m"}
        yield "log", {"at": "T", "claim": 1, "level": "print", "logger": None, "text": "printed"}
        yield "chunk", {"at": "T", "claim": 1, "chunk": {"n": 1}}
        yield "dropped", {"claim": 1, "dropped": 3, "unread": None}

    def call(self, method: str, params: dict[str, Any]) -> Any:
        self.asked.append(params["ids"])
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "LOOK_SECONDS", 0)


def test_it_goes_on_until_all_have_settled_also_while_the_api_is_away(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = TASK | {"id": 1}, TASK | {"id": 2}
    api = Scripted(
        [one, two], Unavailable("away"), RateLimited(0.1), [one | {"state": "SUCCESS"}, two],
        [two | {"state": "CANCELLED"}],
    )  # fmt: skip
    assert task.follow(api, [1, 2, 1], as_json=False) == 3  # type: ignore[arg-type]
    assert api.asked == [[1, 2]] * 4 + [[2]]
    out, err = capsys.readouterr()
    given = ["info shop: charged\\x1b[1m", "print printed", '{"n": 1}', "3 entries dropped above the limit"]
    lines = [line.split("  ", 2)[-1].removeprefix("task 1  ").removeprefix("task 2  ") for line in out.splitlines()]
    assert len([line for line in lines if line not in given]) == 4
    assert Counter(line for line in lines if line in given) == dict.fromkeys(given, 2)
    assert err.count("still trying") == 1


def test_success_of_all_is_0_and_json_is_a_line_a_change(capsys: pytest.CaptureFixture[str]) -> None:
    api = Scripted([TASK], [TASK], [TASK | {"state": "SUCCESS"}])
    assert task.follow(api, [7], as_json=True) == 0  # type: ignore[arg-type]
    lines = [json.loads(one) for one in capsys.readouterr().out.splitlines()]
    assert len([one for one in lines if "state" in one]) == 2
    assert [one["event"] for one in lines if "event" in one] == ["log", "log", "chunk", "dropped"]


def test_a_task_that_is_not_there_or_goes_meanwhile_is_an_error() -> None:
    with pytest.raises(PenstockError, match="task 7 does not exist"):
        task.follow(Scripted([None]), [7], as_json=False)  # type: ignore[arg-type]
    with pytest.raises(PenstockError, match="task 7 is no longer kept"):
        task.follow(Scripted([TASK], [None]), [7], as_json=False)  # type: ignore[arg-type]


def test_a_wait_outlasts_a_restart_of_the_api_and_its_limits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [
        Unavailable("away"), ResultTimeout(7, "ACQUIRED", 1), TooManyWaits("callers", 1), RateLimited(2), {"n": 1},
    ]  # fmt: skip

    class Api:
        def result(self, task_id: int, *, timeout: float | None) -> Any:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        def call(self, method: str, params: Any) -> Any:
            return TASK

    monkeypatch.setattr(PollPauses, "seconds_after", lambda self, exc: 0.0)
    task._print_result(Api(), 7, None, show_failures=True)  # type: ignore[arg-type]
    assert json.loads(capsys.readouterr().out) == {"n": 1}


WITHOUT_READER = f"""
import time
from penstock.cli.task import follow

class Client:
    def call(self, method, params):
        return [{TASK}]

    def events(self, task_id, *, follow):
        while True:
            time.sleep(0.1)
            yield "log", {{"at": "T1", "level": "info", "logger": None, "text": "a line"}}

follow(Client(), [7], as_json=False)
"""


def test_it_ends_without_a_traceback_once_nobody_reads_it() -> None:
    command = [sys.executable, "-c", WITHOUT_READER]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "T0  task 7  SCHEDULED, runs at R\n"
    process.stdout.close()
    try:
        assert process.wait(10) == 1
    finally:
        process.kill()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()
