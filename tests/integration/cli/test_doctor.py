"""`penstock doctor` against a real Postgres and a real SQS, each with one thing wrong: found, with what to do."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from penstock.brokers.sqs import SqsTransport
from penstock.cli.app import app
from penstock.cli.doctor.checks import _examine_processes, examine, examine_deliveries, examine_payloads, examine_queues
from penstock.cli.doctor.command import _show
from penstock.cli.doctor.database import PROCESSES, examine_database
from penstock.cli.doctor.findings import Finding, Report
from penstock.db.migrate import grant, grants, head_revision, upgrade
from penstock.db.pool import Store
from penstock.local.postgres import EmbeddedPostgres
from penstock.runtime.health import Health, serve_health
from penstock.settings.model import Settings, load_settings
from penstock.settings.payload_texts import fingerprint, new_key, read_key
from tests import postgres_versions
from tests.failover import url_of_hosts
from tests.integration.apis import running
from tests.pgbouncer import WHY_NOT, pgbouncer_before, through
from tests.s3 import S3Bucket

IGNORING = {
    "ignore_startup_parameters": "statement_timeout,lock_timeout,idle_in_transaction_session_timeout,jit,enable_seqscan"
}
OFF_IN_TESTS = {"fsync", "synchronous_commit"}  # the tests' own server is quick, and keeps nothing


async def findings(settings: Settings) -> list[Finding]:
    report = Report()
    await examine(settings, report)
    return report.findings


def findings_of_deliveries(settings: Settings) -> list[Finding]:
    report = Report()
    examine_deliveries(settings, report)
    return report.findings


async def complaint(settings: Settings, what: str) -> Finding:
    """The one finding about something, which must be a complaint that says what to do."""
    (found,) = [finding for finding in await findings(settings) if finding.what == what and finding.level != "ok"]
    assert found.fix, found
    return found


@pytest.fixture
async def sqs(settings: Settings) -> AsyncIterator[Any]:
    transport = SqsTransport(settings)
    yield await transport.client()
    await transport.close()


async def set_attributes(sqs: Any, name: str, **attributes: str) -> None:
    url = (await sqs.get_queue_url(QueueName=name))["QueueUrl"]
    await sqs.set_queue_attributes(QueueUrl=url, Attributes=attributes)


@contextmanager
def database_with(postgres: EmbeddedPostgres, settings: Settings, assignment: str) -> Iterator[None]:
    """The test's database with a setting, for sessions that begin now."""
    name = urlsplit(settings.require_database_url).path.removeprefix("/")
    postgres.execute(f'alter database "{name}" set {assignment}')
    yield


async def test_a_standby_is_named_with_what_to_write_into_the_url(data_path: Path, settings: Settings) -> None:
    server = postgres_versions.server(data_path / "postgres", options={"shared_buffers": "16MB"})
    server.start()
    server.stop()
    (server.pgdata / "standby.signal").touch()
    server.start()
    try:
        found = await complaint(settings.model_copy(update={"database_url": SecretStr(server.dsn())}), "database role")
        assert found.seen == "it is a standby, and takes no writes"
        assert "all hosts" in found.fix
        both = SecretStr(url_of_hosts(server.dsn(), server.dsn()))
        found = await complaint(settings.model_copy(update={"database_url": both}), "database role")
        assert found.seen.startswith("no host of PENSTOCK_DATABASE_URL takes writes")
    finally:
        server.stop()


async def test_timeouts_that_end_work_are_found_with_how_to_lift_them(
    postgres: EmbeddedPostgres, settings: Settings
) -> None:
    with database_with(postgres, settings, "idle_session_timeout = '20s'"):
        found = await complaint(settings, "timeouts")
    assert found.seen == "idle_session_timeout closes connections that wait for work after 20 s"
    assert found.fix.endswith(" set idle_session_timeout = 0")
    if postgres_versions.VERSION >= 17:
        with database_with(postgres, settings, "transaction_timeout = '10s'"):
            found, idle = [finding for finding in await findings(settings) if finding.what == "timeouts"]
        assert (found.level, idle.level) == ("error", "warning")
        assert "transaction_timeout ends transactions after 10 s" in found.seen
    postgres.execute(f"alter database {urlsplit(settings.require_database_url).path[1:]} reset all")
    found = await complaint(settings.model_copy(update={"statement_timeout_seconds": 1}), "timeouts")
    assert "PENSTOCK_STATEMENT_TIMEOUT_SECONDS" in found.fix


async def test_a_pipeline_that_runs_is_found_well(store: Store, settings: Settings) -> None:
    async with running(store, settings) as api:
        stores = [
            Store(settings.require_database_url, pool_size=2, application_name=f"penstock-{name}") for name in PROCESSES
        ]
        for one in stores:
            await one.open()
        found = await findings(settings.model_copy(update={"api_url": api.url}))
        for one in stores:
            await one.close()
    wrong = [finding for finding in found if finding.level != "ok" and finding.what not in OFF_IN_TESTS]
    assert wrong == []
    assert {finding.what for finding in found} >= {
        "settings", "database", "connections", "database clock", "privileges", "schema", "transactions", "processes",
        "inbound queue", "outbound dead letters", "queue clock", "api",
    }  # fmt: skip


async def test_a_database_that_is_away_is_one_finding_and_hides_no_other(settings: Settings) -> None:
    away = Settings(
        **settings.model_dump(exclude={"database_url"}), database_url="postgresql://me:secret@127.0.0.1:1/x"
    )
    found = await complaint(away, "database")
    assert found.level == "error"
    assert "PENSTOCK_DATABASE_URL" in found.fix
    everything = await findings(away)
    assert "inbound queue" in {finding.what for finding in everything}
    assert "secret" not in str(everything)


async def test_no_database_is_right_for_a_worker_alone(settings: Settings) -> None:
    found = await complaint(settings.model_copy(update={"database_url": None}), "database")
    assert (found.level, "worker" in found.fix) == ("note", True)


@pytest.mark.parametrize(
    ("given", "level", "seen"),
    [
        ({"deliveries": "http.requests"}, "error", "did you mean http.request?"),
        ({"deliveries": "sql.execute"}, "error", "PENSTOCK_SQL_STATEMENTS names no statement"),
        ({"deliveries": "http.request", "http_allow": "10.0.0.0/8,0.0.0.0/0"}, "warning", "has 0.0.0.0/0"),
        ({"deliveries": "sqs.send", "sqs_send_queues": "penstock-results"}, "warning", "penstock-results"),
        ({"deliveries": "sqs.send", "sqs_send_queues": "x/penstock-inbound-dlq"}, "warning", "penstock-inbound-dlq"),
        (
            {"deliveries": "kafka.publish", "kafka_brokers": "a:1, b:1", "transport_url": "kafka://b:1"},
            "warning",
            "kafka://b:1",
        ),
        (
            {"deliveries": "amqp.publish", "amqp_publish_url": "amqp://u:p@h/v", "transport_url": "amqp://w:p@h/v"},
            "warning",
            "carries the work",
        ),
    ],
    ids=["misspelt", "no-statement", "everything", "own-queue", "own-dead-letters", "kafka", "amqp"],
)
def test_deliveries_that_no_worker_can_run_or_that_let_through_too_much(
    given: dict[str, Any], level: str, seen: str
) -> None:
    (found,) = findings_of_deliveries(load_settings(**given))
    assert (found.level, seen in found.seen, bool(found.fix)) == (level, True, True)


def test_deliveries_that_are_as_they_should_be() -> None:
    assert findings_of_deliveries(load_settings()) == []
    (found,) = findings_of_deliveries(load_settings(deliveries="http.request,sqs.send", http_allow="10.0.0.0/8"))
    assert (found.level, found.seen) == ("ok", "http.request, sqs.send")


async def test_a_schema_that_is_missing_old_or_unknown(
    settings: Settings, empty_database_url: str, postgres: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = Settings(**settings.model_dump(exclude={"database_url"}), database_url=empty_database_url)
    found = await complaint(empty, "schema")
    assert (found.level, found.fix) == ("error", "run `penstock migrate`")
    with monkeypatch.context() as newer:
        newer.setattr("penstock.cli.doctor.database.head_revision", lambda: "next")
        found = await complaint(settings, "schema")
    assert found.seen == f"at {head_revision()}, and next is needed"
    assert found.fix == "run `penstock migrate`"
    name = urlsplit(settings.require_database_url).path.removeprefix("/")
    postgres.execute("update penstock.alembic_version set version_num = '9999'", name)
    found = await complaint(settings, "schema")
    assert "9999, which this version does not know" in found.seen


async def test_a_role_that_may_not_write(settings: Settings, postgres: EmbeddedPostgres) -> None:
    parts = urlsplit(settings.require_database_url)
    name = parts.path.removeprefix("/")
    postgres.execute("create role reader login password 'reader'")
    try:
        url = parts._replace(netloc=f"reader:reader@127.0.0.1:{postgres.port}").geturl()
        reader = Settings(**settings.model_dump(exclude={"database_url"}), database_url=url)
        assert "may not use the schema" in (await complaint(reader, "privileges")).seen
        postgres.execute("grant usage on schema penstock to reader", name)
        postgres.execute("grant select on all tables in schema penstock to reader", name)
        found = await complaint(reader, "privileges")
        assert found.level == "error"
        assert " this role lacks UPDATE on " in found.seen
        assert "penstock migrate --grant" in found.fix
        postgres.execute("grant insert, update, delete on all tables in schema penstock to reader", name)
        postgres.execute("grant usage, select on all sequences in schema penstock to reader", name)
        assert "EXECUTE on begin_default_move, " in (await complaint(reader, "privileges")).seen
        await grant(settings.require_database_url, "reader")
        for who in (reader, settings):
            assert {found.what: found.level for found in await findings(who)}["privileges"] == "ok"
    finally:
        postgres.execute("drop owned by reader", name)
        postgres.execute("drop role reader")


async def test_a_server_of_a_provider_without_superuser(settings: Settings, postgres: EmbeddedPostgres) -> None:
    """The owner of the database migrates; each process has a role of its own, which sees little of other sessions."""
    postgres.execute("create role provided login password 'p'")
    postgres.execute("create role provided_scheduler login password 'p'")
    postgres.execute("create database provided owner provided")
    url = f"postgresql://provided:p@127.0.0.1:{postgres.port}/provided"
    as_scheduler = url.replace("provided:", "provided_scheduler:")
    stores = [Store(as_scheduler, application_name="penstock-scheduler"), Store(url, application_name="penstock-api")]
    try:
        await asyncio.to_thread(upgrade, url)
        owner = await asyncpg.connect(url)
        await owner.execute(";".join(grants("provided_scheduler", ["scheduler"])))
        async with stores[0].session(), stores[1].session():
            who = settings.model_copy(update={"database_url": SecretStr(as_scheduler)})
            found = {finding.what: finding for finding in await findings(who)}
            assert not [one for one in found.values() if one.level == "error" and one.what != "api"]
            assert found["privileges"].seen.startswith("this role may run scheduler; as ")
            assert re.match(r"[4-9] of", found["connections"].seen)  # its own, the api's, the owner's and doctor's
            assert "scheduler" not in found["processes"].seen
            await owner.execute("revoke update on penstock.task from provided_scheduler")
            lacking = await complaint(who, "privileges")
            assert (lacking.level, lacking.seen) == ("error", "as scheduler this role lacks UPDATE on task")
            assert "penstock grants --role provided_scheduler --process scheduler" in lacking.fix
        await owner.close()
    finally:
        for store in stores:
            await store.close()
        postgres.drop_database("provided")
        postgres.execute("drop role provided")
        postgres.execute("drop role provided_scheduler")


async def privileges_of(settings: Settings) -> Finding:
    report = Report()
    await examine_database(settings, report)
    (found,) = [finding for finding in report.findings if finding.what == "privileges"]
    return found


async def test_a_role_of_some_processes_keeps_the_rights_of_all_of_them(
    settings: Settings, postgres: EmbeddedPostgres
) -> None:
    parts = urlsplit(settings.require_database_url)
    name = parts.path.removeprefix("/")
    url = parts._replace(netloc=f"shared:p@127.0.0.1:{postgres.port}").geturl()
    shared = settings.model_copy(update={"database_url": SecretStr(url)})
    stores = [Store(url, application_name=f"penstock-{process}") for process in ("submitter", "resulter")]
    postgres.execute("create role shared login password 'p'")

    def give(*processes: str) -> None:
        postgres.execute(";".join(grants("shared", processes)), name)

    try:
        give(*PROCESSES)
        found = await privileges_of(shared)
        assert (found.level, found.seen) == ("ok", f"this role may run {', '.join(PROCESSES)}")
        for source in ("kafka-source", "clockwork-source"):
            give(source)
            found = await privileges_of(shared)
            assert found.level == "note"
            assert found.seen.startswith("this role may run kafka-source, clockwork-source; as ")
        give("submitter", "resulter")
        postgres.execute("revoke update on penstock.resulter from shared", name)
        async with stores[0].session(), stores[1].session():
            found = await privileges_of(shared)
            assert (found.level, found.seen) == ("error", "as resulter this role lacks UPDATE on resulter")
            advised = re.search(r"`penstock grants --role shared ([^`]*)`", found.fix)
            assert advised is not None
            give(*advised[1].replace("--process", "").split())
            assert (await privileges_of(shared)).level == "note"
    finally:
        for store in stores:
            await store.close()
        postgres.execute("drop owned by shared", name)
        postgres.execute("drop role shared")


async def test_a_look_that_fails_hides_no_other(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    async def examine_database(*_: Any) -> None:
        raise ValueError("s3cr3t")

    monkeypatch.setattr("penstock.cli.doctor.checks.examine_database", examine_database)
    found = await complaint(settings, "database")
    assert (found.level, "ValueError in line " in found.seen, "s3cr3t" in found.seen) == ("error", True, False)
    assert "inbound queue" in {finding.what for finding in await findings(settings)}


@pytest.mark.parametrize(
    ("assignment", "what", "level"),
    [
        ("default_transaction_read_only = on", "database role", "error"),
        ("synchronous_commit = off", "synchronous_commit", "warning"),
    ],
)
async def test_a_database_that_keeps_nothing(
    assignment: str, what: str, level: str, settings: Settings, postgres: EmbeddedPostgres
) -> None:
    with database_with(postgres, settings, assignment):
        assert (await complaint(settings, what)).level == level


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
@pytest.mark.parametrize(
    ("pooler", "given", "level", "what", "said", "fix"),
    [
        ({}, {}, "note", "wake-ups", "every 0.05 s", "PENSTOCK_DATABASE_LISTEN_URL"),
        ({}, {"listens": "directly"}, "ok", "wake-ups", "receives them", ""),
        ({}, {"listens": "pooled"}, "error", "wake-ups", "receives none", "past the pooler"),
        ({}, {"listens": "away"}, "error", "wake-ups", "receives none: ", "past the pooler"),
        ({}, {"database_pooler": "session"}, "error", "connection pooler", "startup parameter", "leave it unset"),
        (IGNORING, {"database_pooler": "session"}, "error", "connection pooler", "taken for one in", "leave it unset"),
        (IGNORING | {"pool_mode": "session"}, {"database_pooler": "session"}, "error", "connection settings",
         "enable_seqscan is on, not off", "docs/postgres.md"),
        ({"pool_mode": "statement"}, {}, "error", "connection pooler", "statement pooling", "pool_mode to transaction"),
        (None, {"database_pooler": "transaction"}, "warning", "connection pooler", "none is found", "unset"),
    ],
    ids=["polling", "listening", "deaf", "unreachable", "refuses", "shares", "ignores", "by-statement", "none"],
)  # fmt: skip
async def test_a_pooler_is_recognised_with_what_is_wrong_about_it(
    pooler: dict[str, str] | None, given: dict[str, str], level: str, what: str, said: str, fix: str,
    settings: Settings, postgres: EmbeddedPostgres,
) -> None:  # fmt: skip
    direct = settings.require_database_url
    with nullcontext() if pooler is None else pgbouncer_before(postgres.dsn(), **pooler) as before:
        url = direct if before is None else through(direct, before.port)
        urls = {"directly": direct, "pooled": url, "away": "postgresql://u@127.0.0.1:1/x"}
        listen_url = urls.get(given.get("listens", ""))
        changed = {name: value for name, value in given.items() if name != "listens"}
        pooled = Settings(
            **settings.model_dump(exclude={"database_url", "database_listen_url", "database_pooler"}),
            database_url=url, database_listen_url=listen_url, **changed,
        )  # fmt: skip
        report = Report()
        await examine_database(pooled, report)
    (found,) = [finding for finding in report.findings if finding.what == what]
    assert found.level == level, found
    assert said in found.seen
    assert fix in found.fix
    if what == "wake-ups":
        assert "schema" in {finding.what for finding in report.findings}


async def test_more_connections_than_there_are(settings: Settings) -> None:
    found = await complaint(settings.model_copy(update={"database_pool_size": 200}), "connections")
    assert found.level == "error"
    assert "PENSTOCK_DATABASE_POOL_SIZE" in found.fix


async def test_a_schema_in_which_every_role_may_make_overloads(settings: Settings, postgres: EmbeddedPostgres) -> None:
    name = urlsplit(settings.require_database_url).path.removeprefix("/")
    postgres.execute("grant create on schema public to public", name)
    found = await complaint(settings, "enqueue functions")
    assert (found.level, found.fix) == ("warning", "revoke create on schema public from public")
    postgres.execute(found.fix, name)
    assert "enqueue functions" not in {finding.what for finding in await findings(settings)}


async def test_a_transaction_that_is_left_open(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cli.doctor.database._LONG_TRANSACTION_SECONDS", 0)
    connection = await asyncpg.connect(settings.require_database_url, server_settings={"application_name": "forgetful"})
    try:
        async with connection.transaction():
            pid = await connection.fetchval("select pg_backend_pid()")
            found = await complaint(settings, "transactions")
            assert "forgetful" in found.seen
            assert f"pg_terminate_backend({pid})" in found.fix
    finally:
        await connection.close()


async def test_processes_that_nobody_started(settings: Settings) -> None:
    found = await complaint(settings, "processes")
    assert "submitter, scheduler, resulter, supervisor, api" in found.seen


@pytest.mark.parametrize(
    ("changes", "what", "said"),
    [
        ({"stale_after_seconds": 30.0, "heartbeat_seconds": 20.0}, "settings", "PENSTOCK_STALE_AFTER_SECONDS"),
        ({"inbound_queue": "no-such-queue"}, "inbound queue", "PENSTOCK_INBOUND_QUEUE"),
        ({"sqs_endpoint_url": "http://127.0.0.1:1"}, "outbound queue", "PENSTOCK_SQS_ENDPOINT_URL"),
        ({"api_url": "http://127.0.0.1:1"}, "api", "PENSTOCK_API_URL"),
    ],
)
async def test_settings_that_lead_nowhere(changes: dict[str, Any], what: str, said: str, settings: Settings) -> None:
    assert said in (await complaint(settings.model_copy(update=changes), what)).fix


async def test_a_misspelt_variable(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_DATABSE_URL", "postgresql://elsewhere/x")
    found = await complaint(settings, "settings")
    assert "PENSTOCK_DATABSE_URL" in found.seen
    assert found.fix == "did you mean PENSTOCK_DATABASE_URL?"


@pytest.mark.parametrize(
    ("given", "unused"),
    [
        ({}, ["PENSTOCK_SQS_ENDPOINT_URL", "PENSTOCK_AWS_REGION"]),
        ({"payload_bucket": "s3://large"}, ["PENSTOCK_SQS_ENDPOINT_URL"]),
        ({"database_iam": True, "database_ssl_mode": "verify-full"}, ["PENSTOCK_SQS_ENDPOINT_URL"]),
        ({"deliveries": "sqs.send"}, []),
    ],
    ids=["nothing", "bucket", "iam", "delivery"],
)
async def test_settings_of_sqs_are_left_over_where_nothing_else_needs_them(
    given: dict[str, Any], unused: list[str]
) -> None:
    settings = load_settings(
        transport_url="amqp://u:p@127.0.0.1:1/", sqs_endpoint_url="http://127.0.0.1:1", aws_region="eu-central-1",
        database_url="postgresql://u@db.example.org/x", **given,
    )  # fmt: skip
    report = Report()
    await examine_queues(settings, report)
    found = [finding.seen.split(" ")[0] for finding in report.findings if finding.what == "settings"]
    assert found == unused


async def test_two_settings_of_one_queue(settings: Settings) -> None:
    found = await complaint(settings.model_copy(update={"results_queue": settings.inbound_queue}), "queue names")
    assert found.level == "error"
    assert "inbound and results" in found.seen


@pytest.mark.parametrize(
    ("attributes", "what", "said"),
    [
        ({"DelaySeconds": "30"}, "outbound queue", "DelaySeconds to 0"),
        ({"MaximumMessageSize": "262144"}, "outbound queue", "MaximumMessageSize"),
        ({"RedrivePolicy": ""}, "outbound dead letters", "RedrivePolicy"),
        ({"MessageRetentionPeriod": "1209600"}, "outbound dead letters", "14 days"),
    ],
)
async def test_a_queue_of_the_wrong_kind(
    attributes: dict[str, str], what: str, said: str, settings: Settings, sqs: Any
) -> None:
    name = settings.outbound_queue
    if "MessageRetentionPeriod" in attributes:
        await set_attributes(sqs, f"{name}-dlq", MessageRetentionPeriod="345600")
    await set_attributes(sqs, name, **attributes)
    assert said in (await complaint(settings, what)).fix


async def test_an_inbound_queue_that_outlives_the_receipts(settings: Settings, sqs: Any) -> None:
    await set_attributes(sqs, f"{settings.inbound_queue}-dlq", MessageRetentionPeriod="1209600")
    await set_attributes(sqs, settings.inbound_queue, MessageRetentionPeriod="1209000")
    found = await complaint(settings, "inbound queue")
    assert (found.level, "PENSTOCK_RETENTION_RECEIPTS_SECONDS" in found.fix) == ("warning", True)
    assert "receipts are kept for 5" in found.seen


async def test_a_queue_that_gives_up_after_one_delivery(settings: Settings, sqs: Any) -> None:
    described = await sqs.get_queue_url(QueueName=f"{settings.results_queue}-dlq")
    arn = (await sqs.get_queue_attributes(QueueUrl=described["QueueUrl"], AttributeNames=["QueueArn"]))["Attributes"]
    policy = json.dumps({"deadLetterTargetArn": arn["QueueArn"], "maxReceiveCount": 1})
    await set_attributes(sqs, settings.results_queue, RedrivePolicy=policy)
    found = await complaint(settings, "results dead letters")
    assert "maxReceiveCount" in found.fix


async def test_dead_letters_that_go_where_nobody_looks(settings: Settings, sqs: Any) -> None:
    url = (await sqs.create_queue(QueueName=f"{settings.results_queue}-failed"))["QueueUrl"]
    arn = (await sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"]))["Attributes"]["QueueArn"]
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 5})
    await set_attributes(sqs, settings.results_queue, RedrivePolicy=policy)
    found = await complaint(settings, "results dead letters")
    assert f"they go to {settings.results_queue}-failed" in found.seen
    assert f"{settings.results_queue}-dlq" in found.fix


async def test_dead_letters_are_pointed_out(settings: Settings, sqs: Any) -> None:
    url = (await sqs.get_queue_url(QueueName=f"{settings.inbound_queue}-dlq"))["QueueUrl"]
    await sqs.send_message(QueueUrl=url, MessageBody="{}")
    found = await complaint(settings, "inbound dead letters")
    assert (found.level, "penstock dlq list inbound" in found.fix) == ("note", True)


async def test_a_clock_that_is_wrong(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    for module in ("database", "checks"):
        monkeypatch.setattr(f"penstock.cli.doctor.{module}.time.time", lambda: real() - 60)
    found = await complaint(settings, "database clock")
    assert re.fullmatch(r"60\.\d s ahead of this machine's", found.seen)  # half of the look is in it


async def test_an_api_that_wants_another_key(store: Store, settings: Settings) -> None:
    asking = settings.model_copy(update={"api_require_keys": True})
    async with running(store, asking) as api:
        found = await complaint(settings.model_copy(update={"api_url": api.url}), "api")
    assert "PENSTOCK_API_KEY" in found.fix


def test_the_command_exits_with_one_for_an_error_and_prints_json(empty_database_url: str, sqs_url: str) -> None:
    env = {
        "PENSTOCK_DATABASE_URL": empty_database_url, "PENSTOCK_SQS_ENDPOINT_URL": sqs_url,
        "PENSTOCK_AWS_REGION": "us-east-1",
    }  # fmt: skip
    done = CliRunner().invoke(app, ["doctor"], env=env)
    assert done.exit_code == 1
    assert "error    schema: there is none\n         -> run `penstock migrate`" in done.output
    told = json.loads(CliRunner().invoke(app, ["doctor", "--json"], env=env).stdout)
    assert {"level": "error", "what": "schema", "seen": "there is none", "fix": "run `penstock migrate`"} in told


def test_warnings_count_where_that_is_asked_for(settings: Settings) -> None:
    env = {
        "PENSTOCK_DATABASE_URL": settings.require_database_url,
        "PENSTOCK_SQS_ENDPOINT_URL": settings.sqs_endpoint_url or "", "PENSTOCK_AWS_REGION": "us-east-1",
        **{f"PENSTOCK_{label}_QUEUE": getattr(settings, f"{label.lower()}_queue")
           for label in ("INBOUND", "OUTBOUND", "RESULTS")},
    }  # fmt: skip
    assert CliRunner().invoke(app, ["doctor"], env=env).exit_code == 0
    assert CliRunner().invoke(app, ["doctor", "--strict"], env=env).exit_code == 1


async def test_a_bucket_or_a_key_that_cannot_be_used_is_found(settings: Settings, s3: S3Bucket) -> None:
    async def found(**changes: Any) -> list[tuple[str, str, str]]:
        report = Report()
        await examine_payloads(load_settings(**settings.model_dump() | changes), report)
        return [(one.level, one.seen, one.fix) for one in report.findings]

    assert await found() == []
    keys = [new_key(), new_key()]
    ids = [fingerprint(read_key(key)) for key in keys]
    assert await found(**s3.settings(payload_keys=",".join(keys))) == [
        ("ok", f"{ids[0]} encrypts, 1 more only decrypt", ""),
        ("ok", f"s3://{s3.name}/pipe answers", ""),
    ]
    assert s3.objects() == {}
    ((level, seen, fix),) = await found(**s3.settings(payload_bucket="s3://no-such-bucket"))
    assert (level, "NoSuchBucket" in seen, "PENSTOCK_PAYLOAD_BUCKET" in fix) == ("error", True, True)
    ((level, seen, fix),) = await found(**s3.settings(payload_s3_endpoint_url="http://127.0.0.1:1"))
    assert (level, "S3 is unavailable" in seen, "PENSTOCK_PAYLOAD_S3_ENDPOINT_URL" in fix) == ("error", True, True)


def test_a_key_is_made_that_settings_take_and_is_named_by_its_id() -> None:
    done = CliRunner().invoke(app, ["payload-key", "--json"])
    made = json.loads(done.stdout)
    assert load_settings(payload_keys=made["key"]).payload_keys[0].get_secret_value() == made["key"]
    assert made["id"] == fingerprint(read_key(made["key"]))
    assert CliRunner().invoke(app, ["payload-key"]).stdout.split("\n")[0] != made["key"]


async def test_processes_that_are_away_or_saturated_are_found(settings: Settings) -> None:
    health = Health("worker", lambda: "a task waits for one of 16 threads, for 9 s")
    health.succeeded()
    server = serve_health([health], "127.0.0.1", 0)
    urls = (f"busy={server.url}", "gone=http://127.0.0.1:1")
    report = Report()
    try:
        await _examine_processes(settings.model_copy(update={"dashboard_processes": urls}), report)
    finally:
        server.close()
    busy, gone = report.findings
    assert (busy.level, gone.level) == ("warning", "warning")
    assert "busy: ok, but saturated: a task waits for one of 16 threads" in busy.seen
    assert "PENSTOCK_WORKER_THREADS" in (busy.fix or "")
    assert "gone" in gone.seen


def test_what_was_seen_is_no_command_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    _show(Finding("warning", "processes", "busy: \x1b]52;c;Y3VybCBldmls\x07", "look at \x07"))
    out = capsys.readouterr().out
    assert "busy: \\x1b]52;c;Y3VybCBldmls\\x07\n" in out
    assert "-> look at \\x07\n" in out
