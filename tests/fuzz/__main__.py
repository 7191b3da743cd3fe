"""Looks for inputs that a reader cannot cope with, led by what they cover: `make fuzz TARGET=cron MINUTES=10`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["penstock", "cronsim"]):
    from tests.fuzz import targets

FOUND = Path(__file__).with_name("corpus")  # inputs that went wrong once; the tests give them to their targets
LEARNT = Path(__file__).parents[2] / "build" / "fuzz"  # inputs that cover something of their own; not kept in git


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=sorted(targets.TARGETS))
    parser.add_argument("--minutes", type=float, default=1)
    args = parser.parse_args()
    learnt, found = LEARNT / args.target, FOUND / args.target
    for folder in (learnt, found):
        folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(targets.TARGETS[args.target][1]):
        (learnt / f"seed-{number}").write_bytes(seed)
    options = (
        f"-max_total_time={round(args.minutes * 60)}", f"-max_len={targets.LONGEST_BYTES}", "-timeout=10",
        "-rss_limit_mb=1024", f"-artifact_prefix={found}/", str(learnt), str(found),
    )  # fmt: skip
    atheris.Setup([sys.argv[0], *options], lambda data: targets.run(args.target, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
