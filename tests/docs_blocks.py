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
        *ROOT.glob("benchmarks/*.md"), *ROOT.glob("clients/*/*.md"),
    )
    if "node_modules" not in path.parts
)  # fmt: skip


# Blocks by (page, what stands behind the fence). Those that a test of their page runs, against the real thing:
TESTED = {
    ("README.md", "console"): "tests/acceptance/test_readme.py::test_the_example_of_the_readme_prints_what_it_shows",
    ("README.md", "python shop.py"): "tests/acceptance/test_readme.py::"
    "test_the_example_of_the_readme_prints_what_it_shows",
    ("docs/autoscaling.md", "json load"): "tests/integration/limits/test_scaling.py::"
    "test_a_lane_is_plain_numbers_as_the_page_shows_and_all_lanes_stand_by_name",
    ("docs/batches.md", "python app"): "tests/integration/test_waiting_page.py::"
    "test_the_handler_of_the_batches_page_answers_for_each",
    ("docs/deliveries.md", "toml"): "tests/integration/test_deliveries_page.py::test_every_example_is_true",
    ("docs/deliveries.md", "json http"): "tests/integration/test_deliveries_page.py::test_every_example_is_true",
    ("docs/deliveries.md", "python"): "tests/integration/test_deliveries_page.py::test_every_example_is_true",
    ("docs/deliveries.md", "json kafka"): "tests/integration/test_moving_pages.py::"
    "test_the_examples_of_kafka_publish_are_answered_as_the_page_says",
    ("docs/django.md", "sh manage"): "tests/integration/contrib/test_django.py::"
    "test_the_commands_migrate_a_database_and_run_a_worker",
    ("docs/lambda.md", "python shop.py"): "tests/integration/worker/test_lambda.py::"
    "test_the_module_of_the_page_is_a_function",
    ("docs/lifespans.md", "python app"): "tests/integration/worker/test_lifespans.py::"
    "test_the_lifespan_of_the_page_is_given_to_its_handler",
    ("docs/lifespans.md", "python sentry"): "tests/integration/worker/test_lifespans.py::"
    "test_failed_attempts_reach_sentry_with_their_task",
    ("docs/lifespans.md", "python hooks"): "tests/integration/worker/test_lifespans.py::"
    "test_hooks_see_the_context_and_the_failure_of_each_attempt",
    ("docs/moving-from-clockwork.md", "http clockwork"): "tests/integration/test_moving_pages.py::"
    "test_the_requests_of_the_clockwork_page_are_answered_as_it_says",
    ("docs/moving-from-kafka-message-scheduler.md", "json schedule"): "tests/integration/test_moving_pages.py::"
    "test_the_schedule_of_the_page_is_one",
    ("docs/mcp.md", "json first"): "tests/integration/test_mcp_page.py::"
    "test_the_first_answer_of_the_page_has_what_the_api_answers",
    ("docs/payloads.md", "python"): "tests/integration/test_payloads_page.py::test_the_programs_of_the_page_run",
    **{
        ("docs/postgres.md", f"sql {side}"): "tests/integration/test_publications.py::"
        "test_a_server_that_follows_by_logical_replication_takes_over"
        for side in ("publisher", "subscriber", "sequences")
    },
    ("docs/postgres.md", "sql restore"): "tests/integration/test_postgres_page.py::"
    "test_after_a_restore_results_of_later_claims_are_ignored_once_the_sequences_are_advanced",
    ("docs/processes.md", "python app"): "tests/integration/worker/test_processes.py::"
    "test_the_handler_of_the_processes_page_runs_in_a_child",
    ("docs/protocol.md", "json http"): "tests/integration/test_protocol_page.py::"
    "test_every_example_of_the_protocol_page_is_true",
    ("docs/python-api.md", "python"): "tests/integration/test_python_api_page.py::"
    "test_every_example_of_the_page_prints_what_it_says",
    ("docs/python-api.md", "python images.py"): "tests/integration/test_python_api_page.py::"
    "test_every_example_of_the_page_prints_what_it_says",
    ("docs/results.md", "python"): "tests/integration/test_results_page.py::"
    "test_the_example_of_the_results_page_prints_what_it_says",
    ("docs/tasks.md", "json http"): "tests/integration/test_tasks_page.py::"
    "test_every_example_of_the_tasks_page_is_true",
    ("docs/tenants.md", "json http"): "tests/integration/test_tenants_page.py::"
    "test_every_example_of_the_tenants_page_is_true",
    ("docs/testing.md", "python shop.py"): "tests/integration/testing/test_testing_page.py::"
    "test_every_test_of_the_testing_page_passes",
    ("docs/testing.md", "python test_shop.py"): "tests/integration/testing/test_testing_page.py::"
    "test_every_test_of_the_testing_page_passes",
    ("docs/testing.md", "python test_transaction.py"): "tests/integration/testing/test_testing_page.py::"
    "test_every_test_of_the_testing_page_passes",
    ("docs/tracing.md", "shell trace"): "tests/integration/test_tracing_page.py::"
    "test_the_example_of_the_tracing_page_reaches_a_collector",
    ("docs/tracing.md", "python app"): "tests/integration/test_tracing_page.py::"
    "test_the_example_of_the_tracing_page_reaches_a_collector",
    ("docs/tracing.md", "json traces"): "tests/integration/test_tracing_page.py::"
    "test_the_attribute_of_the_page_is_read_as_it_says",
    ("docs/transactions.md", "python"): "tests/integration/test_transactions_page.py::"
    "test_every_example_of_the_transactions_page_runs",
    ("docs/transactions.md", "python handler"): "tests/integration/tasks/test_settle.py::"
    "test_the_handler_of_the_transactions_page_ships_once",
    ("docs/transactions.md", "sql"): "tests/integration/test_transactions_page.py::"
    "test_every_example_of_the_transactions_page_runs",
    ("docs/output.md", "python app"): "tests/integration/test_output.py::test_the_examples_of_the_page_run",
    ("docs/output.md", "python client"): "tests/integration/test_output.py::test_the_examples_of_the_page_run",
    ("docs/steps.md", "python app"): "tests/integration/test_steps.py::test_the_examples_of_the_page_run",
    ("docs/waiting.md", "python app"): "tests/integration/test_waiting_page.py::"
    "test_every_example_of_the_waiting_page_is_true",
    ("docs/waiting.md", "json http"): "tests/integration/test_waiting_page.py::"
    "test_every_example_of_the_waiting_page_is_true",
    ("docs/workflows.md", "json http"): "tests/integration/workflows/test_workflow_doors.py::"
    "test_every_example_of_the_workflows_page_is_true",
    ("docs/workflows.md", "json inbound"): "tests/integration/workflows/test_workflow_doors.py::"
    "test_every_example_of_the_workflows_page_is_true",
    ("docs/workflows.md", "json results"): "tests/integration/workflows/test_workflow_doors.py::"
    "test_the_answer_of_the_page_makes_its_child",
} | {
    ("docs/web-frameworks.md", f"python {kind}"): "tests/integration/test_web_frameworks_page.py::"
    f"test_the_application_of_{framework}_adds_orders_with_their_tasks"
    for kind, framework in (("receipts.py", "fastapi"), ("fastapi", "fastapi"), ("flask", "flask"))
} | {
    ("docs/mcp.md", kind): "tests/integration/test_mcp_page.py::"
    "test_the_settings_of_each_client_reach_the_api_with_its_key"
    for kind in ("sh claude", "json claude", "json vscode", "json cursor", "json desktop")
} | {
    ("docs/django.md", f"python shop/{name}.py"): "tests/integration/contrib/test_django.py::"
    "test_a_request_stores_its_order_and_task_together_and_the_task_commits_its_result_with_its_rows"
    for name in ("settings", "models", "tasks", "urls")
} | {
    ("docs/protocol.md", f"json {kind}"): "tests/integration/test_protocol_page.py::"
    "test_every_example_of_the_protocol_page_is_true"
    for kind in ("inbound", "outbound", "results", "dead", "rejected")
} | {
    ("docs/tutorial.md", kind): "tests/acceptance/test_packaging.py::"
    "test_the_tutorial_holds_with_the_installed_wheel_up_to_the_end_of_penstock_up"
    for kind in (
        "sh install", "python", "python shop.py", "console", "console up", "console exit-code=3", "console production",
    )
}  # fmt: skip

# Those that are nothing to be run, or run by a tool that a machine may not have: by the test that holds them on every
# machine against the code, the files and the options that they speak of.
HELD = {
    ("README.md", "mermaid"): "tests/unit/test_drawings.py::"
    "test_arrows_to_and_from_queues_are_the_calls_of_the_processes",
    ("docs/autoscaling.md", "sh kubectl"): "tests/unit/test_docs_kubernetes.py::"
    "test_files_that_are_applied_are_held_by_the_tests_of_the_manifests",
    ("docs/cli.md", "generated"): "tests/unit/cli/test_cli_tree.py::test_the_page_has_the_reference_of_these_commands",
    ("docs/operations.md", "mermaid"): "tests/unit/test_operations_page.py::"
    "test_the_drawing_of_the_silent_ends_where_the_repair_does_and_names_what_it_goes_by",
    ("docs/python-reference.md", "generated"): "tests/unit/test_python_reference.py::"
    "test_the_page_is_written_from_this_code",
    ("docs/states.md", "mermaid"): "tests/unit/test_states_page.py::"
    "test_the_diagram_draws_every_transition_and_no_other",
    ("docs/threat-model.md", "mermaid"): "tests/unit/test_drawings.py::"
    "test_arrows_to_and_from_queues_are_the_calls_of_the_processes",
    ("docs/tutorial.md", "hcl"): "tests/unit/test_terraform.py::"
    "test_examples_of_the_module_give_variables_that_it_has",
    ("docs/tutorial.md", "sh docker"): "tests/unit/test_docs_docker.py::"
    "test_every_process_is_started_from_the_image_that_is_built_with_what_was_written_before",
    ("docs/tutorial.md", "sh image"): "tests/unit/test_docs_docker.py::"
    "test_every_process_is_started_from_the_image_that_is_built_with_what_was_written_before",
    ("docs/tutorial.md", "sh terraform"): "tests/unit/test_docs_terraform.py::"
    "test_outputs_that_a_page_asks_for_are_there",
    ("examples/helm/README.md", "sh helm"): "tests/unit/test_helm_chart.py::"
    "test_the_page_names_the_chart_and_objects_that_it_makes",
    ("examples/helm/README.md", "yaml values"): "tests/unit/test_helm_chart.py::"
    "test_the_page_names_the_chart_and_objects_that_it_makes",
    ("examples/kubernetes/README.md", "sh kubectl"): "tests/unit/test_docs_kubernetes.py::"
    "test_files_that_are_applied_are_held_by_the_tests_of_the_manifests",
    ("examples/orders/README.md", "sh orders"): "examples/orders/test_orders.py::"
    "test_the_requests_of_the_page_are_answered_and_its_commands_are_there",
    ("examples/scheduler0-node/README.md", "sh npm"): "tests/unit/test_moving_from_scheduler0_page.py::"
    "test_the_example_can_be_installed_and_started_as_its_page_says",
    ("clients/go/README.md", "go"): "tests/unit/test_go_readme.py::"
    "test_the_example_of_the_readme_is_that_which_is_built",
    ("clients/node/README.md", "ts"): "tests/unit/test_node_readme.py::"
    "test_the_examples_use_what_the_package_exports",
    ("examples/terraform-ecs/README.md", "hcl"): "tests/unit/test_terraform_ecs.py::"
    "test_the_page_speaks_of_variables_outputs_and_files_that_exist",
    ("examples/terraform-ecs/README.md", "sh terraform"): "tests/unit/test_docs_terraform.py::"
    "test_outputs_that_a_page_asks_for_are_there",
    ("examples/lambda/README.md", "sh terraform"): "tests/unit/test_docs_terraform.py::"
    "test_outputs_that_a_page_asks_for_are_there",
    ("terraform/README.md", "hcl"): "tests/unit/test_terraform.py::"
    "test_examples_of_the_module_give_variables_that_it_has",
    ("terraform/README.md", "console terraform"): "tests/unit/test_docs_terraform.py::"
    "test_outputs_that_a_page_asks_for_are_there",
}  # fmt: skip

# Those of the held ones that are run too, as they stand, where the tool is installed: by the tool and the test. What
# lies behind the tool is stood in for: AWS by a provider of its schema, a cluster by the schemas of its objects, the
# daemon of Docker by one that records each request. Nothing stands in for npm's registry.
RUN_WHERE = {
    ("docs/autoscaling.md", "sh kubectl"): ("kubectl", "tests/unit/test_docs_kubernetes.py::"
    "test_a_block_makes_the_objects_of_the_files_that_it_names"),
    ("docs/tutorial.md", "hcl"): ("terraform", "tests/unit/test_docs_terraform.py::"
    "test_the_configuration_of_the_tutorial_gives_the_environment_of_the_processes"),
    ("docs/tutorial.md", "sh docker"): ("docker", "tests/unit/test_docs_docker.py::"
    "test_docker_makes_the_image_and_the_containers_of_every_process"),
    ("docs/tutorial.md", "sh image"): ("docker", "tests/unit/test_docs_docker.py::"
    "test_docker_makes_the_image_and_the_containers_of_every_process"),
    ("docs/tutorial.md", "sh terraform"): ("terraform", "tests/unit/test_docs_terraform.py::"
    "test_the_configuration_of_the_tutorial_gives_the_environment_of_the_processes"),
    ("examples/kubernetes/README.md", "sh kubectl"): ("kubectl", "tests/unit/test_docs_kubernetes.py::"
    "test_a_block_makes_the_objects_of_the_files_that_it_names"),
    ("clients/node/README.md", "ts"): ("npm", "tests/acceptance/test_node_kit.py::"
    "test_the_examples_of_its_readme_compile"),
    ("examples/scheduler0-node/README.md", "sh npm"): ("npm", "tests/acceptance/test_scheduler0_node.py::"
    "test_the_example_is_called_back_for_every_job"),
    ("examples/terraform-ecs/README.md", "hcl"): ("terraform", "tests/unit/test_docs_terraform.py::"
    "test_the_steps_of_the_ecs_example_end_in_a_run_of_the_migration"),
    ("examples/terraform-ecs/README.md", "sh terraform"): ("terraform", "tests/unit/test_docs_terraform.py::"
    "test_the_steps_of_the_ecs_example_end_in_a_run_of_the_migration"),
    ("terraform/README.md", "console terraform"): ("terraform", "tests/unit/test_docs_terraform.py::"
    "test_the_module_as_it_is_gives_the_environment_of_the_processes"),
}  # fmt: skip


@dataclass(frozen=True)
class Block:
    """info: what stands behind its fence, "generated" for one of docs/cli.md's reference."""

    page: str
    line: int
    info: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<info>[^`]*)$")


def blocks_in(page: str, text: str) -> Iterator[Block]:
    """Every fenced block of a page, in its order, without its indentation. Raises ValueError for one without an end."""
    opened: tuple[int, str, str, str] | None = None
    lines: list[str] = []
    is_generated = False
    for number, line in enumerate(text.splitlines(), 1):
        match = _FENCE.match(line)
        if opened is None:
            is_generated |= line == MARK.strip()
            if match is not None:
                info = "generated" if is_generated else match["info"].strip()
                opened = number, match["indent"], match["fence"], info
                lines = []
        elif match is not None and match["fence"] == opened[2] and not match["info"].strip():
            indent = len(opened[1])
            body = "".join(f"{one[indent:] if one[:indent].isspace() or not indent else one}\n" for one in lines)
            yield Block(page, opened[0], opened[3], body)
            opened = None
        else:
            lines.append(line)
    if opened is not None:
        raise ValueError(f"{page}:{opened[0]}: the block has no end")


@cache
def all_blocks() -> tuple[Block, ...]:
    return tuple(block for page in PAGES for block in blocks_in(page, (ROOT / page).read_text("utf-8")))
