"""Every setting: typed, with unit, default and meaning; checked as a whole before the first connection.

Precedence, written once: arguments, then ``PENSTOCK_*`` environment variables, then ``penstock.toml`` in the
current folder (or the file named by ``PENSTOCK_CONFIG``), then the defaults of the fields. AWS credentials are not
settings: they come from the SDK's own chain.

Each theme of docs/configuration.md is a module with the fields, what one of them may be, and what must fit together
among them; ``model`` makes one object of all, and ``loading`` reads it.
"""

from __future__ import annotations

from penstock.settings.http import is_loopback
from penstock.settings.loading import load_settings, misspelt_variables, sources_of
from penstock.settings.model import Settings
from penstock.settings.values import DAY, PREFIX

__all__ = ["DAY", "PREFIX", "Settings", "is_loopback", "load_settings", "misspelt_variables", "sources_of"]
