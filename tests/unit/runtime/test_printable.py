"""Text of strangers on its way to a terminal."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.common import print_cursor, print_fields, print_json, print_table, say
from penstock.cli.schedules import _print_import
from penstock.runtime.logs import printable, printable_json

HOSTILE = "\x1b]52;c;Y3VybCBldmls\x07\x1b[2J\x9b31m\x7f\u202eevil\u2066\r\x00\ud800"
SHOWN = r"\x1b]52;c;Y3VybCBldmls\x07\x1b[2J\x9b31m\x7f\u202eevil\u2066\r\x00\ud800"


@given(text=st.text(st.characters()))
def test_nothing_but_newlines_and_tabs_of_what_controls_a_terminal_is_left(text: str) -> None:
    for left in (printable(text), printable(text, one_line=True), printable_json(text)):
        assert all(char >= " " or char in "\n\t" for char in left)
        assert not set(left) & {chr(code) for code in (*range(0x7F, 0xA0), *range(0x202A, 0x202F), 0x2066, 0x2069)}
    assert not set(printable(text, one_line=True)) & {"\n", "\t"}


@given(value=st.text(st.characters(exclude_categories=["Cs"])))
def test_json_means_the_same(value: str) -> None:
    assert json.loads(printable_json(json.dumps(value, ensure_ascii=False))) == value


def test_ordinary_text_of_any_language_stays() -> None:
    text = "Grüße, 日本語, שלום 🎉\n\tline"
    assert printable(text) == text


def test_what_people_are_shown_is_printable(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"said {HOSTILE}")
    say(f"failed {HOSTILE}", err=True)
    print_fields([("name", HOSTILE), ("error", {"message": HOSTILE})])
    print_table(["action"], [[HOSTILE]])
    print_json({"message": HOSTILE})
    out, err = capsys.readouterr()
    assert err == f"failed {SHOWN}\n"
    assert out.startswith(f"said {SHOWN}\nname   {SHOWN}\n")
    assert out.count("evil") == 5
    assert all(char >= " " or char == "\n" for char in out)
    assert not set(out) & {"\x7f", "\x9b", "\u202e", "\u2066"}


def test_so_are_errors_of_an_import_and_cursors(capsys: pytest.CaptureFixture[str]) -> None:
    error = {"index": 0, "name": HOSTILE, "field": "name", "problem": HOSTILE}
    _print_import([{"created": 0, "replaced": 0, "refused": 1, "errors": [error]}])
    print_cursor(HOSTILE)
    assert capsys.readouterr().err == f"entry 0 ({SHOWN}): name {SHOWN}\nmore: add --cursor {SHOWN}\n"
