"""A real Postgres and a real SQS endpoint for the whole run; a fresh database and fresh queues for each test."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import botocore.session
import httpx._transports.default
import hypothesis
import psutil
import psycopg
import pytest
from botocore.hooks import EventAliaser

SQS_ACCESS_KEY_ID = "penstock"  # that the SQS of the run takes

# Before any SDK client is made: its credential chain must find these and must not ask the network.
for _name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
    os.environ[_name] = SQS_ACCESS_KEY_ID
os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
os.environ["AWS_DEFAULT_REGION"] = os.environ["AWS_REGION"] = "us-east-1"
for _name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_SQS", "AWS_ENDPOINT_URL_S3"):
    os.environ.pop(_name, None)
for _name in [_name for _name in os.environ if _name.startswith("PENSTOCK_")]:
    del os.environ[_name]

# A property is about values; how long a busy machine takes over one says nothing.
hypothesis.settings.register_profile("penstock", deadline=None)
hypothesis.settings.load_profile("penstock")

# Hundreds of clients are made in one process here: each would parse the SDK's descriptions, look for the present names
# of its events, and load all certificates.
botocore.session.create_loader = functools.cache(botocore.session.create_loader)
_present_name = functools.cache(functools.partial(EventAliaser._alias_event_name, EventAliaser(None)))
EventAliaser._alias_event_name = lambda _, name: _present_name(name)
httpx._transports.default.create_ssl_context = functools.cache(httpx._transports.default.create_ssl_context)

from penstock.brokers.base import MAX_RECEIVES  # noqa: E402
from penstock.db.connecting import connect  # noqa: E402
from penstock.db.pool import Store  # noqa: E402
from penstock.local.postgres import EmbeddedPostgres  # noqa: E402
from penstock.local.sqs import EmbeddedSqs  # noqa: E402
from penstock.protocol.schema import DEFAULT  # noqa: E402
from penstock.runtime import metrics  # noqa: E402
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX  # noqa: E402
from penstock.settings.model import Settings, load_settings  # noqa: E402
from penstock.testing.plugin import penstock_inline as penstock_inline  # noqa: E402
from penstock.testing.plugin import penstock_pipeline as penstock_pipeline  # noqa: E402
from tests import postgres_versions  # noqa: E402
from tests.claims import use_known_key  # noqa: E402
from tests.kafka import kafka as kafka  # noqa: E402
from tests.partitions import divide  # noqa: E402
from tests.pgbouncer import pgbouncer as pgbouncer  # noqa: E402
from tests.rabbitmq import rabbitmq as rabbitmq  # noqa: E402
from tests.s3 import s3 as s3  # noqa: E402
from tests.s3 import s3_url as s3_url  # noqa: E402

TEMPLATE = "penstock_template"
SCHEMA = os.environ.get("TEST_SCHEMA") or DEFAULT
if SCHEMA != DEFAULT:
    # Tests that reach the database by a store, the fixture `sql` or settings then use a schema of that name.
    os.environ["PENSTOCK_DATABASE_SCHEMA"] = SCHEMA
    for _function in (Store.__init__, connect):
        _function.__kwdefaults__["schema"] = SCHEMA
PARTITIONS = int(os.environ.get("TEST_PARTITIONS") or 1)  # of the table of live tasks, in every database of a test
_ROOM_BYTES = 4 * 1024**3
_numbers = itertools.count(1)


def pytest_configure(config: pytest.Config) -> None:
    """A folder for the cluster that stacks copy theirs from (tests/forking.py), for all processes of the run."""
    if not hasattr(config, "workerinput"):
        os.environ["TEST_CLUSTER"] = tempfile.mkdtemp(prefix="penstock-test-", dir=_memory())


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop("TEST_CLUSTER"), ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules are no garbage: a tenth of the time of the collection of tests goes into looking for it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """What is loaded by now stays: the collector of garbage need not look through a million objects again and again."""
    gc.collect()
    gc.freeze()


@contextmanager
def reachable_folder() -> Iterator[Path]:
    """A temporary folder for data of a Postgres, removed afterwards.

    Not one of pytest's: as root, Postgres runs as another user, which has to pass the folders above its data, and
    pytest takes that right from its own root folder whenever another run begins. In memory where that can be had: a
    database for each test is a thousand files, which a disk takes seven times as long to make.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-test-", dir=_memory(), ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _memory() -> Path | None:
    """A folder in memory with room for a whole run, None where there is none; containers often give it 64 MB."""
    folder = Path("/dev/shm")
    if not os.access(folder, os.W_OK | os.X_OK) or psutil.virtual_memory().available < 2 * _ROOM_BYTES:
        return None
    return folder if shutil.disk_usage(folder).free > _ROOM_BYTES else None


@pytest.fixture(autouse=True)
def _penstock_log_put_back() -> Iterator[None]:
    """A process that a test runs in its own process sets up the log; tests after it read theirs from pytest."""
    logger = logging.getLogger("penstock")
    kept = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], level, logger.propagate = kept
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def _no_action_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics name the first actions that a process meets: here those of this test."""
    monkeypatch.setattr(metrics, "_labelled_actions", set())


@pytest.fixture
def data_path() -> Iterator[Path]:
    """A :func:`reachable_folder` of this test alone."""
    with reachable_folder() as path:
        yield path


@pytest.fixture(scope="module")
def module_data_path() -> Iterator[Path]:
    """A :func:`reachable_folder` of this module."""
    with reachable_folder() as path:
        yield path


@pytest.fixture(scope="session")
def postgres() -> Iterator[EmbeddedPostgres]:
    """One server for the run; without fsync, since no test pulls the plug of the machine."""
    options = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off", "autovacuum_naptime": "5s"}
    if postgres_versions.VERSION >= 16:
        options["scram_iterations"] = "1"  # for the passwords of roles that tests make
    with reachable_folder() as path:
        server = postgres_versions.server(path, options=options)
        server.start()
        postgres_versions.quicken_logins(server)
        yield server
        server.stop()


@pytest.fixture(scope="session")
def penstock_postgres(postgres: EmbeddedPostgres) -> EmbeddedPostgres:
    """For `penstock_pipeline`: the server of the run instead of one more."""
    return postgres


@pytest.fixture(scope="session")
def administration(postgres: EmbeddedPostgres) -> Iterator[psycopg.Connection[Any]]:
    """A connection that makes and drops databases: a new one each time costs as much as the database."""
    with psycopg.connect(postgres.dsn(), autocommit=True) as connection:
        yield connection


@pytest.fixture(scope="session")
def template_database(postgres: EmbeddedPostgres) -> str:
    """Name of a migrated database that others are copied from; no connection to it may stay open."""
    from penstock.db.migrate import upgrade

    postgres.create_database(TEMPLATE)
    upgrade(postgres.dsn(TEMPLATE), schema=SCHEMA)
    if PARTITIONS > 1:
        divide(postgres, TEMPLATE, PARTITIONS, SCHEMA)
    use_known_key(postgres, TEMPLATE, SCHEMA)
    postgres.execute("revoke create on schema public from public", TEMPLATE)  # as every version from 15 on has it
    return TEMPLATE


@pytest.fixture
def empty_database_url(postgres: EmbeddedPostgres, administration: psycopg.Connection[Any]) -> Iterator[str]:
    """A database without any table."""
    name = f"empty_{next(_numbers)}"
    administration.execute(f"create database {name} {postgres_versions.COPY_FILES}")
    yield postgres.dsn(name)
    administration.execute(f"drop database {name} with (force)")


@pytest.fixture
def database_url(
    postgres: EmbeddedPostgres, administration: psycopg.Connection[Any], template_database: str
) -> Iterator[str]:
    """A migrated database of this test alone."""
    name = f"test_{next(_numbers)}"
    administration.execute(f"create database {name} template {template_database} {postgres_versions.COPY_FILES}")
    yield postgres.dsn(name)
    administration.execute(f"drop database if exists {name} with (force)")


@pytest.fixture(scope="session")
def _certificates_read_once() -> Iterator[None]:
    """Every client of AWS reads botocore's file of certificates: 20 ms, for endpoints that have no TLS."""
    from aiobotocore.httpsession import AIOHTTPSession

    read = AIOHTTPSession._build_verify_context
    contexts: dict[Any, Any] = {}  # by the setting verify

    def kept(session: AIOHTTPSession) -> Any:
        if session._cert_file:
            return read(session)  # it takes a certificate of its own
        if session._verify not in contexts:
            contexts[session._verify] = read(session)
        return contexts[session._verify]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AIOHTTPSession, "_build_verify_context", kept)
        yield


@pytest.fixture(scope="session")
def sqs_url(tmp_path_factory: pytest.TempPathFactory, _certificates_read_once: None) -> Iterator[str]:
    """Endpoint of one SQS for the run."""
    server = EmbeddedSqs(tmp_path_factory.mktemp("sqs"), access_key_id=SQS_ACCESS_KEY_ID)
    server.start()
    yield server.url
    server.stop()


@pytest.fixture(scope="session")
def make_queues(sqs_url: str) -> Callable[[Settings], None]:
    """Make the queues of settings, as ``create_queues`` does, in 6 calls of one client instead of 15 of a new one."""
    from penstock.brokers import sqs
    from penstock.brokers.opening import queue_names

    client = botocore.session.get_session().create_client("sqs", endpoint_url=sqs_url, region_name="us-east-1")

    def make(settings: Settings) -> None:
        for name in queue_names(settings).values():
            dead = f"{name}{DEAD_LETTER_SUFFIX}"
            client.create_queue(
                QueueName=dead, Attributes={"MessageRetentionPeriod": str(sqs._DEAD_LETTER_RETENTION_SECONDS)}
            )
            redrive = {
                "deadLetterTargetArn": f"arn:aws:sqs:us-east-1:000000000000:{dead}", "maxReceiveCount": MAX_RECEIVES,
            }  # fmt: skip
            client.create_queue(
                QueueName=name,
                Attributes={
                    "RedrivePolicy": json.dumps(redrive),
                    "VisibilityTimeout": str(settings.visibility_timeout_seconds),
                    "ReceiveMessageWaitTimeSeconds": str(settings.receive_wait_seconds),
                    "MessageRetentionPeriod": str(sqs._RETENTION_SECONDS),
                },
            )

    return make


@pytest.fixture
def application_url(database_url: str) -> str:
    """That database as our own code reaches it."""
    return database_url


@pytest.fixture
def settings(application_url: str, sqs_url: str, make_queues: Callable[[Settings], None]) -> Settings:
    """Settings with a database and queues of this test alone, the queues created, and short times."""
    prefix = f"t-{secrets.token_hex(4)}"
    result = load_settings(
        database_url=application_url,
        sqs_endpoint_url=sqs_url,
        aws_region="us-east-1",
        inbound_queue=f"{prefix}-inbound",
        outbound_queue=f"{prefix}-outbound",
        results_queue=f"{prefix}-results",
        inbound_methods="*",
        announce_actions=False,
        receive_wait_seconds=0,
        visibility_timeout_seconds=30,
        billed_call_wait_seconds=0,
        retry_base_seconds=0.05,
        retry_cap_seconds=0.2,
        poll_seconds=0.05,
        supervisor_interval_seconds=0.2,
        http_port=0,
        metrics_port=0,
        grace_seconds=5,
    )
    make_queues(result)
    return result
