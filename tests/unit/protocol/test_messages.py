from __future__ import annotations

import json
import math
import re
import tracemalloc
from time import perf_counter
from typing import Any

import msgspec
import pytest

from penstock.protocol.errors import InvalidParams, InvalidRequest, ParseError
from penstock.protocol.fence import ClaimKey, Fence
from penstock.protocol.json_text import (
    MAX_DEPTH,
    check_payload,
    decode_any,
    escape_for_sqs,
    replace_unstorable,
    text_of,
    utf8_size,
)
from penstock.protocol.reports import (
    SHARED_RESULT_BYTES,
    BackoffHint,
    Failed,
    Hints,
    Progress,
    Report,
    RunTimes,
    SharedResult,
    Succeeded,
    Unreadable,
    decode_reports,
    encode_error,
    encode_notification,
    encode_progress,
    encode_result,
    encode_shared_result,
    sole_result,
)
from penstock.protocol.requests import (
    ClaimId,
    Invalid,
    Request,
    TaskRequest,
    decode_body,
    decode_task_requests,
    encode_call,
    join_batch,
    pack,
    parse_claim_id,
)
from penstock.protocol.sealed import MARK

GOOD = '{"jsonrpc":"2.0","method":"enqueue","params":{"action":"a"},"id":1}'
RESULT = '{"jsonrpc":"2.0","result":{"ok":true},"id":"42:7"}'


def only(body: bytes | str) -> Request | Invalid:
    decoded = decode_body(body, batch_limit=10)
    assert not decoded.is_batch
    (entry,) = decoded.entries
    return entry


def refused(body: str) -> Invalid:
    entry = only(body)
    assert isinstance(entry, Invalid)
    return entry


def report(body: str | bytes) -> Report:
    (entry,) = decode_reports(body, batch_limit=10)
    return entry


def unreadable(body: str | bytes) -> Unreadable:
    entry = report(body)
    assert isinstance(entry, Unreadable)
    return entry


# Requests


def test_a_request_keeps_its_params_and_id_as_the_text_that_came() -> None:
    request = only('{"jsonrpc": "2.0", "method": "m", "params": {"n": 1e400, "m": 1.0}, "id": "x"}')
    assert isinstance(request, Request)
    assert (request.method, bytes(request.params), bytes(request.id)) == ("m", b'{"n": 1e400, "m": 1.0}', b'"x"')


@pytest.mark.parametrize("body", [GOOD.encode(), "\ufeff" + GOOD, b"\xef\xbb\xbf" + GOOD.encode(), f"\n {GOOD} \t"])
def test_bytes_byte_order_marks_and_blanks_around_a_request_are_fine(body: bytes | str) -> None:
    assert isinstance(only(body), Request)


def test_a_request_without_id_is_a_notification_and_one_with_null_is_not() -> None:
    absent, null = only('{"jsonrpc":"2.0","method":"m"}'), only('{"jsonrpc":"2.0","method":"m","id":null}')
    assert isinstance(absent, Request)
    assert isinstance(null, Request)
    assert (bytes(absent.id), bytes(null.id)) == (b"", b"null")
    assert bytes(absent.params) == b""


@pytest.mark.parametrize(
    "body",
    [
        "",
        "   ",
        "plain text",
        "{",
        '{"jsonrpc":"2.0","method":"m"} x',
        "NaN",
        '{"jsonrpc":"2.0","method":"m","params":{"n":NaN}}',
        '{"jsonrpc":"2.0","method":"m","params":{"n":Infinity}}',
        '{"jsonrpc":"2.0","method":"m","params":{"n":-Infinity}}',
        "[",
        "[1",
        "[1 2]",
        "[1,]",
        "[1] 2",
        "[NaN]",
        '["\ud800",NaN]',
        '["\ud800"] x',
        '{"a":' * 10_000,
        "[" * 10_000,
        "[" * 10_000 + "]" * 9_999,
        "[" * 10_000 + "]" * 10_000 + "]",
        '{"a":' * 10_000 + "1" + "}" * 10_000,
        '"\ud800"',
        b"\xff\xfe",
        b'{"jsonrpc":"2.0","method":"\xc3\x28"}',
    ],
)
def test_a_body_that_is_no_json_is_a_parse_error(body: bytes | str) -> None:
    with pytest.raises(ParseError, match=r"^Parse error: "):
        decode_body(body, batch_limit=10)


@pytest.mark.parametrize(
    "rest", ['\\"', '"\\"', '{"a":"', "\\", '"'], ids=["escaped", "both", "keys", "marks", "quotes"]
)
def test_a_mebibyte_that_is_nested_too_deeply_and_has_a_string_without_end_is_refused_at_once(rest: str) -> None:
    """The bound is far above what a linear scan takes; a quadratic one took an hour."""
    body = "[" * 3000 + '"' + rest * (2**20 // len(rest))
    started = perf_counter()
    with pytest.raises(ParseError):
        decode_body(body, batch_limit=10)
    assert isinstance(unreadable(body), Unreadable)
    assert perf_counter() - started < 30


def test_a_body_that_is_not_utf8_is_refused_with_the_place() -> None:
    with pytest.raises(ParseError, match="not UTF-8 at byte 3"):
        text_of(b"abc\xff")


@pytest.mark.parametrize("body", ["[]", " [ \n] "])
def test_an_empty_batch_is_an_invalid_request(body: str) -> None:
    with pytest.raises(InvalidRequest, match="empty batch"):
        decode_body(body, batch_limit=10)


@pytest.mark.parametrize(
    "entry", ["1", GOOD, '"\ud800"', "[" * 5000 + "]" * 5000], ids=["number", "request", "surrogate", "deep"]
)
def test_a_batch_of_50000_is_refused_with_the_limit(entry: str) -> None:
    count = 50_000 if len(entry) < 100 else 11
    with pytest.raises(InvalidRequest, match=f"a batch of {count}; the limit is 10"):
        decode_body(f"[{','.join([entry] * count)}]", batch_limit=10)


@pytest.mark.parametrize(
    ("body", "answered_id"),
    [
        ("{}", b"null"),
        ("null", b"null"),
        ("1", b"null"),
        ('"text"', b"null"),
        ('{"method":"m","id":7}', b"7"),
        ('{"jsonrpc":"1.0","method":"m","id":7}', b"7"),
        ('{"jsonrpc":2.0,"method":"m","id":"seven"}', b'"seven"'),
        ('{"jsonrpc":"2.0","method":1,"id":7.5}', b"7.5"),
        ('{"jsonrpc":"2.0","id":7}', b"7"),
        ('{"jsonrpc":"2.0","method":"m","params":1,"id":7}', b"7"),
        ('{"jsonrpc":"2.0","method":"m","params":"text","id":7}', b"7"),
        ('{"jsonrpc":"2.0","method":"m","params":null,"id":7}', b"7"),
        ('{"jsonrpc":"2.0","method":"m","id":{}}', b"null"),
        ('{"jsonrpc":"2.0","method":"m","id":[1]}', b"null"),
        ('{"jsonrpc":"2.0","method":"m","id":true}', b"null"),
        ('{"jsonrpc":"2.0","method":"\\ud800","id":7}', b"7"),
        ('{"jsonrpc":"2.0","method":"m","params":{"a":"\\udc00"},"id":7}', b"7"),
        ('{"jsonrpc":"2.0","method":"m","params":{"a":"\\ud800"},"id":"\\ud800"}', b'"\\ufffd"'),
    ],
)
def test_json_that_is_no_request_is_invalid_with_the_id_it_had(body: str, answered_id: bytes) -> None:
    entry = refused(body)
    assert isinstance(entry.error, InvalidRequest)
    assert entry.error.message.startswith("Invalid Request: ")
    assert (entry.id, entry.text) == (answered_id, body)


@pytest.mark.parametrize(
    "bad",
    [
        "1",
        "[]",
        '{"jsonrpc":"2.0"}',
        '"\\ud800"',
        '{"jsonrpc":"2.0","method":"m","params":{"a":"\\ud800"},"id":2}',
        '"\ud800"',
        "[" * 10_000 + "]" * 10_000,
        '{"jsonrpc":"2.0","method":"m","params":' + '{"a":' * 10_000 + '"],[}\\""' + "}" * 10_001,
    ],
    ids=[
        "number",
        "array",
        "no method",
        "half pair",
        "half pair inside",
        "raw half pair",
        "deep arrays",
        "deep object",
    ],
)
def test_a_bad_entry_never_spoils_its_neighbours(bad: str) -> None:
    body = decode_body(f" [ {GOOD} ,{bad},\n{GOOD}] ", batch_limit=10)
    assert body.is_batch
    first, spoilt, last = body.entries
    assert isinstance(first, Request)
    assert isinstance(spoilt, Invalid)
    assert isinstance(last, Request)
    assert spoilt.text == bad
    assert bytes(first.params) == bytes(last.params) == b'{"action":"a"}'


def test_a_batch_of_one_is_still_a_batch() -> None:
    assert decode_body(f"[{GOOD}]", batch_limit=1).is_batch


# Payloads


def nested(depth: int) -> str:
    return '{"a":[' * (depth // 2) + "1" + "]}" * (depth // 2)


@pytest.mark.parametrize(
    "payload",
    [
        "{}",
        "[]",
        '{"n":123456789012345678901234567890}',
        '{"n":-0.0,"m":1E+2}',
        '{"a":"\\ud83d\\ude00"}',
        '{"a":"\\\\u0000"}',
        '{"a":"\\\\ud800"}',
        '{"a":"\\\\\\ud83d\\ude00"}',
        '{"a":"\uffff"}',
        nested(MAX_DEPTH),
        "[" + ",".join("[]" for _ in range(1000)) + "]",
        '{"a":1,"a":2}',
        '{"a":"1e999 \\" 1e999","b":[1e300,0.' + "1" * 400 + ",1e-999]}",
        "[" + "9" * 4300 + "]",
        '["[[[","\\"[[[","\\\\",' + nested(MAX_DEPTH - 2) + "]",
    ],
)
def test_a_payload_that_every_worker_can_read_is_taken(payload: str) -> None:
    check_payload(payload)


@pytest.mark.parametrize("piece", ["[],", '"[",', "1,", "1.5,", '{"a":"}"},'])
def test_a_payload_is_checked_without_building_its_values(piece: str) -> None:
    payload = "[" + piece * (4 * 2**20 // len(piece)) + "1e200]"
    tracemalloc.start()
    try:
        check_payload(payload)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 12 * len(payload)


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        ("null", "must be an object or an array, not null"),
        ("true", "not a boolean"),
        ('"text"', "not a string"),
        ("1", "not a number"),
        ("1.5", "not a number"),
        ("{", "is not valid JSON"),
        ('{"n":NaN}', "is not valid JSON"),
        ('{"n":[1e400,NaN]}', "is not valid JSON"),
        ('{"n":[1e400,-Infinity]}', "is not valid JSON"),
        ('{"n":[1e400}', "is not valid JSON"),
        ('{"n":[1e400,"\\ud800"]}', "half a surrogate pair"),
        ('{"n":1e400,"m":' + nested(MAX_DEPTH + 1) + "}", f"deeper than {MAX_DEPTH} levels"),
        ('{"a":"\\u0000"}', "holds \\u0000"),
        ('{"\\u0000":1}', "holds \\u0000"),
        ('{"a":"\\\\\\u0000"}', "holds \\u0000"),
        ('{"a":"\\ud800"}', "half a surrogate pair"),
        ('{"a":"\\udc00"}', "half a surrogate pair"),
        ('{"a":"\\ud83dx"}', "half a surrogate pair"),
        ('{"a":"\\ud83d\\ud83d\\ude00"}', "half a surrogate pair"),
        ('{"a":"\\\\ud83d\\ude00"}', "half a surrogate pair"),
        ('{"\\ud800":1}', "half a surrogate pair"),
        (nested(MAX_DEPTH + 2), f"deeper than {MAX_DEPTH} levels"),
        ('{"a":' * 10_000 + "1" + "}" * 10_000, f"deeper than {MAX_DEPTH} levels"),
    ],
)
def test_a_payload_that_some_worker_or_postgres_could_not_read_is_refused(payload: str, problem: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        check_payload(payload, "params")
    assert caught.value.data["field"] == "params"
    assert problem in caught.value.data["problem"]


@pytest.mark.parametrize("number", ["1e400", "-1E+999999", "1" * 5000, "-0.5e-999999", "1" * 4000])
def test_a_number_of_any_size_is_taken_and_beyond_a_double_is_infinite(number: str) -> None:
    beyond = {"1e400": math.inf, "-1E+999999": -math.inf, "1" * 5000: math.inf, "-0.5e-999999": -0.0}
    text = f'{{"n":{number},"m":[1.5,2]}}'
    check_payload(text)
    assert decode_any(text) == {"n": beyond.get(number, 10**4000 // 9), "m": [1.5, 2]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"plain"', '"plain"'),
        ('"\\u0041\\n"', '"\\u0041\\n"'),
        ('"\\u0000"', '"\\ufffd"'),
        ('"\\u0000\\u0000"', '"\\ufffd\\ufffd"'),
        ('"\\\\u0000"', '"\\\\u0000"'),
        ('"\\\\\\u0000"', '"\\\\\\ufffd"'),
        ('"\\ud83d\\ude00"', '"\\ud83d\\ude00"'),
        ('"\\uD83D\\uDE00\\uDE00"', '"\\uD83D\\uDE00\\ufffd"'),
        ('"\\ud83d\\ud83d\\ude00"', '"\\ufffd\\ud83d\\ude00"'),
        ('"\\ude00\\ud83d"', '"\\ufffd\\ufffd"'),
        ('"\\\\ud83d\\ude00"', '"\\\\ud83d\\ufffd"'),
        ('"\\ud83d\\\\ude00"', '"\\ufffd\\\\ude00"'),
    ],
)
def test_only_escapes_of_nul_and_of_half_pairs_are_replaced(text: str, expected: str) -> None:
    assert replace_unstorable(text) == expected


# Claims


def test_a_call_is_a_request_whose_id_names_task_and_claim() -> None:
    call = encode_call(42, 7, 'a"b\u20ac', '{"n": 1e400}')
    request = only(call)
    assert isinstance(request, Request)
    assert (request.method, bytes(request.params), bytes(request.id)) == ('a"b\u20ac', b'{"n": 1e400}', b'"42:7"')


@pytest.mark.parametrize(
    "text",
    [
        "",
        "42",
        ":",
        "42:",
        ":7",
        "42:7:",
        "42:7:a b",
        "42:7:a:b",
        '42:7:"',
        "42:7:" + "a" * 65,
        " 42:7",
        "42:7\n",
        "-1:7",
        "4\u0662:7",
        f"{2**63}:1",
        "1:" + "9" * 20,
    ],
)
def test_what_is_no_claim_id_is_none(text: str) -> None:
    assert parse_claim_id(text) is None


def test_the_largest_claim_id_is_read() -> None:
    assert parse_claim_id(f"{2**63 - 1}:{2**63 - 1}") == ClaimId(2**63 - 1, 2**63 - 1)


# Reports


@pytest.mark.parametrize(
    ("body", "result"),
    [
        (RESULT, '{"ok":true}'),
        ('{"result":null,"id":"42:7"}', "null"),
        ('{"jsonrpc":"2.0","result":0,"id":"42:7"}', "0"),
        ('{"jsonrpc":"2.0","result":1e400,"id":"42:7"}', "1e400"),
        ('{"jsonrpc":"2.0","result":1,"error":null,"id":"42:7"}', "1"),
        ('{"jsonrpc":"2.0","result":null,"error":null,"id":"42:7"}', "null"),
        ('{"jsonrpc":"2.0","result":"\\u0000\\ud800","id":"42:7"}', '"\\ufffd\\ufffd"'),
    ],
)
def test_a_result_is_kept_as_the_text_that_came(body: str, result: str) -> None:
    assert report(body) == Succeeded(42, 7, None, result)


@pytest.mark.parametrize("result", ["null", None])
def test_an_error_is_a_failure_with_or_without_a_null_result(result: str | None) -> None:
    member = "" if result is None else f'"result":{result},'
    error = '{"code":-32000,"message":"boom","data":{"type":"ValueError"}}'
    assert report(f'{{{member}"error":{error},"id":"42:7"}}') == Failed(42, 7, None, error, Hints())


@pytest.mark.parametrize(
    ("body", "claim", "attempt"),
    [
        ('{"result":{"attempt":3},"id":42}', None, 3),
        ('{"result":{"attempt":"3"},"id":"42"}', None, 3),
        ('{"error":{"code":1,"message":"m","attempt":3},"id":42}', None, 3),
        ('{"error":{"code":1,"message":"m","data":{"attempt":"3"}},"id":42}', None, 3),
        ('{"result":{"attempt":3},"id":"42:7"}', 7, None),
    ],
)
def test_the_older_convention_names_its_attempt(body: str, claim: int | None, attempt: int | None) -> None:
    (outcome,) = decode_reports(body, batch_limit=10, bare_ids=True)
    assert isinstance(outcome, Succeeded | Failed)
    assert (outcome.task_id, outcome.claim, outcome.attempt) == (42, claim, attempt)


@pytest.mark.parametrize(
    ("code", "number"),
    [('"5050"', 5050), ('"-32000"', -32000), ('"01"', -32000), ('"E_BUSY"', -32000), ('"9999999999"', -32000)],
)
def test_a_code_of_an_error_may_be_text_as_sqs_scheduler_sends_it(code: str, number: int) -> None:
    outcome = report(f'{{"error":{{"attempt":"","code":{code},"message":"random é"}},"id":"42:7:ab"}}')
    assert isinstance(outcome, Failed)
    assert json.loads(outcome.error) == {"attempt": "", "code": number, "message": "random é"}


@pytest.mark.parametrize(
    "result", ["1", "[3]", '{"attempt":"x"}', '{"attempt":-1}', '{"attempt":1.5}', f'{{"attempt":"{"9" * 5000}"}}']
)
def test_a_bare_task_id_needs_an_attempt_and_the_setting(result: str) -> None:
    body = f'{{"result":{result},"id":42}}'
    (entry,) = decode_reports(body, batch_limit=10, bare_ids=True)
    assert isinstance(entry, Unreadable)
    assert "needs an attempt" in entry.reason
    assert "PENSTOCK_RESULTS_BARE_IDS=true" in unreadable(body).reason


def test_a_claim_id_may_carry_a_token() -> None:
    assert parse_claim_id("42:7:0123456789abcdef0123") == ClaimId(42, 7)


KEYS = [ClaimKey(secret) for secret in (b"new", b"old", b"older")]


def test_a_fence_takes_the_ids_that_its_keys_made_and_no_others() -> None:
    fence = Fence(KEYS)
    name = fence.name(42, 7)
    assert re.fullmatch("42:7:[0-9a-f]{20}", name)
    assert name == Fence(KEYS[:1]).name(42, 7) != fence.name(42, 8)
    token = name[5:]
    others = [Fence([key]).name(42, 7) for key in KEYS]
    assert [fence.problem(other) for other in others] == [None, None, None]
    forged = ["42:7", f"42:8:{token}", f"43:7:{token}", f"42:7:{'0' * 20}", "42:7:", f"042:7:{token}", name[:-1]]
    assert all(fence.problem(text) for text in forged)
    assert token not in f"{fence.problem(f'42:8:{token}')}"


def test_a_key_that_is_not_accepted_any_more_lets_nothing_through() -> None:
    over = [ClaimKey(b"new"), ClaimKey(b"old", seconds_left=0.0)]
    assert "expired" in (Fence(over).problem(Fence(over[1:]).name(42, 7)) or "")


@pytest.mark.parametrize(
    "entry",
    [
        '{"result":1,"id":"42:7"}',
        '{"result":1,"spawn":[{"action":"a"}],"id":"42:7:0123456789abcdef0123"}',
        '{"error":{"code":1,"message":"m"},"id":"42:7"}',
        '{"method":"progress","params":{"id":"42:7","percent":1}}',
        '{"method":"wait","params":{"id":"42:7","token":"t"}}',
        '{"method":"wait","params":{"id":"42:7","token":""}}',
    ],
)
def test_no_kind_of_report_passes_the_fence_by_an_id_that_was_made_up(entry: str) -> None:
    for body in (entry, f"[{entry}]"):
        (found,) = decode_reports(body, batch_limit=10, fence=Fence(KEYS))
        assert isinstance(found, Unreadable)
        assert (found.text, found.is_foreign) == (entry, True)
        assert not isinstance(decode_reports(body, batch_limit=10)[0], Unreadable)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("", "not a JSON-RPC response"),
        ("[1", "the array does not end"),
        ("[]", "empty batch"),
        (b"\xff", "not UTF-8"),
        ("1", "not a JSON-RPC response"),
        ('"\ud800"', "not a JSON-RPC response"),
        ('{"result":' + "[" * 10_000 + "]" * 10_000 + ',"id":"42:7"}', "not a JSON-RPC response"),
        ('{"jsonrpc":2,"result":1,"id":"42:7"}', "not a JSON-RPC response"),
        ('{"result":1,"error":{"code":1,"message":"m"},"id":"42:7"}', "both result and error"),
        ('{"id":"42:7"}', "neither result nor error"),
        ('{"error":null,"id":"42:7"}', "not a JSON-RPC response"),
        ('{"result":1}', "holds no id"),
        ('{"result":1,"id":null}', "holds no id"),
        ('{"result":1,"id":1.5}', "not a JSON-RPC response"),
        ('{"result":1,"id":"x"}', "is not <task id>:<claim>"),
        ('{"result":1,"id":-1}', "is not <task id>:<claim>"),
        ('{"result":1,"id":9223372036854775808}', "is not <task id>:<claim>"),
        ('{"result":1,"id":"9223372036854775808:1"}', "is not <task id>:<claim>"),
        ('{"error":"text","id":"42:7"}', "not a JSON-RPC response"),
        ('{"error":{"message":"m"},"id":"42:7"}', "not a JSON-RPC response"),
        ('{"error":{"code":1.5,"message":"m"},"id":"42:7"}', "not a JSON-RPC response"),
        ('{"jsonrpc":"2.0","method":"enqueue","params":{}}', "unknown notification 'enqueue'"),
        ('{"jsonrpc":"2.0","method":"progress"}', "not a JSON-RPC response"),
        ('{"jsonrpc":"2.0","method":"progress","params":{}}', "not a JSON-RPC response"),
        ('{"jsonrpc":"2.0","method":"progress","params":{"id":"42"}}', "is not <task id>:<claim>"),
        ('{"jsonrpc":"2.0","method":"progress","params":{"id":"42:7","percent":"x"}}', "not a JSON-RPC response"),
        ('{"jsonrpc":"2.0","method":"run_times"}', "not a JSON-RPC response"),
        ('{"jsonrpc":"2.0","method":"run_times","params":{}}', "not a JSON-RPC response"),
        ('{"jsonrpc":"2.0","method":"run_times","params":{"actions":[]}}', "not a JSON-RPC response"),
        ('{"jsonrpc":"2.0","method":"run_times","params":{"actions":{"a":1}}}', "not a JSON-RPC response"),
        ('{"jsonrpc":"2.0","method":"run_times","params":{"actions":{"a":[1]}}}', "not a JSON-RPC response"),
        ('{"jsonrpc":"2.0","method":"run_times","params":{"actions":{"a":["1",2.0]}}}', "not a JSON-RPC response"),
        ('{"jsonrpc":"2.0","method":"run_times","params":{"actions":{"a":[1,NaN]}}}', "not a JSON-RPC response"),
        ('{"jsonrpc":"2.0","method":"run_times","params":{"actions":{"a":[1,1e400]}}}', "not a JSON-RPC response"),
        ('{"jsonrpc":"2.0","method":"run_times","params":{"actions":{"a":[-1,2.0]}}}', "Expected `int` >= 0"),
        ('{"jsonrpc":"2.0","method":"run_times","params":{"actions":{"a":[1,-2.0]}}}', "Expected `float` >= 0.0"),
        (
            '{"jsonrpc":"2.0","method":"run_times","params":{"actions":{"a":[1,2],"b":[9223372036854775807,2]}}}',
            "Expected `int` <= 1000000000",
        ),
        (
            '{"jsonrpc":"2.0","method":"run_times","params":{"actions":{"a":[1,1e308]}}}',
            "Expected `float` <= 1000000000000.0",
        ),
        (
            '{"jsonrpc":"2.0","method":"run_times","params":{"actions":{"' + "x" * 201 + '":[1,2]}}}',
            "Expected `str` of length <= 200",
        ),
    ],
)
def test_an_entry_that_says_nothing_about_any_task_is_unreadable_with_its_reason(
    body: str | bytes, reason: str
) -> None:
    entry = unreadable(body)
    assert reason in entry.reason
    assert isinstance(body, bytes) or entry.text == body


def test_a_body_above_the_limit_of_a_batch_is_unreadable_as_a_whole() -> None:
    (entry,) = decode_reports(f"[{','.join([RESULT] * 11)}]", batch_limit=10)
    assert isinstance(entry, Unreadable)
    assert "a batch of 11; the limit is 10" in entry.reason


@pytest.mark.parametrize(
    "bad", ["1", "{}", '"\ud800"', '{"result":' + "[" * 10_000 + "]" * 10_000 + ',"id":"42:7"}'],
    ids=["number", "empty", "raw half pair", "deep"],
)  # fmt: skip
def test_a_bad_report_never_spoils_its_neighbours(bad: str) -> None:
    first, spoilt, last = decode_reports(f"[{RESULT},{bad},{RESULT}]", batch_limit=10)
    assert isinstance(spoilt, Unreadable)
    assert first == last == Succeeded(42, 7, None, '{"ok":true}')


@pytest.mark.parametrize(
    ("data", "hints"),
    [
        ('{"retry_after":2.5,"final":true,"max_attempts":3}', Hints(2.5, True, 3)),
        (
            '{"backoff":{"base_seconds":1,"factor":3,"cap_seconds":9}}',
            Hints(backoff=BackoffHint(1.0, 3.0, 9.0)),
        ),
        ('{"type":"ValueError","retry_after":1}', Hints(1.0)),
        ('{"retry_after":"soon"}', Hints()),
        ('{"final":"yes"}', Hints()),
        ('{"backoff":{"base_seconds":1}}', Hints()),
        ("[1]", Hints()),
        ("null", Hints()),
        ('"text"', Hints()),
    ],
)
def test_hints_are_read_from_the_errors_data_and_wrong_ones_ignored(data: str, hints: Hints) -> None:
    outcome = report(f'{{"error":{{"code":1,"message":"m","data":{data}}},"id":"42:7"}}')
    assert isinstance(outcome, Failed)
    assert outcome.hints == hints


def test_progress_tells_percent_and_note_and_a_bare_one_is_a_heartbeat() -> None:
    full, bare = report(encode_progress("42:7", 40, "half")), report(encode_progress("42:7"))
    assert isinstance(full, Progress)
    assert full.detail is not None
    assert json.loads(full.detail) == {"percent": 40.0, "note": "half"}
    assert bare == Progress(42, 7, None)


def test_run_times_are_read_by_action_beside_results() -> None:
    body = join_batch(
        [encode_result("42:7", "1"), encode_notification("run_times", actions={"a": (3, 1.5), "b": (0, 0.0)})]
    )
    assert decode_reports(body, batch_limit=10) == [
        Succeeded(42, 7, None, "1"),
        RunTimes({"a": (3, 1.5), "b": (0, 0.0)}),
    ]
    assert report('{"method":"run_times","params":{"actions":{"a":[2,3]}},"id":null}') == RunTimes({"a": (2, 3.0)})


def test_a_result_and_an_error_read_back_as_they_were_sent() -> None:
    assert report(encode_result("42:7", "[1]")) == Succeeded(42, 7, None, "[1]")
    data = {"type": "ValueError", "traceback": "a\nb", "retry_after": 2.0, "final": None}
    outcome = report(encode_error("42:7", -32000, "b\ud800m", data))
    assert isinstance(outcome, Failed)
    assert json.loads(outcome.error) == {
        "code": -32000,
        "message": "b\ufffdm",
        "data": {"type": "ValueError", "traceback": "a\nb", "retry_after": 2.0},
    }
    assert outcome.hints == Hints(retry_after=2.0)


class Strange:
    def __str__(self) -> str:
        return "strange"


def test_an_error_holds_whatever_the_worker_puts_there() -> None:
    outcome = report(encode_error("42:7", 1, "m", {"value": Strange()}))
    assert isinstance(outcome, Failed)
    assert json.loads(outcome.error)["data"] == {"value": "strange"}


# Packing


def test_a_single_entry_travels_bare_and_several_as_a_batch() -> None:
    assert join_batch(["{}"]) == "{}"
    assert json.loads(join_batch(["{}", "[]"])) == [{}, []]


def slices(sizes: list[int], **limits: Any) -> list[tuple[int, int]]:
    return list(pack(sizes, **limits))


def test_entries_are_cut_by_count_and_by_bytes() -> None:
    assert slices([10] * 5, max_bytes=1000, max_items=2) == [(0, 2), (2, 4), (4, 5)]
    assert slices([10] * 5, max_bytes=35, max_items=100) == [(0, 3), (3, 5)]
    assert slices([], max_bytes=35, max_items=100) == []


def test_entries_are_cut_by_weight() -> None:
    limits = {"max_bytes": 1000, "max_items": 100, "max_weight": 1.0}
    assert list(pack([10] * 4, [0.5, 0.5, 0.25, 0.0], **limits)) == [(0, 2), (2, 4)]
    assert list(pack([10] * 3, [0.1, 9.0, 0.1], **limits)) == [(0, 1), (1, 2), (2, 3)]


def test_an_entry_larger_than_a_body_stands_alone() -> None:
    assert slices([5, 500, 5], max_bytes=100, max_items=100) == [(0, 1), (1, 2), (2, 3)]


def test_the_two_characters_that_sqs_refuses_are_escaped() -> None:
    body = '{"a":"\ufffe\uffff\ufffd\u20ac\U0001f600"}'
    assert escape_for_sqs(body) == '{"a":"\\ufffe\\uffff\ufffd\u20ac\U0001f600"}'
    assert escape_for_sqs("plain") == "plain"


@pytest.mark.parametrize(("text", "size"), [("abc", 3), ("\u20ac", 3), ("\U0001f600", 4), ("\ud800", 3)])
def test_size_is_counted_in_utf8_bytes(text: str, size: int) -> None:
    assert utf8_size(text) == size


# Shared results


def shared(places: object, result: str = "null", pack: str = "pack:7:41-44,50") -> str:
    params = f'{{"pack":"{pack}","places":"{places}","result":{result}}}'
    return f'{{"jsonrpc":"2.0","method":"shared_result","params":{params}}}'


def test_a_shared_result_is_that_of_the_tasks_at_its_places() -> None:
    (all_of_them,) = decode_reports(shared("0-4", '"\\u0000 \\ud800"'), batch_limit=10, worker="w")
    assert all_of_them == SharedResult([41, 42, 43, 44, 50], 7, r'"\ufffd \ufffd"', "w")
    (some,) = decode_reports(shared("0,3-4"), batch_limit=10)
    assert isinstance(some, SharedResult)
    assert some.each() == [Succeeded(task_id, 7, None, "null") for task_id in (41, 44, 50)]


def test_what_a_worker_writes_of_a_shared_result_is_read() -> None:
    text = encode_shared_result("pack:7:41-44,50", [1, 2, 4], '{"n":1}')
    (report,) = decode_reports(text, batch_limit=10)
    assert report == SharedResult([42, 43, 50], 7, '{"n":1}')


@pytest.mark.parametrize(
    "text",
    [
        shared("5"), shared("0-5"), shared("0,0"), shared(""), shared("a"), shared("0-1", pack="7:41-42"),
        shared("0-1", f'"{"x" * SHARED_RESULT_BYTES}"'), shared("0-1").replace('"result"', '"outcome"'),
        shared("0-1").replace('"places":"0-1"', '"places":[0,1]'),
    ],
)  # fmt: skip
def test_a_shared_result_that_makes_no_sense_is_kept_as_it_came(text: str) -> None:
    assert unreadable(text).text == text


def test_a_pack_id_counts_with_the_token_that_a_scheduler_made() -> None:
    fence = Fence(KEYS)
    signed = fence.sign("pack:7:41-44,50")
    (report,) = decode_reports(shared("0", pack=signed), batch_limit=10, fence=fence)
    assert isinstance(report, SharedResult)
    token = signed.rpartition(":")[2]
    others = ("pack:7:1:" + "0" * 20, "pack:7:1:é", r"pack:7:1:\ud800", "pack:é:1:0")
    for forged in ("pack:7:41-44,50", f"pack:7:41-45,50:{token}", f"pack:8:41-44,50:{token}", *others):
        (refused,) = decode_reports(shared("0", pack=forged), batch_limit=10, fence=fence)
        assert isinstance(refused, Unreadable)
        assert refused.is_foreign
    (refused,) = decode_reports(shared("0", pack=fence.name(41, 7)), batch_limit=10, fence=fence)
    assert isinstance(refused, Unreadable)


# What a worker receives


@pytest.mark.parametrize(
    "entry", [r'{"jsonrpc":"2.0","method":"a","id":"\ud800"}', '{"jsonrpc":"2.0","method":"a","id":7}', "7"]
)
def test_an_entry_that_names_no_task_leaves_its_neighbours_as_they_are(entry: str) -> None:
    good = encode_call(42, 7, "a", "{}")
    first, odd, last = decode_task_requests(f"[{good},{entry},{good}]", batch_limit=10)
    assert isinstance(first, TaskRequest)
    assert first == last == TaskRequest("2.0", "a", "42:7", msgspec.Raw(b"{}"))
    assert parse_claim_id(odd.id) is None if isinstance(odd, TaskRequest) else isinstance(odd, Request | Invalid)


def test_a_message_of_tasks_is_read_like_its_entries() -> None:
    for payload in ("{}", "[1]", '{"a":"\u00e9"}', f'{MARK}sealed"'):
        call = encode_call(42, 7, "a", payload)
        (alone,) = decode_task_requests(call, batch_limit=10)
        assert decode_task_requests(f"[{call},{call}]", batch_limit=10) == [alone, alone]
    with pytest.raises(InvalidRequest, match="a batch of 2"):
        decode_task_requests(f"[{call},{call}]", batch_limit=1)


def test_only_a_response_of_a_result_alone_may_be_shared() -> None:
    name = "42:7:0123456789abcdef0123"
    assert sole_result(encode_result(name, '{"n":[1]}'), name) == '{"n":[1]}'
    others = [
        encode_result(name, "null", ['{"action":"a"}']),
        encode_result(name, "null", '"penstock+sealed"'),
        encode_result(name, '"H4sI"', encoding="gzip"),
        encode_result("42:7:0000000000abcdef0123", "null"),
        f'{encode_result(name, "null")[:-1]},"traceparent":"00-1-2-01"}}',
        f'{encode_result(name, "null")[:-1]},"steps":[]}}',
        encode_error(name, 1, "m", {}),
        encode_progress(name),
    ]
    assert [sole_result(other, name) for other in others] == [None] * len(others)
