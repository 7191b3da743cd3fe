"""Every code block of the documentation is run by a test, held against what it speaks of, or at least read.

What tests of their pages run or hold stands in ``tests.docs_blocks``. The rest is run here, page by page, against one
api, one database and a worker for the tasks: shell commands as they stand, programs, requests. No process is
started. What is neither, programs for other queues and answers, is at least read.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import shlex
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import asyncpg
import httpx
import pytest
from typer.testing import CliRunner

import penstock
from penstock.api.process import Api
from penstock.brokers.base import Outgoing
from penstock.brokers.sqs import SqsTransport
from penstock.cli.app import app
from penstock.db.pool import Store
from penstock.protocol.reports import Succeeded, decode_reports
from penstock.results.spawn import read_spawner
from penstock.runtime.periodic import repeat
from penstock.settings.model import Settings, load_settings
from penstock.settings.values import PREFIX
from penstock.submitter import Submitter
from penstock.supervisor.bulk_jobs import BulkJobs
from penstock.worker.handlers.actions import REGISTRY, Registry
from penstock.worker.handlers.context import Context
from tests.command_lines import find_command, options_of
from tests.docs_blocks import HELD, ROOT, RUN_WHERE, TESTED, Block, all_blocks, blocks_in
from tests.integration.apis import JSON, running
from tests.integration.doors import rejected
from tests.integration.lives import Lives

ADDRESS = "http://127.0.0.1:8080"
SHELL = {"", "sh", "console"}
OTHERS = {
    "python arq",
    "python celery",
    "python procrastinate",
    "python rq",
    "go river",
}  # what readers have now; those libraries are not ours
ELSEWHERE = TESTED | HELD
HERE = [block for block in all_blocks() if (block.page, block.info) not in ELSEWHERE]
# Commands that go on for ever, or change this machine: that there are such, with such options, is all that is checked.
NOT_CALLED = {"up", "down", "ps", "logs", "worker"}
ASKING = {("tasks", verb) for verb in ("cancel", "retry", "delete", "reschedule")}
ENDLESS = {"--interval", "--install-completion", "--show-completion"}
# The server's answer is that the task or workflow is in another state; that it was asked is what the page shows.
REFUSED = {
    ("docs/tasks.md", "penstock task retry 42"): "cannot be retried",
    ("docs/workflows.md", "penstock workflows retry 1"): "cannot be retried",
}
SEEDS = 50  # tasks that are there before a page begins; pages speak of 1 and 42


# Which there are


def is_request(text: str) -> bool:
    """Whether it can be sent: a request, or the params of ``enqueue``."""
    return bool(json.loads(text).keys() & {"method", "action"})


def sort_of(block: Block) -> str:
    if (block.page, block.info) in TESTED:
        return "run by the test of its page"
    if (block.page, block.info) in HELD:
        return "held by the test of its page"
    if block.info in SHELL or block.info in {"python", "sql"} or (block.info == "json" and is_request(block.text)):
        return "run here"
    if block.info in {"json", *OTHERS}:
        return "read here"
    return "nobody's"


def test_every_block_is_run_or_held_or_read() -> None:
    assert [block.place for block in all_blocks() if sort_of(block) == "nobody's"] == []
    counted = Counter(map(sort_of, all_blocks()))
    print(dict(counted))
    assert counted["run by the test of its page"] > 100
    assert counted["run here"] > 50
    assert counted["read here"] <= 11, "so many blocks that are but read? run or hold them, or raise this knowingly"


def test_no_block_is_in_the_register_twice_and_those_run_by_a_tool_are_held_as_well() -> None:
    assert TESTED.keys() & HELD.keys() == set()
    assert RUN_WHERE.keys() <= HELD.keys()
    tools = {"terraform", "kubectl", "docker", "npm"}
    assert {tool for tool, _ in RUN_WHERE.values()} == tools
    for block in HERE:
        if block.info in SHELL:
            assert not {words[0] for words in commands(block.text)} & tools, block.place


@pytest.mark.parametrize(
    ("key", "test"),
    [*ELSEWHERE.items(), *((key, test) for key, (_, test) in RUN_WHERE.items())],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value.rpartition("::")[2],
)
def test_a_test_that_is_said_to_run_or_hold_blocks_is_there_and_reads_their_page(
    key: tuple[str, str], test: str
) -> None:
    assert any((block.page, block.info) == key for block in all_blocks()), "there is no such block any more"
    path, _, name = test.partition("::")
    source = (ROOT / path).read_text("utf-8")
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    assert name in {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, functions)}
    page, info = key
    assert Path(page).name in source or (" " in info and f'"{info}"' in source)


def test_blocks_are_found_wherever_they_stand() -> None:
    text = "a\n```\nb\n```\n1. c\n\n   ```sh x\n   d\n     e\n\n   ```\n\n```` python\n```\n````\n"
    assert [(b.line, b.info, b.text) for b in blocks_in("p", text)] == [
        (2, "", "b\n"), (7, "sh x", "d\n  e\n\n"), (13, "python", "```\n"),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="p:1: the block has no end"):
        list(blocks_in("p", "```\nx\n"))


def test_commands_are_told_from_what_they_print() -> None:
    assert [*commands("a 'b\nc' \\\n  d  # e\n# f\n\nX=1 g | h >> i\n")] == [
        ["a", "b\nc", "d"], ["X=1", "g", "|", "h", ">>", "i"],
    ]  # fmt: skip
    assert [*commands("$ a b\nprinted\n$ c\n")] == [["a", "b"], ["c"]]


# Read


@pytest.mark.parametrize("block", [b for b in HERE if sort_of(b) == "read here"], ids=lambda block: block.place)
def test_what_is_not_to_be_run_can_be_read(block: Block) -> None:
    match block.info:
        case "json":
            assert isinstance(json.loads(block.text), dict)
            (report,) = decode_reports(block.text, batch_limit=1)
            assert isinstance(report, Succeeded)
            if report.spawn:
                read_spawner(report.spawn, load_settings())
        case "python arq" | "python celery" | "python procrastinate" | "python rq":
            compile(block.text, block.place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
        case "go river":
            assert all(block.text.count(opening) == block.text.count(end) for opening, end in ("()", "{}", "[]"))


# Run


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command; ``|``, ``>>`` and ``&&`` are words of their own."""
    lines = text.splitlines()
    if any(line.startswith("$ ") for line in lines):
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    whole = ""
    for line in lines:
        if line.endswith("\\"):
            whole += line[:-1]
            continue
        whole += line + "\n"
        lexer = shlex.shlex(whole, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            words = [*lexer]
        except ValueError:  # a quotation that goes on
            continue
        whole = ""
        if words:
            yield [word.strip("\n") if word.isspace() else word for word in words]
    assert not whole, f"a quotation has no end: {whole}"


@dataclass
class Stage:
    """What the blocks of a page are run against. env: what commands of the page are given, and what it exports."""

    page: str
    api: Api
    store: Store
    settings: Settings
    transport: SqsTransport
    env: dict[str, str]
    names: dict[str, Any] = field(default_factory=dict)

    async def run(self, block: Block) -> None:
        if block.info == "python":
            await self.program(block)
        elif block.info == "sql":
            await self.names["connection"].execute(block.text)
        elif block.info == "json":
            request = json.loads(block.text)
            if "method" not in request:
                request = {"jsonrpc": "2.0", "method": "enqueue", "params": request, "id": 1}
            async with httpx.AsyncClient(base_url=self.api.url, headers=JSON) as http:
                answer = (await http.post("/rpc", json=request)).json()
            assert "result" in answer, answer
        else:
            for words in commands(block.text):
                await self.command(words)

    async def program(self, block: Block) -> None:
        source = block.text.replace(ADDRESS, self.api.url)
        code = compile(source, block.place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        names = self.names
        if code.co_flags & 0x80:  # a coroutine: it awaits at its top
            await eval(code, names)
        else:
            await asyncio.to_thread(exec, code, names)

    async def command(self, words: list[str]) -> None:
        given = {}
        while words and (match := re.fullmatch(r"(\w+)=(.*)", words[0], re.DOTALL)):
            given[match[1]] = match[2]
            words = words[1:]
        if words[:1] == ["export"]:
            exported = dict(word.split("=", 1) for word in words[1:])
            given, words = given | exported, []
            self.env |= exported
        if given:
            settings = {name: value for name, value in given.items() if name.startswith(PREFIX)}
            assert settings == given
            load_settings(**{name.removeprefix(PREFIX).lower(): value for name, value in settings.items()})
        if not words:
            return
        for mark in ("|", ">>"):
            if mark in words:
                place = words.index(mark)
                words, rest = words[:place], words[place + 1 :]
                printed = await self.call(words)
                if mark == "|":
                    assert rest[0] == "jq"
                    value = json.loads(printed)
                    for member in rest[1].strip(".").split("."):
                        value = value[member]
                return
        await self.call(words)

    async def call(self, words: list[str]) -> str:
        match words[0].removeprefix(".venv/bin/"):
            case "penstock":
                return await self.penstock(words[1:])
            case "curl":
                await self.curl(words[1:])
            case "aws":
                await self.aws(words[1:])
            case "make":
                makefile = (ROOT / "Makefile").read_text("utf-8")
                variables = {word.partition("=")[0] for word in words[1:] if "=" in word}
                assert variables <= {*re.findall(r"\$[({]{1,2}(\w+)", makefile)}
                targets = re.findall(r"^([\w-]+):", makefile, re.MULTILINE)
                assert {word for word in words[1:] if "=" not in word} <= set(targets)
            case "python":
                assert words[1] == "-m"
                found = find_spec(words[2])
                assert found is not None
                assert found.origin is not None
                source = Path(found.origin).read_text("utf-8")
                assert all(f'"{word}"' in source for word in words[3:] if word.startswith("--"))
            case "pip":
                extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
                wanted = re.fullmatch(r"penstock\[([\w,]+)\]", " ".join(words[2:]))
                assert words[1] == "install"
                assert wanted is not None
                assert set(wanted[1].split(",")) <= set(extras)
            case other:
                raise AssertionError(f"{other}: nothing runs this; teach it here, or have a test of its page run it")
        return ""

    async def penstock(self, words: list[str]) -> str:
        if words[0] in NOT_CALLED or ENDLESS & set(words):
            self.parse(words)
            return ""
        asks = (
            tuple(words[:2]) in ASKING and "--dry-run" not in words
        )  # a question is for a terminal, which this is not
        given = [*words, "--yes"] if asks else words
        refusal = REFUSED.get((self.page, f"penstock {' '.join(words)}"))
        done = await asyncio.to_thread(CliRunner().invoke, app, given, env=self.env)
        deadline = time.monotonic() + 30
        while refusal is not None and done.exit_code == 0 and time.monotonic() < deadline:
            await asyncio.sleep(0.1)  # what it names still runs, and is left as it is
            done = await asyncio.to_thread(CliRunner().invoke, app, given, env=self.env)
        printed = f"{done.output}{done.exception or ''}"
        if refusal is None:
            assert done.exit_code == 0, (words, printed)
        else:
            assert (done.exit_code, refusal in printed) == (1, True), (words, printed)
        return done.stdout

    def parse(self, words: list[str]) -> None:
        command, words = find_command(words)
        if hasattr(command, "commands"):  # an option of penstock itself
            assert words[0] in options_of(command)
        else:
            command.make_context(command.name, words)

    async def curl(self, words: list[str]) -> None:
        url, headers, body = "", {}, None
        while words:
            word, *words = words
            match word:
                case "-s":
                    pass
                case "-H":
                    name, _, value = words.pop(0).partition(": ")
                    headers[name] = value
                case "-d":
                    body = words.pop(0)
                case _:
                    url = word
        assert url.startswith(ADDRESS + "/")
        async with httpx.AsyncClient(base_url=self.api.url, headers=headers) as http:
            path = url.removeprefix(ADDRESS)
            answer = await (http.get(path) if body is None else http.post(path, content=body))
        assert answer.status_code == 200, answer.text
        assert "error" not in answer.json(), answer.text

    async def aws(self, words: list[str]) -> None:
        """What is sent to a queue is taken by the submitter."""
        assert words[:2] == ["sqs", "send-message"]
        options = dict(zip(words[2::2], words[3::2], strict=True))
        body = options.pop("--message-body")
        assert options == {
            "--endpoint-url": "$PENSTOCK_SQS_ENDPOINT_URL", "--region": "$PENSTOCK_AWS_REGION",
            "--queue-url": "$(penstock ps --json | jq -r .queues.inbound)",
        }  # fmt: skip
        inbound = self.transport.queue(self.settings.inbound_queue, label="inbound")
        assert (await inbound.send([Outgoing(body)])).failed == []
        submitter = Submitter(store=self.store, inbound=inbound, settings=self.settings)
        while not await submitter.run_once():
            pass
        assert await rejected(self.store) == []


@asynccontextmanager
async def everything_done(store: Store, settings: Settings) -> Any:
    """A worker runs the tasks, whatever their actions are, and what a supervisor does for workflows and jobs."""
    lives = Lives(store, settings)
    jobs = BulkJobs(store=store, changed=lambda: None)

    async def live() -> None:
        while True:
            await lives.live(lambda action, payload: ["a"])
            await asyncio.sleep(0.02)

    tasks = [asyncio.create_task(live()), asyncio.create_task(repeat("bulk jobs", jobs.work_then_rest))]
    try:
        yield
        assert not [task for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def names_for(page: str, database_url: str) -> tuple[dict[str, Any], Any]:
    """What programs of a page take from their surroundings, and a connection among it that is to be closed."""
    connection = await asyncpg.connect(database_url)
    await connection.execute("create table orders (id bigint primary key)")

    async def nothing(*_: Any) -> Any:
        return SimpleNamespace(wait=nothing, kill=lambda: None)

    @penstock.action(registry=Registry())
    async def receipt(order: int, to: str) -> None: ...

    common = {
        "receipt": receipt,
        "send": nothing,
        "find_links": list,
        "fetch": lambda url, width: width,
        "Busy": OSError,
        "busy": lambda: False,
        "list_files": lambda _: ["a", "b"],
        "resize": nothing,
        "start": nothing,
    }
    imported = {name: getattr(penstock, name) for name in ("Context", "action", "Client")}
    return {**common, **imported, "asyncio": asyncio, "penstock": penstock, "connection": connection}, connection


# Handlers that a page defines are called as well: (action, parameters).
CALLED = {
    "README.md": [("resize", {"url": "u", "width": 1})],
    "docs/moving-from-celery.md": [("resize", {"url": "u", "width": 1})],
    "docs/moving-from-postgres-queues.md": [("welcome", {"user": 7})],
    "docs/tasks.md": [("resize-all", {"ids": [1, 2]}), ("transcode", {"url": "u"})],
    "docs/workflows.md": [("scan", {"folder": "f"})],
}


@pytest.fixture
def forgotten_handlers() -> Iterator[None]:
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


@pytest.mark.parametrize("page", sorted({block.page for block in HERE if sort_of(block) == "run here"}))
async def test_every_block_of_a_page_that_no_test_of_its_own_runs(
    page: str,
    store: Store,
    settings: Settings,
    database_url: str,
    transport: SqsTransport,
    forgotten_handlers: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    async with store.session() as session:
        await session._connection.execute(
            "insert into penstock.task (state, action, payload, priority, run_at, max_attempts, created_at, updated_at)"
            " select 'SCHEDULED', 'seed', '{}', 0, now(), 10, now(), now() from generate_series(1, $1)", SEEDS,
        )  # fmt: skip
    names, connection = await names_for(page, database_url)
    async with running(store, settings) as api, everything_done(store, settings):
        names_of = ("inbound_queue", "outbound_queue", "results_queue")
        queues = {PREFIX + name.upper(): getattr(settings, name) for name in names_of}
        env = queues | {
            "PENSTOCK_API_URL": api.url, "PENSTOCK_DATABASE_URL": database_url, "COLUMNS": "200", "NO_COLOR": "1",
            "PENSTOCK_SQS_ENDPOINT_URL": str(settings.sqs_endpoint_url), "PENSTOCK_AWS_REGION": "us-east-1",
            "PENSTOCK_METRICS_PORT": "0",
        }  # fmt: skip
        stage = Stage(page, api, store, settings, transport, env, names)
        for block in HERE:
            if block.page == page and sort_of(block) == "run here":
                try:
                    await asyncio.wait_for(stage.run(block), 120)
                except Exception as exc:
                    raise AssertionError(f"{block.place}: {exc}") from exc
    await connection.close()
    for name, params in CALLED.get(page, ()):
        handler = REGISTRY.get(name)
        assert handler is not None, name
        args, kwargs = handler.fit(json.dumps(params).encode())
        returned = handler.function(Context(1, 1, name), *args, **kwargs)
        if handler.is_async:
            await returned
    assert os.environ.get("PENSTOCK_API_URL") is None
