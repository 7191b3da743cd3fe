from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

import penstock

# What users may rely on. A name that is added or taken away here is a change of the contract: see CHANGELOG.md.
PUBLIC = [
    "AsyncClient",
    "Backoff",
    "Batcher",
    "Call",
    "Client",
    "Context",
    "Fail",
    "InboundClient",
    "NoResult",
    "PenstockError",
    "ResultGone",
    "ResultTimeout",
    "Retry",
    "RpcError",
    "Settings",
    "SettingsError",
    "TaskCalledOff",
    "TaskCancelled",
    "TaskFailed",
    "Unavailable",
    "Wait",
    "Workflow",
    "__version__",
    "action",
    "enqueue",
    "enqueue_many",
    "enqueue_many_sync",
    "enqueue_sync",
    "load_settings",
]


def test_the_public_names_are_these() -> None:
    assert sorted(penstock.__all__) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_can_be_imported_and_has_a_docstring(name: str) -> None:
    value = getattr(penstock, name)
    if name != "__version__":
        assert inspect.getdoc(value)
        assert value is getattr(importlib.import_module(value.__module__), name)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = penstock.nonsense


def test_the_version_is_the_one_of_the_package() -> None:
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    assert f'\nversion = "{penstock.__version__}"\n' in pyproject.read_text("utf-8")


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(penstock.__file__).parent / "py.typed").is_file()
