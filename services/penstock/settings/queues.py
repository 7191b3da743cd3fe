"""Settings of the queues that carry the work, on SQS, RabbitMQ or Kafka."""

from __future__ import annotations

from pydantic import Field, SecretStr, field_validator

from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX, BrokerUrl, parse_broker_url
from penstock.settings.values import Group, Names, empty_is_unset, http_url


class QueueSettings(Group):
    """The section Queues of docs/configuration.md."""

    transport_url: SecretStr | None = Field(
        None,
        description="Transport between the processes: `sqs://`, also the meaning of unset, "
        "`amqp://user:password@host:port/vhost` (or `amqps://`) for RabbitMQ, or `kafka://host:port,host:port`.",
    )
    sqs_endpoint_url: str | None = Field(None, description="SQS endpoint; unset means AWS.")
    sqs_access_key: SecretStr | None = Field(
        None,
        description="An AWS access key for SQS alone, as `ID:SECRET`; unset means the SDK's own chain. The "
        "embedded SQS of `penstock up` accepts the key that `penstock env` prints.",
    )
    aws_region: str | None = Field(None, description="AWS region; unset means the SDK's own chain.")
    inbound_queue: str = Field("penstock-inbound", min_length=1, description="Name or URL: producers to submitter.")
    outbound_queue: str = Field("penstock-outbound", min_length=1, description="Name or URL: scheduler to workers.")
    results_queue: str = Field("penstock-results", min_length=1, description="Name or URL: workers to resulter.")
    inbound_methods: Names = Field(
        ("enqueue", "submit:*", "workflow.create", "task.complete", "task.fail"),
        description="Comma-separated methods that are accepted from the inbound queue, `*` standing for "
        "anything; others are stored as rejected messages.",
    )
    results_bare_ids: bool = Field(
        False,
        description="Also accept results of sqs-scheduler's workers, a bare task id with `attempt`, which every "
        "sender to the results queue can forge.",
    )
    receive_wait_seconds: int = Field(
        20,
        ge=0,
        le=20,
        description="Long poll of a receive; a shorter one stops sooner, a longer one makes fewer empty calls.",
    )
    visibility_timeout_seconds: int = Field(
        60, ge=3, le=43200, description="A received message reappears after this long unless deleted or extended."
    )
    amqp_consumer_timeout_seconds: float = Field(
        1800,
        ge=10,
        description="The broker's consumer_timeout: a message held for nearly as long is deleted, and from then "
        "on the heartbeats of its tasks replace it.",
    )
    kafka_partitions: int = Field(
        12,
        ge=1,
        le=10_000,
        description="Partitions of topics that are created for queues; at most this many workers take tasks from one.",
    )
    kafka_replication: int = Field(
        -1, ge=-1, le=100, description="Copies of topics that are created for queues; -1 leaves it to the brokers."
    )

    _unset_queues = field_validator(
        "transport_url", "sqs_endpoint_url", "sqs_access_key", "aws_region", mode="before"
    )(empty_is_unset)  # fmt: skip
    _http_of_queues = field_validator("sqs_endpoint_url")(http_url)

    @field_validator("transport_url")
    @classmethod
    def _known_broker(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            parse_broker_url(value.get_secret_value())
        return value

    @field_validator("sqs_access_key")
    @classmethod
    def _id_and_secret(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not all(value.get_secret_value().partition(":")):
            raise ValueError("must be ID:SECRET of an AWS access key")
        return value

    @property
    def transport(self) -> BrokerUrl:
        """What carries the work, taken apart."""
        return parse_broker_url(self.transport_url.get_secret_value() if self.transport_url else "sqs://")

    def is_own_queue(self, name: str) -> bool:
        """Whether a queue or topic is one of the pipeline's: the three, with those of their dead letters, and those of
        routes that are named as the outbound queue with a dash behind it."""
        names = [each.rsplit("/", 1)[-1] for each in (self.inbound_queue, self.outbound_queue, self.results_queue)]
        own = {each + suffix for each in names for suffix in ("", DEAD_LETTER_SUFFIX)}
        return name in own or name.startswith(f"{names[1]}-")

    def _queue_problems(self) -> list[str]:
        kind = self.transport.kind
        names = {name: getattr(self, name) for name in ("inbound_queue", "outbound_queue", "results_queue")}
        return [
            f"{name} {value} is a URL of SQS, and transport_url begins with {self.transport.scheme}://: name the queue"
            for name, value in names.items()
            if kind != "sqs" and "://" in value
        ]
