"""Checks of large and encrypted payloads: whether the bucket answers and the keys are valid."""

from __future__ import annotations

from datetime import UTC, datetime

from penstock.cli.doctor.findings import Report
from penstock.payloads.bucket import Bucket, folder_of, new_name
from penstock.payloads.codec import PayloadCodec
from penstock.protocol.errors import PayloadLost, PayloadUnavailable, SettingsError
from penstock.settings.model import Settings
from penstock.settings.values import fingerprint, read_key

_POLICY = (
    "let this role call s3:PutObject, s3:GetObject and s3:DeleteObject below the prefix, "
    "and s3:ListBucket on the bucket"
)


async def examine_payloads(settings: Settings, report: Report) -> None:
    """No finding if neither is set. Writes nothing to the bucket, so the right to write is not checked."""
    if not settings.payload_keys and settings.payload_bucket is None:
        return
    try:
        codec = PayloadCodec(settings)
    except SettingsError as exc:
        report("error", "payloads", str(exc), "install it where any of the processes runs")
        return
    if settings.payload_keys:
        ids = [fingerprint(read_key(key.get_secret_value())) for key in settings.payload_keys]
        others = f", {len(ids) - 1} more only decrypt" if len(ids) > 1 else ""
        report("ok", "payload keys", f"{ids[0]} encrypts{others}")
    if codec.bucket is not None:
        await _examine_bucket(codec.bucket, folder_of(settings.outbound_queue), report)
        await codec.close()


async def _examine_bucket(bucket: Bucket, folder: str, report: Report) -> None:
    try:
        await bucket.list(folder, datetime.now(UTC).date(), "")
        await bucket.get(new_name(folder), 0)
    except PayloadLost:
        report("ok", "payload bucket", f"{bucket.url} answers")  # as expected for an unknown object
    except PayloadUnavailable as exc:
        if "NoSuchBucket" in str(exc):
            fix = "create the bucket, or correct PENSTOCK_PAYLOAD_BUCKET"
        elif exc.is_refusal:
            fix = _POLICY
        else:
            fix = "check PENSTOCK_PAYLOAD_S3_ENDPOINT_URL, PENSTOCK_AWS_REGION and the AWS credentials"
        report("error", "payload bucket", str(exc), fix)
    else:
        report("error", "payload bucket", f"{bucket.url} has an object under a name chosen just now", "look at it")
