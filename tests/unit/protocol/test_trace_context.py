from __future__ import annotations

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from penstock.protocol.trace_context import TRACESTATE_MAX_CHARS, TraceContext, of_headers, of_text, parse

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEX = "0123456789abcdef"

trace_ids = st.text(HEX, min_size=32, max_size=32).filter(lambda text: text.strip("0"))
span_ids = st.text(HEX, min_size=16, max_size=16).filter(lambda text: text.strip("0"))
keys = st.from_regex(re.compile(r"[a-z][a-z0-9_*/-]{0,20}"), fullmatch=True)
values = st.from_regex(re.compile(r"[ -+\--<>-~]{0,20}[!-+\--<>-~]"), fullmatch=True).map(str.lstrip).filter(bool)
states = st.dictionaries(keys, values, max_size=8).map(lambda given: ",".join(f"{k}={v}" for k, v in given.items()))


@given(trace_ids, span_ids, st.integers(0, 3), states)
def test_what_is_written_is_read_again(trace_id: str, span_id: str, flags: int, state: str) -> None:
    context = TraceContext(trace_id, span_id, flags, state)
    assert of_headers(context.headers) == context
    assert of_text(context.text) == context
    assert len(context.traceparent) == 55


@given(trace_ids, span_ids, st.integers(0, 3), states)
def test_opentelemetry_reads_it_alike(trace_id: str, span_id: str, flags: int, state: str) -> None:
    context = TraceContext(trace_id, span_id, flags, state)
    found = get_current_span(TraceContextTextMapPropagator().extract(context.headers)).get_span_context()
    assert (f"{found.trace_id:032x}", f"{found.span_id:016x}", found.trace_flags) == (trace_id, span_id, flags)
    assert sorted(found.trace_state.to_header().split(",")) == sorted(state.split(","))


@given(
    st.one_of(st.text(), st.text(HEX + "-", min_size=50, max_size=60), st.none(), st.integers(), st.binary()), st.text()
)
def test_junk_is_no_context_and_no_error(traceparent: object, tracestate: str) -> None:
    context = parse(traceparent, tracestate)
    if context is not None:
        assert parse(context.traceparent, context.state) == context
        assert "\n" not in context.text
        assert context.text.isascii()


@given(st.text(string.printable))
def test_a_junk_state_takes_nothing_from_the_parent(state: str) -> None:
    context = parse(f"00-{TRACE_ID}-{SPAN_ID}-01", state)
    assert context is not None
    assert (context.trace_id, context.span_id, context.is_sampled) == (TRACE_ID, SPAN_ID, True)


@pytest.mark.parametrize(
    "traceparent",
    [
        f"00-{TRACE_ID}-{SPAN_ID}",
        f"00-{TRACE_ID}-{SPAN_ID}-01-more",
        f"ff-{TRACE_ID}-{SPAN_ID}-01",
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-{TRACE_ID.upper()}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{SPAN_ID}-1",
        f"00-{TRACE_ID}-{SPAN_ID}-01\n",
        f"1-{TRACE_ID}-{SPAN_ID}-01",
        f"01-{TRACE_ID}-{SPAN_ID}-01.more",
        "",
    ],
)  # fmt: skip
def test_the_grammar_is_kept(traceparent: str) -> None:
    assert parse(traceparent) is None


def test_a_newer_version_is_read_as_far_as_it_is_known() -> None:
    context = parse(f"cc-{TRACE_ID}-{SPAN_ID}-ff-what-comes", "a=b")
    assert context == TraceContext(TRACE_ID, SPAN_ID, 3, "a=b")
    assert context.traceparent == f"00-{TRACE_ID}-{SPAN_ID}-03"


@pytest.mark.parametrize(
    ("state", "kept"),
    [
        ("rojo=1, congo=t61 ,,", "rojo=1,congo=t61"),
        ("fw529a3039@dt=FfAAAAA", "fw529a3039@dt=FfAAAAA"),
        ("rojo=1,rojo=2", ""),
        ("Rojo=1", ""),
        ("rojo=1=2", ""),
        ("rojo", ""),
        (",".join(f"k{n}=v" for n in range(33)), ""),
        ("k=" + "v" * TRACESTATE_MAX_CHARS, ""),
    ],
)
def test_a_tracestate_is_kept_whole_or_not_at_all(state: str, kept: str) -> None:
    context = parse(f"00-{TRACE_ID}-{SPAN_ID}-00", state)
    assert context is not None
    assert context.state == kept
