"""`penstock conformance` on Penstock's worker, on one without Penstock, and on one that breaks rules: all at once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli.conformance.checks import CHECKS, MINIMUM

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "conformance"
PENSTOCK = (
    "env PYTHONPATH={folder} PENSTOCK_TRACES=true OTEL_TRACES_EXPORTER=none {python} -m penstock worker --app {app}"
)
# Penstock's worker, to one station of which each message of a task with steps comes again, as on a busy machine.
REDELIVERED = """
import os

import penstock
from examples.conformance.penstock_worker import steps
from penstock.worker.handlers.steps import Suspend

seen = set()


@penstock.around_attempt
def redeliver(ctx):
    if ctx.action == steps.name and "main" in os.environ["PENSTOCK_OUTBOUND_QUEUE"] and ctx.task_id not in seen:
        seen.add(ctx.task_id)
        raise Suspend(is_redelivered=True)
    yield
"""
# What a worker does wrong, as changes of the plain one, and the rules by which the suite finds it.
CHANGES = {
    "        sqs.send_message(QueueUrl=RESULTS, MessageBody=json.dumps(answers))\n": "",
    "        sqs.delete_message(QueueUrl=OUTBOUND, ReceiptHandle=handle)\n": (
        "        sqs.delete_message(QueueUrl=OUTBOUND, ReceiptHandle=handle)\n"
        "        sqs.send_message(QueueUrl=RESULTS, MessageBody=json.dumps(answers))\n"
    ),
    "while not done.wait(SECONDS / 3):": "while False:",
    '"id": request["id"]}': '"id": request["id"][: None if body_is(request) else -1]}',
    "action(*params) if isinstance(params, list) else action(**params)": "action(**params)",
    "def keep(": 'def body_is(request):\n    return request["method"] != "conformance.fail"\n\n\ndef keep(',
}
BROKEN_RULES = {
    "A task is answered by its id, then its message is deleted",
    "A payload may be an array of positional parameters",
    "A failed task is answered with an error: a number as code, a text as message",
    "Each task of a batch is answered by its own id",
    "The visibility timeout of a longer task is extended",
    "No message is deleted while the results queue refuses its answer",
    "Only responses and known notifications are sent, under ids as they came",
}


class Run:
    """The suite in a process of its own. found: outcome and detail by rule."""

    def __init__(self, command: str, *options: str, folder: Path) -> None:
        suite = [sys.executable, "-m", "penstock", "conformance", "--json", "--logs", str(folder), "--worker", command]
        self.folder = folder
        self.process = subprocess.Popen(
            [*suite, *options], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.found: dict[str, tuple[str, str]] = {}
        self.code = 0

    def wait(self) -> None:
        out, err = self.process.communicate(timeout=240)
        assert out, err
        self.code = self.process.returncode
        self.found = {one["rule"]: (one["outcome"], one["detail"]) for one in json.loads(out)}

    def missed(self) -> dict[str, tuple[str, str]]:
        return {rule: found for rule, found in self.found.items() if found[0] != "passed"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    folder = tmp_path_factory.mktemp("conformance")
    text = (EXAMPLES / "plain_worker.py").read_text("utf-8")
    for before, after in CHANGES.items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    broken = folder / "broken_worker.py"
    broken.write_text(text, "utf-8")
    (folder / "redelivered.py").write_text(REDELIVERED, "utf-8")
    ours = PENSTOCK.format(folder=folder, python=sys.executable, app="redelivered")
    plain = f"{sys.executable} {EXAMPLES / 'plain_worker.py'}"
    made = {
        "penstock": Run(ours, "--require", "all", folder=folder / "penstock"),
        "plain": Run(plain, folder=folder / "plain"),
        "broken": Run(f"{sys.executable} {broken}", "--timeout", "15", folder=folder / "broken"),
    }
    yield made
    for run in made.values():
        run.process.kill()
        run.process.communicate()


@pytest.fixture(scope="module")
def ended(runs: dict[str, Run]) -> dict[str, Run]:
    for run in runs.values():
        run.wait()
    return runs


def test_penstocks_worker_keeps_every_rule(ended: dict[str, Run]) -> None:
    assert ended["penstock"].missed() == {}
    assert len(ended["penstock"].found) == len(CHECKS)
    assert ended["penstock"].code == 0


def test_thirty_lines_without_penstock_keep_the_minimum(ended: dict[str, Run]) -> None:
    missed = ended["plain"].missed()
    assert ended["plain"].code == 0, missed
    assert not {rule for feature, rule, *_ in CHECKS if feature == MINIMUM} & missed.keys()
    assert missed["The response has a traceparent of the trace in the message's attributes"][0] == "not supported"
    lines = (EXAMPLES / "plain_worker.py").read_text("utf-8").splitlines()
    assert len([line for line in lines if line and not line.startswith(('"""', "import ", "from "))]) <= 30
    assert not any("penstock" in line for line in lines if "import" in line)


def test_a_worker_that_breaks_rules_is_found_out(ended: dict[str, Run]) -> None:
    failed = {rule for rule, (outcome, _) in ended["broken"].missed().items() if outcome == "failed"}
    assert failed >= BROKEN_RULES
    assert ended["broken"].code == 1


@pytest.mark.parametrize("options", [("--require", "wings"), ()])
def test_a_feature_that_there_is_not_and_a_missing_command_are_refused(options: tuple[str, ...]) -> None:
    command = ["--worker", "true"] if options else []
    suite = [sys.executable, "-m", "penstock", "conformance", *command, *options]
    done = subprocess.run(suite, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done
    assert ("wings is no feature" if options else "--worker") in done.stderr


def test_the_plain_worker_ends_when_it_cannot_answer(tmp_path: Path) -> None:
    (tmp_path / "botocore").mkdir()
    (tmp_path / "botocore/__init__.py").touch()
    (tmp_path / "botocore/session.py").write_text(
        """
class Client:
    def receive_message(self, **_):
        body = '{"id": "1:1", "method": "conformance.echo", "params": [1]}'
        return {"Messages": [{"ReceiptHandle": "r", "Body": body}]}

    def change_message_visibility(self, **_):
        pass

    def send_message(self, **_):
        raise OSError("the queue is unavailable")


def get_session():
    return Session()


class Session:
    def create_client(self, name):
        return Client()
"""
    )
    env = {"PYTHONPATH": str(tmp_path), "PENSTOCK_OUTBOUND_QUEUE": "out", "PENSTOCK_RESULTS_QUEUE": "in"}
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / "plain_worker.py")], env=env, capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, "the queue is unavailable" in ended.stderr) == (1, True)
