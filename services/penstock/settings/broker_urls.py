"""URLs of message brokers: which kind, where, with what; checked once, and shown without what is secret in them."""

import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qsl, unquote, urlsplit

Kind = Literal["sqs", "amqp", "kafka"]
_KINDS: dict[str, Kind] = {"sqs": "sqs", "amqp": "amqp", "amqps": "amqp", "kafka": "kafka"}
_FORMS = {
    "amqp": "amqp://user:password@host:port/vhost, the characters : / ? # [ ] @ and % of a user or password written as "
    "%3A %2F %3F %23 %5B %5D %40 %25",
    "kafka": "kafka://host:port,host:port; what else there is to say say PENSTOCK_KAFKA_*",
}
_SECRET = re.compile("password|secret|key|token", re.IGNORECASE)  # in the name of an option
_PORTS = {"amqp": 5672, "amqps": 5671, "kafka": 9092}
DEAD_LETTER_SUFFIX = "-dlq"  # a queue's dead-letter queue is named as the queue is, and labelled so


@dataclass(frozen=True, slots=True)
class BrokerUrl:
    """A URL taken apart. ``hosts``: host:port of each. ``text``: all of it, its secrets too."""

    kind: Kind
    scheme: str
    hosts: tuple[str, ...]
    path: str
    secrets: frozenset[str]
    text: str

    @property
    def shown(self) -> str:
        """For logs and people: no user, no password, no options."""
        return f"{self.scheme}://{','.join(self.hosts)}{self.path}"

    def scrub(self, text: str) -> str:
        """A text, such as an error of a library, without what is secret in the URL."""
        for secret in sorted(self.secrets | {self.text}, key=len, reverse=True):
            text = text.replace(secret, "***")
        return text


def parse_broker_url(url: str) -> BrokerUrl:
    """Raises ValueError, whose text holds no part of the URL."""
    scheme, sign, rest = url.partition("://")
    kind = _KINDS.get(scheme) if sign else None
    if kind is None:
        raise ValueError("must begin with sqs://, amqp://, amqps:// or kafka://")
    if kind == "sqs":
        if rest:
            raise ValueError("is sqs:// alone: PENSTOCK_SQS_ENDPOINT_URL and PENSTOCK_AWS_REGION say where SQS is")
        return BrokerUrl(kind, scheme, (), "", frozenset(), url)
    problem = ValueError(f"must be {_FORMS[kind]}")
    try:
        parts = urlsplit(url)
        options = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise problem from None
    credentials, _, servers = parts.netloc.rpartition("@")
    hosts = tuple(_with_port(server, _PORTS[scheme]) for server in servers.split(","))
    if not all(hosts) or "@" in credentials + parts.path + parts.query or parts.fragment:
        raise problem
    if kind == "amqp" and len(hosts) != 1:
        raise problem
    if kind == "kafka" and (credentials or parts.path not in ("", "/") or options):
        raise problem
    password = credentials.partition(":")[2]
    secrets = {password, unquote(password), *(value for name, value in options if _SECRET.search(name))}
    return BrokerUrl(kind, scheme, hosts, parts.path, frozenset(secrets - {""}), url)


def _with_port(server: str, port: int) -> str:
    """host:port, "" for what is none."""
    host, colon, given = server.rpartition(":") if ":" in server.rpartition("]")[2] else (server, "", "")
    if not host or any(c in host for c in " /?#"):
        return ""
    if not colon:
        return f"{host}:{port}"
    return server if given.isascii() and given.isdigit() and 0 < int(given) < 65536 else ""
