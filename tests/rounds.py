"""State machines, run until they have met what their test is about."""

from __future__ import annotations

import os
from collections.abc import Callable

from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

FIRST_SEED = int(os.environ.get("FUZZ_SEED", "0"))  # another number tries other lives
MOST_ROUNDS = 20


def run_rounds(
    machine: type[RuleBasedStateMachine], is_enough: Callable[[], bool], *, examples: int, steps: int
) -> None:
    """Runs the machine over and over, each time by another seed, until it is enough.

    The seeds are the same in each run: a rare step that one run meets is met by the next, on any machine. Without
    them hypothesis repeats the very same lives in each round where ``CI`` is set.
    """
    run = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
    )
    for number in range(FIRST_SEED, FIRST_SEED + MOST_ROUNDS):
        run_state_machine_as_test(seed(number)(machine), settings=run)
        if is_enough():
            return
