"""Passwords that may change while a process runs: from a file, a command, or IAM; read for each new connection."""

import asyncio
import shlex
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from penstock.protocol.errors import Unavailable
from penstock.settings.model import Settings
from penstock.settings.values import PREFIX

Passwords = Callable[[Sequence[str]], Awaitable[Sequence[str]]]
"""Given URLs of one host each, their passwords. Raises Unavailable."""

_COMMAND_SECONDS = 10.0
_TOKEN_SECONDS = 900  # the longest that RDS accepts; a connection outlives it
_TOKEN_REQUEST = {"url_path": "/", "query_string": "", "headers": {}, "method": "GET"}


def passwords_of(settings: Settings) -> Passwords | None:
    """Where passwords come from; None for the URL."""

    async def from_file(urls: Sequence[str]) -> Sequence[str]:
        try:
            text = await asyncio.to_thread(Path(settings.database_password_file or "").read_text, "utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise Unavailable(f"{PREFIX}DATABASE_PASSWORD_FILE cannot be read: {type(exc).__name__}") from None
        return [_only_line(text, "FILE")] * len(urls)

    async def from_command(urls: Sequence[str]) -> Sequence[str]:
        assert settings.database_password_command is not None
        words = shlex.split(settings.database_password_command)
        return [_only_line(await _output_of(words), "COMMAND")] * len(urls)

    async def from_iam(urls: Sequence[str]) -> Sequence[str]:
        return await asyncio.to_thread(lambda: [_iam_token(url, settings.aws_region) for url in urls])

    if settings.database_iam:
        return from_iam
    if settings.database_password_file is not None:
        return from_file
    return None if settings.database_password_command is None else from_command


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
