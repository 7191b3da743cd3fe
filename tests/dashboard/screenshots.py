"""Screenshots of the main pages, of a stack with sample data: ``python -m tests.dashboard.screenshots [FOLDER]``."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.brokers.opening import create_queues
from penstock.db.migrate import upgrade
from penstock.local.postgres import EmbeddedPostgres
from penstock.local.sqs import EmbeddedSqs
from penstock.settings.model import load_settings
from tests.conftest import reachable_folder  # also sets the credentials that an embedded SQS takes
from tests.dashboard.browser import open_browser, wait_live
from tests.dashboard.stand import Stand

FOLDER = Path(__file__).parents[2] / "docs" / "images"
WIDTH, PHONE = 1280, 390


@contextmanager
def stand() -> Iterator[Stand]:
    """The sample on an embedded Postgres and SQS of its own."""
    import asyncio

    with reachable_folder() as data, tempfile.TemporaryDirectory() as messages:
        postgres = EmbeddedPostgres(data, options={"fsync": "off"})
        postgres.start()
        sqs = EmbeddedSqs(Path(messages))
        sqs.start()
        try:
            postgres.create_database("shots")
            upgrade(postgres.dsn("shots"))
            settings = load_settings(
                database_url=postgres.dsn("shots"), sqs_endpoint_url=sqs.url, aws_region="us-east-1", http_port=0,
                sqs_access_key=f"{sqs.access_key_id}:any", metrics_port=0,
            )  # fmt: skip
            asyncio.run(create_queues(settings))
            with Stand(settings) as made:
                yield made
        finally:
            sqs.stop()
            postgres.stop()


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with stand() as made, open_browser() as browser:
        pages = {
            "overview": "/", "tasks": "/tasks", "task-failed": f"/tasks/{made.ids['failure']}",
            "schedules": "/schedules", "schedule": "/schedules/inventory",
            "workflow": f"/workflows/{made.ids['workflow']}", "queues": "/queues", "actions": "/actions",
            "bulk": "/bulk?operation=bulk.retry&action=charge-card&count=yes",
            "keys": "/keys", "audit": "/audit",
        }  # fmt: skip
        shots = [(name, path, "light", WIDTH) for name, path in pages.items()]
        shots += [("overview-dark", "/", "dark", WIDTH), ("task-failed-dark", pages["task-failed"], "dark", WIDTH)]
        shots += [("overview-phone", "/", "light", PHONE), ("tasks-phone", "/tasks", "dark", PHONE)]
        for name, path, theme, width in shots:
            browser.execute_cdp_cmd(
                "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]}
            )
            browser.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride",
                {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width == PHONE},
            )
            browser.get(made.url + path)
            wait_live(browser)
            time.sleep(0.6)  # bars grow for 0.4 s
            height = browser.execute_script("return document.documentElement.scrollHeight")
            browser.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride",
                {"width": width, "height": min(height, 1700), "deviceScaleFactor": 1, "mobile": width == PHONE},
            )
            browser.save_screenshot(str(folder / f"dashboard-{name}.png"))
            print(f"dashboard-{name}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
