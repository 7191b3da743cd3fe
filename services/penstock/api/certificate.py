"""The certificate of the api: its files may be replaced while the process runs."""

import os
import ssl

from penstock.protocol.errors import SettingsError
from penstock.runtime.logs import log
from penstock.settings.values import PREFIX

LOOK_SECONDS = 10.0


class Certificate:
    """A context for servers that shows the newest pair of files which fit together. Raises SettingsError at first."""

    def __init__(self, cert: str, key: str) -> None:
        self._files = (cert, key)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._seen = self._state()
        try:
            self.context.load_cert_chain(*self._files)
        except (OSError, ssl.SSLError) as exc:
            raise SettingsError(f"{PREFIX}HTTP_TLS_CERT and _KEY cannot be used: {exc}") from exc

    def _state(self) -> list[tuple[int, int, int]]:
        """Differs once a file is replaced, also by a link to another."""
        found = [os.stat(file) for file in self._files]
        return [(stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in found]

    async def look(self) -> float:
        """Take replaced files for connections from now on; returns seconds until the next look.

        Files that do not fit together, as while one is replaced, change nothing.
        """
        try:
            if (state := self._state()) != self._seen:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*self._files)  # raises before anything changes
                self.context.load_cert_chain(*self._files)
                self._seen = state
                log.info("certificate_loaded", file=self._files[0])
        except (OSError, ssl.SSLError) as exc:
            log.warning("certificate_not_loaded", file=self._files[0], reason=str(exc))
        return LOOK_SECONDS
