from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", ROOT / ".ci" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entry(name: str, *found: str) -> dict[str, Any]:
    return {"name": name, "version": "1.0", "vulns": [{"id": one, "fix_versions": ["1.1"]} for one in found]}


def test_what_ships_is_audited_with_what_it_needs_and_tools_of_development_are_not(audit: ModuleType) -> None:
    versions = audit.shipped(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8")))
    assert {"asyncpg", "starlette", "uvicorn", "aiobotocore", "botocore", "aiohttp", "anyio", "psutil"} <= set(versions)
    assert {"cryptography", "cffi", "aiormq", "confluent-kafka", "fastavro", "opentelemetry-sdk", "protobuf"} <= set(
        versions
    )
    assert not {"pytest", "mypy", "ruff", "moto"} & set(versions)
    assert all(version[0].isdigit() for version in versions.values())


def test_known_vulnerability_fails_the_check_with_its_number_and_the_version_that_mends_it(audit: ModuleType) -> None:
    code, lines = audit.verdict({"dependencies": [entry("good"), entry("bad", "PYSEC-1", "CVE-2")]})
    assert code == 1
    assert lines[:2] == ["bad 1.0: PYSEC-1, fixed in 1.1", "bad 1.0: CVE-2, fixed in 1.1"]
    assert lines[2] == "vulnerabilities: 2 in 2 packages"


def test_none_known_passes_and_tells_how_many_were_looked_at(audit: ModuleType) -> None:
    report = {"dependencies": [entry("good"), {"name": "private", "skip_reason": "not found"}]}
    assert audit.verdict(report) == (0, ["vulnerabilities: 0 in 1 packages (1 not known)"])


def test_database_that_knows_nothing_is_not_taken_for_good_news(audit: ModuleType) -> None:
    code, lines = audit.verdict({"dependencies": [{"name": "a", "skip_reason": "not found"}]})
    assert code == 0
    assert "not looked for" in lines[0]
    assert audit.verdict({"dependencies": [{"name": "a", "skip_reason": "not found"}]}, required=True)[0] == 1


def test_unreachable_database_is_said_and_fails_nothing(audit: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    code, lines = audit.ask({"no-such-package-of-ours": "1.0"})
    assert code == 0
    assert "not looked for" in lines[0]
    assert audit.ask({"no-such-package-of-ours": "1.0"}, required=True) == (1, lines)
