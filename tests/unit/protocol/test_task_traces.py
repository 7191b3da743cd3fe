from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.message_attributes import (
    TRACE_ENTRY_BYTES,
    CarriedTrace,
    decode_traces,
    encode_traces,
    read_carried,
)
from penstock.protocol.reports import Failed, Succeeded, add_trace, decode_reports, encode_error, encode_result
from penstock.protocol.trace_context import TraceContext

contexts = st.builds(
    TraceContext,
    st.integers(1, 5).map(lambda n: f"{n:032x}"),
    st.integers(1, 5).map(lambda n: f"{n:016x}"),
    st.integers(0, 1),
    st.sampled_from(["", "a=b", "rojo=1,congo=t61"]),
)
plain = st.builds(lambda context: context._replace(state=""), contexts)
carried = st.one_of(st.none(), st.builds(CarriedTrace, contexts, st.one_of(st.none(), plain)))
HERE = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", 1, "a=b")


def text_of(one: CarriedTrace | None) -> str | None:
    """As the claim has it."""
    if one is None:
        return None
    return one.context.text if one.former is None else f"{one.context.text}\n{one.former.traceparent}"


@given(st.lists(carried, min_size=1, max_size=20))
def test_each_task_of_a_message_keeps_its_own_trace(traces: list[CarriedTrace | None]) -> None:
    texts = {number: text_of(one) for number, one in enumerate(traces, 1)}
    assert [read_carried(text) for text in texts.values()] == traces
    attributes = encode_traces(texts.items())
    found = decode_traces(attributes, texts)
    assert [found.get(number) for number in texts] == traces
    assert bool(attributes) == any(traces)
    most = sum(len(text) + TRACE_ENTRY_BYTES for text in texts.values() if text is not None)
    assert sum(len(name) + len(value) for name, value in attributes.items()) <= most + 200


def test_a_message_of_one_trace_says_so_as_every_library_reads_it() -> None:
    assert encode_traces([(1, HERE.text), (2, HERE.text)]) == HERE.headers
    assert "traceparent" not in encode_traces([(1, HERE.text), (2, None)])


@given(
    st.one_of(st.text(), st.sampled_from(['[{"traceparent":"x","tasks":[1]}]', "[" * 9000, '[{"tasks":[1]}]', "{}"]))
)
def test_junk_attributes_are_no_traces(text: str) -> None:
    assert decode_traces({"traces": text}, [1]) == {}
    assert decode_traces({"traceparent": text}, [1]) == {}


def test_an_answer_tells_the_attempts_trace() -> None:
    result = add_trace(encode_result("1:2", '{"a":1}', ['{"action":"x"}']), HERE)
    error = add_trace(encode_error("3:4", -32000, "no", {"type": "E"}), HERE)
    for body in (f"[{result},{error}]", f"[{error},{result}]"):
        reports = {report.task_id: report for report in decode_reports(body, batch_limit=9)}  # type: ignore[union-attr]
        assert isinstance(reports[1], Succeeded)
        assert isinstance(reports[3], Failed)
        assert reports[1].trace == reports[3].trace == HERE
        assert (reports[1].result, reports[1].spawn) == ('{"a":1}', '[{"action":"x"}]')
        assert json.loads(reports[3].error)["message"] == "no"
