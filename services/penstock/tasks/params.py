"""The parameters of `enqueue`, of which schedules and steps of workflows are made too."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from penstock.protocol.task import (
    ACTION_MAX_CHARS,
    KEY_MAX_CHARS,
    LABEL_NAME_MAX_CHARS,
    LABEL_VALUE_MAX_CHARS,
    MAX_ATTEMPTS_LIMIT,
    MAX_LABELS,
    PRIORITY_MAX,
    PRIORITY_MIN,
    OnDuplicate,
)
from penstock.protocol.tenant import TENANT_MAX_CHARS
from penstock.protocol.views import about


class EnqueueParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    action: Annotated[str, about(f"What a worker's handler is registered for; 1 to {ACTION_MAX_CHARS} characters.")]
    payload: Annotated[
        msgspec.Raw, about("The handler's parameters: an object (by name) or an array (by position).")
    ] = msgspec.Raw(b"{}")
    run_at: Annotated[
        str | int | None, about("Not before this instant: RFC 3339 with a zone, or epoch milliseconds.")
    ] = None
    delay: Annotated[
        float | None, about("Not before so many seconds from now, by the database's clock; excludes run_at.")
    ] = None
    priority: Annotated[int | None, about(f"Higher first; {PRIORITY_MIN} to {PRIORITY_MAX}, null for 0.")] = None
    unique_key: Annotated[
        str | None,
        about(
            "One task per action and key, see unique; a second enqueue gets the first's id. "
            f"1 to {KEY_MAX_CHARS} characters."
        ),
    ] = None
    ordering_key: Annotated[
        str | None, about(f"Tasks of one key run one at a time, in order. 1 to {KEY_MAX_CHARS} characters.")
    ] = None
    max_attempts: Annotated[
        int | None, about(f"Attempts before CRITICAL_ERROR; 1 to {MAX_ATTEMPTS_LIMIT}, null for the server's own.")
    ] = None
    timeout: Annotated[
        float | None, about("Seconds that one attempt may take; null for the action's or worker's own.")
    ] = None
    labels: Annotated[
        dict[str, str] | None,
        about(
            f"Text by text, to find it and to route it by; up to {MAX_LABELS}, names of 1 to {LABEL_NAME_MAX_CHARS} "
            f"and values of up to {LABEL_VALUE_MAX_CHARS} characters."
        ),
    ] = None
    expires_at: Annotated[str | int | None, about("Cancelled unless started before this instant; as run_at.")] = None
    expires_in: Annotated[
        float | None, about("The same, so many seconds from now, by the database's clock; excludes expires_at.")
    ] = None
    limit_key: Annotated[
        str | None, about(f"Which of its action's limits by key it counts against. 1 to {KEY_MAX_CHARS} characters.")
    ] = None
    unique: Annotated[
        Literal["retained", "live"] | float,
        about(
            "Until when another task keeps the unique key from this one: retained, until its record is cleaned; "
            "live, until it settles; a number, for so many seconds from when it took the key."
        ),
    ] = "retained"
    on_duplicate: Annotated[
        OnDuplicate,
        about(
            "When another has the key: return its id; replace its payload, and its run_at and priority if given, while "
            "it waits; or error."
        ),
    ] = "return"
    tenant: Annotated[
        str | None, about(f"For whom it is; 1 to {TENANT_MAX_CHARS} characters. Its keys are that tenant's own.")
    ] = None
    sealed_payload: Annotated[
        str | None,
        about("Instead of payload: a payload that a client has encrypted or stored in the bucket."),
    ] = None
