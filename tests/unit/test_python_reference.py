"""docs/python-reference.md, written from signatures and docstrings."""

from __future__ import annotations

import inspect
import re

import pytest

import penstock
from docs import generate_python, generated
from penstock.client.async_client import AsyncClient
from penstock.client.client import Client
from penstock.testing import plugin

PAGE = generate_python.PAGE.read_text("utf-8")
HEADINGS = [heading.replace("\\", "") for heading in re.findall(r"^### (.+)$", PAGE, re.MULTILINE)]


def section(name: str) -> str:
    return PAGE.split(f"\n### {name}\n", 1)[1].split("\n### ", 1)[0].split("\n## ", 1)[0]


def public(one: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(one, callable) if not name.startswith("_")}


def test_the_page_is_written_from_this_code() -> None:
    assert generated.page(generate_python.PAGE, generate_python.reference) == PAGE, "run `make reference`"


def test_every_public_name_is_there_once() -> None:
    assert [name for name in HEADINGS if name in penstock.__all__] == [
        name for names in generate_python.subjects().values() for name in names
    ]
    assert sorted(name for name in HEADINGS if name in penstock.__all__) == sorted(penstock.__all__)
    fixtures = [name for name in vars(plugin) if name.startswith("penstock_")]
    assert len(fixtures) == 3
    assert set(fixtures) < set(HEADINGS)
    assert {"Inline", "Pipeline", "Clock", "WorkerCrash"} < set(HEADINGS)


def test_a_name_without_a_subject_is_an_error() -> None:
    for name in generate_python.subjects()["Errors"]:
        assert issubclass(getattr(penstock, name), penstock.PenstockError), f"{name} needs a subject of its own"


@pytest.mark.parametrize("name", ["AsyncClient", "InboundClient", "Action", "Task", "Context", "Workflow", "Bound"])
def test_every_public_method_is_there(name: str) -> None:
    shown = set(re.findall(r"^(?:async )?def (\w+)\(|^(\w+): ", section(name), re.MULTILINE))
    described = {one for pair in shown for one in pair}
    own = {one for one in public(getattr(penstock, name)) if one not in dir(dict)}
    assert own - described == set()


def test_the_blocking_client_has_the_methods_of_the_other() -> None:
    assert public(Client) == public(AsyncClient)
    assert "Its methods are those of [AsyncClient](#asyncclient)" in section("Client")


def test_methods_of_clients_return_answers() -> None:
    assert "async def pause(name: str) -> answers.ScheduleDetail" in section("AsyncClient")
    assert "-> None" in section("InboundClient")
    assert not re.search(r"-> (?:Request|Exchange|Call)\[", PAGE)
