"""What `penstock up` suggests to try, an action of the app with its parameters: `python -m` with the modules of --app,
a process of its own, since it imports them."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from penstock.worker.announcing import schemas
from penstock.worker.handlers.actions import REGISTRY, load_app

# By the type in a parameter's schema.
_EXAMPLES = {"string": "text", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}


def suggestion(apps: Sequence[str]) -> dict[str, Any] | None:
    """An action of these modules and a payload for it; None where there is none. Raises SettingsError."""
    for app in apps:
        load_app(app)
    handlers = sorted(REGISTRY.values(), key=lambda handler: handler.batch is not None)
    if not handlers:
        return None
    params, _ = schemas(handlers[0])
    properties = params.get("properties", {})
    payload = {name: _EXAMPLES.get(properties[name].get("type"), "...") for name in params.get("required", ())}
    return {"action": handlers[0].name, "payload": payload}


if __name__ == "__main__":
    print(json.dumps(suggestion(sys.argv[1:])))
