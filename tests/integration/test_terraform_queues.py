"""Queues with the attributes that terraform/ gives them, as `penstock doctor` sees them."""

from __future__ import annotations

import json
import re
import uuid
from pathlib import Path
from typing import Any

import hcl2

from penstock.brokers.sqs import SqsTransport
from penstock.cli.doctor.checks import examine_sqs
from penstock.cli.doctor.findings import Report
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX
from penstock.settings.model import Settings

TERRAFORM = Path(__file__).parents[2] / "terraform"
# As the provider calls the attributes of SQS.
ATTRIBUTES = {
    "visibility_timeout_seconds": "VisibilityTimeout",
    "message_retention_seconds": "MessageRetentionPeriod",
    "receive_wait_time_seconds": "ReceiveMessageWaitTimeSeconds",
    "max_message_size": "MaximumMessageSize",
}


def defaults() -> dict[str, Any]:
    tree = hcl2.loads((TERRAFORM / "variables.tf").read_text("utf-8"))
    return {name.strip('"'): body.get("default") for item in tree["variable"] for name, body in item.items()}


def attributes_of(resource: str) -> dict[str, str]:
    """What the module sets of a queue, by the variables' defaults."""
    tree = hcl2.loads((TERRAFORM / "main.tf").read_text("utf-8"))
    (queue,) = [
        kinds['"aws_sqs_queue"'][f'"{resource}"']
        for kinds in tree["resource"]
        if f'"{resource}"' in kinds.get('"aws_sqs_queue"', {})
    ]
    found = {}
    for name, attribute in ATTRIBUTES.items():
        value = queue[name]
        if isinstance(value, str):
            (variable,) = re.findall(r"^\$\{each\.value\.(\w+)\}$", value)
            value = defaults()[variable]
        found[attribute] = str(value)
    return found


async def test_doctor_has_nothing_against_the_queues_of_terraform(settings: Settings, transport: SqsTransport) -> None:
    client = await transport.client()
    prefix = f"tf-{uuid.uuid4().hex[:8]}"
    for role in ("inbound", "outbound", "results"):
        name = f"{prefix}-{role}"
        dead = await client.create_queue(QueueName=name + DEAD_LETTER_SUFFIX, Attributes=attributes_of("dead_letter"))
        described = await client.get_queue_attributes(QueueUrl=dead["QueueUrl"], AttributeNames=["QueueArn"])
        redrive = {
            "deadLetterTargetArn": described["Attributes"]["QueueArn"],
            "maxReceiveCount": defaults()["max_receive_count"],
        }
        await client.create_queue(
            QueueName=name, Attributes=attributes_of("main") | {"RedrivePolicy": json.dumps(redrive)}
        )
    named = settings.model_copy(
        update={f"{role}_queue": f"{prefix}-{role}" for role in ("inbound", "outbound", "results")}
    )
    report = Report()
    await examine_sqs(named, report)
    assert [finding for finding in report.findings if finding.level != "ok"] == []
    assert {finding.what for finding in report.findings} >= {"inbound queue", "outbound dead letters", "results queue"}
