"""Celery over SQS, results in Postgres. It cannot wait for a start, so it starts on the full queue."""

from __future__ import annotations

import sys
from typing import Any

from barrier import DATABASE_URL, SQS_URL, note_start
from celery import Celery

QUEUE = "peer-celery"
KEYS = {"access_key_id": "penstock", "secret_access_key": "penstock"}

app = Celery("peer", broker=SQS_URL.replace("http://", "sqs://penstock:penstock@"))
app.conf.update(
    task_default_queue=QUEUE,
    broker_transport_options={
        "region": "us-east-1",
        "is_secure": False,
        "visibility_timeout": 300,
        "wait_time_seconds": 10,
        "polling_interval": 0.1,
        "predefined_queues": {QUEUE: {"url": f"{SQS_URL}/000000000000/{QUEUE}", **KEYS}},
    },
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=10,
    worker_enable_remote_control=False,
    worker_send_task_events=False,
    result_backend="db+" + DATABASE_URL.replace("postgresql://", "postgresql+psycopg2://"),
    database_engine_options={"pool_size": 10, "max_overflow": 50},
    database_short_lived_sessions=False,
)


@app.task(name="noop")
def noop(n: int) -> None:
    note_start()


def fill(tasks: int) -> None:
    import boto3

    sqs: Any = boto3.client("sqs", endpoint_url=SQS_URL, region_name="us-east-1")
    sqs.create_queue(QueueName=QUEUE)
    sqs.purge_queue(QueueUrl=f"{SQS_URL}/000000000000/{QUEUE}")
    app.backend.ResultSession().close()  # makes its tables
    with app.producer_pool.acquire(block=True) as producer:
        for n in range(tasks):
            noop.apply_async((n,), producer=producer)


if __name__ == "__main__":
    fill(int(sys.argv[2]))
