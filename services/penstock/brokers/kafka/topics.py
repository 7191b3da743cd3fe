"""Which topics tasks and schedules may publish to."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from penstock.settings.model import Settings

_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_SHOWN_CHARS = 300


def topic_problem(topic: str, settings: Settings) -> str | None:
    """Why tasks and schedules may not publish to a topic, and what to do; None where they may."""
    if not _NAME.fullmatch(topic) or topic in (".", ".."):
        return (
            f"topic {topic[:_SHOWN_CHARS]!r} is no name of a topic: use letters, digits, dots, dashes, underscores, "
            "up to 249 of them"
        )
    if topic.startswith("__"):
        return f"topic {topic!r} is one of Kafka's own: name another"
    if settings.is_own_queue(topic):
        return f"topic {topic!r} is Penstock's own: a right to enqueue is none to write it"
    allowed = settings.kafka_publish_topics
    if allowed and not any(fnmatchcase(topic, pattern) for pattern in allowed):
        return f"topic {topic!r} is not among PENSTOCK_KAFKA_PUBLISH_TOPICS: name another, or add it there"
    return None
