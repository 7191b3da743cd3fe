"""Penstock broken on purpose, in ways each of which the simulation has to notice.

Name: the changes, each of a statement or of a module, with the text that it replaces. Import this before Penstock.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType

_HOLDS = "t.claim = any(array[r.claim])"
_CLAIMS = "claim_tasks", "claim_ready_tasks", "claim_tasks_by_rules"
_SUCCESSES = "finish_tasks", "finish_few_tasks"
_UNFENCED = "r.claim is not null"

MUTATIONS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "a result of an old claim counts": tuple((name, _HOLDS, _UNFENCED) for name in _SUCCESSES),
    "a failure of an old claim counts": (("delay_tasks", _HOLDS, _UNFENCED), ("read_attempts", _HOLDS, _UNFENCED)),
    "a final failure of an old claim counts": (
        ("fail_tasks_permanently", _HOLDS, _UNFENCED), ("read_attempts", _HOLDS, _UNFENCED),
    ),
    "an attempt counts twice": tuple(
        (name, "attempts = t.attempts + 1", "attempts = least(t.attempts + 2, t.max_attempts)")
        for name in _CLAIMS
    ),
    "a claim token is used again": tuple(
        (name, "claim = n.id,", "claim = greatest(t.claim, 1),") for name in _CLAIMS
    ),
    "stale claims are not found": (("find_stale", "where state = 'ACQUIRED'", "where state = 'ACQUIRED' and false"),),
    "a failed task has no next attempt": (
        ("delay_tasks", "run_at = now() + make_interval(secs => r.delay)", "run_at = now() + interval '1 year'"),
    ),
    "all of an ordering key start at once": (
        ("enqueue_keyed_tasks", "case when h.task_id <> f.id then 'WAITING' else 'SCHEDULED' end", "'SCHEDULED'"),
    ),
    "the newest of an ordering key goes first": (
        ("finish_tasks", "order by id limit 1", "order by id desc limit 1"),
        ("promote_successors", "order by id limit 1", "order by id desc limit 1"),
    ),
    "successors wait for ever": (
        ("finish_tasks", "select ordering_key as key from gone where ordering_key is not null",
         "select ordering_key as key from gone where false"),
    ),
    "a turn is taken twice": (
        ("claim_tasks", "delete from penstock.turn\n    where", "delete from penstock.turn\n    where false and"),
        ("claim_tasks", "and t.state::text = 'WAITING' and t.claimed_at is null and t.ordering_key is not null", ""),
    ),
    "a unique key is free at once": (
        ("enqueue_keyed_tasks", "then (select t.id from penstock.task t where t.id = k.task_id) is null", "then true"),
    ),
    "a message is taken in twice": (
        ("record_receipts", "on conflict do nothing",
         "on conflict (message_id) do update set message_id = excluded.message_id"),
    ),
    "a gate lets one more through": (
        ("claim_tasks_at_gates", "limit allotted.tasks for", "limit allotted.tasks + 1 for"),
    ),
    "what is in flight is not counted": (("count_gated", "where state = 'ACQUIRED'", "where state = 'WAITING'"),),
    "limit keys are not counted": (
        ("lock_gates", "when a.key_max_in_flight is null then 0", "when a.key_max_in_flight is not null then 0"),
    ),
    "a workflow receives no success": tuple(
        (name, "select workflow, id, claim, 'SUCCESS' from gone where workflow is not null",
         "select workflow, id, claim, 'SUCCESS' from gone where false")
        for name in _SUCCESSES
    ),
    "a cancelled task leaves no record": (("cancel_tasks", "trace, now(), $2::text, worker\n    from gone",
                                           "trace, now(), $2::text, worker\n    from gone where false"),),
    "turns are never over": (("take_overdue_promotions", "where ends_at <=", "where false and ends_at <="),),
    "a wait of an old claim holds the task": (("note_waits", _HOLDS, _UNFENCED), ("suspend_tasks", _HOLDS, _UNFENCED)),
    "a wait has no end": (("find_overdue_waits", "deadline is not null and", "false and"),),
    "an answer finds no task": (("resume_waits", "state::text = 'WAITING'", "state::text = 'ERROR'"),),
    "an instant is left out": (
        ("move_clocks", "set next_at = u.next_at, due_at = u.due_at",
         "set next_at = u.next_at + interval '2 seconds', due_at = u.due_at + interval '2 seconds'"),
    ),
    "finished steps are not carried": (
        ("read_carried_journals", "where task_id = any(", "where position < 0 and task_id = any("),
    ),
    "a suspended task does not go on": (
        ("suspend_attempts", "coalesce(r.until, now() +", "coalesce(r.until, now() + interval '1 year' +"),
    ),
    # Steps
    "what an old claim reports of a step comes back": (
        ("raise_journal_floor", "set journal = claim", "set journal = 0"),
    ),
    "a message that comes again begins a step": (
        ("penstock.worker.payload_io", "or (attempt.is_redelivered and not attempt.reported)", ""),
    ),
    "an outcome does not repeat its steps": (
        ("penstock.results.apply", "if outcome.steps and outcome.claim is not None:", "if False:"),
    ),
    # Defects that Penstock once had; see decision 074.
    "a locked row fails its whole batch": (
        ("penstock.runtime.halving", "SPOILING = (Refused, Locked, TooSlow)", "SPOILING = (Refused,)"),
    ),
    "results that a resulter holds count as read": (
        ("penstock.results.watermark", "    if (known and not is_established)",
         "    return math.inf if (await results.depth()).visible else 0.0\n    if (known and not is_established)"),
    ),
    "a pause does not hold behind a route": (
        ("claim_tasks_by_route", "where exists (select from penstock.action) and", "where false and"),
    ),
    "a body's keyed tasks are stored side by side": (
        ("penstock.api.dispatch", "Batcher(self._insert, max_items=MAX_INSERT_TASKS)",
         "Batcher(self._insert, max_items=MAX_INSERT_TASKS, max_parallel=PARALLEL_INSERTS)"),
    ),
    "packed messages are held to the limit of clients": (
        ("penstock.settings.model", "def packed_limit(self) -> int:",
         "def packed_limit(self) -> int:\n        return self.batch_limit"),
    ),
    "a released claim loses its task": (
        ("release_unsent", "penstock.dispatch where id in", "penstock.dispatch where $1::float8 is null and id in"),
        ("find_stale", "where state = 'ACQUIRED'", "where state = 'ACQUIRED' and heartbeat_at is not null"),
    ),
}  # fmt: skip


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module with some of its text replaced."""

    changes: Sequence[tuple[str, str]]

    def get_code(self, fullname: str) -> CodeType:
        text = self.get_data(self.path).decode()
        for before, after in self.changes:
            assert before in text, f"{fullname} no longer says {before!r}"
            text = text.replace(before, after)
        return compile(text, self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutation: str) -> None:
        self._changes = MUTATIONS[mutation]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        changes = [change for place, *change in self._changes if place == fullname]
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if changes else None
        if spec is not None and spec.origin is not None:
            spec.loader = loader = _Loader(fullname, spec.origin)
            loader.changes = [(before, after) for before, after in changes]
        return spec


def break_modules(arguments: Sequence[str]) -> None:
    """Break what the option --mutation=NAME of a child names, in modules that are imported from now on."""
    for name in (argument.removeprefix("--mutation=") for argument in arguments):
        if name in MUTATIONS:
            sys.meta_path.insert(0, _Finder(name))


def break_statements(mutation: str, statements: dict[str, str]) -> None:
    """Break statements, by name."""
    for name, before, after in MUTATIONS[mutation]:
        if name in statements:
            assert before in statements[name], f"{name} no longer says {before!r}"
            statements[name] = statements[name].replace(before, after)
        else:
            assert name in sys.modules, f"there is neither a statement nor a module {name}"
