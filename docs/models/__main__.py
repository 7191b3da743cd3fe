"""Checks every model, and that each intended bug is found: `make models`, `make models ARGS="--bug 'no fence'"`."""

from __future__ import annotations

import argparse
import sys
import time

from docs.models import claims, ordering, waits
from docs.models.checker import check

MODELS = (claims.model(), ordering.model(), waits.model())


def main() -> int:
    """Returns the exit code: 0, or 1 if a property does not hold, or a bug is not found."""
    parser = argparse.ArgumentParser(prog="python -m docs.models", description=__doc__)
    bugs = [bug for model in MODELS for bug in model.bugs]
    parser.add_argument("--bug", help="show how this intended bug goes wrong", choices=bugs)
    bug = parser.parse_args().bug
    good = True
    for model in MODELS:
        if bug is not None:
            if bug in model.bugs:
                print(check(model, bug)[1])
            continue
        began = time.monotonic()
        states, found = check(model)
        print(f"{model.name}: {states:,} states in {time.monotonic() - began:.1f} s: {found or 'every property holds'}")
        good &= found is None
        for name in model.bugs:
            _, found = check(model, name)
            print(f"  {name}: {'NOT FOUND' if found is None else f'{found.problem}, in {len(found.path)} steps'}")
            good &= found is not None
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
