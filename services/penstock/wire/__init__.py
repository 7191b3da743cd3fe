"""JSON-RPC 2.0 on the wire: bodies to records and back, claim ids, packing. Pure; knows no queue and no database.

A body is one request or response, or a batch (array) of them. Payloads and results pass through as the JSON text
that they came as: they are checked but never re-encoded, so numbers of any size arrive as they were sent.
"""

from penstock.wire.packing import join_batch, pack
from penstock.wire.reports import (
    NO_HINTS,
    PROGRESS_NOTE_CHARS,
    BackoffHint,
    Failed,
    Hints,
    Progress,
    Report,
    RunTimes,
    Succeeded,
    Unreadable,
    decode_report,
    decode_reports,
    encode_error,
    encode_progress,
    encode_result,
    encode_run_times,
)
from penstock.wire.requests import (
    SUSPECT_ATTRIBUTE,
    TIMEOUT_ATTRIBUTE,
    Body,
    ClaimId,
    Invalid,
    Request,
    decode_body,
    decode_request,
    encode_call,
    parse_claim_id,
    split_body,
)
from penstock.wire.text import (
    MAX_DEPTH,
    check_payload,
    escape_for_sqs,
    replace_unstorable,
    text_of,
    utf8_size,
)

__all__ = [
    "MAX_DEPTH",
    "NO_HINTS",
    "PROGRESS_NOTE_CHARS",
    "SUSPECT_ATTRIBUTE",
    "TIMEOUT_ATTRIBUTE",
    "BackoffHint",
    "Body",
    "ClaimId",
    "Failed",
    "Hints",
    "Invalid",
    "Progress",
    "Report",
    "Request",
    "RunTimes",
    "Succeeded",
    "Unreadable",
    "check_payload",
    "decode_body",
    "decode_report",
    "decode_reports",
    "decode_request",
    "encode_call",
    "encode_error",
    "encode_progress",
    "encode_result",
    "encode_run_times",
    "escape_for_sqs",
    "join_batch",
    "pack",
    "parse_claim_id",
    "replace_unstorable",
    "split_body",
    "text_of",
    "utf8_size",
]
