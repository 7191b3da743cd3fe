from __future__ import annotations

import pytest

from penstock.protocol.errors import SettingsError
from penstock.settings.model import load_settings
from penstock.settings.values import named_url


@pytest.mark.parametrize(
    ("entry", "name", "url"),
    [
        ("http://host:9464", "", "http://host:9464"),
        ("worker-1=http://host:9464", "worker-1", "http://host:9464"),
        ("a.b_c=https://[::1]:1/x=y", "a.b_c", "https://[::1]:1/x=y"),
        ("http://host/?a=b", "", "http://host/?a=b"),
    ],
)
def test_a_url_stands_alone_or_behind_its_name(entry: str, name: str, url: str) -> None:
    assert named_url(entry) == (name, url)
    assert load_settings(dashboard_processes=f"{entry} , {entry}").dashboard_processes == (entry, entry)


@pytest.mark.parametrize(
    "entry",
    ["host:9464", "a=host", "a b=http://host", "=", "http://", "x" * 61 + "=http://h", "http://host:99999", "a=http://host:x",
     "http://host:0"],
)  # fmt: skip
def test_what_is_none_is_an_error_that_shows_it(entry: str) -> None:
    with pytest.raises(SettingsError, match="PENSTOCK_DASHBOARD_PROCESSES") as caught:
        load_settings(dashboard_processes=entry)
    assert entry[:100] in str(caught.value)


@pytest.mark.parametrize("entry", ["http://me:secret@host:1", "a=https://me:secret@host:1"])
def test_a_password_is_refused_and_not_shown(entry: str) -> None:
    with pytest.raises(SettingsError, match="no user and no password") as caught:
        load_settings(dashboard_processes=entry)
    assert "secret" not in str(caught.value)
