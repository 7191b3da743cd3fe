"""Parameters of `schedule.*`, whose form :mod:`penstock.schedules.model` has, with the task that each fire makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from penstock.protocol.checks import HIGHEST_ID, read_cursor, read_id, read_limit
from penstock.protocol.params import decode
from penstock.protocol.task import BEGINNING, NewTask
from penstock.protocol.tenant import read_tenant
from penstock.schedules.model import (
    CreateSchedule,
    DeleteSchedule,
    GetSchedule,
    ListRuns,
    ListSchedules,
    NewSchedule,
    PauseSchedule,
    ReadImport,
    ResumeSchedule,
    RunSchedule,
    ScheduleCommand,
    ScheduleCreateManyParams,
    ScheduleCreateParams,
    ScheduleDeleteParams,
    ScheduleGetParams,
    ScheduleImportStatusParams,
    ScheduleListParams,
    SchedulePauseParams,
    ScheduleResumeParams,
    ScheduleRunNowParams,
    ScheduleRunsParams,
    ScheduleUpdateParams,
    new_schedule,
    read_import,
    read_kept_name,
    read_labels,
    read_update,
)
from penstock.schedules.policy import render
from penstock.settings.model import Settings
from penstock.tasks.new_task import check_task_payload, new_task
from penstock.tasks.params import EnqueueParams


def read_schedule_command(values: Any, settings: Settings) -> ScheduleCommand:
    match values:
        case ScheduleCreateParams():
            return CreateSchedule(new_schedule(values, _template(values, settings)), values.replace)
        case ScheduleUpdateParams():
            return read_update(values, lambda members: _whole_schedule(members, settings))
        case ScheduleListParams():
            labels = None if values.labels is None else read_labels(values.labels)
            return ListSchedules(
                labels, values.action, values.paused, read_limit(values.limit), read_cursor(values.cursor),
                read_tenant(values.tenant),
            )  # fmt: skip
        case ScheduleRunsParams():
            return ListRuns(read_kept_name(values.name), read_limit(values.limit), read_cursor(values.cursor))
        case ScheduleCreateManyParams():
            return read_import(values)
        case ScheduleImportStatusParams():
            return ReadImport(read_id(values.id, "id"))
        case ScheduleRunNowParams():
            return RunSchedule(read_kept_name(values.name), settings.max_attempts)
    return _OF_A_NAME[type(values)](read_kept_name(values.name))


_OF_A_NAME: dict[type, Callable[[str], ScheduleCommand]] = {
    ScheduleGetParams: GetSchedule,
    ScheduleDeleteParams: DeleteSchedule,
    SchedulePauseParams: PauseSchedule,
    ScheduleResumeParams: ResumeSchedule,
}


def _whole_schedule(members: Mapping[str, Any], settings: Settings) -> NewSchedule:
    given = decode(ScheduleCreateParams, msgspec.json.encode(members))
    return new_schedule(given, _template(given, settings))


def _template(given: ScheduleCreateParams, settings: Settings) -> NewTask:
    """The task that each fire makes, but for what is filled into its payload, which must have room too."""
    task = new_task(
        EnqueueParams(
            given.action,
            given.payload,
            priority=given.priority,
            ordering_key=given.ordering_key,
            max_attempts=given.max_attempts,
            timeout=given.timeout,
            tenant=given.tenant,
        ),
        settings,
    )
    check_task_payload(render(task.payload, given.name, HIGHEST_ID, BEGINNING.run_at), settings)
    return task
