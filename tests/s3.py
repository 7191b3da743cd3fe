"""An S3 for tests: moto's server, in a thread of the process, a bucket of its own for each test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import boto3
import pytest

_numbers = itertools.count(1)


@dataclass(frozen=True)
class S3Bucket:
    """A bucket with nothing in it, and a client that looks at it by other ways than the code that is tested."""

    endpoint_url: str
    name: str
    client: Any

    @property
    def url(self) -> str:
        return f"s3://{self.name}/pipe"

    def objects(self) -> dict[str, bytes]:
        """What is in it, by key."""
        listed = self.client.list_objects_v2(Bucket=self.name).get("Contents", [])
        return {one["Key"]: self.client.get_object(Bucket=self.name, Key=one["Key"])["Body"].read() for one in listed}

    def settings(self, **more: Any) -> dict[str, Any]:
        """Settings for it, with a low threshold."""
        return {
            "payload_bucket": self.url, "payload_s3_endpoint_url": self.endpoint_url, "payload_threshold_bytes": 1024,
            "payload_sweep_seconds": 0, **more,
        }  # fmt: skip


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    """Endpoint of one S3 for the run."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(s3_url: str) -> S3Bucket:
    """A bucket of this test alone."""
    client = boto3.client("s3", endpoint_url=s3_url, region_name="us-east-1")
    name = f"penstock-{next(_numbers)}"
    client.create_bucket(Bucket=name)
    return S3Bucket(s3_url, name, client)
