"""Real processes with marked secrets are brought to every failure that could repeat one; all they say is searched."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from penstock.local.postgres import EmbeddedPostgres
from tests.conftest import SQS_ACCESS_KEY_ID
from tests.forking import forked_commands

ROOT = Path(__file__).parents[2]
MARK = "Sesame"  # in every secret, so that a part of one is found as well
PASSWORD = f"pw{MARK}open"
API_KEY = f"key{MARK}one-of-length"
WRONG_KEY = f"key{MARK}two"
AWS_SECRET = f"aws{MARK}secret"
OVER_POSTGRES = ("submitter", "scheduler", "resulter", "supervisor", "api")
PROCESSES = (*OVER_POSTGRES, "worker")


@pytest.fixture
def marked_url(postgres: EmbeddedPostgres, database_url: str) -> Iterator[str]:
    """The test's database, with a user whose password is marked."""
    role = f"user_{os.getpid()}"
    postgres.execute(f"create role {role} login superuser password '{PASSWORD}'")
    parts = urlsplit(database_url)
    yield parts._replace(netloc=f"{role}:{PASSWORD}@127.0.0.1:{postgres.port}").geturl()
    postgres.execute(f"revoke all on schema public from {role}")
    postgres.execute(f"select pg_terminate_backend(pid) from pg_stat_activity where usename = '{role}'")
    postgres.execute(f"drop role {role}")


class Running:
    """A process and the file that it writes to."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], output: Path) -> None:
        self.name = name
        self.process = process
        self.output = output

    def said(self) -> str:
        return self.output.read_text("utf-8", "replace")

    def wait_for(self, pattern: str, seconds: float = 90) -> str:
        """Wait until it has said so; returns the first group, if there is one."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.said())):
            assert time.monotonic() < deadline, f"{self.name} never said {pattern!r}:\n{self.said()[-3000:]}"
            assert self.process.poll() is None, f"{self.name} ended before it said {pattern!r}:\n{self.said()[-3000:]}"
            time.sleep(0.05)
        return found[1] if found.re.groups else found[0]

    def asked_for_health(self) -> str:
        url = self.wait_for(r"metrics_listening .*url=(\S+)")
        return "".join(httpx.get(f"{url}{path}", timeout=30).text for path in ("/metrics", "/readyz", "/healthz"))


def environment(**settings: str) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": f"{ROOT / 'services'}{os.pathsep}{ROOT}",
        "AWS_ACCESS_KEY_ID": SQS_ACCESS_KEY_ID,
        "AWS_SECRET_ACCESS_KEY": AWS_SECRET,
        "AWS_SESSION_TOKEN": f"token{MARK}",
        "PENSTOCK_API_KEYS": f"{API_KEY},ci:read:{'ab' * 32}",
        "PENSTOCK_API_KEY": API_KEY,
        "PENSTOCK_METRICS_PORT": "0",
        "PENSTOCK_HTTP_PORT": "0",
        "PENSTOCK_LOG_LEVEL": "debug",
        "PENSTOCK_RECEIVE_WAIT_SECONDS": "0",
        "PENSTOCK_GRACE_SECONDS": "2",
    } | settings  # fmt: skip


@contextmanager
def started(folder: Path, *names: str, **settings: str) -> Iterator[list[Running]]:
    """So many processes at once; ended by SIGTERM."""
    running = []
    try:
        for name in names:
            output = folder / f"{name}-{len(list(folder.iterdir()))}.log"
            arguments = ["--app", "tests.acceptance.app"] if name == "worker" else []
            with output.open("wb") as file, forked_commands():
                process = subprocess.Popen(
                    [sys.executable, "-m", "penstock", name, *arguments], env=environment(**settings), cwd=ROOT,
                    stdout=file, stderr=subprocess.STDOUT,
                )  # fmt: skip
            running.append(Running(name, process, output))
        yield running
    finally:
        for one in running:
            one.process.send_signal(signal.SIGTERM)
        for one in running:
            try:
                one.process.wait(30)
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()


def run(*arguments: str, **settings: str) -> tuple[int, str]:
    """A command that ends: its exit code and its whole output."""
    with forked_commands():
        done = subprocess.run(
            [sys.executable, "-m", "penstock", *arguments], env=environment(**settings), cwd=ROOT,
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def assert_clean(text: str) -> None:
    assert text.strip(), "nothing was said: this would prove nothing"
    at = text.find(MARK)
    assert at < 0, f"a secret was printed: ...{text[max(0, at - 300) : at + 100]}..."


@pytest.mark.parametrize("failure", ["wrong password", "no server", "no such database"])
def test_process_that_cannot_reach_postgres_keeps_its_password(
    failure: str, postgres: EmbeddedPostgres, marked_url: str, sqs_url: str, tmp_path: Path
) -> None:
    url = {
        "wrong password": marked_url.replace(PASSWORD, f"not{MARK}"),
        "no server": f"postgresql://me:{PASSWORD}@127.0.0.1:1/x",
        "no such database": f"{marked_url}_gone",
    }[failure]
    names = OVER_POSTGRES if failure == "wrong password" else ("scheduler", "api")  # all open their store the same way
    with started(tmp_path, *names, PENSTOCK_DATABASE_URL=url, PENSTOCK_SQS_ENDPOINT_URL=sqs_url) as running:
        for one in running:
            one.wait_for("event=waiting_to_start")
            assert_clean(one.asked_for_health())
    for one in running:
        assert_clean(one.said())


def test_process_that_cannot_reach_sqs_keeps_its_credentials(marked_url: str, tmp_path: Path) -> None:
    with started(
        tmp_path, *PROCESSES, PENSTOCK_DATABASE_URL=marked_url, PENSTOCK_SQS_ENDPOINT_URL="http://127.0.0.1:1"
    ) as running:
        for one in running:
            one.wait_for(
                "event=api_listening" if one.name == "api" else "event=(?:waiting_to_start|backing_off|\\w*fail)"
            )
            assert_clean(one.asked_for_health())
    for one in running:
        assert_clean(one.said())


MISTAKES = {
    "password with a slash": {"PENSTOCK_DATABASE_URL": f"postgresql://me:{MARK}/x@127.0.0.1/name"},
    "password with a hash": {"PENSTOCK_DATABASE_URL": f"postgresql://me:{MARK}#x@127.0.0.1/name"},
    "password with a bracket": {"PENSTOCK_DATABASE_URL": f"postgresql://me:[{MARK}@127.0.0.1/name"},
    "another scheme": {"PENSTOCK_DATABASE_URL": f"mysql://me:{MARK}@127.0.0.1/name"},
    "broken entry of a key": {"PENSTOCK_API_KEYS": f"fine,{MARK}:read:{'a' * 63}"},
    "key too short": {"PENSTOCK_API_KEYS": MARK},
    "key given twice": {"PENSTOCK_API_KEYS": f"{API_KEY},{API_KEY}"},
    "password in the endpoint": {"PENSTOCK_SQS_ENDPOINT_URL": f"http://me:{MARK}@127.0.0.1:1"},
    "another setting": {"PENSTOCK_MAX_ATTEMPTS": "none", "PENSTOCK_DATABASE_URL": f"postgresql://me:{MARK}@h/name"},
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistaken_setting_is_told_without_its_value(mistake: str, tmp_path: Path) -> None:
    code, said = run("migrate" if mistake == "another setting" else "api", **MISTAKES[mistake])
    assert code == 2, said
    assert_clean(said)
    assert next(iter(MISTAKES[mistake])) in said


def test_commands_that_fail_keep_what_they_were_given(postgres: EmbeddedPostgres, marked_url: str) -> None:
    wrong = marked_url.replace(PASSWORD, f"not{MARK}")
    for arguments, settings in (
        (("migrate",), {"PENSTOCK_DATABASE_URL": wrong}),
        (("migrate", "--database-url", f"postgresql://me:{PASSWORD}@127.0.0.1:1/x"), {}),
        (("keys", "list"), {"PENSTOCK_DATABASE_URL": wrong}),
        (("keys", "create", "x", "--permission", "read"), {"PENSTOCK_DATABASE_URL": wrong}),
        (("task", "show", "1", "--api-url", "http://127.0.0.1:1"), {}),
        (("create-queues",), {"PENSTOCK_SQS_ENDPOINT_URL": "http://127.0.0.1:1"}),
    ):
        code, said = run(*arguments, **settings)
        assert code != 0, said
        assert_clean(said)


def test_api_at_work_repeats_neither_its_own_secrets_nor_those_it_is_sent(
    postgres: EmbeddedPostgres, marked_url: str, sqs_url: str, tmp_path: Path
) -> None:
    """Good and bad keys, junk of every kind, Postgres gone in between: what it answers, logs and exports is clean."""
    said: list[str] = []

    def ask(url: str, **request: Any) -> int:
        response = httpx.post(f"{url}/rpc", timeout=60, **request)
        said.append(f"{response.status_code} {response.headers} {response.text}")
        return response.status_code

    good = {"jsonrpc": "2.0", "method": "enqueue", "params": {"action": "a"}, "id": 1}
    key, wrong = {"Authorization": f"Bearer {API_KEY}"}, {"Authorization": f"Bearer {WRONG_KEY}"}
    settings = {"PENSTOCK_DATABASE_URL": marked_url, "PENSTOCK_SQS_ENDPOINT_URL": sqs_url}
    with started(tmp_path, "api", **settings) as [api]:
        url = api.wait_for(r"event=api_listening .*url=(\S+)")
        assert ask(url, json=good, headers=key) == 200
        assert ask(url, json=good, headers=wrong) == 401
        assert ask(url, json=good, headers={"X-API-Key": WRONG_KEY}) == 401
        assert ask(url, json=good, headers={"Authorization": f"Basic {WRONG_KEY}"}) == 401
        assert ask(url, json=good) == 401
        assert ask(url, content=b"junk", headers=key | {"Content-Type": "application/json"}) == 200
        assert ask(url, content=b"junk", headers=key) == 415
        assert ask(url, json=good | {"method": "keys.create", "params": {"name": 5}}, headers=key) == 200
        assert ask(url, json=good | {"method": "dlq.list", "params": {"queue": "inbound"}}, headers=key) == 200
        made = httpx.post(
            f"{url}/rpc", headers=key,
            json=good | {"method": "keys.create", "params": {"name": "made", "permissions": ["read"]}},
        ).json()["result"]  # fmt: skip
        assert ask(url, json=good, headers={"X-API-Key": made["key"]}) == 403
        code, text = run("stats", "--api-url", url, PENSTOCK_API_KEY=WRONG_KEY)
        assert code == 1
        said.append(text)

        name = urlsplit(marked_url).path.removeprefix("/")
        postgres.execute(f'alter database "{name}" allow_connections false')
        postgres.execute(f"select pg_terminate_backend(pid) from pg_stat_activity where datname = '{name}'")
        try:
            assert ask(url, json=good, headers=key) == 503
            assert ask(url, json=good | {"method": "stats", "params": {}}, headers=key) == 503
            api.wait_for("event=request_unavailable")
            said.append(api.asked_for_health())
        finally:
            postgres.execute(f'alter database "{name}" allow_connections true')
    said.append(api.said())
    for text in said:
        assert_clean(text)
        assert made["key"] not in text
