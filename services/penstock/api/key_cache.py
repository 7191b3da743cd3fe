"""The keys that the api accepts: those of the settings, and those of Postgres as they were a moment ago."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence
from time import monotonic

from penstock.api.keys import active_keys
from penstock.db.pool import Store
from penstock.protocol.api_key import ApiKey
from penstock.protocol.errors import Unavailable
from penstock.runtime.logs import get_logger

REFRESH_SECONDS = 2.0
BELIEVED_SECONDS = 8.0  # a key that was revoked stops within 10 s, even where Postgres cannot be asked
USE_NOTED_SECONDS = 60.0

log = get_logger()


class KeyCache:
    """Finds keys by their digests, without a query. fixed: keys of the settings. store: where the others are."""

    def __init__(self, fixed: Sequence[ApiKey], store: Store | None) -> None:
        self._fixed = {key.digest: key for key in fixed}
        self._store = store
        self._kept: dict[bytes, ApiKey] = {}
        self._read_at = float("-inf")
        self._used: set[int] = set()
        self._noted_at = float("-inf")

    def find(self, digest: bytes) -> ApiKey | None:
        """The key whose secret has this digest. Raises Unavailable while the keys were last read too long ago."""
        # The time of this look-up depends on digests alone, which lead back to no secret.
        key = self._fixed.get(digest)
        if key is None and self._store is not None:
            if monotonic() - self._read_at > BELIEVED_SECONDS:
                raise Unavailable("the API keys in Postgres could not be read for some seconds")
            key = self._kept.get(digest)
        if key is None or not hmac.compare_digest(key.digest, digest):
            return None
        if key.id is not None:
            self._used.add(key.id)
        return key

    async def refresh(self) -> None:
        """Read the keys again, and from time to time record which were used. Raises Unavailable."""
        if self._store is None:
            return
        asked_at = monotonic()
        async with self._store.session() as session:
            keys = await active_keys(session)
            if self._used and asked_at - self._noted_at >= USE_NOTED_SECONDS:
                used, self._used = self._used, set()
                await session.fetch("note_key_use", sorted(used))
                self._noted_at = asked_at
        self._kept = {key.digest: key for key in keys}
        self._read_at = asked_at  # what was asked before must not count as newer than it is

    async def run(self) -> None:
        """Keep the keys fresh; runs beside the requests."""
        failed = False
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            try:
                # A pool that is used up would otherwise hold this one for half a minute.
                async with asyncio.timeout(BELIEVED_SECONDS):
                    await self.refresh()
            except (Unavailable, TimeoutError) as exc:
                if not failed:
                    log.warning("api_keys_not_read", reason=str(exc) or "no answer in time")
                failed = True
            else:
                failed = False
