"""Options and arguments made of the parameters of a method."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from penstock.cli.parameters import Given, ParamsOf, expanded
from penstock.protocol.views import about


class Colour(StrEnum):
    RED = "red"


class Params(msgspec.Struct):
    name: Annotated[str, about("What it is called.")]
    colour: Annotated[Colour | None, about("Its colour.")] = None
    kind: Annotated[Literal["big", "small"], about("Its size.")] = "big"
    count: Annotated[int | msgspec.UnsetType | None, about("How many.")] = msgspec.UNSET
    run_at: str | int | None = None
    delay: float | None = None
    labels: dict[str, str] = {}
    replace: Annotated[bool, about("Replace it.")] = False
    paused: bool | None = None
    limit: int = 50
    secret: str | None = None


def call(*words: str) -> Any:
    """What a command is given, or the text that it prints instead."""
    seen: list[Given] = []

    def command(
        *,
        given: Annotated[
            Given,
            ParamsOf(
                Params, without=["secret"], paused=typer.Option("--paused/--running"), limit="Maximum number of things."
            ),
        ],
    ) -> None:
        seen.append(given)

    app = typer.Typer()
    app.command()(expanded(command))
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200", "TERM": "dumb"})
    return seen[0] if seen else result.output


def test_only_what_was_given_is_sent_and_a_shown_default() -> None:
    assert call("x") == {"name": "x", "limit": 50}


def test_values_become_those_of_the_api() -> None:
    given = call(
        "x", "--colour", "red", "--kind", "small", "--count", "0", "--run-at", "1700000000000", "--delay", "1m30s",
        "--label", "a=b", "--label", "c=d", "--replace", "--running", "--limit", "7",
    )  # fmt: skip
    assert given == {
        "name": "x", "colour": "red", "kind": "small", "count": 0, "run_at": 1700000000000, "delay": 90.0,
        "labels": {"a": "b", "c": "d"}, "replace": True, "paused": False, "limit": 7,
    }  # fmt: skip


@pytest.mark.parametrize("text", ["5x", "-1", "nan", 400 * "9", 400 * "9" + "d"])
def test_what_is_no_duration_is_said(text: str) -> None:
    assert "is not a duration" in call("x", "--delay", text)


@pytest.mark.parametrize("word", ["What it is called.", "Its colour.", "How many.", "Maximum number of things."])
def test_the_description_of_a_parameter_is_its_help(word: str) -> None:
    assert word in call("--help")


def test_what_the_command_gives_itself_is_no_option() -> None:
    assert "--secret" not in call("--help")
    assert "No such option" in call("x", "--secret", "y")


@pytest.mark.parametrize("words", [["x", "--kind", "huge"], ["x", "--delay", "soon"], ["x", "--label", "a"],
                                   ["x", "--limit", "0"], []])  # fmt: skip
def test_a_value_that_does_not_fit_is_refused(words: list[str]) -> None:
    assert "Error" in call(*words)


def test_help_of_own_parameters_stands_in_the_docstring() -> None:
    def command(words: Annotated[list[str], typer.Argument(metavar="WORD")], very_loud: bool = False) -> None:
        """Say something.

        words: What to say,
            in this order.
        very_loud: Say it so that everyone hears.
        """
        seen.append((words, very_loud))

    seen: list[Any] = []
    app = typer.Typer()
    app.command()(expanded(command))
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    assert "What to say, in this order." in shown
    assert "words:" not in shown
    assert "Say it so that everyone hears." in shown
    assert "no-very-loud" not in shown
    CliRunner().invoke(app, ["a", "b", "--very-loud"])
    assert seen == [(["a", "b"], True)]
