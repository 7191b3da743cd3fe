"""Settings of what payloads may be: their limits, the bucket of large ones, and encryption; see docs/payloads.md."""

from __future__ import annotations

from pydantic import Field, SecretStr, field_validator

from penstock.settings.payload_values import LONGEST_SEALED_BYTES, parse_bucket_url, read_key
from penstock.settings.values import DAY, Group, Secrets, empty_is_unset

_REQUEST_ROOM_BYTES = 65_536  # for what surrounds a payload
_PACKED_LIMIT = 10_000  # above what schedulers and workers pack into one message


class PayloadSettings(Group):
    """The sections Limits on input and Large and encrypted payloads of docs/configuration.md."""

    payload_limit_bytes: int = Field(
        262144, ge=2, le=900_000, description="Maximum payload of a task as JSON, UTF-8 bytes."
    )
    result_limit_bytes: int = Field(
        262144, ge=2, le=900_000, description="Maximum result of a task as JSON, UTF-8 bytes."
    )
    request_limit_bytes: int = Field(16 * 1024 * 1024, ge=1024, description="Maximum body of one HTTP request.")
    batch_limit: int = Field(10000, ge=1, description="Maximum number of requests in one JSON-RPC batch of a caller.")

    payload_bucket: str | None = Field(
        None,
        description="Payloads and results over the threshold are stored as objects here, `s3://bucket/prefix`; "
        "unset: everything stays in Postgres and the queues.",
    )
    payload_s3_endpoint_url: str | None = Field(None, description="Endpoint of that bucket; unset means AWS.")
    payload_threshold_bytes: int = Field(
        131_072,
        ge=1024,
        le=LONGEST_SEALED_BYTES,
        description="Larger payloads and results become objects; JSON, UTF-8 bytes.",
    )
    payload_max_bytes: int = Field(
        64 * 1024 * 1024, ge=1024, le=1024**3, description="Maximum size of a payload or result that becomes an object."
    )
    payload_sweep_seconds: float = Field(
        3600, ge=0, description="Interval at which each object is checked for a task that still references it."
    )
    payload_orphan_seconds: float = Field(
        45 * DAY,
        ge=DAY,
        description="Unreferenced objects are deleted after this; longer than messages, dead letters and "
        "rejected messages are kept.",
    )
    payload_keys: Secrets = Field(
        (),
        description="Comma-separated keys of `penstock payload-key`: payloads, results and errors are encrypted "
        "with the first, and decrypted with any; none: they are stored unencrypted.",
    )
    payload_bind_tenants: bool = Field(
        True,
        description="An encrypted payload of a tenant can be decrypted for tasks of that tenant only; false "
        "while workers run that do not know the tenant, of an earlier version or in other languages.",
    )

    _unset_payloads = field_validator("payload_bucket", "payload_s3_endpoint_url", mode="before")(empty_is_unset)

    @field_validator("payload_bucket")
    @classmethod
    def _bucket_url(cls, value: str | None) -> str | None:
        if value is not None:
            parse_bucket_url(value)
        return value

    @field_validator("payload_keys")
    @classmethod
    def _keys_of_payloads(cls, value: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        for entry in value:
            read_key(entry.get_secret_value())
        return value

    @property
    def packed_limit(self) -> int:
        """Entries in a body of the outbound or the results queue, which schedulers and workers pack."""
        return max(self.batch_limit, _PACKED_LIMIT)

    @property
    def largest_payload_bytes(self) -> int:
        """The limit of a payload that may become an object, that of any where there is no bucket."""
        return self.payload_limit_bytes if self.payload_bucket is None else self.payload_max_bytes

    @property
    def largest_result_bytes(self) -> int:
        """Of a result, likewise."""
        return self.result_limit_bytes if self.payload_bucket is None else self.payload_max_bytes

    @property
    def largest_request_bytes(self) -> int:
        """The limit of a request's body: one payload of the greatest size has room in it."""
        if self.payload_bucket is None:
            return self.request_limit_bytes
        return max(self.request_limit_bytes, self.payload_max_bytes + _REQUEST_ROOM_BYTES)

    def _payload_problems(self) -> list[str]:
        problems = []
        if self.payload_keys:
            problems = [
                f"{name} may be at most {LONGEST_SEALED_BYTES} with payload_keys, for what is encrypted is longer"
                for name in ("payload_limit_bytes", "result_limit_bytes")
                if getattr(self, name) > LONGEST_SEALED_BYTES
            ]
        if self.payload_bucket is not None and self.payload_max_bytes < self.payload_threshold_bytes:
            problems.append("payload_max_bytes must be at least payload_threshold_bytes")
        return problems
