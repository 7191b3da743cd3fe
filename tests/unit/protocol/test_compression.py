"""Packed results: what comes out is what went in, and nothing gets more room than it may have."""

from __future__ import annotations

import base64
import gzip
import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.compression import (
    ENCODING,
    UNPACKED_BODY_BYTES,
    UNPACKED_RESULT_BYTES,
    Unpackable,
    pack_result,
    unpack_result,
)
from penstock.protocol.reports import Failed, Succeeded, decode_reports, encode_result

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8", exclude_characters="\0")),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8", exclude_characters="\0")), inner)
    ),
)


@given(JSON)
def test_what_is_packed_comes_out_as_it_was(value: object) -> None:
    text = json.dumps(value, ensure_ascii=False)
    (report,) = decode_reports(encode_result("1:2", f'"{pack_result(text)}"', encoding=ENCODING), batch_limit=10)
    assert report == Succeeded(1, 2, None, text)


def test_gzip_of_anybody_is_read() -> None:
    packed = base64.b64encode(gzip.compress(b'{"rows": 120}', mtime=0)).decode()
    body = json.dumps([{"jsonrpc": "2.0", "id": "1:2", "result": packed, "encoding": "gzip"}])
    assert decode_reports(body, batch_limit=10) == [Succeeded(1, 2, None, '{"rows": 120}')]


def test_a_result_that_only_looks_packed_is_left_as_it_is() -> None:
    result = '{"encoding":"gzip","result":"H4sI"}'
    body = f'{{"jsonrpc":"2.0","result":{result},"id":"1:2"}}'
    assert decode_reports(body, batch_limit=10) == [Succeeded(1, 2, None, result)]


@pytest.mark.parametrize(
    ("result", "told"),
    [
        ('"H4sI"', "cut off"),
        ('"not base64!"', "cannot be read"),
        ("17", "cannot be read"),
        (json.dumps(base64.b64encode(gzip.compress(b"1", mtime=0) + b"more").decode()), "followed by something else"),
        (json.dumps(pack_result("{")), "cannot be read"),
        (json.dumps(base64.b64encode(gzip.compress(b'"\xff"', mtime=0)).decode()), "cannot be read"),
    ],
)
def test_what_cannot_be_unpacked_says_why(result: str, told: str) -> None:
    with pytest.raises(Unpackable, match=told):
        unpack_result(result.encode(), "gzip", UNPACKED_BODY_BYTES)


def test_a_message_of_bombs_gets_no_more_room_than_one_may_have() -> None:
    bomb = pack_result("[" + "0," * 10_000_000 + "0]")
    fair = pack_result('"' + "x" * (UNPACKED_RESULT_BYTES - 2) + '"')
    entries = [encode_result(f"{n}:1", f'"{bomb if n % 2 else fair}"', encoding=ENCODING) for n in range(1, 61)]
    body = "[" + ",".join(entries) + "]"
    tracemalloc.start()
    reports = decode_reports(body, batch_limit=100)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    taken = [report for report in reports if isinstance(report, Succeeded)]
    refused = [json.loads(report.error) for report in reports if isinstance(report, Failed)]
    assert len(taken) == UNPACKED_BODY_BYTES // UNPACKED_RESULT_BYTES
    assert len(taken) + len(refused) == 60
    assert {error["code"] for error in refused} == {-32013}
    assert peak < 3 * UNPACKED_BODY_BYTES
