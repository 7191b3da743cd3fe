"""The models of docs/models: all their states hold what they must, and every intended bug is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.models.__main__ import MODELS
from docs.models.checker import Model, check

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_state_holds_and_every_bug_is_found(model: Model) -> None:
    states, found = check(model)
    assert found is None, str(found)
    assert states > 100
    for bug in model.bugs:
        _, found = check(model, bug)
        assert found is not None, bug
        assert len(found.path) < 15


def test_the_page_names_every_model_and_bug() -> None:
    page = (ROOT / "docs/models/README.md").read_text("utf-8")
    for model in MODELS:
        assert f"`{model.name}.py`" in page
        for bug in model.bugs:
            assert bug in page
