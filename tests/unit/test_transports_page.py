"""docs/transports.md against what the transports declare, and the compose files of brokers."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.brokers import sqs
from penstock.brokers.base import Limits
from penstock.brokers.kafka import queue as kafka
from penstock.brokers.rabbitmq import queue
from penstock.settings.broker_urls import parse_broker_url

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "transports.md").read_text("utf-8")
COMPOSE = sorted((ROOT / "examples" / "brokers").glob("compose.*.yml"))


def test_the_table_says_what_is_declared() -> None:
    rows = dict(re.findall(r"^\| `(\w+)`: [^|]* \| (.*) \|$", PAGE, re.MULTILINE))
    assert rows.keys() == {field.name for field in fields(Limits)}
    for name, cells in rows.items():
        declared = [getattr(module.LIMITS, name) for module in (sqs, queue, kafka)]
        shown = [("yes" if value else "no") if isinstance(value, bool) else str(value) for value in declared]
        assert cells.split(" | ") == shown, name


def test_every_url_of_the_page_can_be_read() -> None:
    urls = re.findall(r"PENSTOCK_TRANSPORT_URL=(\S+)|--transport-url (\S+)", PAGE)
    assert {parse_broker_url(one or other).kind for one, other in urls} == {"sqs", "amqp", "kafka"}


def test_every_test_that_the_page_names_is_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)`", PAGE)
    assert named
    assert all((ROOT / name).is_file() for name in named)


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_a_brokers_compose_file_runs_one_pinned_broker_on_loopback(path: Path) -> None:
    text = path.read_text("utf-8")
    compose: dict[str, Any] = yaml.safe_load(text)
    (service,) = compose["services"].values()
    assert re.fullmatch(r"[\w/]+:\d+\.\d+\.\d+[\w-]*", service["image"])
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert {volume.split(":")[0] for volume in service["volumes"]} == compose["volumes"].keys()
    assert "test" in service["healthcheck"]
    (url,) = re.findall(r"--transport-url (\S+)", text)
    broker = parse_broker_url(url)
    assert any(port.split(":")[1] == broker.hosts[0].rpartition(":")[2] for port in service["ports"])


def test_there_is_a_compose_file_for_each_broker() -> None:
    assert [path.name for path in COMPOSE] == ["compose.kafka.yml", "compose.rabbitmq.yml"]


def test_kafka_keeps_its_topics_in_the_volume() -> None:
    compose = yaml.safe_load((ROOT / "examples" / "brokers" / "compose.kafka.yml").read_text("utf-8"))
    (service,) = compose["services"].values()
    assert [volume.split(":")[1] for volume in service["volumes"]] == [service["environment"]["KAFKA_LOG_DIRS"]]
