"""docs/methods.md: the reference of the api, written from what the api says of itself."""

from __future__ import annotations

import re

from docs import generate_methods, generated
from penstock.api.table import METHODS, describe


def test_the_page_has_the_reference_of_these_methods() -> None:
    page = generated.page(generate_methods.PAGE, generate_methods.reference)
    assert page == generate_methods.PAGE.read_text("utf-8"), "run `make reference`"


def test_the_file_is_the_answer_of_rpc_discover() -> None:
    assert generate_methods.document() == generate_methods.DOCUMENT.read_bytes(), "run `make reference`"


def test_the_help_of_commands_is_what_their_methods_say_of_themselves() -> None:
    assert generate_methods.summaries() == generate_methods.SUMMARIES.read_text("utf-8"), "run `make reference`"


def test_the_page_tells_every_method_with_every_parameter_and_error() -> None:
    text = generate_methods.PAGE.read_text("utf-8")
    document = describe()
    headings = re.findall(r"^### (.+)$", text, re.MULTILINE)
    assert set(METHODS) < set(headings)
    for method in document["methods"]:
        section = text.split(f"### {method['name'].replace('<', '&lt;')}\n", 1)[1].split("\n### ", 1)[0]
        told = [*(parameter["name"] for parameter in method["params"])]
        told += [error["$ref"].rpartition("/")[2] for error in method["errors"]]
        assert [name for name in told if f"`{name}`" not in section] == []


def test_every_answer_that_is_named_is_described() -> None:
    text = generate_methods.PAGE.read_text("utf-8")
    headings = {heading.lower() for heading in re.findall(r"^### (\w+)$", text, re.MULTILINE)}
    anchors = set(re.findall(r"\]\(#(\w+)\)", text)) - {"errors"}
    assert anchors <= headings
    assert len(anchors) > 30
    slugs = [re.sub(r"[^a-z0-9_-]", "", heading.lower()) for heading in re.findall(r"^##+ (.+)$", text, re.MULTILINE)]
    assert [slug for slug in anchors if slugs.count(slug) > 1] == [], "a link would lead to the first of these"
