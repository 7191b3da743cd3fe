"""Payloads and results that are encrypted, or too large for a row and a message: sealed before they are stored, opened
where they are used. Off by default; then nothing here loads a library."""

from penstock.payloads.bucket import Bucket
from penstock.payloads.cipher import Bound
from penstock.payloads.failures import seal_error, seal_progress
from penstock.payloads.records import open_outcome, shown_rows
from penstock.payloads.vault import (
    Vault,
    answer_bound,
    error_bound,
    offered_bound,
    options_bound,
    payload_bound,
    result_bound,
    spawn_bound,
)

__all__ = [
    "Bound",
    "Bucket",
    "Vault",
    "answer_bound",
    "error_bound",
    "offered_bound",
    "open_outcome",
    "options_bound",
    "payload_bound",
    "result_bound",
    "seal_error",
    "seal_progress",
    "shown_rows",
    "spawn_bound",
]
