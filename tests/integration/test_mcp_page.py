"""docs/mcp.md against a real api: what it has clients configured with, and what it says that is answered."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from penstock.api.keys import CreateKey, create_key
from penstock.api.mcp import CONFIRM_SECONDS, EARLIER, SHOWN_CHARS, TOOLS, VERSION
from penstock.db.pool import Store
from penstock.protocol.api_key import Permission
from penstock.protocol.task import NewTask
from penstock.settings.model import Settings
from tests.docs_blocks import ROOT, all_blocks
from tests.integration.api.test_mcp import Agent, added, official
from tests.integration.apis import running

BLOCKS = {block.info: block.text for block in all_blocks() if block.page == "docs/mcp.md"}
PAGE = (ROOT / "docs" / "mcp.md").read_text("utf-8")


def connection(kind: str, key: str) -> tuple[str, dict[str, str]]:
    """URL and headers as the client sends them, by the variables that it fills in."""
    text = BLOCKS[kind]
    for variable in (
        "$PENSTOCK_API_KEY",
        "${PENSTOCK_API_KEY}",
        "${env:PENSTOCK_API_KEY}",
        "${input:penstock-key}",
        "the-key",
    ):
        text = text.replace(variable, key)
    if kind == "sh claude":
        words = shlex.split(text)
        assert words[:5] == ["claude", "mcp", "add", "--transport", "http"]
        url, header = words[6], words[words.index("--header") + 1]
        return url, dict([header.split(": ")])
    servers = json.loads(text)
    server = servers["servers" if kind == "json vscode" else "mcpServers"]["penstock"]
    if kind == "json desktop":
        url, header = server["args"][2], server["args"][server["args"].index("--header") + 1]
        name, _, value = header.partition(":")
        return url, {name: re.sub(r"\$\{(\w+)\}", lambda found: server["env"][found[1]], value)}
    if kind == "json vscode":
        assert servers["inputs"][0]["id"] == "penstock-key"
    assert server.get("type", "http") == "http"
    return server["url"], server["headers"]


@pytest.mark.parametrize("kind", ["sh claude", "json claude", "json vscode", "json cursor", "json desktop"])
async def test_the_settings_of_each_client_reach_the_api_with_its_key(
    store: Store, settings: Settings, kind: str
) -> None:
    async with store.session() as session:
        made = await create_key(session, CreateKey("agent", [Permission.READ]))
    assert made is not None
    url, headers = connection(kind, made.key)
    assert url == "https://penstock.example.com/mcp"
    async with running(store, settings.model_copy(update={"api_require_keys": True})) as api:
        agent = Agent(api)
        agent.headers = headers
        async with official(agent, "auto") as client:
            assert "task_explain" in {tool.name for tool in (await client.list_tools()).tools}


async def test_the_first_answer_of_the_page_has_what_the_api_answers(store: Store, settings: Settings) -> None:
    shown = json.loads(BLOCKS["json first"])
    await added(store, NewTask("a"))
    async with running(store, settings) as api:
        answer = await Agent(api).call("bulk_cancel", all=True)
    assert list(answer) == list(shown)
    assert list(answer["about"]) == list(shown["about"])
    assert answer["next"] == shown["next"]
    assert [len(part) for part in answer["confirm"].split(".")][2] == len(shown["confirm"].split(".")[2])


def test_names_and_figures_of_the_page_are_those_of_the_code() -> None:
    table = PAGE.split("## Tools")[1].split("## Changes")[0]
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)*)`", table)) - {"read", "admin", "enqueue"}
    assert len(named) > 8
    assert named - {"isError"} <= set(TOOLS)
    assert f"{SHOWN_CHARS:,} characters" in PAGE
    assert f"for {CONFIRM_SECONDS:.0f} seconds" in PAGE
    assert f"Protocol versions {VERSION}, {' and '.join(EARLIER)}," in PAGE
