"""The project of docs/django.md, and the backend behind it, on the Django that is installed.

It takes no fixture of the other tests, so that .ci/django runs it in an environment of its own with a newer Django.
"""

from __future__ import annotations

import functools
import importlib
import io
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

import penstock
from penstock.client import default
from penstock.protocol.answers import TaskDetail
from penstock.protocol.errors import PayloadLost, ResultGone, SettingsError
from penstock.testing.inline import Inline
from penstock.testing.pipeline import Pipeline
from penstock.worker.handlers.actions import REGISTRY

django = pytest.importorskip("django")
ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/django.md"
BACKEND = "penstock.contrib.django.backend.PenstockBackend"

MORE = """
import asyncio
import penstock
from django.core.exceptions import PermissionDenied
from django.db import connection
from django.tasks import task

ran = []

@task(takes_context=True)
def fail(context, how: "no such type"):
    ran.append(context.attempt)
    context.penstock.progress_sync(50, "half")
    if how == "wait":
        return context.penstock.wait(timeout=60)
    asked = {"retry": penstock.Retry, "snooze": penstock.Snooze, "limited": penstock.RateLimited}
    if how in asked:
        raise asked[how](5)
    raise {"built in": ValueError, "django": PermissionDenied}[how]("no")

@task
async def add(a, b=2, *, c=0):
    return [a, b, c]

@task
def by_position(a, /, *more):
    return [a, *more]

@penstock.action("successor")
def successor(number: int):
    return number + 1

def use():
    connection.ensure_connection()
    ran.append(connection.connection)
    return connection.connection.closed

@penstock.action("reads")
def reads():
    return use()

@penstock.action("awaits")
async def awaits():
    from asgiref.sync import sync_to_async
    return await sync_to_async(use)()

@task
def asks():
    return use()

@task(options={"timeout": 0.2, "max_attempts": 1})
async def sleeps():
    await asyncio.sleep(60)
"""


def adapted(source: str) -> str:
    """The source as this release of Django wants it."""
    if django.VERSION < (6, 0):
        source = source.replace("from django.tasks", "from django_tasks")
        source = source.replace('["penstock.contrib', '["django_tasks", "more", "penstock.contrib')
    return source.replace('["penstock.contrib', '["more", "penstock.contrib')


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the project of the page, and an app `more`; Django is set up with it."""
    folder = tmp_path_factory.mktemp("project")
    blocks = re.findall(r"```python shop/(\w+\.py)\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    (folder / "shop").mkdir()
    for name, source in [*blocks, ("__init__.py", "")]:
        (folder / "shop" / name).write_text(adapted(source), "utf-8")
    (folder / "more").mkdir()
    (folder / "more/__init__.py").touch()
    (folder / "more/tasks.py").write_text(adapted(MORE), "utf-8")
    sys.path.insert(0, str(folder))
    given = {
        "DJANGO_SETTINGS_MODULE": "shop.settings",
        "SECRET_KEY": "of a test",
        "DATABASE_URL": "postgresql://nobody@localhost/no",
    }
    zone = os.environ.get("TZ")
    os.environ.update(given)
    django.setup()
    yield folder
    sys.path.remove(str(folder))
    for name in given:
        del os.environ[name]
    os.environ.pop("TZ", None)  # Django has set the zone of the process
    if zone is not None:
        os.environ["TZ"] = zone
    time.tzset()


def settings_of(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    return {
        "NAME": parts.path[1:], "HOST": parts.hostname, "PORT": parts.port, "USER": parts.username,
        "PASSWORD": parts.password,
    }  # fmt: skip


@pytest.fixture
def shop(project: Path, penstock_pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The modules of the project, whose database is the pipeline's."""
    from django.db import connections

    connections["default"].close()
    del connections["default"]
    for name, value in settings_of(penstock_pipeline.database_url).items():
        monkeypatch.setitem(connections.settings["default"], name, value)
    monkeypatch.setattr(default, "client", functools.cache(default.client.__wrapped__))
    shop = SimpleNamespace(connection=connections["default"])
    for name in ("models", "tasks", "urls"):
        setattr(shop, name, importlib.import_module(f"shop.{name}"))
    with shop.connection.schema_editor() as editor:
        editor.create_model(shop.models.Order)
    yield shop
    connections["default"].close()


@pytest.fixture
def more(shop: SimpleNamespace) -> Iterator[ModuleType]:
    module = importlib.import_module("more.tasks")
    module.ran.clear()
    return module


@pytest.fixture
def signals() -> Iterator[list[tuple[str, str]]]:
    """What the signals of tasks were sent with: their name and the task's status."""
    from penstock.contrib.django.backend import task_enqueued, task_finished, task_started

    seen: list[tuple[str, str]] = []
    named = {"enqueued": task_enqueued, "started": task_started, "finished": task_finished}
    receivers = []
    for name, sent in named.items():

        def receive(*, name: str = name, task_result: Any, **_: Any) -> None:
            seen.append((name, str(task_result.status)))

        sent.connect(receive)
        receivers.append((sent, receive))
    yield seen
    for sent, receiver in receivers:
        sent.disconnect(receiver)


def test_a_request_stores_its_order_and_task_together_and_the_task_commits_its_result_with_its_rows(
    shop: SimpleNamespace, penstock_pipeline: Pipeline, signals: list[tuple[str, str]]
) -> None:
    from django.test import Client

    http = Client()
    answer = http.get("/checkout", {"to": "ann@example.org"}).json()
    charge = shop.tasks.charge
    assert http.get(f"/tasks/{answer['task']}").json() == {"status": "READY"}
    (stored,) = penstock_pipeline.enqueued("shop.tasks.charge", {"order": 1})
    assert (str(stored.id), stored.priority, stored.max_attempts, stored.timeout) == (answer["task"], 10, 5, 30)
    assert (stored.unique_key, stored.labels) == ("order-1", {"queue": "cards"})
    penstock_pipeline.crash("shop.tasks.charge", before_answer=True)
    penstock_pipeline.drain_sync()
    result = charge.get_result(answer["task"])
    assert (result.status, result.return_value, result.kwargs) == ("SUCCESSFUL", {"paid": 1}, {"order": 1})
    assert result.enqueued_at <= result.started_at == result.last_attempted_at <= result.finished_at
    assert shop.models.Order.objects.get().is_paid
    (receipt,) = penstock_pipeline.enqueued("shop.tasks.send_receipt")  # one, though the task ran
    assert receipt.result == "sent to ann@example.org"
    assert signals[:3] == [("enqueued", "READY"), ("started", "RUNNING"), ("enqueued", "READY")]


def test_a_rolled_back_block_leaves_no_task(shop: SimpleNamespace, penstock_pipeline: Pipeline) -> None:
    from django.db import transaction

    with pytest.raises(ZeroDivisionError), transaction.atomic():
        shop.models.Order.objects.create(to="ann@example.org")
        kept = shop.tasks.send_receipt.enqueue(1, to="ann@example.org")
        with pytest.raises(KeyError), transaction.atomic():  # a savepoint
            shop.tasks.send_receipt.enqueue(2, to="bob@example.org")
            raise KeyError
        assert int(kept.id) > 0
        raise ZeroDivisionError
    assert not penstock_pipeline.enqueued()
    with transaction.atomic():
        shop.tasks.send_receipt.enqueue(3, to="eve@example.org")
    assert [task.payload for task in penstock_pipeline.enqueued()] == [{"order": 3, "to": "eve@example.org"}]


def test_failed_attempts_are_told_with_their_class_and_traceback(
    shop: SimpleNamespace, more: ModuleType, penstock_pipeline: Pipeline, signals: list[tuple[str, str]]
) -> None:
    more.add.enqueue(1)
    penstock_pipeline.drain_sync()  # a claim of another task
    signals.clear()
    result = more.fail.using(options={"max_attempts": 2}).enqueue("django")
    penstock_pipeline.drain_sync(retries=False)
    result.refresh()
    assert (result.status, result.attempts, more.ran) == ("READY", 1, [1])
    assert result.finished_at is None
    penstock_pipeline.drain_sync()
    result.refresh()
    assert (result.status, result.attempts, more.ran) == ("FAILED", 2, [1, 1])
    assert [error.exception_class.__name__ for error in result.errors] == ["PermissionDenied"] * 2
    assert 'more/tasks.py", line' in result.errors[1].traceback
    with pytest.raises(ValueError, match="Task failed"):
        _ = result.return_value
    assert signals == [("enqueued", "READY"), *[("started", "RUNNING"), ("finished", "FAILED")] * 2]
    signals.clear()
    built_in = more.fail.using(options={"max_attempts": 1}).enqueue(how="built in")
    retried = more.fail.using(options={"max_attempts": 1}).enqueue("retry")
    penstock_pipeline.drain_sync()
    for one, kind in ((built_in, ValueError), (retried, penstock.Retry)):
        one.refresh()
        assert [error.exception_class for error in one.errors] == [kind]
    assert signals.count(("finished", "FAILED")) == 1


def test_an_attempt_that_is_put_off_or_waits_is_not_finished(
    more: ModuleType, penstock_pipeline: Pipeline, signals: list[tuple[str, str]]
) -> None:
    results = [more.fail.enqueue(how) for how in ("snooze", "wait", "limited")]
    penstock_pipeline.drain_sync()
    assert signals == [("enqueued", "READY")] * 3 + [("started", "RUNNING")] * 3
    for one in results:
        one.refresh()
    assert [(one.status, one.errors) for one in results] == [("READY", [])] * 3


def test_an_attempt_over_its_time_limit_is_finished(
    more: ModuleType, penstock_pipeline: Pipeline, signals: list[tuple[str, str]]
) -> None:
    more.sleeps.enqueue()
    penstock_pipeline.drain_sync()
    assert signals == [("enqueued", "READY"), ("started", "RUNNING"), ("finished", "FAILED")]


def test_a_lost_worker_is_a_failure_without_a_class_of_its_own() -> None:
    from penstock.contrib.django.backend import _error
    from penstock.protocol.answers import Failure

    lost = {"code": -32000, "message": "StaleTask: no heartbeat", "data": {"type": "StaleTask", "message": "x"}}
    error = _error(Failure({"attempt": 1, "claim": 1, "at": "2030-01-01T00:00:00Z", "error": lost, "worker": None}))
    assert (error.exception_class, error.traceback) == (penstock.TaskFailed, "StaleTask: no heartbeat\n")


@pytest.mark.parametrize("data", ["no object", {"type": 5}, {"type": None, "traceback": ["line"]}])
def test_a_failure_may_have_data_of_any_kind(data: Any) -> None:
    from penstock.contrib.django.backend import _error
    from penstock.protocol.answers import Failure

    given = {"code": 1, "message": "no", "data": data}
    error = _error(Failure({"attempt": 1, "claim": 1, "at": "2030-01-01T00:00:00Z", "error": given, "worker": None}))
    assert (error.exception_class, error.traceback) == (penstock.TaskFailed, "no\n")


def test_coroutines_and_arguments_of_every_kind(
    shop: SimpleNamespace, more: ModuleType, penstock_pipeline: Pipeline
) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    results = [
        more.add.enqueue(1, c=3),
        more.add.using(run_after=later).enqueue(a=5),
        more.by_position.enqueue(1, 2, 3),
    ]
    penstock_pipeline.drain_sync()
    assert [str(more.add.get_result(one.id).status) for one in results[:2]] == ["SUCCESSFUL", "READY"]
    penstock_pipeline.clock.advance(hours=1)
    penstock_pipeline.drain_sync()
    for one in results:
        one.refresh()
    assert [one.return_value for one in results] == [[1, 2, 3], [5, 2, 0], [1, 2, 3]]
    assert (results[2].args, results[2].kwargs) == ([1, 2, 3], {})
    for arguments, problem in (
        ({"a": object()}, TypeError),
        ({"z": 1}, penstock.InvalidParams),
        ({}, penstock.InvalidParams),
    ):
        with pytest.raises(problem):
            more.add.enqueue(**arguments)
    assert len(penstock_pipeline.enqueued()) == 3


def test_a_result_that_status_does_not_show_is_fetched(
    more: ModuleType, penstock_pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    task_id = more.add.enqueue(1).id
    penstock_pipeline.drain_sync()
    client = default.client()
    whole = client.status(int(task_id), detail=True)
    hidden = {"payload": None, "payload_unread": "large", "result": None, "result_unread": "large"}
    monkeypatch.setattr(client, "status", lambda task_id, detail: type(whole)(whole | hidden))
    monkeypatch.setattr(client, "download", lambda task_id, what: whole[what])
    result = more.add.get_result(task_id)
    assert (result.return_value, result.kwargs) == ([1, 2, 0], {"a": 1})

    def lost(task_id: int, what: str) -> Any:
        raise PayloadLost(what)

    monkeypatch.setattr(client, "download", lost)
    with pytest.raises(PayloadLost, match="result"):
        more.add.get_result(task_id)
    hidden["result_unread"] = None
    result = more.add.get_result(task_id)
    assert (result.status, result.kwargs) == ("SUCCESSFUL", {})


def test_a_result_that_is_kept_no_more_is_told(
    more: ModuleType, penstock_pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    task_id = more.add.enqueue(1).id
    penstock_pipeline.drain_sync()
    client = default.client()
    gone = client.status(int(task_id), detail=True) | {"result": None, "result_gone": True}
    monkeypatch.setattr(client, "status", lambda task_id, detail: TaskDetail(gone))
    with pytest.raises(ResultGone):
        more.add.get_result(task_id)


def test_a_worker_closes_old_connections_around_each_attempt(
    more: ModuleType, penstock_pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = {handler: handler.function for handler in REGISTRY.values()}
    try:
        importlib.reload(importlib.import_module("penstock.contrib.django.worker_app"))
        penstock.action("late")(more.use)  # as a module of --app, loaded behind it
        for _ in range(2):
            for name in ("reads", "awaits", "more.tasks.asks", "late"):
                penstock.enqueue_sync(more.connection, name)
        more.asks.using(priority=3)  # the same function, known by then
        penstock_pipeline.drain_sync()
        assert {task.state for task in penstock_pipeline.enqueued()} == {"SUCCESS"}
        assert [task.result for task in penstock_pipeline.enqueued()] == [False] * 8
        assert [one.closed for one in more.ran] == [True] * 8
    finally:
        REGISTRY.pop("late", None)
        vars(REGISTRY).pop("add", None)
        for handler, function in functions.items():
            handler.function = function


async def test_a_task_is_enqueued_and_read_from_a_coroutine(project: Path, penstock_inline: Inline) -> None:
    more = importlib.import_module("more.tasks")
    result = await more.add.aenqueue(1)
    await penstock_inline.drain()
    await result.arefresh()
    assert (result.return_value, result.attempts) == ([1, 2, 0], 1)


def test_what_no_worker_could_run_is_refused(shop: SimpleNamespace, more: ModuleType) -> None:
    from penstock.contrib.django.backend import InvalidTask, Task, TaskResultDoesNotExist

    with pytest.raises(InvalidTask, match="did you mean max_attempts"):
        more.add.using(options={"max_attempt": 1})
    with pytest.raises(InvalidTask, match="no option of a task is named 'run_at'"):
        more.add.using(options={"run_at": 1})
    of_another = Task(func=more.add.func, backend="default")
    with pytest.raises(InvalidTask, match="declare it as @task\\(backend='default'\\)"):
        of_another.enqueue(1)
    with pytest.raises(InvalidTask, match="Queue 'video' is not valid"):
        more.add.using(queue_name="video")
    of_no_task = penstock.enqueue_sync(shop.connection, "successor", {"number": 1})
    of_no_module = penstock.enqueue_sync(shop.connection, ".x")
    for unknown in ("1", "x", "-1", "9" * 20, str(of_no_task.id), str(of_no_module.id)):
        with pytest.raises(TaskResultDoesNotExist):
            more.add.get_result(unknown)


def test_calls_of_penstock_take_djangos_connections(
    shop: SimpleNamespace, more: ModuleType, penstock_pipeline: Pipeline
) -> None:
    from django.db import connection, connections, transaction
    from django.db.utils import ProgrammingError

    with transaction.atomic():
        task = more.successor.enqueue_in_sync(connection, 1)
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        penstock.enqueue_many_sync(connections["default"], [{"action": "successor", "payload": {"number": 2}}])
        raise ZeroDivisionError
    penstock_pipeline.drain_sync()
    assert [one.id for one in penstock_pipeline.enqueued()] == [task.id]
    assert task.result_sync() == 2
    with connection.cursor() as cursor:
        cursor.execute("create role nobody")
        cursor.execute("set role nobody")
    with pytest.raises(ProgrammingError) as refused:
        penstock.enqueue_sync(connection, "successor")
    assert "grant execute on function penstock_enqueue" in refused.value.__notes__[0]
    with connection.cursor() as cursor:
        cursor.execute("reset role")
        cursor.execute("drop role nobody")


def test_a_connection_to_another_database_is_refused(project: Path) -> None:
    from django.db.backends.sqlite3.base import DatabaseWrapper

    with pytest.raises(TypeError, match="one of sqlite"):
        penstock.enqueue_sync(DatabaseWrapper({"NAME": ":memory:"}), "successor")


def test_checks_say_what_is_wrong_with_the_settings(project: Path) -> None:
    from django.test import override_settings

    from penstock.contrib.django.backend import PenstockBackend

    def found(**options: Any) -> list[str | None]:
        return [one.id for one in PenstockBackend("default", {"OPTIONS": options}).check()]

    assert found() == []
    assert found(databse="default") == ["penstock.E001"]
    assert found(enqueue={"timeuot": 1}) == ["penstock.E002"]
    assert found(database="other") == ["penstock.E003"]
    with override_settings(INSTALLED_APPS=["shop"]):
        assert found() == ["penstock.W001"]


def test_checks_of_a_database_name_the_next_step(shop: SimpleNamespace) -> None:
    from django.core.checks import run_checks

    def found() -> list[tuple[str | None, str | None]]:
        return [(one.id, one.hint) for one in run_checks(tags=["database"], databases=["default"])]

    assert found() == []
    with shop.connection.cursor() as cursor:
        cursor.execute("create role nobody")
        cursor.execute("set role nobody")
        assert found()[0][0] == "penstock.W003"
        cursor.execute("reset role")
        cursor.execute("drop role nobody")
        cursor.execute("alter function penstock_enqueue_many rename to elsewhere")
    ((code, hint),) = found()
    assert code == "penstock.W002"
    assert "penstock_migrate --database default" in (hint or "")


def test_the_migration_connects_with_the_options_of_the_database(
    shop: SimpleNamespace, penstock_pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trustme")
    from django.core.management import call_command

    from penstock.contrib.django.databases import database_url
    from tests.tls import tls_front

    known = shop.connection.settings_dict
    with tls_front(penstock_pipeline.database_url, tmp_path, wants_certificates=True) as front:
        options = {"sslmode": "verify-full", "sslrootcert": front.ca_path, "sslcert": str(front.cert_path)}
        options |= {"sslkey": str(front.key_path), "sslcrl": None, "assume_role": "nobody", "pool": False}
        for name, value in {"HOST": "127.0.0.1", "PORT": front.port, "OPTIONS": options}.items():
            monkeypatch.setitem(known, name, value)
        call_command("penstock_migrate", stdout=io.StringIO())
        assert front.secured > 0
        front.secured = 0
        monkeypatch.setenv("SSL_CERT_FILE", str(front.ca_path))
        system = {"sslrootcert": "system", "sslcert": options["sslcert"], "sslkey": options["sslkey"]}
        monkeypatch.setitem(known, "OPTIONS", system)
        call_command("penstock_migrate", stdout=io.StringIO())
        assert front.secured > 0
        assert front.plain == 0
        assert dict(parse_qsl(urlsplit(database_url("default")).query))["sslmode"] == "verify-full"
    monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: SimpleNamespace(cafile=None))
    with pytest.raises(SettingsError, match="sslrootcert"):
        database_url("default")
    rest = {"sslcrl": "a b.crl", "ssl_min_protocol_version": "TLSv1.3", "target_session_attrs": "read-write"}
    monkeypatch.setitem(known, "OPTIONS", rest)
    assert dict(parse_qsl(urlsplit(database_url("default")).query)) == rest


def test_the_commands_migrate_a_database_and_run_a_worker(
    shop: SimpleNamespace, penstock_pipeline: Pipeline, tmp_path: Path, project: Path
) -> None:
    import botocore.session

    from penstock.local.sqs import EmbeddedSqs

    with shop.connection.cursor() as cursor:
        cursor.execute("create database empty")
    url = urlsplit(penstock_pipeline.database_url)._replace(path="/empty").geturl()
    manage = [sys.executable, "-m", "django"]
    server = EmbeddedSqs(tmp_path / "sqs", access_key_id="penstock")
    server.start()
    environment = {
        **os.environ, "PYTHONPATH": f"{project}:{ROOT / 'services'}", "DATABASE_URL": url,
        "AWS_ACCESS_KEY_ID": "penstock",
        "AWS_SECRET_ACCESS_KEY": "penstock", "AWS_DEFAULT_REGION": "us-east-1",
        "PENSTOCK_SQS_ENDPOINT_URL": server.url,
        "PENSTOCK_HEALTH_PORT": "0",
    }  # fmt: skip
    try:
        migrated = subprocess.run([*manage, "penstock_migrate"], env=environment, capture_output=True, text=True)
        assert (migrated.returncode, migrated.stdout) == (0, "Penstock's schema in 'default' is up to date\n"), migrated
        sqs = botocore.session.get_session().create_client(
            "sqs", endpoint_url=server.url, region_name="us-east-1", aws_access_key_id="penstock",
            aws_secret_access_key="penstock",
        )  # fmt: skip
        urls = {name: sqs.create_queue(QueueName=f"penstock-{name}")["QueueUrl"] for name in ("outbound", "results")}
        params = {"order": 1, "to": "ann@example.org"}
        call = {"jsonrpc": "2.0", "method": "shop.tasks.send_receipt", "params": params, "id": "1:1"}
        sqs.send_message(QueueUrl=urls["outbound"], MessageBody=json.dumps(call))
        worker = subprocess.Popen([*manage, "penstock_worker", "--concurrency", "2"], env=environment, cwd=tmp_path)
        try:
            answers: list[Any] = []
            deadline = time.monotonic() + 60
            while not answers and time.monotonic() < deadline:
                got = sqs.receive_message(QueueUrl=urls["results"], WaitTimeSeconds=1).get("Messages", [])
                bodies = [json.loads(message["Body"]) for message in got]
                for body in bodies:
                    answers += [one for one in (body if isinstance(body, list) else [body]) if "result" in one]
        finally:
            worker.send_signal(signal.SIGTERM)
            code = worker.wait(30)
    finally:
        server.stop()
        with shop.connection.cursor() as cursor:
            cursor.execute("drop database empty")
    assert [(one["id"], one["result"]) for one in answers] == [("1:1", "sent to ann@example.org")]
    assert code == 0


def test_the_commands_refuse_what_those_of_penstock_refuse(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from django.core.management import CommandError, call_command

    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # which the command sets
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(CommandError, match=r"the migration did not finish.*nope"):
        call_command("penstock_migrate", database="nope")
    with pytest.raises(CommandError, match="PENSTOCK_WORKER_CONCURRENCY"):
        call_command("penstock_worker", concurrency=0)


def test_a_reloading_worker_finds_the_project_from_another_folder(project: Path, tmp_path: Path) -> None:
    manage = project / "manage.py"
    manage.write_text(
        "import sys\nfrom django.core.management import execute_from_command_line as run\nrun(sys.argv)\n"
    )
    env = {
        **os.environ, "PYTHONPATH": str(ROOT / "services"), "PENSTOCK_SQS_ENDPOINT_URL": "http://127.0.0.1:1",
        "PENSTOCK_SQS_ACCESS_KEY": "a:b", "PENSTOCK_METRICS_PORT": "0",
    }  # fmt: skip
    command = [sys.executable, str(manage), "penstock_worker", "--reload"]
    with subprocess.Popen(command, env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stderr is not None
        line = next(line for line in worker.stderr if "process_started" in line or "cannot be loaded" in line)
        worker.send_signal(signal.SIGTERM)
        worker.stderr.read()
    assert "process_started" in line
