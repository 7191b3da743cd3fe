"""A real browser without a window."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MISSING = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]


@contextmanager
def open_browser() -> Iterator[Any]:
    """Debian's chromium, driven by its chromedriver."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = shutil.which("chromium") or ""
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--window-size=1280,900",
        "--hide-scrollbars", "--no-proxy-server", "--force-device-scale-factor=1",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        browser.set_page_load_timeout(60)
        yield browser
    finally:
        browser.quit()


def wait_live(browser: Any, seconds: float = 60) -> None:
    """Until the page has been sent something by its stream, if it has one."""
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, seconds).until(
        lambda b: b.execute_script(
            "return !document.querySelector('[data-live]') || Number(document.documentElement.dataset.updates) > 0"
        )
    )
