"""What the OpenRPC document says about the methods of schedules."""

from __future__ import annotations

from typing import Any

from penstock.schedules import views
from penstock.schedules.model import IMPORT_LIMIT, NAME_MAX_CHARS
from penstock.schedules.policy import MAX_MISSED_LIMIT

# Summary, result, errors beyond those of every method
SCHEDULE_SUMMARIES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "schedule.create": ("Have a task made by the clock, again and again.", "ScheduleDetail", ("TooLarge",)),
    "schedule.update": (
        "Change what is named of a schedule and leave the rest.",
        "ScheduleDetail",
        ("ScheduleNotFound", "TooLarge"),
    ),
    "schedule.get": ("Show a schedule, with its payload and the next few instants.", "ScheduleDetail",
                     ("ScheduleNotFound",)),
    "schedule.list": ("List schedules, newest first, without their payloads.", "SchedulePage", ()),
    "schedule.delete": (
        "Delete a schedule; tasks that it made stay as they are.", "ScheduleDeleted", ("ScheduleNotFound",)
    ),
    "schedule.pause": (
        "Stop a schedule; the instants of the pause are not made up for.", "ScheduleDetail", ("ScheduleNotFound",)
    ),
    "schedule.resume": ("Let a schedule go on, from now.", "ScheduleDetail", ("ScheduleNotFound",)),
    "schedule.run_now": ("Run a schedule once, beside its clock, also when it is paused.", "ScheduleRun",
                         ("ScheduleNotFound",)),
    "schedule.runs": ("List what became of a schedule's instants, newest first.", "SchedulePageOfRuns",
                      ("ScheduleNotFound",)),
    "schedule.create_many": (
        "Take many schedules, to be written by the supervisor; schedule.import_status tells how far it is.",
        "ImportStarted",
        (),
    ),
    "schedule.import_status": ("Show how far a schedule.create_many has come.", "ImportStatus", ("ScheduleNotFound",)),
}  # fmt: skip

_NAME = {"name": "The schedule."}
_SCHEDULE = {
    "name": f"Its own; 1 to {NAME_MAX_CHARS} characters.",
    "expression": "Five fields, or six with the seconds first; or @hourly and the like; or @every 1h30m.",
    "action": "As of enqueue.",
    "payload": "As of enqueue, with {{scheduled_time}}, {{schedule}} and {{run}} filled in inside its string values.",
    "timezone": "A name of the IANA database, by whose wall clock the expression is read.",
    "start_at": "No instant before this one: RFC 3339 with a zone, or epoch milliseconds.",
    "end_at": "No instant after this one.",
    "jitter": "Each fire is delayed by up to so many seconds, always the same for the same instant.",
    "missed": "What becomes of instants at which nothing could be fired: skip, one (the newest runs), or all.",
    "max_missed": f"With all: so many of the newest run; 1 to {MAX_MISSED_LIMIT}.",
    "max_lateness": "What is later than so many seconds never runs; null for any.",
    "overlap": "While the task before is not settled: allow, skip (recorded), or queue (one after the other).",
    "priority": "As of enqueue.",
    "max_attempts": "As of enqueue.",
    "timeout": "As of enqueue.",
    "ordering_key": "As of enqueue; with overlap queue in place of the schedule's own.",
    "labels": "An object of text by text, to list schedules by.",
    "tenant": "For whom its tasks are; null for nobody.",
}
SCHEDULE_PARAMETERS: dict[str, dict[str, str]] = {
    "schedule.create": _SCHEDULE
    | {
        "paused": "It waits for schedule.resume; null for as it is, which for a new one is false.",
        "replace": "One of that name becomes this one; otherwise that is an error.",
    },
    "schedule.update": _SCHEDULE,
    "schedule.get": _NAME,
    "schedule.list": {
        "labels": "Only those that have each of these labels.",
        "action": "Only those of this action.",
        "paused": "Only those that are paused, or only those that are not.",
        "limit": "Schedules at the most; 1 to 1000.",
        "tenant": "Only those of this tenant.",
        "cursor": "The cursor of the page before.",
    },
    "schedule.delete": _NAME,
    "schedule.pause": _NAME,
    "schedule.resume": _NAME,
    "schedule.run_now": _NAME,
    "schedule.runs": _NAME | {"limit": "Runs at the most; 1 to 1000.", "cursor": "The cursor of the page before."},
    "schedule.create_many": {
        "schedules": f"Objects, each the parameters of schedule.create but for replace; 1 to {IMPORT_LIMIT}.",
        "replace": "Those that exist become these; otherwise they are refused.",
    },
    "schedule.import_status": {"id": "From schedule.create_many."},
}

RESULTS: tuple[Any, ...] = (
    views.ScheduleDetail, views.SchedulePage, views.ScheduleDeleted, views.ScheduleRun, views.SchedulePageOfRuns,
    views.ImportStarted, views.ImportStatus,
)  # fmt: skip
