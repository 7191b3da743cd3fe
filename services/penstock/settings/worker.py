"""Settings of workers: what they run at once and for how long, and what they ask the api."""

from __future__ import annotations

from pydantic import Field, SecretStr, field_validator

from penstock.settings.values import DAY, Group, empty_is_unset, http_url


class WorkerSettings(Group):
    """The section Worker of docs/configuration.md."""

    worker_concurrency: int = Field(100, ge=1, description="Tasks that one worker process runs at once.")
    worker_name: str | None = Field(
        None, description="Name of this worker in what is shown of its tasks; unset: `host:pid`."
    )
    worker_threads: int = Field(16, ge=1, description="Threads for handlers that are plain functions.")
    task_timeout_seconds: float = Field(
        900, gt=0, description="Maximum run time of one attempt, unless the task or its action sets one."
    )

    bad_params_attempts: int | None = Field(
        3,
        ge=1,
        description="Attempts of a task whose parameters do not fit its handler, unless its action sets a "
        "number; unset: as many as for any other error.",
    )
    unknown_action_attempts: int | None = Field(
        None,
        ge=1,
        description="Attempts of a task for which a worker has no handler, such as during a deploy; unset: as "
        "many as for any other error.",
    )

    control_url: str | None = Field(
        None,
        description="The api, which workers ask for cancelled tasks; unset: handlers do not learn of a cancellation.",
    )
    control_api_key: SecretStr | None = Field(
        None, description="The API key for control_url; it needs `worker` or `read`."
    )

    result_compress_bytes: int | None = Field(
        65_536,
        ge=1024,
        description="Results over this size are sent compressed if that makes them smaller; unset: never.",
    )

    wait_timeout_seconds: float = Field(
        7 * DAY,
        gt=0,
        le=100 * 366 * DAY,
        description="How long a task waits for its event, unless its handler sets a time.",
    )

    _unset_worker = field_validator(
        "bad_params_attempts",
        "unknown_action_attempts",
        "control_url",
        "control_api_key",
        "worker_name",
        "result_compress_bytes",
        mode="before",
    )(empty_is_unset)
    _http_of_worker = field_validator("control_url")(http_url)

    @field_validator("worker_name")
    @classmethod
    def _worker_name(cls, value: str | None) -> str | None:
        from penstock.protocol.worker_names import check_worker_name

        return None if value is None else check_worker_name(value)
