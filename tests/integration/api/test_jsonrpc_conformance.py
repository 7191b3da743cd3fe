"""JSON-RPC 2.0 over real HTTP: every example of its section 7 word for word, and what servers commonly get wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from penstock.api.access import Authenticator
from penstock.api.http import make_app
from penstock.api.rpc import Dispatcher, each
from penstock.api.scaling import Scaling
from penstock.api.server import HttpServer
from penstock.db.pool import Store
from penstock.protocol.errors import InvalidParams, RpcError
from penstock.protocol.requests import Request
from penstock.settings.model import Settings, load_settings
from tests.integration.apis import JSON, captured_log, running

BATCH_LIMIT = 100


def arguments(request: Request) -> Any:
    return msgspec.json.decode(request.params) if bytes(request.params) else None


async def subtract(request: Request) -> int:
    given = arguments(request)
    if isinstance(given, dict):
        given = [given.get("minuend"), given.get("subtrahend")]
    if not isinstance(given, list) or len(given) != 2 or not all(isinstance(n, int) for n in given):
        raise InvalidParams("minuend", "and subtrahend must be two integers")
    return int(given[0] - given[1])


async def total(request: Request) -> int:
    return sum(arguments(request))


async def get_data(_request: Request) -> list[Any]:
    return ["hello", 5]


async def nothing(_request: Request) -> None:
    return None


async def wordless(_request: Request) -> None:
    raise RuntimeError("postgresql://user:secret@host/name is unreachable")


async def own_code(_request: Request) -> None:
    error = RpcError("out of paper", {"tray": 2})
    error.code = 7
    raise error


METHODS = {
    "subtract": subtract, "sum": total, "get_data": get_data, "update": nothing, "foobar_known": nothing,
    "notify_hello": nothing, "notify_sum": nothing, "wordless": wordless, "own_code": own_code,
}  # fmt: skip


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    """A client of the api's HTTP and JSON-RPC layers, in front of the methods of the specification's examples."""
    dispatcher = Dispatcher({name: each(method) for name, method in METHODS.items()}, batch_limit=BATCH_LIMIT)
    nothing_stored: Any = None  # no test here asks how much waits
    settings = load_settings(grace_seconds=5)
    app = make_app(dispatcher, Authenticator(), settings, scaling=Scaling(nothing_stored))
    server = HttpServer(app, settings, port=0)
    server.bind()
    server.listen()
    serving = asyncio.create_task(server.run())
    async with httpx.AsyncClient(base_url=server.url, headers=JSON) as client:
        yield client
    server.stop()
    await serving


async def ask(http: httpx.AsyncClient, body: str | bytes) -> Any:
    """The answer as JSON; None for no answer at all."""
    response = await http.post("/rpc", content=body)
    if response.status_code == 204:
        assert response.content == b""
        return None
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    answer = response.json()
    for one in answer if isinstance(answer, list) else [answer]:
        assert one["jsonrpc"] == "2.0"
        assert set(one) in ({"jsonrpc", "id", "result"}, {"jsonrpc", "id", "error"})
        if "error" in one:
            assert isinstance(one["error"]["code"], int)
            assert isinstance(one["error"]["message"], str)
            assert set(one["error"]) <= {"code", "message", "data"}
    return answer


def outcome(answer: dict[str, Any]) -> tuple[Any, Any]:
    """(id, result), or (id, the error's code)."""
    return answer["id"], answer["result"] if "result" in answer else answer["error"]["code"]


SECTION_7 = [
    ("positional", '{"jsonrpc": "2.0", "method": "subtract", "params": [42, 23], "id": 1}', (1, 19)),
    ("positional, the other way", '{"jsonrpc": "2.0", "method": "subtract", "params": [23, 42], "id": 2}', (2, -19)),
    (
        "named",
        '{"jsonrpc": "2.0", "method": "subtract", "params": {"subtrahend": 23, "minuend": 42}, "id": 3}',
        (3, 19),
    ),
    (
        "named, the other way",
        '{"jsonrpc": "2.0", "method": "subtract", "params": {"minuend": 42, "subtrahend": 23}, "id": 4}',
        (4, 19),
    ),
    ("notification", '{"jsonrpc": "2.0", "method": "update", "params": [1,2,3,4,5]}', None),
    ("notification of no known method", '{"jsonrpc": "2.0", "method": "foobar"}', None),
    ("no known method", '{"jsonrpc": "2.0", "method": "foobar", "id": "1"}', ("1", -32601)),
    ("invalid JSON", '{"jsonrpc": "2.0", "method": "foobar, "params": "bar", "baz]', (None, -32700)),
    ("invalid request", '{"jsonrpc": "2.0", "method": 1, "params": "bar"}', (None, -32600)),
    (
        "batch of invalid JSON",
        '[ {"jsonrpc": "2.0", "method": "sum", "params": [1,2,4], "id": "1"}, {"jsonrpc": "2.0", "method" ]',
        (None, -32700),
    ),
    ("empty array", "[]", (None, -32600)),
    ("invalid batch, not empty", "[1]", [(None, -32600)]),
    ("invalid batch", "[1,2,3]", [(None, -32600)] * 3),
    (
        "batch",
        """[
            {"jsonrpc": "2.0", "method": "sum", "params": [1,2,4], "id": "1"},
            {"jsonrpc": "2.0", "method": "notify_hello", "params": [7]},
            {"jsonrpc": "2.0", "method": "subtract", "params": [42,23], "id": "2"},
            {"foo": "boo"},
            {"jsonrpc": "2.0", "method": "foo.get", "params": {"name": "myself"}, "id": "5"},
            {"jsonrpc": "2.0", "method": "get_data", "id": "9"}
        ]""",
        [("1", 7), ("2", 19), (None, -32600), ("5", -32601), ("9", ["hello", 5])],
    ),
    (
        "batch of notifications",
        """[
            {"jsonrpc": "2.0", "method": "notify_sum", "params": [1,2,4]},
            {"jsonrpc": "2.0", "method": "notify_hello", "params": [7]}
        ]""",
        None,
    ),
]


@pytest.mark.parametrize(("body", "expected"), [case[1:] for case in SECTION_7], ids=[case[0] for case in SECTION_7])
async def test_example_of_section_7_is_answered_as_written(http: httpx.AsyncClient, body: str, expected: Any) -> None:
    answer = await ask(http, body)
    if isinstance(expected, list):
        assert sorted(map(outcome, answer), key=repr) == sorted(expected, key=repr)
    else:
        assert (None if answer is None else outcome(answer)) == expected


def request_of(**members: Any) -> str:
    return json.dumps({"jsonrpc": "2.0", "method": "get_data"} | members)


PROBES = [
    ("empty body", "", (None, -32700)),
    ("only white space", " \n ", (None, -32700)),
    ("invalid UTF-8", b'{"jsonrpc":"2.0","method":"get_data","id":"\xff"}', (None, -32700)),
    ("two values", '{"jsonrpc":"2.0","method":"get_data","id":1} {}', (None, -32700)),
    ("NaN", '{"jsonrpc":"2.0","method":"sum","params":[NaN],"id":1}', (None, -32700)),
    ("Infinity in a batch", '[{"jsonrpc":"2.0","method":"sum","params":[-Infinity],"id":1}]', (None, -32700)),
    ("10,000 deep", request_of(params=[0], id=1).replace("0]", "[" * 10_000 + "]" * 10_001), (None, -32700)),
    ("10,000 deep and never closed", "[" * 10_000, (None, -32700)),
    ("byte order mark", b"\xef\xbb\xbf" + request_of(id=1).encode(), (1, ["hello", 5])),
    ("a scalar", "1", (None, -32600)),
    ("a string", '"get_data"', (None, -32600)),
    ("null", "null", (None, -32600)),
    ("an empty object", "{}", (None, -32600)),
    ("a batch in a batch", f"[[{request_of(id=1)}]]", [(None, -32600)]),
    ("a batch over the limit", f"[{','.join([request_of(id=1)] * (BATCH_LIMIT + 1))}]", (None, -32600)),
    ("a batch at the limit", f"[{','.join([request_of(id=1)] * BATCH_LIMIT)}]", [(1, ["hello", 5])] * BATCH_LIMIT),
    ("no version", '{"method":"get_data","id":1}', (1, -32600)),
    ("version 1.0", request_of(jsonrpc="1.0", id=1), (1, -32600)),
    ("version as a number", request_of(jsonrpc=2.0, id=1), (1, -32600)),
    ("no method", '{"jsonrpc":"2.0","id":1}', (1, -32600)),
    ("method null", request_of(method=None, id=1), (1, -32600)),
    ("method an array", request_of(method=["get_data"], id=1), (1, -32600)),
    ("method empty", request_of(method="", id=1), (1, -32601)),
    ("method with the reserved prefix", request_of(method="rpc.get_data", id=1), (1, -32601)),
    ("method in other letters", request_of(method="Get_Data", id=1), (1, -32601)),
    ("method of a Python object", request_of(method="__class__", id=1), (1, -32601)),
    ("params a string", request_of(params="bar", id=1), (1, -32600)),
    ("params a number", request_of(params=7, id="x"), ("x", -32600)),
    ("params null", request_of(params=None, id=1), (1, -32600)),
    ("params missing where needed", request_of(method="subtract", id=1), (1, -32602)),
    ("params too many", request_of(method="subtract", params=[1, 2, 3], id=1), (1, -32602)),
    ("params of another type", request_of(method="subtract", params={"minuend": "x"}, id=1), (1, -32602)),
    ("id null is no notification", request_of(id=None), (None, ["hello", 5])),
    ("id zero", request_of(id=0), (0, ["hello", 5])),
    ("id negative", request_of(id=-1), (-1, ["hello", 5])),
    ("id an empty string", request_of(id=""), ("", ["hello", 5])),
    ("id a fraction", request_of(id=1.5), (1.5, ["hello", 5])),
    ("id beyond 64 bits", request_of(id=2**70), (2**70, ["hello", 5])),
    ("id with a letter beyond ASCII", request_of(id="über"), ("über", ["hello", 5])),
    ("id an object", request_of(id={}), (None, -32600)),
    ("id an array", request_of(id=[1]), (None, -32600)),
    ("id a boolean", request_of(id=True), (None, -32600)),
    ("further members are let pass", request_of(id=1, extra=True), (1, ["hello", 5])),
    ("result null is a result", request_of(method="update", id=1), (1, None)),
    ("own code", request_of(method="own_code", id=1), (1, 7)),
    ("failing method", request_of(method="wordless", id=1), (1, -32603)),
    ("notification of a failing method", request_of(method="wordless"), None),
    ("notification with wrong params", request_of(method="subtract", params=[1]), None),
    ("notification in no batch, invalid", '{"jsonrpc":"2.0","method":1}', (None, -32600)),
    (
        "half a surrogate pair beside a good one",
        '[{"jsonrpc":"2.0","method":"subtract","params":{"x":"\\ud800"},"id":1},' + request_of(id=2) + "]",
        [(1, -32600), (2, ["hello", 5])],
    ),
    (
        "two of one id",
        f"[{request_of(id=1)},{request_of(id=1, method='update')}]",
        [(1, ["hello", 5]), (1, None)],
    ),
    (
        "only an invalid entry among notifications",
        f"[{request_of()},5]",
        [(None, -32600)],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("body", "expected"), [case[1:] for case in PROBES], ids=[case[0] for case in PROBES])
async def test_probe_is_answered_by_the_rules(http: httpx.AsyncClient, body: str | bytes, expected: Any) -> None:
    answer = await ask(http, body)
    if isinstance(expected, list):
        assert [outcome(one) for one in answer] == expected
    else:
        assert (None if answer is None else outcome(answer)) == expected


async def test_ids_come_back_as_the_very_text_that_was_sent(http: httpx.AsyncClient) -> None:
    for text in ("1.50", "1e2", "-0", "123456789012345678901234567890", '"\\u00fc"', "null"):
        response = await http.post("/rpc", content='{"jsonrpc":"2.0","method":"update","id":' + text + "}")
        assert response.text == '{"jsonrpc":"2.0","result":null,"id":' + text + "}"


async def test_text_of_an_exception_stays_inside(http: httpx.AsyncClient) -> None:
    single = await ask(http, request_of(method="wordless", id=1))
    batch = await ask(http, f"[{request_of(method='wordless', id=1)},{request_of(id=2)}]")
    assert "secret" not in json.dumps([single, batch])
    assert "RuntimeError" not in json.dumps([single, batch])
    assert single["error"]["message"] == "Internal error"
    assert set(single["error"]["data"]) == {"ref"}
    assert outcome(batch[1]) == (2, ["hello", 5])


async def test_reference_of_an_internal_error_is_in_the_log_with_the_exception(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = captured_log(monkeypatch)
    answer = await ask(http, request_of(method="wordless", id=1))
    [line] = logged
    assert (line["event"], line["method"], line["error"]) == ("request_failed", "wordless", "RuntimeError")
    assert line["ref"] == answer["error"]["data"]["ref"]
    assert "secret" in str(line["exc_info"])


async def test_a_member_given_twice_harms_nobody(http: httpx.AsyncClient) -> None:
    answer = await ask(
        http, '[{"jsonrpc":"2.0","method":"update","method":"get_data","id":1},' + request_of(id=2) + "]"
    )
    assert outcome(answer[1]) == (2, ["hello", 5])


REAL = [
    ("known method", '{"jsonrpc":"2.0","method":"status","params":{"ids":[1]},"id":1}', (1, [None])),
    ("params by position", '{"jsonrpc":"2.0","method":"status","params":[null,[1]],"id":1}', (1, [None])),
    ("no params where none are needed", '{"jsonrpc":"2.0","method":"rejected.list","id":1}',
     (1, {"rejected": [], "cursor": None})),
    ("too many positions", '{"jsonrpc":"2.0","method":"cancel","params":[1,2],"id":1}', (1, -32602)),
    ("missing param", '{"jsonrpc":"2.0","method":"cancel","id":1}', (1, -32602)),
    ("unknown param", '{"jsonrpc":"2.0","method":"cancel","params":{"id":1,"why":"x"},"id":1}', (1, -32602)),
    ("unknown method", '{"jsonrpc":"2.0","method":"cancle","params":[1],"id":1}', (1, -32601)),
    ("unknown method with the reserved prefix", '{"jsonrpc":"2.0","method":"rpc.describe","id":1}', (1, -32601)),
    ("notification of an unknown method", '{"jsonrpc":"2.0","method":"cancle"}', None),
    ("notification that fails", '{"jsonrpc":"2.0","method":"cancel","params":[99]}', None),
    ("all of a batch notifications", '[{"jsonrpc":"2.0","method":"stats"},{"jsonrpc":"2.0","method":"x"}]', None),
    ("good, bad, silent and no request in one batch",
     '[{"jsonrpc":"2.0","method":"cancel","params":[99],"id":1},7,{"jsonrpc":"2.0","method":"stats"},'
     '{"jsonrpc":"2.0","method":"status","params":{"ids":[5]},"id":"z"}]',
     [(1, -32004), (None, -32600), ("z", [None])]),
]  # fmt: skip


async def test_methods_of_the_api_keep_the_rules(store: Store, settings: Settings) -> None:
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url, headers=JSON) as client:
        for name, body, expected in REAL:
            answer = await ask(client, body)
            if isinstance(expected, list):
                assert [outcome(one) for one in answer] == expected, name
            else:
                assert (None if answer is None else outcome(answer)) == expected, name
