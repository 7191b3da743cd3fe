"""A chain as the steps that it stands for. Pure."""

from __future__ import annotations

import msgspec

from penstock.protocol.errors import InvalidParams
from penstock.workflows.names import FreeNames
from penstock.workflows.params import StepParams


def linked_steps(chain: list[StepParams | list[StepParams]]) -> list[StepParams]:
    """A chain as steps: each after the one before, a group after that and before what follows.

    Between two groups stands a step without an action, so that their widths add up and do not multiply.
    """
    steps: list[StepParams] = []
    names = FreeNames(step.name for link in chain for step in (link if isinstance(link, list) else [link]))
    before: list[str] = []
    for place, link in enumerate(chain):
        group = link if isinstance(link, list) else [link]
        if not group:
            raise InvalidParams(f"chain[{place}]", "is an empty group")
        if len(group) > 1 and len(before) > 1:
            joint = names.free("join")
            steps.append(StepParams(name=joint, after=before))
            before = [joint]
        called = []
        for step in group:
            if step.after:
                raise InvalidParams(f"chain[{place}].after", "goes with steps; in a chain the place says it")
            name = step.name if step.name is not None else names.free((step.action or "join").replace("/", "-"))
            called.append(name)
            steps.append(msgspec.structs.replace(step, name=name, after=before))
        before = called
    return steps
