"""The command line without a stack: what it refuses, how it says so, with which exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.local.service import HOST, free_port, python_path
from tests.forking import forked_commands


def penstock(*arguments: str, cwd: Path, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    with forked_commands():
        return subprocess.run(
            [sys.executable, "-m", "penstock", *arguments],
            cwd=cwd,
            env=os.environ | {"PYTHONPATH": python_path(), "COLUMNS": "200", "NO_COLOR": "1"} | env,
            input=stdin,
            text=True,
            capture_output=True,
            timeout=60,
        )


def test_version_is_the_package_version(tmp_path: Path) -> None:
    from penstock import __version__

    assert penstock("--version", cwd=tmp_path).stdout == f"penstock {__version__}\n"


@pytest.mark.parametrize(
    "command",
    ["up", "down", "ps", "logs", "enqueue", "stats", "top", "task", "tasks", "jobs", "workflows", "schedules",
     "actions", "routes", "tenants", "ordering", "rejected", "dlq", "keys", "credential", "config", "doctor", "env",
     "migrate", "create-queues", "submitter", "scheduler", "resulter", "supervisor", "api", "worker"],
)  # fmt: skip
def test_every_command_is_listed_and_has_help(command: str, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from penstock.cli.app import app

    assert f" {command} " in CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    shown = CliRunner().invoke(app, [command, "--help"])
    assert shown.exit_code == 0
    assert "Usage" in shown.output


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("1.5", 1.5), ("10s", 10), ("5m", 300), ("1h30m", 5400), ("2d", 172_800), ("250ms", 0.25), ("0", 0)],
)
def test_a_duration_is_a_number_of_seconds_or_has_units(text: str, seconds: float) -> None:
    from penstock.cli.values import duration

    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5x", "m", "-5", "-5m", "5 m", "1h 30m", "nan", "inf", "5m10"])
def test_what_is_no_duration_is_refused_with_an_example(text: str) -> None:
    import typer

    from penstock.cli.values import duration

    with pytest.raises(typer.BadParameter, match="1h30m"):
        duration(text)


def test_rates_have_units_and_are_given_to_the_api_in_one() -> None:
    from penstock.cli.limits import in_one_unit, parse_rate

    def given(per: str = "second", **rates: str) -> dict[str, object]:
        return in_one_unit({"per": per} | {name: parse_rate(rate) for name, rate in rates.items()})

    assert given(rate="10/m") == {"per": "minute", "rate": 10}
    assert given(rate="10/hour", per="minute") == {"per": "hour", "rate": 10}
    assert given(rate="10", key_rate="2", per="minute") == {"per": "minute", "rate": 10, "key_rate": 2}
    assert given(rate="60/m", key_rate="3600/h") == {"per": "second", "rate": 1, "key_rate": 1}
    assert given(rate="6/m", key_rate="2", per="minute") == {"per": "minute", "rate": 6, "key_rate": 2}
    assert given() == {"per": "second"}


@pytest.mark.parametrize("text", ["10/x", "10/", "many", "/m", "nan", "inf/m", "1e999"])
def test_what_is_no_rate_is_refused_with_an_example(text: str) -> None:
    import typer

    from penstock.cli.limits import parse_rate

    with pytest.raises(typer.BadParameter, match="10/m"):
        parse_rate(text)


def test_help_documents_the_exit_codes(tmp_path: Path) -> None:
    assert "Exit codes: 0 done; 1 the operation failed" in penstock("--help", cwd=tmp_path).stdout


@pytest.mark.parametrize(
    ("deliveries", "is_clone", "workers"), [("", False, 0), ("http.request", False, 1), ("", True, 1)]
)
def test_up_without_handlers_starts_a_worker_where_deliveries_are_on_or_an_example_is_there(
    deliveries: str, is_clone: bool, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from penstock.cli.app import app

    made: list[int] = []

    class Made(Exception):
        pass

    def stack(*_: object, workers: int, **__: object) -> None:
        made.append(workers)
        raise Made

    monkeypatch.setattr("penstock.local.stack.Stack", stack)
    monkeypatch.setattr("penstock.runtime.logs.setup_logging", lambda *_, **__: None)  # of this process
    monkeypatch.setenv("PENSTOCK_DELIVERIES", deliveries)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples" / "export").mkdir(parents=True)
    if is_clone:
        (tmp_path / "examples" / "export" / "__init__.py").touch()
    done = CliRunner().invoke(app, ["up"])
    assert isinstance(done.exception, Made), done.output
    assert made == [workers]


def test_ps_and_down_and_logs_where_nothing_runs(tmp_path: Path) -> None:
    shown = penstock("ps", "--json", cwd=tmp_path)
    assert (shown.returncode, shown.stdout) == (1, "")
    assert f"nothing runs in {tmp_path}/.penstock" in shown.stderr
    stopped = penstock("down", cwd=tmp_path)
    assert (stopped.returncode, stopped.stdout) == (0, f"nothing runs in {tmp_path}/.penstock\n")
    printed = penstock("logs", cwd=tmp_path)
    assert printed.returncode == 1
    assert "--detach" in printed.stderr
    assert not (tmp_path / ".penstock").exists()


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        ('{"a": 1 2}', "line 1 column 9"),
        ('{"a":\n  nope}', "line 2 column 3"),
        ('{"a": NaN}', "NaN is no JSON"),
        ('{"a": 1e999}', "1e999 is beyond a double"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_payload_that_is_not_json_is_refused_with_its_position(payload: str, words: str, tmp_path: Path) -> None:
    result = penstock("enqueue", "export", "-", cwd=tmp_path, stdin=payload)
    assert result.returncode == 2
    assert words in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.stderr


def test_wrong_settings_are_all_listed_without_a_traceback(tmp_path: Path) -> None:
    env = {"PENSTOCK_CONCURRENCY": "none", "PENSTOCK_RETRY_FACTOR": "0"}
    for command in ("scheduler", "worker", "up"):
        result = penstock(command, cwd=tmp_path, **env)
        assert result.returncode == 2
        assert "PENSTOCK_CONCURRENCY" in result.stderr
        assert "PENSTOCK_RETRY_FACTOR" in result.stderr
        assert "Traceback" not in result.stderr


def test_process_without_a_database_says_what_to_set(tmp_path: Path) -> None:
    result = penstock("scheduler", cwd=tmp_path)
    assert result.returncode == 2
    assert "PENSTOCK_DATABASE_URL" in result.stderr


def test_unknown_log_level_is_refused(tmp_path: Path) -> None:
    result = penstock("scheduler", "--log-level", "loud", cwd=tmp_path)
    assert result.returncode == 2
    assert "PENSTOCK_LOG_LEVEL" in result.stderr


def test_api_that_is_away_is_named_and_the_exit_code_is_1(tmp_path: Path) -> None:
    url = f"http://{HOST}:{free_port()}"
    result = penstock("task", "show", "1", "--api-url", url, cwd=tmp_path)
    assert result.returncode == 1
    assert url in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "command",
    [("task", "show", "1"), ("tasks", "cancel", "--all", "--yes"), ("schedules", "list"), ("doctor",), ("keys",)],
)
def test_a_named_folder_without_a_stack_is_refused_and_no_other_api_called(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    url = f"http://{HOST}:{free_port()}"
    result = penstock(*command, "--data-dir", "elsewhere", cwd=tmp_path, PENSTOCK_API_URL=url)
    assert result.returncode == 1
    folder = tmp_path / "elsewhere"
    assert f"nothing runs in {folder}; `penstock up --data-dir '{folder}' --detach` starts it" in result.stderr


def test_id_that_is_no_number_is_wrong_usage(tmp_path: Path) -> None:
    assert penstock("task", "show", "abc", cwd=tmp_path).returncode == 2


def test_rejected_retry_wants_ids_or_all(tmp_path: Path) -> None:
    result = penstock("rejected", "retry", cwd=tmp_path)
    assert result.returncode == 2
    assert "--all" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["dlq", "replay", "inbound"], "--all"),
        (["dlq", "replay", "inbound", "some-id", "--all"], "--all"),
        (["dlq", "purge", "results", "--all", "--limit", "1"], "--limit"),
        (["dlq", "purge", "results", "some-id"], "--yes"),
        (["dlq", "show", "sideways", "some-id"], "sideways"),
        (["dlq", "list", "inbound", "--limit", "0"], "--limit"),
        (["rejected", "purge", "1", "--source", "inbound"], "--all"),
        (["rejected", "list", "--source", "outbound"], "outbound"),
    ],
)
def test_wrong_use_of_messages_is_refused_before_anything_is_asked(
    arguments: list[str], words: str, tmp_path: Path
) -> None:
    result = penstock(*arguments, "--api-url", f"http://{HOST}:{free_port()}", cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["workflows", "show", "²"], "should be a valid integer"),
        (["workflows", "create", "@latin1.json"], "cannot be read"),
        (["conformance", "--worker", "x 'y"], "is no command"),
        (["conformance", "--worker", ""], "is no command"),
    ],
)
def test_an_argument_that_cannot_be_is_refused_without_a_traceback(
    arguments: list[str], words: str, tmp_path: Path
) -> None:
    (tmp_path / "latin1.json").write_bytes('["é"]'.encode("latin-1"))
    result = penstock(*arguments, cwd=tmp_path, PENSTOCK_API_URL=f"http://{HOST}:{free_port()}")
    assert result.returncode == 2, result.stderr
    assert words in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.stderr


def test_an_instant_is_epoch_milliseconds_or_left_to_the_api() -> None:
    from penstock.cli.values import instant

    assert (instant("-5"), instant("--5"), instant("9" * 5000)) == (-5, "--5", "9" * 5000)


@pytest.mark.parametrize("command", ["list", "show", "replay", "purge"])
def test_dlq_commands_have_help(command: str, tmp_path: Path) -> None:
    shown = penstock("dlq", command, "--help", cwd=tmp_path)
    assert shown.returncode == 0
    assert "inbound, outbound or results" in shown.stdout


def test_up_on_a_port_that_is_taken_is_refused_before_anything_starts(tmp_path: Path) -> None:
    import socket

    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        result = penstock("up", "--port", str(port), cwd=tmp_path)
    assert result.returncode == 1
    assert f"port {port} is taken, or cannot be had on {HOST}" in result.stderr
    assert not (tmp_path / ".penstock" / "postgres").exists()


def test_migrate_moves_a_database_up_and_down_and_prints_sql(tmp_path: Path, empty_database_url: str) -> None:
    assert "CREATE TABLE" in penstock("migrate", "--sql", cwd=tmp_path).stdout
    for arguments in ((), (), ("--down-to", "base"), ()):
        result = penstock("migrate", *arguments, cwd=tmp_path, PENSTOCK_DATABASE_URL=empty_database_url)
        assert result.returncode == 0, result.stderr
    wrong = penstock("migrate", "--revision", "nonsense", "--database-url", empty_database_url, cwd=tmp_path)
    assert wrong.returncode == 1
    assert "nonsense" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_create_queues_makes_the_queues_once_and_again(tmp_path: Path, sqs_url: str) -> None:
    env = {"PENSTOCK_SQS_ENDPOINT_URL": sqs_url, "PENSTOCK_AWS_REGION": "us-east-1", "PENSTOCK_INBOUND_QUEUE": "cli-in"}
    for _ in range(2):
        result = penstock("create-queues", cwd=tmp_path, **env)
        assert result.returncode == 0, result.stderr
        assert f"inbound   {sqs_url}/000000000000/cli-in" in result.stdout


def test_a_fleet_is_not_named_as_the_workers_are(tmp_path: Path) -> None:
    done = penstock("up", "--fleet", "worker=2", "--app", "os", cwd=tmp_path)
    assert done.returncode == 1
    assert "no fleet can have a queue named worker" in done.stderr


def test_a_program_that_cannot_be_started_is_named(tmp_path: Path) -> None:
    done = penstock("conformance", "--worker", "no-such-program", cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "no-such-program cannot be started: No such file or directory" in done.stderr
