"""Connections that end soon after their server is lost, find the primary of several hosts, and rename the schema.

Passwords may change while a process runs: they come from a file, a command, or IAM, and are read for each connection.
"""

import asyncio
import shlex
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import asyncpg

from penstock.protocol.errors import Unavailable
from penstock.protocol.schema import DEFAULT, renamed
from penstock.settings.model import Settings
from penstock.settings.values import PREFIX, query_of

LOST_SECONDS = 5  # a connection ends whose server acknowledges nothing for so long, as a failover leaves it
CONNECT_SECONDS = 5.0
_HEAD_STARTS = (1.0, 2.0)  # seconds of an attempt before the next begins beside it; at a single host, of a new address
_KEEPALIVE = {
    "TCP_USER_TIMEOUT": LOST_SECONDS * 1000,  # milliseconds, until what was sent has to be acknowledged
    "TCP_KEEPIDLE": 2,  # while nothing is sent: probes, which have to be acknowledged too
    "TCP_KEEPINTVL": 1,
    "TCP_KEEPCNT": LOST_SECONDS - 2,
}
_TRY_THE_NEXT = (OSError, asyncpg.CannotConnectNowError, asyncpg.TargetServerAttributeNotMatched)
_COMMAND_SECONDS = 10.0
_TOKEN_SECONDS = 900  # the longest that RDS accepts; a connection outlives it
_TOKEN_REQUEST = {"url_path": "/", "query_string": "", "headers": {}, "method": "GET"}

Passwords = Callable[[Sequence[str]], Awaitable[Sequence[str]]]
"""Given URLs of one host each, their passwords. Raises Unavailable."""


async def connect(
    url: str, *, timeout: float = CONNECT_SECONDS, passwords: Passwords | None = None, schema: str = DEFAULT,
    **options: Any,
) -> Any:  # fmt: skip
    """As ``asyncpg.connect``; of several hosts the first that takes writes, unless the URL asks for another kind.

    A host that does not answer within a second does not keep the next one waiting. passwords: None for those of the
    URL. schema: that statements run in. Raises as the driver does, and Unavailable without a password or in time.
    """
    options["connection_class"] = _renaming(schema, options.get("connection_class", asyncpg.Connection))
    parts, asked = urlsplit(url), query_of(url).get("target_session_attrs")
    user, at, hosts = parts.netloc.rpartition("@")
    urls = [parts._replace(netloc=f"{user}{at}{host}").geturl() for host in hosts.split(",")]
    known: dict[str, str] = {}
    if passwords is not None:
        given = await passwords(urls)
        known = {url: given[0], **dict(zip(urls, given, strict=True))}
    if len(urls) > 1 and asked is None:
        options["target_session_attrs"] = "read-write"
    try:
        async with asyncio.timeout(timeout):
            # prefer-standby is about all hosts together, so the driver tries them.
            connection = await _first_of([url] if asked == "prefer-standby" else urls, known, options)
    except TimeoutError:  # no statement is slow, so no entry of a batch is to blame
        raise Unavailable(f"Postgres took no connection within {timeout:g} s") from None
    if (found := connection._transport.get_extra_info("socket")) is not None and found.family != socket.AF_UNIX:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if (option := getattr(socket, name, None)) is not None:  # not every system has all
                found.setsockopt(socket.IPPROTO_TCP, option, value)
    return connection


async def _first_of(urls: list[str], passwords: Mapping[str, str], options: dict[str, Any]) -> Any:
    """The first connection that an attempt makes; each begins when the one before has failed or had its head start."""
    following = list(urls if len(urls) > 1 else urls * (len(_HEAD_STARTS) + 1))
    attempts: list[asyncio.Task[Any]] = []
    running: set[asyncio.Task[Any]] = set()
    try:
        while True:
            if following:
                url = following.pop(0)
                attempts.append(asyncio.create_task(asyncpg.connect(url, password=passwords.get(url), **options)))
                running.add(attempts[-1])
            pause = _HEAD_STARTS[min(len(attempts), len(_HEAD_STARTS)) - 1] if following else None
            done, running = await asyncio.wait(running, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
            for attempt in done:
                failure = attempt.exception()
                if failure is None:
                    attempts.remove(attempt)
                    return attempt.result()
                if len(urls) == 1 or not isinstance(failure, _TRY_THE_NEXT) or not (following or running):
                    raise failure
    finally:
        for attempt in attempts:
            attempt.add_done_callback(_discard)
            attempt.cancel()


def _discard(attempt: asyncio.Task[Any]) -> None:
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result().terminate()


@cache
def _renaming(schema: str, connection_class: Any) -> Any:
    """A class of the driver's connections whose statements and channels are those of the schema."""
    if schema == DEFAULT:
        return connection_class

    def renaming_first(name: str) -> Any:
        method = getattr(connection_class, name)

        async def call(self: Any, text: str, *args: Any, **options: Any) -> Any:
            return await method(self, renamed(text, schema), *args, **options)

        return call

    names = ("execute", "fetch", "fetchrow", "fetchval", "prepare", "add_listener")
    return type("Renaming", (connection_class,), {name: renaming_first(name) for name in names})


def passwords_of(settings: Settings) -> Passwords | None:
    """Where passwords come from, of which the settings name one place at most; None for the URL."""
    file, command = settings.database_password_file, settings.database_password_command

    async def read(urls: Sequence[str]) -> Sequence[str]:
        if settings.database_iam:
            return await asyncio.to_thread(lambda: [_iam_token(url, settings.aws_region) for url in urls])
        if command is not None:
            return [_only_line(await _output_of(shlex.split(command)), "COMMAND")] * len(urls)
        try:
            text = await asyncio.to_thread(Path(file or "").read_text, "utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise Unavailable(f"{PREFIX}DATABASE_PASSWORD_FILE cannot be read: {type(exc).__name__}") from None
        return [_only_line(text, "FILE")] * len(urls)

    return read if settings.database_iam or file is not None or command is not None else None


def _only_line(text: str, source: str) -> str:
    password = text.rstrip("\r\n")
    if not password or "\n" in password:
        raise Unavailable(f"{PREFIX}DATABASE_PASSWORD_{source} must give one line, the password")
    return password


async def _output_of(words: Sequence[str]) -> str:
    name = f"{PREFIX}DATABASE_PASSWORD_COMMAND"
    try:
        process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
    except OSError as exc:
        raise Unavailable(f"{name} cannot be run: {exc.strerror}") from None
    try:
        async with asyncio.timeout(_COMMAND_SECONDS):
            output, _ = await process.communicate()
    except TimeoutError:
        raise Unavailable(f"{name} gave no password within {_COMMAND_SECONDS:g} s") from None
    finally:
        with suppress(ProcessLookupError):
            process.kill()
    if process.returncode:
        raise Unavailable(f"{name} exited with code {process.returncode}: run it by hand to see why")
    return output.decode("utf-8", "replace")


@cache
def _aws() -> Any:
    """One session, whose temporary credentials renew themselves."""
    import botocore.session

    return botocore.session.get_session()


def _iam_token(url: str, region: str | None) -> str:
    """A token for the host, port and user of the URL, signed on this machine."""
    from botocore.awsrequest import prepare_request_dict
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.model import ServiceId
    from botocore.signers import RequestSigner

    parts = urlsplit(url)
    try:
        credentials = _aws().get_credentials()
        region = region or _aws().get_config_variable("region")
        if credentials is None or region is None:
            missing = "credentials" if credentials is None else f"region: set {PREFIX}AWS_REGION"
            raise Unavailable(f"{PREFIX}DATABASE_IAM finds no AWS {missing}")
        signer = RequestSigner(
            ServiceId("RDS"), region, "rds-db", "v4", credentials, _aws().get_component("event_emitter")
        )
        request = _TOKEN_REQUEST | {"body": {"Action": "connect", "DBUser": unquote(parts.username or "")}}
        prepare_request_dict(request, f"https://{parts.hostname}:{parts.port or 5432}")
        signed: str = signer.generate_presigned_url(request, "connect", expires_in=_TOKEN_SECONDS)
    except (BotoCoreError, ClientError) as exc:
        raise Unavailable(f"{PREFIX}DATABASE_IAM cannot sign: {type(exc).__name__}") from exc
    return signed.removeprefix("https://")


def connecting_options(settings: Settings) -> dict[str, Any]:
    """How connections are made, for ``Store`` and the functions of ``migrate``."""
    return {"passwords": passwords_of(settings), "schema": settings.database_schema}
