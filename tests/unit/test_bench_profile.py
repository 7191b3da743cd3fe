"""Profiles need a program that may be missing, which is reported before anything is filled."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.harness.profile import Profiler
from penstock.protocol.errors import SettingsError


def test_missing_py_spy_is_told_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(SettingsError, match="pip install py-spy"):
        Profiler(tmp_path / "profiles", "drain")
    assert not (tmp_path / "profiles").exists()
