"""The pages about moving from older schedulers: their examples are run, their tables held against the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.cli.processes import CLOCKWORK, KAFKA_MESSAGE_SCHEDULER, older_settings
from penstock.compat.topics.schedules import read_json
from penstock.db.pool import Store
from penstock.protocol.errors import SettingsError
from penstock.settings.model import Settings, load_settings
from penstock.settings.values import PREFIX
from tests.integration.apis import JSON, running

DOCS = Path(__file__).parents[2] / "docs"
CLOCKWORK_PAGE = (DOCS / "moving-from-clockwork.md").read_text("utf-8")
SCHEDULER_PAGE = (DOCS / "moving-from-kafka-message-scheduler.md").read_text("utf-8")
REQUEST = re.compile(r"^(POST|DELETE) (\S+)\n(.*?)^(\d{3})(.*?)$", re.MULTILINE | re.DOTALL)


async def test_the_requests_of_the_clockwork_page_are_answered_as_it_says(store: Store, settings: Settings) -> None:
    (text,) = re.findall(r"^```http clockwork\n(.*?)^```$", CLOCKWORK_PAGE, re.MULTILINE | re.DOTALL)
    requests = REQUEST.findall(text)
    assert len(requests) == 4
    served = settings.model_copy(update={"clockwork_api": True})
    async with running(store, served) as api, httpx.AsyncClient(base_url=api.url) as http:
        for method, path, body, status, answer in requests:
            actual = await http.request(method, path, content=body, headers=JSON)
            assert (actual.status_code, actual.text) == (int(status), answer.strip())


def test_the_schedule_of_the_page_is_one() -> None:
    (text,) = re.findall(r"^```json schedule\n(.*?)^```$", SCHEDULER_PAGE, re.MULTILINE | re.DOTALL)
    schedule = read_json(text.encode())
    assert (schedule.topic, schedule.key, schedule.value, schedule.headers) == (
        "reminders", b"customer-1", b"remind", {"kind": b"soft"},
    )  # fmt: skip
    assert json.loads(text)["time"] == schedule.time


@pytest.mark.parametrize(
    ("page", "names"),
    [(CLOCKWORK_PAGE, CLOCKWORK), (SCHEDULER_PAGE, KAFKA_MESSAGE_SCHEDULER)],
    ids=["clockwork", "kms"],
)
def test_every_older_variable_that_is_understood_stands_beside_ours(page: str, names: object) -> None:
    assert isinstance(names, dict)
    for name, (setting, _) in names.items():
        assert re.search(rf"^\| `{name}`.*\| `{PREFIX}{setting.upper()}`", page, re.MULTILINE), name
    for name in re.findall(rf"{PREFIX}[A-Z_]+[A-Z]", page):
        assert name.removeprefix(PREFIX).lower() in Settings.model_fields, name


def test_a_source_starts_with_the_older_log_level(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KMS_LOGGING_LEVEL", "WARN")
    for more in ((), ("--log-level", "error")):
        done = CliRunner().invoke(app, ["kafka-source", *more])
        assert "PENSTOCK_" in str(done.exception), done.exception  # what is missing yet
        assert isinstance(done.exception, SettingsError)


def test_older_variables_become_our_settings_unless_ours_say_otherwise() -> None:
    environ = {
        "KAFKA_BROKERS": "b:9092", "SCHEDULE_TOPICS": "avro", "JSON_SCHEDULE_TOPICS": "one,two",
        "CONSUMER_GROUP_ID": "g", "SECURITY_PROTOCOL": "PLAINTEXT", "OTEL_EXPORTER_PROMETHEUS_PORT": "9401",
        "KMS_LOGGING_LEVEL": "WARN", "PENSTOCK_KAFKA_SOURCE_GROUP": "ours", "KEYSTORE_LOCATION": "",
        "TRUSTSTORE_LOCATION": "/unused",
    }  # fmt: skip
    given = older_settings(KAFKA_MESSAGE_SCHEDULER, environ)
    settings = load_settings(**given)
    assert settings.kafka_brokers == "b:9092"
    assert settings.kafka_source_json_topics == ("one", "two")
    assert settings.kafka_source_avro_topics == ("avro",)
    assert (settings.metrics_port, settings.log_level, settings.kafka_security_protocol) == (
        9401,
        "warning",
        "plaintext",
    )
    assert "kafka_source_group" not in given
    clockwork = older_settings(CLOCKWORK, {"KAFKA_CONSUMER_GROUP": "shop", "SCHEDULE_CREATE_KAFKA_TOPIC": "create"})
    assert clockwork == {"clockwork_group": "shop-consumers", "clockwork_create_topic": "create"}


@pytest.mark.parametrize("name", ["KEYSTORE_LOCATION", "TRUSTSTORE_LOCATION"])
def test_a_store_of_javas_is_refused_with_what_to_do(name: str) -> None:
    with pytest.raises(SettingsError, match=rf"{name} names a Java key store.*PENSTOCK_KAFKA_SSL_CA_FILE"):
        older_settings(KAFKA_MESSAGE_SCHEDULER, {"SECURITY_PROTOCOL": "SSL", name: "/secrets/store.jks"})


async def test_the_examples_of_kafka_publish_are_answered_as_the_page_says(store: Store, settings: Settings) -> None:
    from tests.integration.test_protocol_page import same

    page = (DOCS / "deliveries.md").read_text("utf-8")
    (text,) = re.findall(r"^```json kafka\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    pairs = re.findall(r"^--> (.*?)^<-- (.*?)(?=^-->|\Z)", text, re.MULTILINE | re.DOTALL)
    assert len(pairs) == 2
    import msgspec

    from penstock.worker.deliveries.kafka import RecordParams, record_of

    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url, headers=JSON) as http:
        for asked, told in pairs:
            assert same(json.loads(told), (await http.post("/rpc", content=asked)).json())
            payload = json.loads(asked)["params"]["payload"]
            listed = [*payload["records"], *payload["then"]] if "records" in payload else [payload]
            assert all(
                record_of(one, load_settings()).topic == "orders" for one in msgspec.convert(listed, list[RecordParams])
            )
