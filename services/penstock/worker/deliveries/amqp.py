"""amqp.publish: one message to an exchange of RabbitMQ, confirmed by the broker."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import msgspec
from aiormq import spec

from penstock.brokers.base import QueueMissing
from penstock.brokers.rabbitmq.connection import Links, TooLargeForBroker
from penstock.protocol.errors import SettingsError, Unavailable
from penstock.settings.model import Settings
from penstock.settings.values import PREFIX
from penstock.worker.deliveries.errors import NotDelivered, Undeliverable, decode_base64
from penstock.worker.deliveries.registry import Deliveries
from penstock.worker.handlers.context import Call

ACTION = "amqp.publish"
_BATCH = 200
_LINGER_SECONDS = 0.01
_ROUTING_HEADERS = ("CC", "BCC")
_LONGEST_NAME_BYTES = 255  # of exchanges, routing keys and ids, in AMQP

Outcome = dict[str, str] | Undeliverable | NotDelivered


class AmqpMessage(msgspec.Struct, forbid_unknown_fields=True):
    """The payload of one task; docs/deliveries.md describes each member."""

    routing_key: str
    exchange: str = ""
    body: str | None = None
    json: Any = msgspec.UNSET
    base64: str | None = None
    headers: dict[str, Any] = msgspec.field(default_factory=dict)
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
    deliveries.action(ACTION, Publisher(links, settings).publish, batch=_BATCH, linger=_LINGER_SECONDS)


class Publisher:
    """The handler."""

    def __init__(self, links: Links, settings: Settings) -> None:
        self._links = links
        self._settings = settings

    async def publish(self, calls: list[Call[AmqpMessage]]) -> list[Outcome]:
        """Publish each task's message; its result is the id of the message."""
        return list(await asyncio.gather(*(self._one(call.ctx.task_id, call.params) for call in calls)))

    async def _one(self, task_id: int, given: AmqpMessage) -> Outcome:
        try:
            body, content_type = _body(given)
            self._check(given)
            properties = spec.Basic.Properties(
                content_type=content_type,
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

    def _check(self, given: AmqpMessage) -> None:
        """Raises Undeliverable."""
        for name in ("exchange", "routing_key", "message_id", "content_type"):
            value = getattr(given, name) or ""
            if len(value.encode("utf-8", "surrogatepass")) > _LONGEST_NAME_BYTES or not _is_plain(value):
                raise Undeliverable(f"{name} must be up to {_LONGEST_NAME_BYTES} bytes of text, not {value[:100]!r}")
        if not given.exchange and self._settings.is_own_queue(given.routing_key):
            raise Undeliverable(
                f"the queue {given.routing_key!r} is Penstock's own: a right to enqueue is none to write it"
            )


def _is_plain(text: str) -> bool:
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


def _body(given: AmqpMessage) -> tuple[bytes, str]:
    """The bytes, and their content type. Raises Undeliverable."""
    if [given.body is None, given.json is msgspec.UNSET, given.base64 is None].count(False) != 1:
        raise Undeliverable("give one of body, a text, json, any value, and base64, bytes")
    if given.body is not None:
        return given.body.encode("utf-8", "replace"), given.content_type or "text/plain; charset=utf-8"
    if given.base64 is None:
        return msgspec.json.encode(given.json), given.content_type or "application/json"
    return decode_base64("base64", given.base64), given.content_type or "application/octet-stream"


def _header(name: str, value: Any) -> Any:
    """Raises Undeliverable."""
    if not _is_plain(name) or not 1 <= len(name.encode()) <= _LONGEST_NAME_BYTES:
        raise Undeliverable(f"{name[:100]!r} is no name of a header")
    if name in _ROUTING_HEADERS:
        raise Undeliverable(f"the header {name} has RabbitMQ route the message to other queues too: leave it out")
    if value is None or isinstance(value, bool | float) or (isinstance(value, str) and _is_plain(value)):
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return value
    if isinstance(value, Mapping) and set(value) == {"base64"} and isinstance(value["base64"], str):
        return bytearray(decode_base64(f"the header {name}", value["base64"]))
    raise Undeliverable(
        f"the header {name} is {json.dumps(value)[:100]}: take a text, a number, true, false, null, or bytes as "
        '{"base64": ...}'
    )
