"""Sealed texts, keys and names of objects, without any queue or database."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import subprocess
import sys
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from penstock.payloads.bucket import OFFERED, Bucket, folder_of, new_name
from penstock.payloads.codec import PayloadCodec, aad_of, payload_aad
from penstock.payloads.records import decrypt_error, encrypt_error, encrypt_note, shown_rows
from penstock.protocol.errors import PayloadLost, PayloadUnavailable, SettingsError
from penstock.protocol.json_text import replace_unstorable
from penstock.protocol.reports import Succeeded, add_trace, decode_reports, encode_result
from penstock.protocol.requests import Invalid, decode_body, encode_call
from penstock.protocol.sealed import (
    SEALED_ENCODING,
    Reference,
    Sealed,
    decode_sealed,
    encode_reference,
    encode_sealed,
    escape_plain,
)
from penstock.protocol.trace_context import TraceContext
from penstock.settings.model import load_settings
from penstock.settings.payload_texts import fingerprint, new_key, parse_bucket_url, read_key

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.text().map(lambda text: f"penstock+{text}"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
KEYS = [new_key(), new_key()]


def codec(*keys: str) -> PayloadCodec:
    return PayloadCodec(load_settings(payload_keys=",".join(keys)))


@given(JSON, st.booleans())
def test_whatever_is_sealed_opens_as_it_was(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    for one in (codec(), codec(KEYS[0])):
        stored = one.encode(escape_plain(text), "b")
        assert one.decode_inline(stored, "b") == text
        assert asyncio.run(one.load(stored, "b")) == text
        assert json.loads(stored) is not None or value is None
    assert codec(KEYS[1], KEYS[0]).decode_inline(codec(KEYS[0]).encode(escape_plain(text), "b"), "b") == text


@given(JSON)
def test_a_plain_result_is_never_taken_for_a_sealed_one(value: Any) -> None:
    text = json.dumps(value)
    for body in (encode_result("1:2", text), f"[{encode_result('1:2', text)}]"):
        (report,) = decode_reports(body, batch_limit=10)
        assert isinstance(report, Succeeded)
        assert decode_sealed(report.result) == replace_unstorable(text)


def test_a_sealed_result_keeps_the_trace_of_its_attempt() -> None:
    trace = TraceContext("a" * 32, "b" * 16, 1, "vendor=x")
    sealed = encode_sealed(Sealed("0" * 16, "AAAA"))
    (report,) = decode_reports(add_trace(encode_result("1:2", sealed, encoding=SEALED_ENCODING), trace), batch_limit=10)
    assert report == Succeeded(1, 2, None, sealed, trace=trace)


@given(st.text(alphabet="penstock+sealedobjct:/-0123456789abcdef", max_size=200))
def test_what_is_no_sealed_text_is_refused_and_nothing_else_is_raised(text: str) -> None:
    for mark in ("sealed", "object", ""):
        try:
            decode_sealed(json.dumps(f"penstock+{mark}:{text}"))
        except ValueError:
            continue


def test_sealing_twice_changes_nothing_and_two_seals_differ() -> None:
    one = codec(KEYS[0])
    sealed = one.encode('{"a":1}', "b")
    assert one.encode(sealed, "b") == sealed
    assert one.encode('{"a":1}', "b") != sealed


def test_each_value_has_a_key_of_its_own_as_the_documentation_describes() -> None:
    key = read_key(KEYS[0])
    data = []
    for _ in range(2):
        sealed = decode_sealed(codec(KEYS[0]).encode('{"a":1}', "payload\0act"))
        assert isinstance(sealed, Sealed)
        data.append(base64.b64decode(sealed.data))
    assert data[0][:4] == data[1][:4] == b"PSK1"
    assert data[0][4:32] != data[1][4:32]
    for one in data:
        derived = AESGCM(hmac.digest(key, one[4:32], "sha256"))
        assert derived.decrypt(bytes(12), one[32:], b"payload\0act") == b'{"a":1}'


@pytest.mark.parametrize("magic", [b"PSK2", b"PSK3", b""])
def test_a_value_of_another_format_does_not_open(magic: bytes) -> None:
    sealed = decode_sealed(codec(KEYS[0]).encode('{"a":1}', "b"))
    assert isinstance(sealed, Sealed)
    data = magic + base64.b64decode(sealed.data)[4:]
    text = encode_sealed(Sealed(sealed.key_id, base64.b64encode(data).decode()))
    with pytest.raises(PayloadLost, match="it does not open"):
        codec(KEYS[0]).decode_inline(text, "b")


def test_a_tenants_value_opens_for_the_tenant_alone_and_never_as_one_without_a_tenant() -> None:
    one, key = codec(KEYS[0]), read_key(KEYS[0])
    theirs = one.encode("{}", payload_aad("a", "acme"))
    sealed = decode_sealed(theirs)
    assert isinstance(sealed, Sealed)
    data = base64.b64decode(sealed.data)
    assert data[:4] == b"PSK2"
    derived = AESGCM(hmac.digest(key, data[:32], "sha256"))
    assert derived.decrypt(bytes(12), data[32:], b"payload\0acme\0a") == b"{}"
    assert one.decode_inline(theirs, payload_aad("a", "acme")) == "{}"
    marked = encode_sealed(Sealed(sealed.key_id, base64.b64encode(b"PSK1" + data[4:]).decode()))
    for text in (theirs, marked):
        for aad in (
            payload_aad("a", "other"),
            payload_aad("a", None),
            payload_aad("b", "acme"),
            "payload\0acme\0a",
        ):
            if (text, aad) != (theirs, "payload\0acme\0a"):  # no other kind of value is bound to that text
                with pytest.raises(PayloadLost):
                    one.decode_inline(text, aad)


def test_a_value_of_before_opens_for_a_tenant_and_none_is_written_so_unless_told() -> None:
    older = PayloadCodec(load_settings(payload_keys=KEYS[0], payload_bind_tenants=False))
    before = older.encode("{}", payload_aad("a", "acme"))
    assert codec(KEYS[0]).decode_inline(before, payload_aad("a", "acme")) == "{}"
    assert codec(KEYS[0]).decode_inline(before, payload_aad("a", None)) == "{}"  # as a worker of before opens it
    with pytest.raises(PayloadLost):
        codec(KEYS[0]).decode_inline(before, payload_aad("b", "acme"))
    assert older.decode_inline(codec(KEYS[0]).encode("{}", payload_aad("a", "acme")), payload_aad("a", "acme")) == "{}"


def test_a_missing_key_is_named_and_another_place_does_not_open() -> None:
    sealed = codec(KEYS[0]).encode("{}", "here")
    name = fingerprint(read_key(KEYS[0]))
    for other in (codec(KEYS[1]), codec()):
        with pytest.raises(PayloadUnavailable, match=f"key {name}.*PENSTOCK_PAYLOAD_KEYS"):
            other.decode_inline(sealed, "here")
    with pytest.raises(PayloadLost, match=name):
        codec(KEYS[0]).decode_inline(sealed, "there")
    with pytest.raises(PayloadLost):
        codec(KEYS[0]).decode_inline(sealed[:-8] + 'AAAAAA="', "here")


def test_an_error_keeps_code_type_and_hints_in_clear() -> None:
    one = codec(KEYS[0])
    error = json.dumps({"code": 7, "message": "m", "data": {"type": "T", "retry_after": 3, "traceback": "secret"}})
    sealed = encrypt_error(one, 5, error)
    shown = json.loads(sealed)
    assert (shown["code"], shown["data"]["type"], shown["data"]["retry_after"]) == (7, "T", 3)
    assert "secret" not in sealed
    assert encrypt_error(one, 5, sealed) == sealed
    assert decrypt_error(one, 5, sealed) == error
    with pytest.raises(PayloadLost):
        decrypt_error(one, 6, sealed)


@pytest.mark.parametrize(
    "note", ["penstock+x", "penstock+plain:x", "penstock+object:x", "penstock+sealed:x", "penstock+"]
)
def test_a_note_that_begins_like_a_sealed_text_is_encrypted_as_any_other(note: str) -> None:
    one = codec(KEYS[0])
    sealed = encrypt_note(one, 5, note)
    assert sealed is not None
    assert sealed != note
    assert encrypt_note(one, 5, sealed) == sealed
    assert json.loads(one.decode_inline(json.dumps(sealed), aad_of("error", 5))) == note


async def test_a_number_beyond_a_double_in_an_error_is_shown_as_it_is() -> None:
    number = "1" * 5000
    error = f'{{"code":1,"message":"m","data":{{"n":{number},"sealed":"penstock+sealed:{"0" * 16}:AAAA"}}}}'
    row = {
        "id": 5, "action": "a", "tenant": None, "result": None, "payload": None, "progress": None, "error": error,
        "failures": f'[{{"attempt":1,"error":{error}}}]',
    }  # fmt: skip
    (shown,) = await shown_rows(codec(), [row], room_bytes=0)
    for name in ("error", "failures"):
        assert number in shown[name]
        assert "not shown: it is encrypted with key" in shown[name]


@pytest.mark.parametrize("name", [
    "../x", "20200101/", "20200101/" + "0" * 31 + "G", "a/20200101/" + "0" * 32, "",
    "queues/20200101/" + "0" * 32, "queues/a/b/20200101/" + "0" * 32, "queues/../20200101/" + "0" * 32,
])  # fmt: skip
async def test_a_name_of_another_form_reaches_no_bucket(name: str) -> None:
    bucket = Bucket("s3://bucket/prefix", endpoint_url="http://127.0.0.1:1")
    for call in (bucket.get(name, 10), bucket.put(name, b""), bucket.delete([name])):
        with pytest.raises(PayloadLost, match="is not an object name"):
            await call
    reference = encode_reference(Reference(name, None, 5, "0" * 64))
    with pytest.raises(ValueError, match="is no text"):
        decode_sealed(reference)


@pytest.mark.parametrize(
    ("queue", "folder"),
    [
        ("penstock-video", "queues/penstock-video/"),
        ("https://sqs.eu-central-1.amazonaws.com/123456789012/penstock-video", "queues/penstock-video/"),
        ("http://127.0.0.1:4566/000000000000/penstock-video.fifo", "queues/penstock-video.fifo/"),
        ("video/4k *", "queues/video%2F4k%20%2A/"),
        ("é" * 250, f"queues/{'%C3%A9' * 133}%C/"),
    ],
)
def test_objects_of_a_queues_tasks_are_in_its_folder_by_name_or_url(queue: str, folder: str) -> None:
    assert folder_of(queue) == folder
    for name in (new_name(folder), new_name(folder).removeprefix(folder), new_name(OFFERED)):
        reference = Reference(name, None, 5, "0" * 64)
        assert decode_sealed(encode_reference(reference)) == reference
        assert reference.is_offered == name.startswith("offered/")


@pytest.mark.parametrize("url", ["https://bucket/x", "s3://", "s3://Bad_Name", "s3://bucket?x=1", "bucket"])
def test_a_bucket_that_is_none_is_refused_at_once(url: str) -> None:
    with pytest.raises(SettingsError, match="PENSTOCK_PAYLOAD_BUCKET: must be s3://"):
        load_settings(payload_bucket=url)


def test_a_prefix_is_told_from_the_bucket() -> None:
    assert parse_bucket_url("s3://bucket") == ("bucket", "")
    assert parse_bucket_url("s3://bucket/a/b/") == ("bucket", "a/b/")


@pytest.mark.parametrize("key", ["hunter2", "aHVudGVyMg==", "é" * 44])
def test_a_key_that_is_none_is_refused_without_being_shown(key: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(payload_keys=f"{KEYS[0]},{key}")
    assert "PENSTOCK_PAYLOAD_KEYS" in str(caught.value)
    assert key not in str(caught.value)
    assert KEYS[0] not in str(caught.value)


def test_limits_that_do_not_fit_are_told_together() -> None:
    with pytest.raises(SettingsError, match="payload_limit_bytes may be at most 700000 with payload_keys"):
        load_settings(payload_keys=KEYS[0], payload_limit_bytes=800_000)
    with pytest.raises(SettingsError, match="payload_max_bytes must be at least"):
        load_settings(payload_bucket="s3://bucket", payload_max_bytes=2000, payload_threshold_bytes=3000)


def test_a_worker_alone_takes_a_sealed_payload() -> None:
    body = encode_call(1, 2, "a", codec(KEYS[0]).encode("{}", payload_aad("a", None)))
    assert isinstance(decode_body(body, batch_limit=10).entries[0], Invalid)
    assert not isinstance(decode_body(body, batch_limit=10, may_be_sealed=True).entries[0], Invalid)
    other = encode_call(1, 2, "a", '"text"')
    assert isinstance(decode_body(other, batch_limit=10, may_be_sealed=True).entries[0], Invalid)


def test_while_both_are_off_nothing_of_them_is_loaded() -> None:
    program = (
        "import sys; from penstock.settings.model import load_settings; "
        "from penstock.payloads.codec import PayloadCodec; "
        "import penstock.worker.process; v = PayloadCodec(load_settings()); assert v.encode('{}', 'b') == '{}'; "
        "print([m for m in sys.modules if m.split('.')[0] in ('cryptography', 'aiobotocore', 'botocore', 'asyncpg')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
