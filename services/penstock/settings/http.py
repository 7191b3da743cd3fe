"""Settings of HTTP: the api, its keys and its dashboard, the commands that call it, and /metrics of each process."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import NoDecode

from penstock.protocol.api_key import ApiKey, check_plain_lengths, parse_entries
from penstock.settings.named_urls import named_url
from penstock.settings.values import DAY, PREFIX, Group, Secrets, empty_is_unset, http_url


def is_loopback(host: str) -> bool:
    """Whether an address or name means this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class HttpSettings(Group):
    """The section HTTP of docs/configuration.md."""

    http_host: str = Field(
        "127.0.0.1", description="Address of the api; an address other than loopback requires API keys."
    )
    http_port: int = Field(8080, ge=0, le=65535, description="Port of the api; 0 takes a free one.")
    api_keys: Secrets = Field(
        (),
        description="Comma-separated keys of 16 characters or more with all permissions, or entries "
        "`name:permissions:sha256` that hold only a key's digest, followed by `:tenant:actions` to bind one; "
        "none = loopback only.",
    )
    api_require_keys: bool = Field(
        False, description="Require a key even if none is set here: those created by `penstock keys create`."
    )
    api_rate_limit: float | None = Field(
        None,
        gt=0,
        description="Requests (entries of batches) per second for each key, or address; unset means no limit.",
    )
    api_rate_burst: int | None = Field(
        None, ge=1, description="Requests that may come at once; unset means those of one second."
    )
    http_connections: int = Field(
        500,
        ge=1,
        description="Maximum number of connections of one api process; one more closes an idle one, or is "
        "answered with 503.",
    )
    http_bytes_in_flight: int = Field(
        64 * 1024 * 1024,
        ge=1024 * 1024,
        description="Maximum bytes of bodies and answers that one api process holds at once, without the first "
        "16 KiB of each request; more are answered with 503. One request of the largest size and its answer "
        "always fit.",
    )
    result_waits_limit: int = Field(
        20_000,
        ge=1,
        description="Maximum number of tasks that one api process waits for at once, over all calls of `result`.",
    )
    request_timeout_seconds: float = Field(
        30, gt=0, le=3600, description="A request must have arrived within this; its first line and headers in 10 s."
    )
    dashboard: bool = Field(True, description="The api serves the dashboard at `/`, beside `/rpc`.")
    dashboard_session_seconds: float = Field(
        12 * 3600, ge=60, le=30 * DAY, description="Lifetime of a dashboard session that was opened with an API key."
    )
    dashboard_processes: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Comma-separated base URLs of /readyz of processes, such as workers, whose state the "
        "dashboard shows; `http://host:9464`, or `worker-1=http://host:9464` to name one.",
    )
    api_url: str | None = Field(
        None, description="The api's URL for commands such as `penstock task show` and for `Client()`."
    )
    api_key: SecretStr | None = Field(None, description="The API key that they send.")
    metrics_host: str = Field("127.0.0.1", description="Address of /metrics, /healthz and /readyz.")
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Their port; unset means 9464 or, if that is in use, a free one; 0 a free one.",
    )

    _unset_http = field_validator(
        "api_url", "api_key", "api_rate_limit", "api_rate_burst", "metrics_port", mode="before"
    )(empty_is_unset)
    _http_of_api = field_validator("api_url")(http_url)

    @field_validator("api_keys")
    @classmethod
    def _entries_can_be_read(cls, value: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        entries = [entry.get_secret_value() for entry in value]
        parse_entries(entries)
        check_plain_lengths(entries)
        return value

    @field_validator("dashboard_processes", mode="before")
    @classmethod
    def _split_processes(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(url.strip().rstrip("/") for url in value.split(",") if url.strip())
        return value

    @field_validator("dashboard_processes")
    @classmethod
    def _are_http(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            named_url(entry)
        return value

    @property
    def needs_keys(self) -> bool:
        """Whether the api asks for a key."""
        return bool(self.api_keys) or self.api_require_keys

    @property
    def known_keys(self) -> tuple[ApiKey, ...]:
        """The keys of ``api_keys``."""
        return parse_entries(entry.get_secret_value() for entry in self.api_keys)

    def _http_problems(self) -> list[str]:
        problems = []
        if not is_loopback(self.http_host) and not self.needs_keys:
            problems.append(
                f"http_host {self.http_host} is not loopback: set {PREFIX}API_KEYS first, "
                f"or {PREFIX}API_REQUIRE_KEYS=true"
            )
        if self.api_rate_burst is not None and self.api_rate_limit is None:
            problems.append("api_rate_burst needs api_rate_limit")
        return problems
