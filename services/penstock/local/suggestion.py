"""What `penstock up` suggests to try: an action of the app, with the parameters that it asks for.

`python -m penstock.local.suggestion MODULE...`, a process of its own, since it imports the modules of --app.
"""

import inspect
import json
import sys
from collections.abc import Sequence
from typing import Any

from penstock.worker.handlers.actions import REGISTRY, Handler, load_app
from penstock.worker.handlers.parameters import resolve

_EXAMPLES: dict[Any, Any] = {str: "text", int: 1, float: 1.5, bool: True, list: [], dict: {}, tuple: [], set: []}


def suggestion(apps: Sequence[str]) -> dict[str, Any] | None:
    """An action of these modules and a payload for it; None where there is none. Raises SettingsError."""
    for app in apps:
        load_app(app)
    handlers = sorted(REGISTRY.values(), key=lambda handler: handler.batch is not None)
    return {"action": handlers[0].name, "payload": _payload(handlers[0])} if handlers else None


def _payload(handler: Handler) -> dict[str, Any]:
    if handler.batch is not None:
        return {}
    found = {}
    parameters = [*inspect.signature(handler.function).parameters.values()]
    for parameter in parameters[handler.takes_context :]:
        wanted = resolve(parameter.annotation, handler.function)
        is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if is_named and parameter.default is parameter.empty:
            found[parameter.name] = _EXAMPLES.get(getattr(wanted, "__origin__", wanted), "...")
    return found


if __name__ == "__main__":
    print(json.dumps(suggestion(sys.argv[1:])))
