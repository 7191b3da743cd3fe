"""amqp.publish: one message to an exchange of RabbitMQ, confirmed by the broker."""

import asyncio
from typing import Annotated, Any

import msgspec
from aiormq import spec

from penstock.brokers.base import QueueMissing
from penstock.brokers.rabbitmq.connection import Links, TooLargeForBroker
from penstock.protocol.errors import SettingsError, Unavailable
from penstock.settings.model import Settings
from penstock.settings.values import PREFIX
from penstock.worker.deliveries.errors import Base64, NotDelivered, Undeliverable, content_of
from penstock.worker.deliveries.registry import Deliveries
from penstock.worker.handlers.context import Call

ACTION = "amqp.publish"
_LONGEST_NAME_BYTES = 255  # of routing keys, ids and types, in AMQP
_LONGEST_HEADER_BYTES = 128  # of a header's name; the library cuts a longer one

Outcome = dict[str, str] | Undeliverable | NotDelivered
Exchange = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.:@#,/+ -]{0,127}(?!\n)$")]  # as the library takes it
Header = (
    str
    | Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
    | Annotated[float, msgspec.Meta(ge=-3.4e38, le=3.4e38)]  # the library sends it with 32 bits
    | bool
    | Base64
    | None
)


class AmqpMessage(msgspec.Struct, forbid_unknown_fields=True):
    """The payload of one task; docs/deliveries.md describes each member."""

    routing_key: str
    exchange: Exchange = ""
    body: str | None = None
    json: Any = msgspec.UNSET
    base64: bytes | None = None
    headers: dict[str, Header] = msgspec.field(default_factory=dict)
    content_type: str | None = None
    message_id: str | None = None
    persistent: bool = True
    mandatory: bool = True


def add_to(deliveries: Deliveries) -> None:
    """Raises SettingsError."""
    settings = deliveries.settings
    if settings.amqp_publish_url is None:
        raise SettingsError(
            f"{PREFIX}DELIVERIES names {ACTION}, and {PREFIX}AMQP_PUBLISH_URL is not set: set it to "
            "amqp://user:password@host:port/vhost"
        )
    url, setting = settings.amqp_publish_url.get_secret_value(), f"{PREFIX}AMQP_PUBLISH_URL"
    links = Links(url, setting=setting, heartbeat_seconds=30, label="delivery")
    deliveries.at_close(links.close)
    deliveries.action(ACTION, Publisher(links, settings).publish, batch=200, linger=0.01, bad_params_attempts=1)


class Publisher:
    def __init__(self, links: Links, settings: Settings) -> None:
        self._links = links
        self._settings = settings

    async def publish(self, calls: list[Call[AmqpMessage]]) -> list[Outcome]:
        """Publish each task's message; its result is the id of the message."""

        async def publish(call: Call[AmqpMessage]) -> Outcome:
            outcome = await self._one(call.ctx.task_id, call.params)
            call.answer(outcome)  # a queue that confirms nothing must not delay the others
            return outcome

        return list(await asyncio.gather(*map(publish, calls)))

    async def _one(self, task_id: int, given: AmqpMessage) -> Outcome:
        try:
            content = content_of(given.body, given.base64, given.json)
            if content is None:
                raise Undeliverable("give one of body, a text, json, any value, and base64, bytes")
            body, content_type = content
            for name in ("routing_key", "message_id", "content_type"):
                value = getattr(given, name) or ""
                if len(value.encode("utf-8", "surrogatepass")) > _LONGEST_NAME_BYTES or not _is_plain(value):
                    rule = f"must be up to {_LONGEST_NAME_BYTES} bytes of text, not {value[:100]!r}"
                    raise Undeliverable(f"{name} {rule}")
            if not given.exchange and self._settings.is_own_queue(given.routing_key):
                raise Undeliverable(
                    f"the queue {given.routing_key!r} is Penstock's own: a right to enqueue is none to write it"
                )
            properties = spec.Basic.Properties(
                content_type=given.content_type or content_type,
                delivery_mode=2 if given.persistent else 1,
                # The same in all attempts of a task, for receivers that detect duplicates.
                message_id=given.message_id or f"penstock-{task_id}",
                headers={name: _header(name, value) for name, value in given.headers.items()},
            )
        except Undeliverable as exc:
            return exc
        where = f"exchange {given.exchange!r} with the routing key {given.routing_key!r}"
        try:
            link = await self._links.link()
            problem = await link.publish(
                given.routing_key, body, properties, exchange=given.exchange, mandatory=given.mandatory
            )
        except Unavailable as exc:
            problem = exc
        if problem is None:
            return {"message_id": str(properties.message_id)}
        if isinstance(problem, TooLargeForBroker):
            return Undeliverable(f"the message for {where} is too large: {problem}")
        if isinstance(problem, QueueMissing):
            return NotDelivered(f"no queue takes a message for {where}: {problem}")
        return NotDelivered(f"the message for {where} was not confirmed: {problem}")


def _is_plain(text: str) -> bool:
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


def _header(name: str, value: Header) -> Any:
    """Raises Undeliverable."""
    if not _is_plain(name) or not 1 <= len(name.encode()) <= _LONGEST_HEADER_BYTES:
        raise Undeliverable(f"{name[:100]!r} is no name of a header")
    if name in ("CC", "BCC"):
        raise Undeliverable(f"the header {name} has RabbitMQ route the message to other queues too: leave it out")
    if isinstance(value, str) and not _is_plain(value):
        raise Undeliverable(f'the header {name} holds characters that cannot be sent: give it as {{"base64": ...}}')
    return bytearray(value.base64) if isinstance(value, Base64) else value
