"""Announces which actions this worker runs, at start and every minute, through the results queue."""

import asyncio
import random
from functools import cache
from importlib import metadata

from penstock.protocol.reports import encode_announce
from penstock.protocol.task import ANNOUNCE_SECONDS
from penstock.worker.handlers.actions import Handler, Registry
from penstock.worker.result_sender import ResultSender

_DESCRIPTION_CHARS = 500


async def announce(registry: Registry, sender: ResultSender, version: str | None) -> None:
    """A side task; handlers are read once, in a thread, for schemas take long to make."""
    texts = await asyncio.to_thread(announcements, registry, version)
    while texts:
        await sender.send_now(texts)
        await asyncio.sleep(ANNOUNCE_SECONDS * random.uniform(0.8, 1.2))


def announcements(registry: Registry, version: str | None) -> list[str]:
    """A notification for each action; the message's attribute names the worker."""
    return [_announcement(handler, version or _version_of(handler)) for handler in registry.values()]


def _announcement(handler: Handler, version: str | None) -> str:
    params, result = handler.schemas
    text = (handler.function.__doc__ or "").strip().partition("\n\n")[0]
    description = " ".join(text.split())[:_DESCRIPTION_CHARS] or None
    return encode_announce(
        handler.name, version=version, description=description, params=params or None, result=result or None
    )


def _version_of(handler: Handler) -> str | None:
    return _installed_version(getattr(handler.function, "__module__", "").partition(".")[0])


@cache
def _installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except (metadata.PackageNotFoundError, ValueError):
        return None
