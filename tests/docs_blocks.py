"""Every code block of the documentation, and who sees to it that it is true."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from docs.generated import MARK

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (
        *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("terraform/*.md"),
        *ROOT.glob("benchmarks/*.md"),
    )
    if "node_modules" not in path.parts
)  # fmt: skip

# Why a block is not run: said by a comment on the line before it, `<!-- not run: REASON -->`.
REASONS = {
    "a drawing": "nothing that a program would read",
    "a formula": "nothing that a program would read",
    "needs AWS": "an account, or what terraform made in one",
    "needs Docker": "an image, and a daemon to run it",
    "needs Kubernetes": "a cluster",
    "needs npm": "packages from a registry",
    "installs": "the wheel is built and installed by tests/acceptance/test_packaging.py, in other words",
}

# Blocks that tests of their pages run or hold against the code: (page, what stands behind the fence) by test.
TESTED = {
    ("docs/autoscaling.md", "json lane"): "tests/integration/test_scaling.py::"
    "test_a_lane_is_plain_numbers_as_the_page_shows_and_all_lanes_stand_by_name",
    ("docs/batches.md", "python app"): "tests/integration/test_waiting_page.py::"
    "test_the_handler_of_the_batches_page_answers_for_each",
    ("docs/cli.md", "generated"): "tests/unit/test_cli_tree.py::test_the_page_has_the_reference_of_these_commands",
    ("docs/deliveries.md", "toml"): "tests/integration/test_deliveries_page.py::test_every_example_is_true",
    ("docs/deliveries.md", "json http"): "tests/integration/test_deliveries_page.py::test_every_example_is_true",
    ("docs/deliveries.md", "python"): "tests/integration/test_deliveries_page.py::test_every_example_is_true",
    ("docs/deliveries.md", "json kafka"): "tests/integration/test_moving_pages.py::"
    "test_the_examples_of_kafka_publish_are_answered_as_the_page_says",
    ("docs/moving-from-clockwork.md", "http clockwork"): "tests/integration/test_moving_pages.py::"
    "test_the_requests_of_the_clockwork_page_are_answered_as_it_says",
    ("docs/moving-from-kafka-message-scheduler.md", "json schedule"): "tests/integration/test_moving_pages.py::"
    "test_the_schedule_of_the_page_is_one",
    ("docs/payloads.md", "python"): "tests/integration/test_payloads_page.py::test_the_programs_of_the_page_run",
    ("docs/protocol.md", "json http"): "tests/integration/test_protocol_page.py::"
    "test_every_example_of_the_protocol_page_is_true",
    ("docs/results.md", "python"): "tests/integration/test_results_page.py::"
    "test_the_example_of_the_results_page_prints_what_it_says",
    ("docs/states.md", "mermaid"): "tests/unit/test_states_page.py::"
    "test_the_diagram_draws_every_transition_and_no_other",
    ("docs/tasks.md", "json http"): "tests/integration/test_tasks_page.py::"
    "test_every_example_of_the_tasks_page_is_true",
    ("docs/tenants.md", "json http"): "tests/integration/test_tenants_page.py::"
    "test_every_example_of_the_tenants_page_is_true",
    ("docs/tracing.md", "shell trace"): "tests/integration/test_tracing_page.py::"
    "test_the_example_of_the_tracing_page_reaches_a_collector",
    ("docs/tracing.md", "python app"): "tests/integration/test_tracing_page.py::"
    "test_the_example_of_the_tracing_page_reaches_a_collector",
    ("docs/tracing.md", "json traces"): "tests/integration/test_tracing_page.py::"
    "test_the_attribute_of_the_page_is_read_as_it_says",
    ("docs/transactions.md", "python"): "tests/integration/test_transactions_page.py::"
    "test_every_example_of_the_transactions_page_runs",
    ("docs/transactions.md", "sql"): "tests/integration/test_transactions_page.py::"
    "test_every_example_of_the_transactions_page_runs",
    ("docs/waiting.md", "python app"): "tests/integration/test_waiting_page.py::"
    "test_every_example_of_the_waiting_page_is_true",
    ("docs/waiting.md", "json http"): "tests/integration/test_waiting_page.py::"
    "test_every_example_of_the_waiting_page_is_true",
    ("docs/workflows.md", "json http"): "tests/integration/test_workflow_doors.py::"
    "test_every_example_of_the_workflows_page_is_true",
    ("docs/workflows.md", "json inbound"): "tests/integration/test_workflow_doors.py::"
    "test_every_example_of_the_workflows_page_is_true",
} | {
    ("docs/protocol.md", f"json {kind}"): "tests/integration/test_protocol_page.py::"
    "test_every_example_of_the_protocol_page_is_true"
    for kind in ("inbound", "outbound", "results", "dead", "rejected")
} | {
    ("docs/tutorial.md", kind): "tests/acceptance/test_packaging.py::"
    "test_the_tutorial_holds_with_the_installed_wheel_up_to_the_end_of_penstock_up"
    for kind in ("python", "python shop.py", "console", "console up", "console exit-code=3", "console production")
}  # fmt: skip


@dataclass(frozen=True)
class Block:
    """info: what stands behind its fence, "generated" for one of docs/cli.md's reference. mark: why it is not run."""

    page: str
    line: int
    info: str
    text: str
    mark: str | None = None

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<info>[^`]*)$")
_MARK = re.compile(r"^ *<!-- not run: (.*?) -->$")


def blocks_in(page: str, text: str) -> Iterator[Block]:
    """Every fenced block of a page, in its order, without its indentation. Raises ValueError for one without an end."""
    opened: tuple[int, str, str, str, str | None] | None = None
    lines: list[str] = []
    is_generated, before = False, ""
    for number, line in enumerate(text.splitlines(), 1):
        match = _FENCE.match(line)
        if opened is None:
            is_generated |= line == MARK.strip()
            if match is not None:
                mark = _MARK.match(before)
                info = "generated" if is_generated else match["info"].strip()
                opened = number, match["indent"], match["fence"], info, mark[1] if mark else None
                lines = []
            if line.strip():
                before = line
        elif match is not None and match["fence"] == opened[2] and not match["info"].strip():
            indent = len(opened[1])
            body = "".join(f"{one[indent:] if one[:indent].isspace() or not indent else one}\n" for one in lines)
            yield Block(page, opened[0], opened[3], body, opened[4])
            opened, before = None, ""
        else:
            lines.append(line)
    if opened is not None:
        raise ValueError(f"{page}:{opened[0]}: the block has no end")


@cache
def all_blocks() -> tuple[Block, ...]:
    return tuple(block for page in PAGES for block in blocks_in(page, (ROOT / page).read_text("utf-8")))


def run_by(block: Block) -> str | None:
    """The test of its own page that runs it, None where there is none."""
    return TESTED.get((block.page, block.info))
