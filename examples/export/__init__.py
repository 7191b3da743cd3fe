"""The export example: rows of t_object, transformed, into t_exported_object, each exactly once.

`penstock worker --app examples.export` serves its action, ``export``.
"""

from __future__ import annotations

from examples.export.actions import export

__all__ = ["export"]
