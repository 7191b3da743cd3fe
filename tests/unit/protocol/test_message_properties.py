from __future__ import annotations

import json
import re
from contextlib import suppress
from time import perf_counter
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocol.errors import InvalidParams, InvalidRequest, ParseError
from penstock.protocol.fence import ClaimKey, Fence
from penstock.protocol.json_text import (
    check_payload,
    decode_any,
    escape_for_sqs,
    json_depth,
    replace_unstorable,
    utf8_size,
)
from penstock.protocol.reports import (
    Announced,
    Failed,
    Progress,
    RunTimes,
    Succeeded,
    Unreadable,
    decode_reports,
    encode_error,
    encode_notification,
    encode_progress,
    encode_result,
)
from penstock.protocol.requests import (
    Invalid,
    Request,
    _split_slowly,
    decode_body,
    encode_call,
    join_batch,
    pack,
    parse_claim_id,
)
from penstock.protocol.task import ACTION_MAX_CHARS

BATCH_LIMIT = 50
IN_SQS = re.compile("[\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]*")

ids = st.integers(0, 2**63 - 1)
# What may stand in a payload: no NUL, no half pair; the awkward ends of the planes as often as the rest.
characters = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
texts = st.text(st.one_of(characters, st.sampled_from('"\\/\ufffe\uffff\ufeff\u2028\x7f\U0001f600ud8')))
any_text = st.text(st.one_of(st.characters(), st.sampled_from('\0\ud800\udc00\\"u{}[],: \n\ufeff')))
numbers = st.one_of(st.integers(-(10**30), 10**30), st.floats(allow_nan=False, allow_infinity=False))
values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=12,
)
payload_values = st.one_of(st.lists(values, max_size=5), st.dictionaries(texts, values, max_size=5))


@st.composite
def dumped(draw: st.DrawFn, source: st.SearchStrategy[Any]) -> str:
    """JSON text of a value, in one of the ways that the world writes it."""
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t: ")]))
    return json.dumps(draw(source), ensure_ascii=draw(st.booleans()), separators=separators)


payloads = dumped(payload_values)
# Text that is nearly JSON: the shapes of the protocol with anything in any place.
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), any_text, st.just("2.0"), st.just("42:7")),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(
                any_text,
                st.sampled_from(["jsonrpc", "method", "params", "id", "result", "error", "code", "message", "data"]),
                st.sampled_from(["attempt", "percent", "note", "retry_after"]),
            ),
            inner,
            max_size=6,
        ),
    ),
    max_leaves=15,
)
names = st.builds("{}:{}:{}".format, any_text, any_text, any_text)
shared_results = st.fixed_dictionaries(
    {
        "method": st.just("shared_result"),
        "params": st.fixed_dictionaries({"pack": names, "places": st.just("0"), "result": anything}),
    }
)
bodies = st.one_of(
    any_text,
    st.binary(),
    dumped(anything),
    dumped(st.lists(anything, max_size=4)),
    dumped(shared_results),
    st.builds(lambda text, cut: text[:cut], dumped(anything), st.integers(0, 200)),
    st.builds(lambda depth, mark: mark * depth, st.integers(0, 3000), st.sampled_from(["[", '{"a":', "[{"])),
)


@given(action=any_text.filter(bool), payload=payloads, task_id=ids, claim=ids)
def test_a_call_carries_its_payload_as_the_same_text(action: str, payload: str, task_id: int, claim: int) -> None:
    action = action.encode("utf-8", "replace").decode()  # what intake takes: no half pair
    (entry,) = decode_body(encode_call(task_id, claim, action, payload), batch_limit=1).entries
    assert isinstance(entry, Request)
    assert entry.method == action
    assert bytes(entry.params).decode() == payload
    assert parse_claim_id(json.loads(bytes(entry.id))) == (task_id, claim)


@given(payload=payloads)
def test_what_is_dumped_as_a_payload_is_taken(payload: str) -> None:
    check_payload(payload)


def depth_of(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(depth_of, value.values() if isinstance(value, dict) else value), default=0)


@given(payload=st.one_of(payloads, dumped(anything)))
def test_the_depth_of_a_text_is_that_of_its_values(payload: str) -> None:
    assert json_depth(payload) == depth_of(json.loads(payload))


@given(raw=st.one_of(any_text, dumped(anything)))
def test_a_payload_is_taken_whole_or_refused_as_invalid_params(raw: str) -> None:
    try:
        check_payload(raw)
    except InvalidParams:
        return
    value = decode_any(raw)
    # Strict, so that no NaN slips through; encoded, so that no half pair does.
    assert json.loads(raw, parse_constant=lambda name: 1 / 0) == value
    assert "\0" not in json.dumps(value, ensure_ascii=False).encode("utf-8").decode()
    assert "\\u0000" not in json.dumps(value).replace("\\\\", "")


@given(task_id=ids, claim=ids)
def test_claim_ids_round_trip(task_id: int, claim: int) -> None:
    assert parse_claim_id(f"{task_id}:{claim}") == (task_id, claim)


@given(text=any_text)
def test_a_claim_id_is_read_from_nothing_else(text: str) -> None:
    read = parse_claim_id(text)
    assert read is None or re.fullmatch(r"[0-9]+:[0-9]+", text)


@given(result=dumped(values), task_id=ids, claim=ids)
def test_a_result_reads_back_as_the_same_text(result: str, task_id: int, claim: int) -> None:
    body = encode_result(f"{task_id}:{claim}", result)
    assert decode_reports(body, batch_limit=1) == [Succeeded(task_id, claim, None, result)]


@given(code=st.integers(-(2**31), 2**31), message=any_text, traceback=any_text, task_id=ids, claim=ids)
def test_an_error_of_any_unicode_reads_back_storable(
    code: int, message: str, traceback: str, task_id: int, claim: int
) -> None:
    body = encode_error(f"{task_id}:{claim}", code, message, {"type": "ValueError", "traceback": traceback})
    assert IN_SQS.fullmatch(body)
    (outcome,) = decode_reports(body, batch_limit=1)
    assert isinstance(outcome, Failed)
    assert (outcome.task_id, outcome.claim) == (task_id, claim)
    error = json.loads(outcome.error)
    assert error["code"] == code
    for kept, given_text in ((error["message"], message), (error["data"]["traceback"], traceback)):
        assert kept == storable(given_text)


def storable(text: str) -> str:
    # Two halves side by side become one character on their way through JSON; what is left alone is replaced.
    return re.sub("[\0\ud800-\udfff]", "\ufffd", json.loads(json.dumps(text)))


@given(note=st.none() | any_text, percent=st.none() | st.floats(0, 100), task_id=ids, claim=ids)
def test_progress_of_any_unicode_is_read(note: str | None, percent: float | None, task_id: int, claim: int) -> None:
    (beat,) = decode_reports(encode_progress(f"{task_id}:{claim}", percent, note), batch_limit=1)
    assert isinstance(beat, Progress)
    assert (beat.task_id, beat.claim) == (task_id, claim)
    if note is None and percent is None:
        assert beat.detail is None
    else:
        assert beat.detail is not None
        expected = {"percent": percent, "note": None if note is None else storable(note)}
        assert json.loads(beat.detail) == expected


@given(body=bodies)
def test_any_body_is_decoded_or_refused_by_parse_error_or_invalid_request(body: bytes | str) -> None:
    try:
        decoded = decode_body(body, batch_limit=BATCH_LIMIT)
    except (ParseError, InvalidRequest):
        return
    assert 1 <= len(decoded.entries) <= BATCH_LIMIT
    for entry in decoded.entries:
        if isinstance(entry, Invalid):
            assert isinstance(entry.error, ParseError | InvalidRequest)
            assert entry.id == b"null" or isinstance(json.loads(entry.id), str | int | float)
        else:
            assert bytes(entry.params)[:1] in (b"", b"{", b"[")


@settings(max_examples=40)
@given(
    start=st.sampled_from(["", "[", "[" * 3000, '{"a":' * 3000, '["', '[{"id":"']),
    piece=st.text(st.sampled_from('[]{},:"\\ua0 1.e-\n\ud800é'), min_size=1, max_size=6),
    size=st.sampled_from([50_000, 200_000]),
)
def test_any_body_is_decoded_in_time_that_grows_with_its_size_alone(start: str, piece: str, size: int) -> None:
    """The bound is a hundred times what these take; what is scanned again from each mark takes minutes."""
    body = start + piece * (size // len(piece))
    started = perf_counter()
    with suppress(ParseError, InvalidRequest):
        decode_body(body, batch_limit=BATCH_LIMIT)
    decode_reports(body, batch_limit=BATCH_LIMIT)
    assert perf_counter() - started < 30


@given(text=st.text(st.sampled_from('[]{},"\\a 1:'), max_size=14), ends=st.booleans())
def test_an_entry_nested_too_deeply_is_split_as_json_is(text: str, ends: bool) -> None:
    """What is split by brackets alone has the entries that a parser finds, wherever there is JSON to be parsed."""
    body = f"[{text}{']' if ends else ''}"
    try:
        meant = msgspec.json.decode(body, type=list[msgspec.Raw])
    except ValueError:
        return
    if meant:
        assert [json.loads(entry) for entry in _split_slowly(body)] == [json.loads(bytes(raw)) for raw in meant]


@given(body=bodies)
def test_any_body_of_results_gives_reports_and_raises_nothing(body: bytes | str) -> None:
    reports = decode_reports(body, batch_limit=BATCH_LIMIT)
    assert 1 <= len(reports) <= BATCH_LIMIT
    fenced = decode_reports(body, batch_limit=BATCH_LIMIT, fence=Fence([ClaimKey(b"key")]))
    assert {type(entry) for entry in fenced} <= {Unreadable, RunTimes, Announced}
    for entry in reports:
        if isinstance(entry, Unreadable):
            assert entry.reason
            assert entry.reason.encode("utf-8")
        elif isinstance(entry, Succeeded | Failed):
            kept = entry.result if isinstance(entry, Succeeded) else entry.error
            assert replace_unstorable(kept) == kept
            assert (entry.claim is None) != (entry.attempt is None)


# Whole eighths add up to the same in any order.
eighths = st.integers(0, 24).map(lambda n: n / 8)


@given(
    entries=st.lists(
        st.one_of(
            st.builds(encode_call, ids, ids, st.just("good"), payloads).map(lambda text: (True, text)),
            st.one_of(
                dumped(anything),
                st.sampled_from(['"\ud800"', "[" * 5000 + "]" * 5000, '{"jsonrpc":"2.0","method":"\\ud800"}', "1e999"]),
            ).map(lambda text: (False, text)),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_good_entries_stand_beside_any_json(entries: list[tuple[bool, str]]) -> None:
    texts_sent = [text for _, text in entries]
    try:
        decoded = decode_body(f"[{','.join(texts_sent)}]", batch_limit=BATCH_LIMIT)
    except ParseError:
        # The body as a whole is no JSON: NaN and Infinity, which Python writes, are none.
        assert any(re.search("NaN|Infinity", text) for good, text in entries if not good)
        return
    assert len(decoded.entries) == len(entries)
    for (good, text), entry in zip(entries, decoded.entries, strict=True):
        if good:
            (alone,) = decode_body(text, batch_limit=1).entries
            assert isinstance(alone, Request)
            assert isinstance(entry, Request)
            assert (entry.method, bytes(entry.params), bytes(entry.id)) == (
                "good", bytes(alone.params), bytes(alone.id),
            )  # fmt: skip


@given(items=st.lists(payloads, max_size=40), max_bytes=st.integers(0, 400), max_items=st.integers(1, 10))
def test_packing_keeps_the_order_loses_nothing_and_keeps_the_limits(
    items: list[str], max_bytes: int, max_items: int
) -> None:
    cuts = list(pack([utf8_size(item) for item in items], max_bytes=max_bytes, max_items=max_items))
    assert [item for start, end in cuts for item in items[start:end]] == items
    for start, end in cuts:
        body = join_batch(items[start:end])
        assert 1 <= end - start <= max_items
        assert end - start == 1 or utf8_size(body) <= max_bytes
        decoded = json.loads(body)
        assert (decoded if end - start > 1 else [decoded]) == [json.loads(item) for item in items[start:end]]


@given(
    entries=st.lists(st.tuples(st.integers(1, 50), eighths), max_size=60),
    max_bytes=st.integers(0, 400),
    max_items=st.integers(1, 10),
    max_weight=eighths,
)
def test_packing_by_weight_fills_each_body_as_far_as_all_its_limits_allow(
    entries: list[tuple[int, float]], max_bytes: int, max_items: int, max_weight: float
) -> None:
    sizes, weights = [size for size, _ in entries], [weight for _, weight in entries]

    def fits(start: int, end: int) -> bool:
        in_bytes = sum(sizes[start:end]) + (end - start) + 1 <= max_bytes  # brackets and commas
        return in_bytes and end - start <= max_items and sum(weights[start:end]) <= max_weight

    cuts = list(pack(sizes, weights, max_bytes=max_bytes, max_items=max_items, max_weight=max_weight))
    assert [position for start, end in cuts for position in range(start, end)] == list(range(len(entries)))
    for start, end in cuts:
        assert end - start == 1 or fits(start, end)
        assert end == len(entries) or not fits(start, end + 1), "a smaller body than need be"


@given(actions=st.dictionaries(texts, st.tuples(st.integers(0, 10**9), st.floats(0, 1e12))))
def test_run_times_read_back_as_they_were_told(actions: dict[str, tuple[int, float]]) -> None:
    (report,) = decode_reports(encode_notification("run_times", actions=actions), batch_limit=1)
    if any(len(action) > ACTION_MAX_CHARS for action in actions):
        assert isinstance(report, Unreadable)
    else:
        assert report == RunTimes(actions)


@given(body=payloads)
def test_what_goes_to_sqs_is_the_same_json_in_characters_that_sqs_takes(body: str) -> None:
    escaped = escape_for_sqs(body)
    assert json.loads(escaped) == json.loads(body)
    assert IN_SQS.fullmatch(escaped)


@given(text=any_text)
def test_the_size_of_a_text_is_that_of_its_utf8(text: str) -> None:
    assert utf8_size(text) == len(text.encode("utf-8", "surrogatepass"))


@given(text=st.text(st.sampled_from('\\u0d8cDC3ef"n')))
def test_replacing_what_cannot_be_stored_is_done_once_and_changes_no_other_escape(text: str) -> None:
    replaced = replace_unstorable(text)
    assert replace_unstorable(replaced) == replaced
    assert replaced.replace("\\ufffd", "") == replaced or "\\u" in text


@given(value=any_text)
def test_replaced_json_text_holds_only_whole_characters(value: str) -> None:
    replaced = json.loads(replace_unstorable(json.dumps(value)))
    assert replaced == storable(value)
