"""Settings of Postgres: where it is, and TLS on the way to it."""

from __future__ import annotations

import ssl
from typing import Literal
from urllib.parse import urlencode

from pydantic import Field, SecretStr, field_validator

from penstock.protocol.errors import SettingsError
from penstock.settings.database_urls import check_database_url, query_of
from penstock.settings.values import PREFIX, Group, empty_is_unset, readable_file

_VERIFYING = ("verify-ca", "verify-full")


class DatabaseSettings(Group):
    """The section Postgres of docs/configuration.md."""

    database_url: SecretStr | None = Field(
        None,
        description="Postgres that stores the tasks, `postgresql://user:password@host:port/name`, directly or "
        "through a pooler in session mode; workers need none.",
    )
    database_pool_size: int = Field(8, ge=2, le=200, description="Maximum number of connections of one process.")
    statement_timeout_seconds: float = Field(
        30, gt=0, description="Postgres cancels a statement that runs longer, and it is tried again."
    )

    database_ssl_mode: Literal["disable", "allow", "prefer", "require", "verify-ca", "verify-full"] | None = Field(
        None,
        description="TLS to Postgres, as libpq's sslmode; `verify-full` is safe on any network, unset uses TLS "
        "if the server offers it and checks no certificate.",
    )
    database_ssl_root_cert: str | None = Field(
        None,
        description="File of the authorities that the server's certificate is checked against; unset: the system's.",
    )

    _unset_database = field_validator("database_url", "database_ssl_mode", "database_ssl_root_cert", mode="before")(
        empty_is_unset
    )
    _readable_database_files = field_validator("database_ssl_root_cert")(readable_file)

    @field_validator("database_url")
    @classmethod
    def _postgres_scheme(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            check_database_url(value.get_secret_value())
        return value

    @property
    def require_database_url(self) -> str:
        """The database URL in clear. Raises SettingsError when there is none."""
        if self.database_url is None:
            raise SettingsError(
                f"{PREFIX}DATABASE_URL is not set: set it to postgresql://user:password@host:5432/name, "
                "or run `penstock up`, which brings a Postgres of its own"
            )
        url = self.database_url.get_secret_value()
        given = query_of(url)
        more = {name: value for name, value in self._ssl_parameters().items() if name not in given}
        if not more:
            return url
        bare, _, fragment = url.partition("#")
        return f"{bare}{'&' if '?' in bare else '?'}{urlencode(more)}" + (f"#{fragment}" if fragment else "")

    def _ssl_parameters(self) -> dict[str, str]:
        """The settings of TLS as parameters of a URL, where every part of Penstock, Alembic included, finds them."""
        parameters: dict[str, str] = {}
        if self.database_ssl_mode is not None:
            parameters["sslmode"] = self.database_ssl_mode
        if self.database_ssl_root_cert is not None:
            parameters["sslrootcert"] = self.database_ssl_root_cert
        elif self.database_ssl_mode in _VERIFYING and (system := ssl.get_default_verify_paths().cafile) is not None:
            parameters["sslrootcert"] = system  # the driver would look for ~/.postgresql/root.crt alone
        return parameters

    def _database_problems(self) -> list[str]:
        if self.database_url is None:
            return []
        given = query_of(self.database_url.get_secret_value())
        wanted = {"sslmode": self.database_ssl_mode, "sslrootcert": self.database_ssl_root_cert}
        problems = [
            f"database_url says {name} too, and otherwise than {setting}: keep one of them"
            for name, setting in (("sslmode", "database_ssl_mode"), ("sslrootcert", "database_ssl_root_cert"))
            if wanted[name] is not None and given.get(name, wanted[name]) != wanted[name]
        ]
        if self.database_ssl_mode in _VERIFYING and "sslrootcert" not in self._ssl_parameters() | given:
            problems.append(f"database_ssl_mode {self.database_ssl_mode} needs database_ssl_root_cert on this system")
        mode = given.get("sslmode", self.database_ssl_mode or "prefer")
        if self.database_ssl_root_cert is not None and mode in ("disable", "allow", "prefer"):
            problems.append(
                f"database_ssl_root_cert is not looked at with the mode {mode}: set database_ssl_mode to verify-full"
            )
        return problems
