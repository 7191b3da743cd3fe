"""Announces which actions this worker runs, at start and every minute, through the results queue."""

import asyncio
import random
from importlib import metadata

from penstock.protocol.reports import encode_notification
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
    texts = []
    for handler in registry.values():
        params, result = handler.schemas
        text = (handler.function.__doc__ or "").strip().partition("\n\n")[0]
        description = " ".join(text.split())[:_DESCRIPTION_CHARS]
        about = {"version": version or _installed_version(handler), "description": description}
        known = {name: value for name, value in {**about, "params": params, "result": result}.items() if value}
        texts.append(encode_notification("announce", action=handler.name, **known))
    return texts


def _installed_version(handler: Handler) -> str | None:
    try:
        return metadata.version(getattr(handler.function, "__module__", "").partition(".")[0])
    except (metadata.PackageNotFoundError, ValueError):
        return None
