from __future__ import annotations

import asyncio
import dataclasses
import datetime
import enum
import functools
import math
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypedDict, TypeVar
from uuid import UUID

import msgspec
import pytest
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, SecretStr, field_serializer, field_validator
from pydantic.dataclasses import dataclass as pydantic_dataclass

from penstock.client.exchanges import request_text
from penstock.protocol.errors import InvalidParams, SettingsError
from penstock.protocol.retry import Backoff
from penstock.worker.handlers.actions import Handler, Registry, action, load_app
from penstock.worker.handlers.context import Call, Context
from penstock.worker.handlers.lifespan import inject
from penstock.worker.handlers.outcomes import Fail, Retry
from penstock.worker.handlers.steps import Step, Suspend, Trial
from penstock.worker.responses import encoded_result, unknown_action

if TYPE_CHECKING:
    from decimal import Decimal as OnlyForCheckers


T = TypeVar("T")


class Numbered(TypedDict):
    number: int


@pytest.fixture
def registry() -> Registry:
    return Registry()


def fit(function: Callable[..., Any], params: str) -> tuple[list[Any], dict[str, Any]]:
    args, kwargs = Handler("act", function).fit(params.encode())
    return list(args), dict(kwargs)


def misfit(function: Callable[..., Any], params: str) -> tuple[str, str]:
    with pytest.raises(InvalidParams) as caught:
        fit(function, params)
    assert caught.value.code == -32602
    return caught.value.data["field"], caught.value.data["problem"]


def test_bare_decorator_takes_the_functions_name(registry: Registry) -> None:
    decorate = action(registry=registry)

    @decorate
    async def export(ctx: Context) -> None: ...

    handler = registry.get("export")
    assert handler is not None
    assert handler.function is export.function
    assert handler.is_async


def test_decorator_without_parentheses_registers_in_the_shared_registry() -> None:
    from penstock.worker.handlers.actions import REGISTRY

    @action
    def registered_without_parentheses(ctx: Context) -> int:
        return 1

    handler = REGISTRY.get("registered_without_parentheses")
    assert handler is not None
    assert not handler.is_async
    assert registered_without_parentheses(Context(1, 1, "x")) == 1


def test_options_are_kept_with_the_action(registry: Registry) -> None:
    backoff = Backoff(1, 3, 60)

    @action("resize", max_attempts=3, timeout=2.5, backoff=backoff, registry=registry)
    def anything(ctx: Context) -> None: ...

    handler = registry.get("resize")
    assert handler is not None
    assert (handler.max_attempts, handler.timeout, handler.backoff) == (3, 2.5, backoff)
    assert list(registry) == ["resize"]


def test_second_function_of_a_name_is_refused_and_both_are_named(registry: Registry) -> None:
    @action("export", registry=registry)
    def first(ctx: Context) -> None: ...

    with pytest.raises(SettingsError, match=r"'export' is registered twice.*first.*second"):

        @action("export", registry=registry)
        def second(ctx: Context) -> None: ...

    handler = registry.get("export")
    assert handler is not None
    assert handler.function is first.function


def test_same_function_registered_again_is_no_mistake(registry: Registry) -> None:
    def export(ctx: Context) -> None: ...

    action("export", registry=registry)(export)
    action("export", registry=registry)(export)
    assert len(registry) == 1


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"max_attempts": 0}, "max_attempts"),
        ({"max_attempts": 1001}, "max_attempts"),
        ({"max_attempts": True}, "max_attempts"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": math.inf}, "timeout"),
        ({"timeout": math.nan}, "timeout"),
    ],
)
def test_options_out_of_range_are_refused_by_name(registry: Registry, options: dict[str, Any], word: str) -> None:
    with pytest.raises(SettingsError, match=f"'export': {word}"):
        action("export", registry=registry, **options)(lambda ctx: None)


@pytest.mark.parametrize("name", ["", "rpc.discover", "x" * 201])
def test_names_that_no_task_can_have_are_refused(registry: Registry, name: str) -> None:
    with pytest.raises(SettingsError):
        action(name, registry=registry)(lambda ctx: None)


def test_a_handler_may_do_without_the_context() -> None:
    def by_name(url: str, width: int = 3) -> None: ...

    def nothing() -> None: ...

    def named_alike(ctx: str) -> None: ...

    def only_names(*, n: int) -> None: ...

    for function in (by_name, nothing, named_alike, only_names):
        assert not Handler("act", function).takes_context
    assert fit(by_name, '{"url":"u","width":4}') == ([], {"url": "u", "width": 4})
    assert fit(by_name, '["u"]') == (["u"], {})
    assert misfit(by_name, '{"url":1}') == ("url", "is wrong: Expected `str`, got `int`")
    assert misfit(by_name, "{}") == ("url", "is missing")
    assert misfit(nothing, '{"n":1}') == ("n", "is no parameter of act")
    assert fit(named_alike, '{"ctx":"text"}') == ([], {"ctx": "text"})
    assert fit(only_names, '{"n":1}') == ([], {"n": 1})


def test_a_first_parameter_that_holds_anything_is_no_context() -> None:
    def members(data: dict[str, Any], n: int = 1) -> None: ...
    def items(data: list[Any]) -> None: ...
    def mapping(data: Mapping[str, object]) -> None: ...
    def open_type(data: list[T]) -> None: ...  # type: ignore[valid-type]
    def typed_dict(data: Numbered) -> None: ...
    def optional(ctx: Context | None) -> None: ...
    def marked(ctx: Annotated[Context, "of the task"]) -> None: ...
    def anything(ctx: Any | None) -> None: ...

    for function in (members, items, mapping, open_type, typed_dict):
        assert not Handler("act", function).takes_context
    assert fit(members, '{"data":{"x":1}}') == ([], {"data": {"x": 1}})
    assert misfit(typed_dict, '{"data":{"number":"1"}}')[0] == "data"
    for function in (optional, marked, anything):
        assert Handler("act", function).takes_context


def test_a_context_that_is_not_the_first_parameter_is_refused(registry: Registry) -> None:
    def by_name_only(*, ctx: Context) -> None: ...

    def second(n: int, ctx: Context) -> None: ...

    def method(self, ctx: Context) -> None: ...  # type: ignore[no-untyped-def]

    for function in (by_name_only, second, method):
        with pytest.raises(SettingsError, match="takes the Context as ctx: make it the first parameter"):
            action("export", registry=registry)(function)


def test_generators_are_refused(registry: Registry) -> None:
    def rows(ctx: Context) -> Iterator[int]:
        yield 1

    async def more_rows(ctx: Context) -> AsyncIterator[int]:
        yield 1

    for function in (rows, more_rows):
        with pytest.raises(SettingsError, match="yields"):
            action("export", registry=registry)(function)


def test_object_with_an_async_call_is_async() -> None:
    class Exporter:
        async def __call__(self, ctx: Context, n: int) -> int:
            return n

    handler = Handler("act", Exporter())
    assert handler.is_async
    assert handler.fit(b'{"n":1}') == ((), {"n": 1})
    with pytest.raises(InvalidParams):
        handler.fit(b'{"n":"1"}')


def test_nearest_name_is_found_and_a_stranger_is_not(registry: Registry) -> None:
    action("export", registry=registry)(lambda ctx: None)
    assert "the nearest it has is 'export'" in str(unknown_action("exprot", registry))
    assert "nearest" not in str(unknown_action("zzz", registry))


# Parameters


def test_members_become_keywords_and_items_positions() -> None:
    def handler(ctx: Context, a: Any, b: Any = 2) -> None: ...

    assert fit(handler, '{"a":1,"b":3}') == ([], {"a": 1, "b": 3})
    assert fit(handler, '{"a":1}') == ([], {"a": 1})
    assert fit(handler, "[1,3]") == ([1, 3], {})
    assert fit(handler, "[1]") == ([1], {})


def test_no_params_are_an_empty_object() -> None:
    assert fit(lambda ctx: None, "") == ([], {})
    assert misfit(lambda ctx, a: None, "") == ("a", "is missing")


def test_missing_and_unknown_members_are_named() -> None:
    def handler(ctx: Context, first: Any, second: Any, *, third: Any = None) -> None: ...

    assert misfit(handler, '{"first":1}') == ("second", "is missing")
    assert misfit(handler, '{"first":1,"second":2,"thrid":3}') == (
        "thrid",
        "is no parameter of act; did you mean third?",
    )
    assert misfit(handler, "[1]") == ("second", "is missing")
    assert misfit(handler, "[1,2,3]") == ("params", "has 3 items; act takes 2")


def test_required_keyword_cannot_come_from_an_array() -> None:
    def handler(ctx: Context, *, name: str) -> None: ...

    assert misfit(handler, '["x"]') == ("name", "is missing; it is taken by name only: send an object")
    assert fit(handler, '{"name":"x"}') == ([], {"name": "x"})


class Pool:
    pass


def test_items_behind_an_injected_parameter_are_passed_by_name() -> None:
    def act(ctx: Context, a: int, pool: Pool = inject(), b: int = 0, *, c: int = 0) -> None: ...
    def any_items(a: int, pool: Pool = inject(), *more: int) -> None: ...
    def by_name(a: int, *more: int, pool: Pool = inject()) -> None: ...

    assert fit(act, "[1]") == ([1], {})
    assert fit(act, "[1,2]") == ([1], {"b": 2})
    assert misfit(act, "[1,true]")[0] == "b"
    assert misfit(act, "[1,2,3]") == ("params", "has 3 items; act takes 2")
    assert misfit(any_items, "[1,2]") == ("params", "has 2 items; act takes 1")
    assert fit(by_name, "[1,2,3]") == ([1, 2, 3], {})


def test_position_only_parameter_cannot_come_from_an_object() -> None:
    def handler(ctx: Context, a: int, /, b: int = 0) -> None: ...

    assert misfit(handler, '{"a":1}')[0] == "a"
    assert fit(handler, "[1,2]") == ([1, 2], {})


def test_member_named_like_the_context_is_no_second_context() -> None:
    def open_handler(ctx: Context, **more: Any) -> None: ...

    def closed_handler(ctx: Context, /, **more: Any) -> None: ...

    assert misfit(open_handler, '{"ctx":1}')[0] == "ctx"
    assert fit(closed_handler, '{"ctx":1}') == ([], {"ctx": 1})


def test_catch_all_parameters_take_everything() -> None:
    def handler(ctx: Context, *items: Any, **members: Any) -> None: ...

    def only_items(*everything: Any) -> None: ...

    assert fit(handler, '{"x":1,"y":2}') == ([], {"x": 1, "y": 2})
    assert fit(handler, "[1,2,3]") == ([1, 2, 3], {})
    assert fit(only_items, "[1,2]") == ([1, 2], {})


@pytest.mark.parametrize("params", ["{", "1", '"text"', "[" * 100_000, '{"a":[1e999,NaN]}'])
def test_params_that_cannot_be_read_are_bad_params(params: str) -> None:
    assert misfit(lambda ctx, a: None, params)[0] in ("params", "a")


def test_a_number_beyond_a_double_is_infinite() -> None:
    assert fit(lambda ctx, a, b: None, '{"a":1e999,"b":-1e999}')[1] == {"a": math.inf, "b": -math.inf}


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Size:
    width: int
    height: int
    tags: list[Size] | None = None


class Point(msgspec.Struct):
    x: float


class Opaque:
    pass


def test_a_value_that_does_not_fit_is_named_by_its_own_path() -> None:
    def handler(sizes: dict[str, list[int]], count: int | None = None) -> None: ...

    assert fit(handler, '{"sizes":{"a":[1]},"count":null}') == ([], {"sizes": {"a": [1]}, "count": None})
    expected = "is wrong: Expected `int`, got `str` - at `$[...][0]`"
    assert misfit(handler, '{"sizes":{"a":["1"]}}') == ("sizes", expected)
    assert misfit(handler, '{"sizes":[]}') == ("sizes", "is wrong: Expected `object`, got `array`")
    assert misfit(handler, '{"sizes":{},"count":"1"}') == ("count", "is wrong: Expected `int | null`, got `str`")


class Level(enum.IntEnum):
    LOW = 1


def test_keys_of_an_object_that_are_no_text_are_read_from_it() -> None:
    def handler(names: dict[int, str], shares: dict[float, int] | None = None) -> dict[Level, dict[UUID, int]]: ...

    assert fit(handler, '{"names":{"7":"a"},"shares":{"0.5":1}}')[1] == {"names": {7: "a"}, "shares": {0.5: 1}}
    assert misfit(handler, '{"names":{"x":"a"}}') == ("names", "is wrong: Expected `int`, got `str` - at `key` in `$`")
    assert misfit(handler, '{"names":{"7":1}}')[0] == "names"
    known = Handler("act", handler)
    assert known.payload([{7: "a"}], {}) == {"names": {"7": "a"}}
    assert known.read_result(1, {"1": {str(UUID(int=1)): 2}}) == {Level.LOW: {UUID(int=1): 2}}


def test_annotated_parameters_are_converted() -> None:
    def handler(
        ctx: Context,
        size: Size,
        at: datetime.datetime,
        colour: Colour,
        point: Point | None = None,
        limit: Annotated[int, msgspec.Meta(ge=1)] = 1,
        ratio: float = 1.0,
    ) -> None: ...

    _, given = fit(
        handler,
        '{"size":{"width":1,"height":2,"tags":[{"width":3,"height":4}]},"at":"2030-01-02T03:04:05Z",'
        '"colour":"red","point":{"x":1},"limit":5,"ratio":2}',
    )
    assert given["size"] == Size(1, 2, [Size(3, 4)])
    assert given["at"] == datetime.datetime(2030, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    assert given["colour"] is Colour.RED
    assert given["point"] == Point(1.0)
    assert given["limit"] == 5
    assert isinstance(given["ratio"], float)
    args, _ = fit(handler, '[{"width":1,"height":2},"2030-01-02T03:04:05Z","red"]')
    assert args[0] == Size(1, 2)
    assert args[2] is Colour.RED


@pytest.mark.parametrize(
    ("params", "field", "part"),
    [
        ('{"n":"1"}', "n", "Expected `int`, got `str`"),
        ('{"n":null}', "n", "Expected `int`, got `null`"),
        ('{"n":1.5}', "n", "Expected `int`, got `float`"),
        ('["1"]', "n", "Expected `int`, got `str`"),
        ('{"n":1,"size":{"width":1,"height":"tall"}}', "size", "$.height"),
    ],
)
def test_mistyped_parameter_is_named(params: str, field: str, part: str) -> None:
    def handler(ctx: Context, n: int, size: Size | None = None) -> None: ...

    named, problem = misfit(handler, params)
    assert named == field
    assert part in problem


class Order(BaseModel):
    id: UUID
    count: int = Field(1, alias="quantity", gt=0)


class Refund(BaseModel):
    model_config = ConfigDict(strict=True)
    refund: datetime.datetime


@pydantic_dataclass
class PackedMessage:
    weight: Annotated[float, Field(gt=0)]


class Picky(BaseModel):
    name: str

    @field_validator("name")
    @classmethod
    def _fail(cls, value: str) -> str:
        raise RuntimeError("the validator is broken")


ID = "6f1c2f0a-5f0c-4b8e-9d5c-7f7b6f0f3b11"


def test_pydantic_parameters_arrive_as_models_however_they_are_nested() -> None:
    def handler(
        ctx: Context, one: Order, many: list[Order], named: dict[str, Order], maybe: Order | None,
        either: Order | Refund, parcel: PackedMessage, positive: PositiveInt, path: Path, plain: int,
    ) -> None: ...  # fmt: skip

    order = f'{{"id":"{ID}","quantity":"2"}}'
    made = Order(id=UUID(ID), quantity=2)
    _, given = fit(
        handler,
        f'{{"one":{order},"many":[{order}],"named":{{"x":{order}}},"maybe":null,"either":{{"refund":"2026-01-02T00:00:00Z"}},'
        '"parcel":{"weight":1},"positive":1,"path":"/tmp","plain":1}',
    )
    assert given == {
        "one": made, "many": [made], "named": {"x": made}, "maybe": None,
        "either": Refund(refund=datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)),
        "parcel": PackedMessage(weight=1), "positive": 1, "path": Path("/tmp"), "plain": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "value", "problem"),
    [
        (Order, "{}", "is wrong: Field required - at `$.id`"),
        (Order, "[]", "is wrong: Input should be an object"),
        (
            list[Order],
            f'[{{"id":"{ID}"}},{{"id":"{ID}","quantity":0}}]',
            "is wrong: Input should be greater than 0 - at `$[1].quantity`",
        ),
        (PackedMessage, '{"weight":-1}', "is wrong: Input should be greater than 0 - at `$.weight`"),
        (PositiveInt, "0", "is wrong: Input should be greater than 0"),
        (Picky, '{"name":"x"}', "is wrong: RuntimeError: the validator is broken"),
    ],
)
def test_a_pydantic_parameter_that_does_not_fit_is_refused(wanted: Any, value: str, problem: str) -> None:
    def handler(ctx: Context, given: Any) -> None: ...

    handler.__annotations__["given"] = wanted
    assert misfit(handler, f'{{"given":{value}}}') == ("given", problem)


def test_a_batched_handler_is_given_models() -> None:
    def orders(calls: list[Call[Order]]) -> None: ...

    def many(calls: list[Call[list[Picky]]]) -> None: ...

    assert Handler("act", orders, batch=2).fit(f'{{"id":"{ID}"}}'.encode()) == Order(id=UUID(ID))
    with pytest.raises(InvalidParams) as caught:
        Handler("act", orders, batch=2).fit(b'{"id":7}')
    assert caught.value.data["field"] == "id"
    with pytest.raises(InvalidParams, match="the validator is broken"):
        Handler("act", many, batch=2).fit(b'[{"name":"x"}]')


def test_annotations_that_cannot_be_checked_are_refused_when_registered() -> None:
    def opaque(ctx: Context, a: Opaque) -> None: ...

    def nested(ctx: Context, a: list[Opaque]) -> None: ...

    def checkers(ctx: Context, a: OnlyForCheckers) -> None: ...

    def alone(ctx: Context, *, a: Callable[[Opaque], int] | Opaque) -> None: ...

    for function, told in (
        (opaque, "a: 'Opaque' of .*opaque cannot be checked: Unable to .*Opaque.* Take a pydantic model, a dataclass"),
        (nested, "a: 'list.Opaque.' of .*nested cannot be checked"),
        (checkers, "name 'OnlyForCheckers' is not defined: import its names outside of TYPE_CHECKING"),
        (alone, "cannot be checked"),
    ):
        with pytest.raises(SettingsError, match=told):
            Handler("act", function)

    def unchecked(ctx: Context, a: object, b: Any, c, *rest: Opaque, **more: Opaque) -> None: ...  # type: ignore[no-untyped-def]

    assert fit(unchecked, '{"a":1,"b":[],"c":{}}')[1] == {"a": 1, "b": [], "c": {}}


def test_the_context_may_be_annotated_in_every_way_that_fits() -> None:
    class Sub(Context): ...

    class Reports(Protocol):
        def progress(self, percent: float) -> None: ...

    def handler(ctx) -> None: ...  # type: ignore[no-untyped-def]

    for annotation in (Context, Any, object, Sub, Reports, Context | None, Annotated[Context, "x"], "penstock.Context"):
        handler.__annotations__["ctx"] = annotation
        Handler("act", handler)


# Context, Retry, Fail


def test_a_task_sleeps_for_decades_and_not_for_ever() -> None:
    now, ctx = datetime.datetime.now(datetime.UTC), Context(1, 1, "act")
    with pytest.raises(Suspend):
        ctx.sleep_until_sync(now + datetime.timedelta(days=36_599))
    for instant in (now + datetime.timedelta(days=36_601), datetime.datetime.max.replace(tzinfo=datetime.UTC)):
        with pytest.raises(ValueError, match=f"3162240000 seconds from now, not until {instant.year}-"):
            ctx.sleep_until_sync(instant)


@pytest.mark.parametrize("timeout", [1e12, math.inf])
def test_a_step_may_have_more_time_than_a_thread_can_wait(timeout: float) -> None:
    ctx = Context(1, 1, "act")
    assert ctx.step_sync(Step("charge", timeout=timeout), str, 5) == "5"
    assert asyncio.run(ctx.step(Step("charge", timeout=timeout), str, 5)) == "5"


@pytest.mark.parametrize("again", [Retry(datetime.timedelta.max), Retry(1e300), ValueError()])
def test_a_step_is_tried_again_within_what_a_thread_can_sleep(again: Exception) -> None:
    """`time.sleep` refuses 292 years and more."""
    trial = Trial(Step("charge", retries=9, backoff=Backoff(1e12, 1, 1e12)), functools.partial(int))
    assert trial.call_sync() == 0
    assert trial.pause_after(again) == 30 * 86_400


def test_progress_goes_on_with_or_without_await() -> None:
    reported: list[tuple[float | None, str | None]] = []
    ctx = Context(1, 2, "act", False, lambda percent, note: reported.append((percent, note)))
    ctx.progress(10)

    async def awaited() -> None:
        await ctx.progress(20.5, "half" * 1000)

    asyncio.run(awaited())
    assert reported[0] == (10, None)
    assert reported[1][0] == 20.5
    assert reported[1][1] == ("half" * 1000)[:1000]
    Context(1, 2, "act").progress(5)


@pytest.mark.parametrize("percent", [math.nan, math.inf, "10", True])
def test_progress_that_is_no_number_is_refused(percent: Any) -> None:
    with pytest.raises(ValueError, match="percent"):
        Context(1, 2, "act").progress(percent)


def test_note_that_is_no_text_is_refused() -> None:
    with pytest.raises(TypeError, match="note"):
        Context(1, 2, "act").progress(1, note=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("delay", [-1, math.nan, math.inf, "5", False])
def test_retry_with_a_delay_that_is_no_time_is_refused(delay: Any) -> None:
    with pytest.raises(ValueError, match="seconds"):
        Retry(delay=delay)


def test_retry_and_fail_say_why() -> None:
    assert str(Retry(5, "busy")) == "busy"
    assert Retry(5).delay == 5
    assert str(Retry())
    assert str(Fail("no such row")) == "no such row"
    assert str(Fail())


# Loading


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_app_of_the_current_folder_is_loaded(folder: Path) -> None:
    from penstock.worker.handlers.actions import REGISTRY

    (folder / "shop_here.py").write_text(
        "from penstock import action\n@action('shop_here.buy')\ndef buy(ctx): return 1\n"
    )
    load_app("shop_here")
    assert REGISTRY.get("shop_here.buy") is not None


def test_app_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"--app absent_shop\.tasks cannot be loaded: there is no module 'absent_shop'"
    ):
        load_app("absent_shop.tasks")


def test_import_that_fails_inside_the_app_is_shown(folder: Path) -> None:
    (folder / "shop_broken.py").write_text("import no_such_library_at_all\n")
    with pytest.raises(SettingsError, match=r"shop_broken.*ModuleNotFoundError.*no_such_library_at_all"):
        load_app("shop_broken")


@pytest.mark.parametrize("line", ["1 / 0", "def broken(:", "raise SystemExit(3)"])
def test_app_that_raises_is_named_with_what_it_raised(folder: Path, line: str) -> None:
    (folder / "shop_raises.py").write_text(line + "\n")
    with pytest.raises(SettingsError, match=r"shop_raises.*(ZeroDivisionError|SyntaxError|SystemExit)"):
        load_app("shop_raises")


@pytest.mark.parametrize(
    ("given", "meant"), [("shop/tasks.py", "shop.tasks"), ("shop.tasks:app", "shop.tasks"), ("", "myapp.tasks")]
)
def test_path_in_place_of_a_module_is_answered_with_the_module(folder: Path, given: str, meant: str) -> None:
    with pytest.raises(SettingsError, match=meant):
        load_app(given)


def test_app_without_actions_is_warned_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "shop_empty.py").write_text("x = 1\n")
    load_app("shop_empty")
    assert "app_registers_nothing app=shop_empty" in caplog.text


def test_app_loaded_twice_is_not_warned_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "shop_twice.py").write_text(
        "from penstock import action\n@action('shop_twice.buy')\ndef buy(ctx): return 1\n"
    )
    load_app("shop_twice")
    load_app("shop_twice")
    assert "app_registers_nothing" not in caplog.text


class Child(BaseModel):
    id: UUID


def test_spawn_takes_what_enqueue_takes() -> None:
    ctx = Context(1, 1, "act")
    ctx.spawn("child", Child(id=UUID(int=7)), delay=datetime.timedelta(minutes=1), priority=3)
    ctx.spawn("child")
    assert [msgspec.json.decode(text) for text in ctx.spawned] == [
        {"action": "child", "payload": {"id": str(UUID(int=7))}, "delay": 60.0, "priority": 3},
        {"action": "child", "payload": {}},
    ]
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    for payload, problem in (
        (object(), "object is not JSON-serialisable"), ("text", "an object or an array"), (deep, "deeper than 100"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=problem):
            ctx.spawn("child", payload)


class Login(BaseModel):
    user: str
    password: SecretStr


class InClear(Login):
    @field_serializer("password", when_used="json")
    def show(self, value: SecretStr) -> str:
        return value.get_secret_value()


def test_a_secret_is_not_sent_as_asterisks() -> None:
    def act(login: Login) -> None: ...

    hidden, clear = Login(user="ann", password="s3"), InClear(user="ann", password="s3")  # type: ignore[arg-type]
    handler = Handler("act", act)
    assert handler.payload((clear,), {}) == {"login": {"user": "ann", "password": "s3"}}
    with pytest.raises(TypeError, match="Login holds a secret"):
        handler.payload((hidden,), {})
    for payload in ({"login": hidden}, {"key": SecretStr("s3")}):
        with pytest.raises(TypeError, match="get_secret_value"):
            request_text("enqueue", {"payload": payload}, 1)
        with pytest.raises(ValueError, match="get_secret_value"):
            Context(1, 1, "act").spawn("child", payload)
    assert "***" in encoded_result([hidden, None])


def test_spawn_is_refused_once_the_attempt_is_settled() -> None:
    ctx = Context(1, 1, "act")
    ctx.note_settled(holds=True)
    with pytest.raises(ValueError, match="the attempt is settled: enqueue in your transaction instead"):
        ctx.spawn("child")
    assert ctx.spawned == []


def test_retry_takes_a_timedelta() -> None:
    assert Retry(datetime.timedelta(minutes=2)).delay == 120
