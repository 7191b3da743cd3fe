"""Runs plans in a process of its own, whose clock is simulated: one JSON line for each on standard output."""

import sys

from tests.simulation import clock, mutations

clock.install()
mutations.break_modules(sys.argv)

import argparse  # noqa: E402 - after the clock, of which they take the functions by name
import gc  # noqa: E402
import json  # noqa: E402
import random  # noqa: E402
from dataclasses import replace  # noqa: E402
from functools import partial  # noqa: E402
from pathlib import Path  # noqa: E402

from penstock.db.statements import SQL  # noqa: E402
from tests.simulation.checks import Violation  # noqa: E402
from tests.simulation.database import Bridge  # noqa: E402
from tests.simulation.loop import Stalled  # noqa: E402
from tests.simulation.plan import Plan, draw_plan, read_plan  # noqa: E402
from tests.simulation.world import World  # noqa: E402

# Makes the partitions of the simulated days, and prepares the statements; of those below 0 one that ends early whatever
# is broken.
_WARM_UP = -2


def run(bridge: Bridge, plan: Plan) -> dict[str, object]:
    world = World(bridge, plan)
    problem, digest = None, ""
    try:
        digest = world.run()
    except Violation as violation:
        problem = str(violation)
    except Stalled:
        problem = "nothing will ever happen again"
    return {
        "seed": plan.seed, "digest": digest, "problem": problem, "seconds": round(clock.Clock.now, 1),
        "commits": world.checks.commits, "statements": world.statements,
        "kills": world.kills, "succeeded": world.checks.succeeded, "history": world.history if problem else [],
        "lines": world.lines, "trace": world.checks.commits_seen, "retried": sorted(world.checks.retried),
    }  # fmt: skip


def shrink(bridge: Bridge, plan: Plan) -> Plan:
    """The smallest plan found that still fails: parts are left out, large ones first, while it fails without them."""
    for kind in ("kills", "holds", "outages", "calls"):
        size = max(1, len(getattr(plan, kind)) // 2)
        while True:
            start = 0
            while start < len(getattr(plan, kind)):
                smaller = plan.without(kind, start, size)
                if run(bridge, smaller)["problem"] is not None:
                    plan = smaller
                else:
                    start += size
            if size == 1:
                break
            size //= 2
    return plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True, help="of a database that tests.simulation has prepared")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--shrink", type=Path, help="where the smallest failing plan is written")
    parser.add_argument("--mutation", choices=sorted(mutations.MUTATIONS))
    parser.add_argument("--traces", action="store_true", help="with what each commit left of the tasks it changed")
    parser.add_argument("--lines", type=Path, help="a folder for a file of each run, with every statement and its rows")
    parser.add_argument("--backwards", action="store_true", help="run the last seed first")
    parser.add_argument("--forwards", action="store_false", dest="backwards")
    parser.add_argument("--lag", action="store_true", help="statements take longer, in real time and by chance")
    parser.add_argument("--until-failure", action="store_true", help="run no seed after one that fails")
    args = parser.parse_args()
    if args.mutation:
        mutations.break_statements(args.mutation, SQL)
    gc.disable()
    lag = partial(random.Random().choice, (0.0, 0.0, 0.001, 0.004)) if args.lag else lambda: 0.0
    bridge = Bridge(args.url, lag=lag)
    run(bridge, replace(draw_plan(_WARM_UP, 5), fault_share=0.0, kills=(), holds=(), outages=()))
    plans = (
        [read_plan(args.plan)]
        if args.plan
        else [draw_plan(seed, args.steps) for seed in range(args.first, args.first + args.seeds)]
    )
    for plan in reversed(plans) if args.backwards else plans:
        outcome = run(bridge, plan)
        if outcome["problem"] is not None and args.shrink is not None:
            smallest = shrink(bridge, plan)
            smallest.write(args.shrink)
            outcome = run(bridge, smallest)
        lines = outcome.pop("lines")
        if args.lines is not None:
            assert isinstance(lines, list)
            (args.lines / plan.seed).write_text("\n".join(lines))
        if not args.traces:
            outcome.pop("trace")
        json.dump(outcome, sys.stdout)
        print(flush=True)
        if args.until_failure and outcome["problem"] is not None:
            break


if __name__ == "__main__":
    main()
