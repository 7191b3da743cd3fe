"""Tests of the store and of each process's pass, run again through PgBouncer in transaction mode."""
# ruff: noqa: F401, F811

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from penstock.db.pool import Store
from tests.integration.api.test_api import (
    api,
    rpc,
    test_list_pages_through_live_and_settled_tasks_newest_first,
    test_stats_count_every_state_with_rates_and_lag,
)
from tests.integration.scheduler.test_scheduler import (
    scheduler,
    test_a_due_task_is_sent_as_a_request_that_names_its_claim,
    test_schedulers_at_once_send_every_task_once,
)
from tests.integration.supervisor.test_supervisor import (
    queues,
    repair,
    supervisor,
    test_a_supervisor_repeats_its_round,
    test_a_task_whose_worker_fell_silent_is_a_failed_attempt_counted_once,
    test_one_supervisor_at_a_time_does_the_upkeep,
)
from tests.integration.tasks.test_store import (
    test_an_ordering_key_lets_one_task_go_at_a_time_in_order,
    test_answers_of_a_batch_with_keys_stand_in_the_order_of_its_tasks,
    test_concurrent_claims_never_share_a_task,
    test_failures_are_kept_one_by_one_and_the_last_is_the_error,
    test_finish_moves_the_task_with_its_result_to_the_history,
)
from tests.integration.test_locks import (
    test_one_result_behind_a_lock_is_kept_and_its_neighbours_are_stored,
    test_one_stale_task_whose_key_is_held_does_not_keep_the_others,
)
from tests.integration.test_resulter import resulter, test_a_result_settles_its_task_with_the_text_that_came
from tests.integration.test_submitter import submitter, test_many_messages_with_many_tasks_are_stored_in_one_pass
from tests.integration.worker.test_sql_delivery import (
    make,
    other,
    other_url,
    test_a_named_statement_runs_with_the_payloads_parameters,
    test_values_that_json_has_no_type_for_go_and_come_as_text,
)
from tests.integration.workflows.test_workflows import (
    lives,
    test_a_chain_runs_in_order_and_each_step_is_given_the_result_before,
)
from tests.pgbouncer import through


@pytest.fixture
def application_url(database_url: str, pgbouncer: int) -> str:
    return through(database_url, pgbouncer)


@pytest.fixture
def delivery_url(other_url: str, pgbouncer: int) -> str:
    return through(other_url, pgbouncer)


@pytest.fixture
async def short(application_url: str) -> AsyncIterator[Store]:
    store = Store(application_url, statement_timeout_seconds=1, application_name="penstock-short")
    yield store
    await store.close()
