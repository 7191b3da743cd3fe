"""Batched handlers: one call for many tasks, each with its own context and parameters, and an answer for each."""

from __future__ import annotations

import collections.abc
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from penstock.protocol.errors import SettingsError
from penstock.worker.handlers.context import Context
from penstock.worker.handlers.parameters import checked, converter, place, read_params, resolve, uncheckable

MAX_BATCH = 10_000
MAX_LINGER_SECONDS = 60.0
DEFAULT_LINGER_SECONDS = 0.05

Params = TypeVar("Params")


@dataclass(frozen=True, slots=True)
class Call(Generic[Params]):
    """One task of a batch. params: its payload, checked and converted to the type in ``list[Call[...]]``."""

    ctx: Context
    params: Params
    _answer: Callable[[Any], None] = field(default=lambda outcome: None, repr=False, compare=False)

    def answer(self, outcome: Any) -> None:
        """Answer this task now, while the handler still works on others of the batch; from any thread.

        outcome: as in the list that the handler returns, whose entry for this task is ignored then.
        """
        self._answer(outcome)


def batch_fit(action: str, function: Callable[..., Any]) -> Callable[[msgspec.Raw | bytes], Any]:
    """Converts a task's parameters to what ``list[Call[...]]`` holds. Raises SettingsError for another signature."""
    parameters = list(inspect.signature(function).parameters.values())
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if not parameters or parameters[0].kind not in by_position or required not in ([], [parameters[0]]):
        raise SettingsError(
            f"action {action!r}: {place(function)} is batched, so it must take one parameter, "
            "such as calls: list[Call[MyParams]]"
        )
    try:
        convert = converter(_params_of(action, function, parameters[0]))
    except SettingsError:
        raise
    except Exception as exc:
        raise uncheckable(action, function, str(parameters[0]), exc) from None
    if convert is None:
        return read_params
    check = checked(convert)
    return lambda params: check(read_params(params))


def _params_of(action: str, function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """The type in ``list[Call[...]]``, or Any."""
    if parameter.annotation is parameter.empty:
        return Any
    wanted = resolve(parameter.annotation, function)
    item: Any = None
    if typing.get_origin(wanted) in (list, collections.abc.Sequence):
        (item,) = typing.get_args(wanted)
    if item is Call or wanted in (list, collections.abc.Sequence):
        return Any
    if typing.get_origin(item) is not Call:
        raise SettingsError(
            f"action {action!r}: {place(function)} is batched, so {parameter.name} must be a list[Call[MyParams]], "
            f"not {wanted!r}"
        )
    return typing.get_args(item)[0]
