"""Handlers: functions registered with ``@action``."""

import copy
import functools
import importlib
import inspect
import math
import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, InitVar, dataclass, field
from functools import cached_property
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypedDict, TypeVar, Unpack, overload

import msgspec

from penstock.protocol.errors import SettingsError, UnexpectedResult
from penstock.protocol.json_text import dumps, to_builtins
from penstock.protocol.output import MODES, OutputMode
from penstock.protocol.retry import Backoff
from penstock.protocol.task import ACTION_MAX_CHARS, MAX_ATTEMPTS_LIMIT
from penstock.runtime.logs import log
from penstock.worker.handlers.context import Call, Context, Wait
from penstock.worker.handlers.enqueueing import Action, ActionFunction
from penstock.worker.handlers.lifespan import place
from penstock.worker.handlers.outcomes import is_number
from penstock.worker.handlers.parameters import Parameters, batch_fit, converter_of, injected, result_type

_MAX_BATCH = 10_000
_MAX_LINGER_SECONDS = 60.0

P = ParamSpec("P")
R = TypeVar("R")
Item = TypeVar("Item")


@dataclass(eq=False)
class Handler:
    """A registered function with its options, as `action` has them; those that are None are left to task or settings.

    batch: None for a handler of one task. takes_context: as its first argument. injected: types of the parameters that
    lifespans give. fit: converts a task's parameters, raw JSON, to the other arguments, or for a task of a batch to the
    type that its calls hold; raises InvalidParams.
    Raises SettingsError for a function that cannot be a handler, an invalid name or invalid numbers.
    """

    name: str
    function: Callable[..., Any]
    _: KW_ONLY
    max_attempts: int | None = None
    bad_params_attempts: int | None = None
    timeout: float | None = None
    backoff: Backoff | None = None
    batch: int | None = None
    linger: InitVar[float | None] = None
    process: bool = False
    output: OutputMode | None = None
    linger_seconds: float = field(init=False)
    is_async: bool = field(init=False)
    takes_context: bool = field(init=False, default=False)
    injected: dict[str, type] = field(init=False)
    fit: Callable[[msgspec.Raw | bytes], Any] = field(init=False)
    _parameters: Parameters | None = field(init=False, default=None)

    def __post_init__(self, linger: float | None) -> None:
        name, function, batch = self.name, self.function, self.batch
        if not isinstance(name, str) or not name:
            raise SettingsError(f"an action's name must be text, not {name!r}")
        if len(name) > ACTION_MAX_CHARS:
            problem = f"a name has at most {ACTION_MAX_CHARS} characters, not {len(name)}"
            raise SettingsError(f"action {name[:40]!r}...: {problem}")
        if name.startswith("rpc."):
            raise SettingsError(f"action {name!r}: names that begin with rpc. belong to JSON-RPC; take another")
        if batch is None and linger is not None:
            raise SettingsError(f"action {name!r}: linger goes with batch, how many tasks one call takes")
        if batch is not None and not (type(batch) is int and 1 <= batch <= _MAX_BATCH):
            raise SettingsError(f"action {name!r}: batch must be 1 to {_MAX_BATCH} tasks, not {batch!r}")
        if linger is not None and not (is_number(linger) and 0 <= linger <= _MAX_LINGER_SECONDS):
            raise SettingsError(f"action {name!r}: linger must be 0 to {_MAX_LINGER_SECONDS:g} seconds, not {linger!r}")
        for option in ("max_attempts", "bad_params_attempts"):
            most = getattr(self, option)
            if most is not None and not (type(most) is int and 1 <= most <= MAX_ATTEMPTS_LIMIT):
                raise SettingsError(f"action {name!r}: {option} must be 1 to {MAX_ATTEMPTS_LIMIT}, not {most!r}")
        if type(self.process) is not bool:
            raise SettingsError(f"action {name!r}: process must be True or False, not {self.process!r}")
        if self.output is not None and self.output not in MODES:
            raise SettingsError(f"action {name!r}: output must be one of {', '.join(MODES)}, not {self.output!r}")
        if self.timeout is not None and not (is_number(self.timeout) and 0 < self.timeout < math.inf):
            raise SettingsError(f"action {name!r}: timeout must be above 0 seconds, not {self.timeout!r}")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise SettingsError(f"action {name!r}: {place(function)} yields; a handler returns its result")
        self.linger_seconds = 0.05 if linger is None else float(linger)
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        self.injected = injected(name, function)
        if batch is not None:
            self.fit = batch_fit(name, function)
            return
        self._parameters = Parameters(name, function)
        self.fit, self.takes_context = self._parameters.fit, self._parameters.takes_context

    def payload(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A call's arguments without the context as a checked payload. Raises InvalidParams, TypeError, ValueError."""
        if self._parameters is None and (len(args) != 1 or kwargs):
            raise TypeError("a batched action is enqueued with one argument, the params of a call")
        payload = to_builtins(args[0] if self._parameters is None else self._parameters.payload(args, kwargs))
        self.fit(dumps(payload).encode())
        return payload

    def read_result(self, task_id: int, result: Any) -> Any:
        """A task's result, decoded JSON, as the annotated type. Raises UnexpectedResult, SettingsError."""
        try:
            return result if self._convert is None else self._convert(result)
        except msgspec.ValidationError as exc:
            raise UnexpectedResult(task_id, str(exc)) from None

    def inside(self, around: Callable[..., AbstractContextManager[None]]) -> Self:
        """The same handler, each call of which runs inside of ``around``, called with the same arguments."""
        function, made = self.function, copy.copy(self)

        @functools.wraps(function)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            with around(*args, **kwargs):
                return await function(*args, **kwargs)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with around(*args, **kwargs):
                return function(*args, **kwargs)

        made.function = run_async if self.is_async else run
        return made

    @cached_property
    def _convert(self) -> Callable[[Any], Any] | None:
        find = functools.partial(result_type, self.function, is_batched=self.batch is not None)
        return converter_of(self.name, self.function, "the result", find)


class Registry(dict[str, Handler]):
    """Handlers by action."""

    def add(self, handler: Handler) -> None:
        """Raises SettingsError when another function has the name; the same function, reloaded, replaces itself."""
        known, where = self.get(handler.name, handler), place(handler.function)
        is_reloaded = place(known.function) == where and "<locals>" not in where
        if known.function is not handler.function and not is_reloaded:
            raise SettingsError(
                f"action {handler.name!r} is registered twice: by {place(known.function)} and {where}; rename one"
            )
        self[handler.name] = handler

    def inside(self, around: Callable[..., AbstractContextManager[None]]) -> Self:
        """The same handlers, each inside of ``around``."""
        return type(self)({name: handler.inside(around) for name, handler in self.items()})


REGISTRY = Registry()


class ActionOptions(TypedDict, total=False):
    """Options of :func:`action`, which describes them."""

    max_attempts: int | None
    bad_params_attempts: int | None
    timeout: float | None
    backoff: Backoff | None
    process: bool
    output: OutputMode | None


class Decorator(Protocol):
    """What ``action(...)`` returns: it takes a function with a Context first, or without one."""

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[Context, P], Coroutine[Any, Any, R | Wait]], /
    ) -> ActionFunction[P, R, Callable[Concatenate[Context, P], Coroutine[Any, Any, R]]]: ...
    @overload
    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, R | Wait]], /
    ) -> ActionFunction[P, R, Callable[P, Coroutine[Any, Any, R]]]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Context, P], R | Wait], /
    ) -> ActionFunction[P, R, Callable[Concatenate[Context, P], R]]: ...
    @overload
    def __call__(self, function: Callable[P, R | Wait], /) -> ActionFunction[P, R, Callable[P, R]]: ...


AsyncBatch = Callable[[list[Call[Item]]], Coroutine[Any, Any, Sequence[R | Exception | Wait]]]
PlainBatch = Callable[[list[Call[Item]]], Sequence[R | Exception | Wait]]


class BatchDecorator(Protocol):
    """What ``action(batch=...)`` returns."""

    @overload
    def __call__(self, function: AsyncBatch[Item, R], /) -> ActionFunction[[Item], R, AsyncBatch[Item, R]]: ...
    @overload
    def __call__(self, function: PlainBatch[Item, R], /) -> ActionFunction[[Item], R, PlainBatch[Item, R]]: ...


@overload
def action(  # type: ignore[overload-overlap]
    function: Callable[Concatenate[Context, P], Coroutine[Any, Any, R | Wait]], /
) -> ActionFunction[P, R, Callable[Concatenate[Context, P], Coroutine[Any, Any, R]]]: ...
@overload
def action(
    function: Callable[P, Coroutine[Any, Any, R | Wait]], /
) -> ActionFunction[P, R, Callable[P, Coroutine[Any, Any, R]]]: ...
@overload
def action(
    function: Callable[Concatenate[Context, P], R | Wait], /
) -> ActionFunction[P, R, Callable[Concatenate[Context, P], R]]: ...
@overload
def action(function: Callable[P, R | Wait], /) -> ActionFunction[P, R, Callable[P, R]]: ...
@overload
def action(
    name: str | None = None, *, batch: int, linger: float | None = None, registry: Registry = REGISTRY,
    **options: Unpack[ActionOptions],
) -> BatchDecorator: ...  # fmt: skip
@overload
def action(
    name: str | None = None, *, registry: Registry = REGISTRY, **options: Unpack[ActionOptions]
) -> Decorator: ...


def action(name: Any = None, *, registry: Registry = REGISTRY, **options: Any) -> Any:
    """Register a function as the handler of an action, named after it unless a name is given.

    The function takes a Context first, unless its first parameter is annotated otherwise, and the payload's members by
    name (or its items by position). Parameters with annotations are checked and converted, pydantic's types by
    pydantic's rules, others by msgspec's, without guessing: ``"1"`` is no int. ``async def`` runs on the event loop,
    ``def`` in a thread. Returns an `Action`: it is called as the function, and has the verbs that enqueue it.
    max_attempts: lowers the task's own cap. bad_params_attempts: of a task whose parameters do not fit, None for
    PENSTOCK_BAD_PARAMS_ATTEMPTS. timeout: seconds that one attempt may run, unless the task has its own. backoff:
    delays between attempts. process: run it in a child process of the worker, whose death fails this attempt alone.
    output: keep what a task emits ("chunks"), logs too ("logs"), prints too ("prints"), or nothing ("off").
    batch: the function takes up to so many tasks at once, as a ``list[Call[MyParams]]`` alone, and returns a list with
    one answer for each, in their order: a result, an exception (Retry, Fail or any other) that fails this task alone,
    or its ``ctx.wait()``. linger: seconds that the first task waits for others, 0.05 unless given.
    Raises SettingsError for a name that is taken, invalid numbers, an annotation that cannot be checked.
    """
    if callable(name):
        return action()(name)

    def register(function: Callable[..., Any]) -> Action[..., Any]:
        function = function.function if isinstance(function, Action) else function  # of another name
        called = name if name is not None else getattr(function, "__name__", None)
        handler = Handler(called, function, **options)  # type: ignore[arg-type]
        registry.add(handler)
        return ActionFunction(handler.name, function, handler.payload, handler.read_result)

    return register


def load_app(module: str) -> None:
    """Import a module so that its actions register; the current folder is importable. Raises SettingsError."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    if not all(part.isidentifier() for part in module.split(".")):
        near = module.removesuffix(".py").replace("/", ".").replace("\\", ".").split(":")[0].strip(".")
        raise SettingsError(
            f"--app {module}: name a module as an import statement does, such as {near or 'myapp.tasks'}"
        )
    before = set(REGISTRY)
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as exc:
        why = f"its import ended in {type(exc).__name__}: {exc}"
        if isinstance(exc, ModuleNotFoundError) and f"{module}.".startswith(f"{exc.name}."):
            why = (
                f"there is no module {exc.name!r} in {here} nor among what is installed; "
                "run the worker from the folder that holds it, or install it"
            )
        raise SettingsError(f"--app {module} cannot be loaded: {why}") from exc
    is_used = any(place(handler.function).startswith(f"{module}.") for handler in REGISTRY.values())
    if REGISTRY.keys() == before and not is_used:
        log.warning("app_registers_nothing", app=module, hint="decorate its handlers with @penstock.action")
