"""`penstock up`, `ps`, `down` as people use them: real processes, killed at will, in awkward folders, side by side."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import botocore.session
import httpx
import psutil
import psycopg
import pytest
import sqlalchemy

from penstock.local.service import python_path
from penstock.local.state import DataDir
from tests.forking import forked_commands
from tests.waiting import wait_until

APP = """
from penstock import Context, action

@action("greet")
async def greet(ctx: Context, name: str) -> dict:
    return {"text": f"hello {name}"}
"""
ROOT = Path(__file__).resolve().parents[2]
SINGLE = {"api", "submitter", "scheduler", "resulter", "supervisor"}
UP_WITHIN_SECONDS = 180


class Place:
    """A folder with an app in it, and the command run there. forks: `penstock up` is forked too, as all others are."""

    command = (sys.executable, "-m", "penstock")
    forks = False

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True)
        (path / "greeting.py").write_text(APP)
        self.path = path
        self.env = {
            "PYTHONPATH": python_path(),
            "NO_COLOR": "1",
            "COLUMNS": "200",
            # Quick enough that a task caught by a kill comes back within the test's timeout.
            "PENSTOCK_STALE_AFTER_SECONDS": "6",
            "PENSTOCK_HEARTBEAT_SECONDS": "2",
            "PENSTOCK_UNSENT_AFTER_SECONDS": "3",
            "PENSTOCK_VISIBILITY_TIMEOUT_SECONDS": "5",
            "PENSTOCK_RETRY_BASE_SECONDS": "0.2",
            "PENSTOCK_RETRY_CAP_SECONDS": "1",
            "PENSTOCK_SUPERVISOR_INTERVAL_SECONDS": "0.5",
        }

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        with forked_commands() if self.forks or arguments[0] != "up" else nullcontext():
            result = subprocess.run(
                [*self.command, *arguments],
                cwd=self.path,
                env=os.environ | self.env,
                text=True,
                capture_output=True,
                timeout=UP_WITHIN_SECONDS,
            )
        if check:
            assert result.returncode == 0, result.stderr
        return result

    def up(self, *arguments: str) -> dict[str, Any]:
        self.run("up", "--detach", *arguments)
        return self.state()

    def state(self) -> dict[str, Any]:
        """What `penstock ps --json` prints, without the price of a command; a test of its own compares the two."""
        state = DataDir(self.path / ".penstock").read_any_state()
        assert state is not None, f"nothing runs in {self.path}"
        return state

    def call(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "--json").stdout)

    def rpc(self, method: str, params: Any) -> Any:
        """What the api answers, None while it does not."""
        body = {"jsonrpc": "2.0", "method": method, "params": params, "id": 1}
        try:
            reply = httpx.post(f"{self.state()['api']}/rpc", json=body, timeout=30).json()
        except httpx.TransportError:
            return None
        return reply.get("result")

    def holder(self) -> int:
        """The process that has started all others."""
        return int((self.path / ".penstock" / "lock").read_text())

    def greet(self, name: str) -> int:
        return int(self.rpc("enqueue", {"action": "greet", "payload": {"name": name}})["id"])

    def wait_success(self, task_id: int, name: str, *, seconds: float = 60) -> None:
        def result() -> Any:
            task = self.rpc("status", [task_id])
            return task and task["state"] == "SUCCESS" and task["result"]

        assert wait_until(result, f"task {task_id} to succeed", seconds=seconds) == {"text": f"hello {name}"}


def process_id(state: dict[str, Any], name: str) -> int:
    return int({entry["name"]: entry["pid"] for entry in state["processes"]}[name])


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def sqs(state: dict[str, Any]) -> Any:
    """A client that knows nothing of Penstock."""
    session = botocore.session.get_session()
    key_id, secret = state["sqs_access_key"].split(":")
    return session.create_client(
        "sqs", endpoint_url=state["sqs_endpoint_url"], region_name="us-east-1", aws_access_key_id=key_id,
        aws_secret_access_key=secret,
    )  # fmt: skip


def make_place(path: Path, *, forks: bool = False) -> Iterator[Place]:
    place = Place(path)
    place.forks = forks
    yield place
    if DataDir(place.path / ".penstock").holder() is not None:
        place.run("down")


@pytest.fixture
def place(data_path: Path) -> Iterator[Place]:
    yield from make_place(data_path / "place")


@pytest.fixture
def forking_place(data_path: Path) -> Iterator[Place]:
    """For a test that is about what comes after the start."""
    yield from make_place(data_path / "place", forks=True)


@pytest.fixture(scope="module")
def shared(module_data_path: Path) -> Iterator[Place]:
    """A running stack in a long path with spaces, for tests that leave it running."""
    for place in make_place(module_data_path / "with space" / ("long" * 40)):
        credentials = place.path / "credentials"
        credentials.write_text("[default]\naws_access_key_id = AKIDREAL\naws_secret_access_key = real-secret\n")
        with pytest.MonkeyPatch.context() as user:
            user.delenv("AWS_ACCESS_KEY_ID")
            user.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
            user.setenv("AWS_DEFAULT_REGION", "eu-central-1")
            place.up("--app", "greeting", "--workers", "2")
        yield place


def test_ps_tells_everything_that_a_foreign_worker_needs(shared: Place) -> None:
    state = json.loads(shared.run("ps", "--json").stdout)
    assert state == shared.state()
    assert set(state) == {
        "api",
        "database_url",
        "database_env",
        "transport_url",
        "sqs_endpoint_url",
        "sqs_access_key",
        "queues",
        "suggestion",
        "env",
        "processes",
    }
    assert state["suggestion"] == {"action": "greet", "payload": {"name": "text"}}
    assert set(state["queues"]) == {"inbound", "outbound", "results"}
    names = {entry["name"] for entry in state["processes"]}
    assert names == SINGLE | {"worker-1", "worker-2", "postgres", "sqs"}
    for entry in state["processes"]:
        assert alive(entry["pid"])
        if entry["name"] in ("postgres", "sqs"):
            assert entry["metrics"] is None
        else:
            with urllib.request.urlopen(entry["metrics"], timeout=10) as response:
                assert b"penstock_" in response.read()
    for url in state["queues"].values():
        attributes = sqs(state).get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
        assert "deadLetterTargetArn" in attributes["RedrivePolicy"]
    mode = stat.S_IMODE((shared.path / ".penstock" / "state.json").stat().st_mode)
    assert mode == 0o600


def test_env_prints_what_a_client_that_knows_nothing_of_penstock_needs(shared: Place) -> None:
    script = (
        "import botocore.session, os; "
        "sqs = botocore.session.get_session().create_client('sqs', "
        "endpoint_url=os.environ['PENSTOCK_SQS_ENDPOINT_URL'], region_name=os.environ['PENSTOCK_AWS_REGION']); "
        "print(sqs.get_queue_url(QueueName=os.environ['PENSTOCK_INBOUND_QUEUE'])['QueueUrl'])"
    )
    exports = shared.run("env").stdout
    done = subprocess.run(
        ["sh", "-euc", f'{exports}\nexec "$0" -c "$1"', sys.executable, script],
        env={name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == shared.state()["queues"]["inbound"], exports + done.stderr
    assert json.loads(shared.run("env", "--json").stdout) == shared.state()["env"]


def test_a_worker_started_by_hand_serves_the_stack_of_the_folder(shared: Place) -> None:
    (shared.path / "by_hand.py").write_text(APP.replace("greet", "greet_by_hand"))
    before = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    with (shared.path / "by_hand.log").open("wb") as output:
        process = subprocess.Popen(
            [*shared.command, "worker", "--app", "by_hand", "--app", "greeting"], cwd=shared.path,
            env=before | shared.env, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    # A worker of the stack that gets the task instead gives it back for half a minute, and may get it again.
    others = [process_id(shared.state(), name) for name in ("worker-1", "worker-2")]
    try:
        for pid in others:
            os.kill(pid, signal.SIGSTOP)
        task = shared.rpc("enqueue", {"action": "greet_by_hand", "payload": {"name": "hand"}, "max_attempts": 100})[
            "id"
        ]
        shared.wait_success(task, "hand", seconds=300)
    finally:
        for pid in others:
            os.kill(pid, signal.SIGCONT)
        process.terminate()
        process.wait(60)
    elsewhere = shared.run("worker", "--data-dir", "nowhere", check=False)
    assert (elsewhere.returncode, "nothing runs in" in elsewhere.stderr) == (1, True)


def test_a_table_of_an_application_may_be_named_as_one_of_penstock(shared: Place) -> None:
    metadata = sqlalchemy.MetaData()
    job = sqlalchemy.Table("job", metadata, sqlalchemy.Column("title", sqlalchemy.Text))
    url = shared.state()["database_url"].replace("postgresql:", "postgresql+psycopg:")
    engine = sqlalchemy.create_engine(url)
    try:
        metadata.create_all(engine)
        with engine.begin() as connection:
            connection.execute(job.insert().values(title="mine"))
            assert connection.scalar(sqlalchemy.text("select title from public.job")) == "mine"
            assert connection.scalar(sqlalchemy.text("select current_schema()")) == "public"
        metadata.drop_all(engine)
        with engine.begin() as connection:
            assert connection.scalar(sqlalchemy.text("select to_regclass('penstock.job')::text")) == "penstock.job"
    finally:
        engine.dispose()


def environment_of(state: dict[str, Any], name: str) -> dict[str, str]:
    return dict(psutil.Process(process_id(state, name)).environ())


def test_processes_are_given_the_secrets_that_they_need_and_no_others(place: Place) -> None:
    admin = "admin-key-of-the-user"
    place.env |= {
        "PENSTOCK_API_KEYS": admin, "penstock_api_key": admin, "AWS_ACCESS_KEY_ID": "AKIDREAL",
        "AWS_SECRET_ACCESS_KEY": "real-secret", "PENSTOCK_DATABASE_URL": "postgresql://u:elsewhere@db.example.org/x",
        "PENSTOCK_DATABASE_READ_URL": "postgresql://u:elsewhere@replica.example.org/x",
        "PENSTOCK_DATABASE_SSL_MODE": "verify-full",
        "PYTHONPATH": os.pathsep.join((place.env["PYTHONPATH"], str(ROOT))),
    }  # fmt: skip
    state = place.up("--app", "examples.export", "--app", "greeting")
    assert "replica.example.org" not in " ".join(environment_of(state, "api").values())
    for command in (("keys", "list"), ("doctor",)):  # reach the embedded Postgres, not one by the user's settings
        place.run(*command, "--data-dir", ".penstock")
    worker = environment_of(state, "worker-1")
    told = " ".join(worker.values())
    password = state["database_url"].split(":")[2].split("@")[0]
    for secret in (admin, password, "elsewhere"):
        assert secret not in told
    assert worker["AWS_ACCESS_KEY_ID"] == "AKIDREAL", "handlers may call other services by the user's own"
    for name in ("postgres", "sqs"):
        told = " ".join(environment_of(state, name).values())
        for secret in (admin, password, "elsewhere", "AKIDREAL", "real-secret", worker["PENSTOCK_CONTROL_API_KEY"]):
            assert secret not in told

    def call(method: str, key: str, params: Any) -> Any:
        body = {"jsonrpc": "2.0", "method": method, "params": params, "id": 1}
        return httpx.post(
            f"{state['api']}/rpc", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=30
        ).json()

    control = worker["PENSTOCK_CONTROL_API_KEY"]
    assert "result" in call("claims.check", control, {"claims": ["1:1"]})
    greeted = {"action": "greet", "payload": {"name": "keys"}}
    assert call("enqueue", control, greeted)["error"]["code"] == -32003
    wanted = [greeted, {"action": "export", "payload": {"objectID": 23}}]
    tasks = [call("enqueue", admin, params)["result"]["id"] for params in wanted]
    wait_until(
        lambda: [task["state"] for task in call("status", admin, {"ids": tasks})["result"]] == ["SUCCESS"] * 2,
        "the tasks to succeed",
    )

    with psycopg.connect(worker["EXPORT_DATABASE_URL"]) as connection:
        assert connection.execute("select count(*) from t_exported_object").fetchone() == (1,)
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("select pg_read_file('/etc/passwd')")
    with psycopg.connect(state["database_url"]) as connection:
        assert connection.execute("select current_schema()").fetchone() == ("public",)


def test_credentials_of_a_file_and_the_region_of_the_user_stay(shared: Place) -> None:
    worker = environment_of(shared.state(), "worker-1")
    assert "AWS_ACCESS_KEY_ID" not in worker, "it would hide the file"
    assert worker["PENSTOCK_AWS_REGION"] == shared.state()["env"]["PENSTOCK_AWS_REGION"] == "eu-central-1"


def test_ps_for_people_shows_no_password(shared: Place) -> None:
    shown = shared.run("ps").stdout
    password = shared.state()["database_url"].split(":")[2].split("@")[0]
    assert password not in shown
    assert shared.state()["sqs_access_key"].split(":")[0] not in shown
    assert password not in (shared.path / ".penstock" / "penstock.log").read_text()
    assert "worker-2" in shown


def test_the_dashboard_shows_every_process_that_is_alive_workers_too(shared: Place) -> None:
    def ready() -> set[str]:
        shown = httpx.get(f"{shared.state()['api']}/", headers={"Accept": "text/html"}, timeout=60).text
        return set(re.findall(r'badge s-active">([\w-]+)<', shown))

    workers = {entry["name"] for entry in shared.state()["processes"] if entry["name"].startswith("worker-")}
    wait_until(lambda: ready() >= workers | SINGLE, "all processes to be shown as alive")


def test_second_up_in_the_same_folder_is_told_where_the_first_one_is(shared: Place) -> None:
    state = shared.state()
    for arguments in (["up"], ["up", "--detach"]):
        result = shared.run(*arguments, check=False)
        assert result.returncode == 1
        assert state["api"] in result.stderr
    assert shared.state()["processes"] == state["processes"]


def test_plain_sqs_message_ends_in_success(shared: Place) -> None:
    state = shared.state()
    body = {"jsonrpc": "2.0", "method": "submit:greet", "params": {"name": "sqs"}}
    sqs(state).send_message(QueueUrl=state["queues"]["inbound"], MessageBody=json.dumps(body))
    wait_until(
        lambda: [t for t in shared.rpc("list", {"state": "SUCCESS"})["tasks"] if "sqs" in str(t["result"])],
        "the task to succeed",
    )


def test_commands_show_list_cancel_and_retry_tasks(shared: Place) -> None:
    done = shared.call("enqueue", "greet", '{"name": "cli"}')["id"]
    shared.wait_success(done, "cli")
    assert "SUCCESS" in shared.run("task", "show", str(done)).stdout
    later = shared.call("enqueue", "greet", '{"name": "later"}', "--delay", "3600", "--priority", "-5")["id"]
    listed = shared.run("tasks", "--state", "scheduled").stdout
    assert str(later) in listed
    assert shared.run("task", "cancel", str(later)).stdout == f"task {later} CANCELLED\n"
    assert shared.run("task", "retry", str(later)).stdout == f"task {later} SCHEDULED\n"
    shared.wait_success(later, "later")
    for refused in (["cancel", str(done)], ["show", "999999999"], ["retry", str(done)]):
        result = shared.run("task", *refused, check=False)
        assert result.returncode == 1
        assert result.stderr.startswith("penstock: ")
        assert "code -32" not in result.stderr
    assert "greet" in shared.run("stats").stdout


def test_rejected_message_is_listed_and_purged_by_command(shared: Place) -> None:
    state = shared.state()
    sqs(state).send_message(QueueUrl=state["queues"]["inbound"], MessageBody="{ no json")
    wait_until(lambda: shared.rpc("rejected.list", {})["rejected"], "the message to be rejected")
    assert "{ no json" in shared.run("rejected").stdout
    shared.run("rejected", "purge", "--all")
    assert shared.call("rejected", "list")["rejected"] == []
    assert shared.run("rejected", "purge", "--all").stdout == "No rejected messages.\n"


@pytest.mark.parametrize("name", ["scheduler", "worker-1", "api", "postgres", "sqs"])
def test_killed_process_comes_back_and_the_pipeline_goes_on(shared: Place, name: str) -> None:
    before = shared.state()
    pid = process_id(before, name)
    os.kill(pid, signal.SIGKILL)

    def replaced() -> bool:
        found = {entry["name"]: entry["pid"] for entry in shared.state()["processes"]}[name]
        return found is not None and found != pid and alive(found)

    wait_until(replaced, f"{name} to come back")
    after = shared.state()
    assert {key: after[key] for key in after if key != "processes"} == {
        key: before[key] for key in before if key != "processes"
    }
    wait_until(lambda: shared.rpc("stats", {}), "the api to answer")
    shared.wait_success(shared.greet(name), name)


def test_a_stack_over_an_outside_postgres_and_sqs_runs_beside_another_and_knows_only_its_own_tasks(
    shared: Place, place: Place, empty_database_url: str, sqs_url: str
) -> None:
    prefix = f"t-{os.urandom(4).hex()}"
    place.env |= {
        f"PENSTOCK_{label}_QUEUE": f"{prefix}-{label.lower()}" for label in ("INBOUND", "OUTBOUND", "RESULTS")
    }
    ours = shared.state()
    other = place.up("--database-url", empty_database_url, "--sqs-endpoint-url", sqs_url, "--app", "greeting")
    assert (other["database_url"], other["sqs_endpoint_url"]) == (empty_database_url, sqs_url)
    for pid in (place.holder(), *(entry["pid"] for entry in other["processes"])):
        assert urlsplit(empty_database_url).password not in " ".join(psutil.Process(pid).cmdline())
    assert "PENSTOCK_UP_DATABASE_URL" not in environment_of(other, "worker-1")
    assert {entry["name"] for entry in other["processes"]} == SINGLE | {"worker-1"}
    assert other["api"] != ours["api"]
    task = place.greet("other")
    place.wait_success(task, "other")
    place.run("down")
    assert shared.state() == ours
    shared.wait_success(shared.greet("still here"), "still here")


def test_a_task_survives_a_stack_that_is_stopped_then_one_that_is_killed_and_succeeds_in_the_third(
    forking_place: Place,
) -> None:
    place = forking_place
    state = place.up("--workers", "0", "--one-process")
    assert not [entry for entry in state["processes"] if entry["name"].startswith("worker")]
    task = place.greet("patient")

    assert "stopped" in place.run("down").stdout
    assert not [entry for entry in state["processes"] if alive(entry["pid"])]
    assert place.run("ps", check=False).returncode == 1
    assert "nothing runs" in place.run("down").stdout

    again = place.up("--workers", "0", "--one-process")
    assert (again["database_url"], again["queues"]) == (state["database_url"], state["queues"])
    os.kill(place.holder(), signal.SIGKILL)
    for entry in again["processes"]:
        wait_until(lambda pid=entry["pid"]: not alive(pid), f"{entry['name']} to end")  # type: ignore[misc]
    assert place.run("ps", check=False).returncode == 1

    third = place.up("--app", "greeting")
    place.wait_success(task, "patient")
    leave_by_a_second_signal(place, third)


def leave_by_a_second_signal(place: Place, state: dict[str, Any]) -> None:
    """At once, and without leaving anything behind."""
    holder = place.holder()
    # A process that does not stop on its own, so that the first signal alone takes long.
    os.kill(process_id(state, "supervisor"), signal.SIGSTOP)
    os.kill(holder, signal.SIGTERM)
    wait_until(lambda: not alive(process_id(state, "api")), "the stop to be under way")
    assert alive(holder)
    os.kill(holder, signal.SIGTERM)
    wait_until(lambda: not alive(holder), "the stack to leave", seconds=10)
    for entry in state["processes"]:
        wait_until(lambda pid=entry["pid"]: not alive(pid), f"{entry['name']} to end")  # type: ignore[misc]


def test_app_that_cannot_be_loaded_is_named_and_nothing_stays(forking_place: Place) -> None:
    result = forking_place.run("up", "--detach", "--app", "no.such.module", check=False)
    assert result.returncode == 1
    assert "no.such" in result.stderr
    assert forking_place.run("ps", check=False).returncode == 1
