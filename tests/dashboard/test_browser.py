"""The dashboard in a real browser: one server and one browser for the whole file."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.local.postgres import EmbeddedPostgres
from penstock.settings.model import load_settings
from tests.dashboard.browser import MISSING, open_browser, wait_live
from tests.dashboard.stand import Stand
from tests.postgres_versions import COPY_FILES

pytestmark = [
    pytest.mark.skipif(
        bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (apt install chromium chromium-driver)"
    ),
    pytest.mark.xdist_group("browser"),
]
SECONDS = 60
MAIN = ("/", "/tasks", "/failures", "/search?q=mail", "/schedules", "/schedules/inventory", "/workflows", "/queues",
        "/rejected", "/actions",
        "/actions/charge-card", "/tenants", "/tenants/acme", "/bulk", "/keys", "/audit")  # fmt: skip


@pytest.fixture(scope="module")
def stand(postgres: EmbeddedPostgres, template_database: str, sqs_url: str) -> Iterator[Stand]:
    """The sample, and queues, of this file alone."""
    import asyncio

    from penstock.brokers.opening import create_queues

    name = f"browser_{secrets.token_hex(4)}"
    postgres.execute(f"create database {name} template {template_database} {COPY_FILES}")
    settings = load_settings(
        database_url=postgres.dsn(name), sqs_endpoint_url=sqs_url, aws_region="us-east-1", http_port=0, metrics_port=0,
        **{f"{queue}_queue": f"{name}-{queue}" for queue in ("inbound", "outbound", "results")},
    )  # fmt: skip
    asyncio.run(create_queues(settings))
    with Stand(settings) as made:
        yield made
    postgres.drop_database(name)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def browser(chromium: Any) -> Iterator[Any]:
    """The browser as it is at a desk, in the light; whatever it complained of fails the test."""
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    chromium.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "light"}]}
    )
    chromium.get_log("browser")
    yield chromium
    complaints = [entry for entry in chromium.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
    # That a form was refused is logged as a failure to load, which it is not.
    assert [entry for entry in complaints if "422 (Unprocessable" not in entry["message"]] == []


def wait(browser: Any, condition: Callable[[Any], Any]) -> Any:
    from selenium.common.exceptions import StaleElementReferenceException
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, SECONDS, ignored_exceptions=[StaleElementReferenceException]).until(condition)


def wait_text(browser: Any, text: str) -> None:
    wait(browser, lambda b: text in b.execute_script("return document.body.innerText"))


def css(browser: Any, selector: str) -> Any:
    return wait(browser, lambda b: next(iter(b.find_elements("css selector", selector)), None))


def opened(browser: Any, stand: Stand, path: str) -> None:
    browser.get(stand.url + path)
    wait_live(browser, SECONDS)


def press(browser: Any, selector: str) -> None:
    """Scroll to it and click as a person would; a live page may just be replacing it."""
    from selenium.common.exceptions import WebDriverException

    def click(b: Any) -> bool:
        found = b.find_elements("css selector", selector)
        if not found:
            return False
        try:
            b.execute_script("arguments[0].scrollIntoView({block: 'center'})", found[0])
            found[0].click()
        except WebDriverException:
            return False
        return True

    wait(browser, click)


def said(browser: Any, text: str) -> str:
    """Until the page that follows a form says so; all that it says."""

    def told(b: Any) -> str | None:
        return next((f.text for f in b.find_elements("css selector", ".flash[role=alert]") if text in f.text), None)

    found: str = wait(browser, told)
    return found


@pytest.mark.parametrize("path", MAIN)
def test_a_main_page_opens_without_an_error_or_a_violation_of_the_policy(browser: Any, stand: Stand, path: str) -> None:
    opened(browser, stand, path)
    assert browser.find_element("css selector", "h1").text
    assert browser.execute_script("return getComputedStyle(document.body).margin") == "0px"  # the stylesheet counts


def test_the_reason_of_a_failure_is_three_clicks_from_the_overview(browser: Any, stand: Stand) -> None:
    """Overview; the failures of an action; its task, with the traceback in sight: two clicks, one to spare."""
    opened(browser, stand, "/")
    press(browser, "a[href='/tasks?state=CRITICAL_ERROR&action=charge-card']")
    wait_text(browser, "failed")
    press(browser, "tr[data-key^=t] a[href^='/tasks/']")
    wait_text(browser, "Why it failed")
    shown = css(browser, ".why pre.trace")
    assert "raise CardDeclined" in shown.text
    assert shown.is_displayed()


def test_a_change_arrives_without_a_reload_and_leaves_what_was_typed(browser: Any, stand: Stand) -> None:
    opened(browser, stand, "/tasks?action=brand-new")
    wait_text(browser, "None among the newest") if "None among" in browser.page_source else wait_text(
        browser, "No task"
    )
    browser.execute_script("window.same = true")
    field = css(browser, "input[name=labels]")
    field.send_keys("half-typed")
    made = stand.run(stand.call("enqueue", action="brand-new"))
    css(browser, f"tr[data-key=t{made.id}]")
    stand.run(stand.call("cancel", id=made.id))
    wait_text(browser, "cancelled")
    assert browser.execute_script("return window.same")
    assert field.get_attribute("value") == "half-typed"
    assert css(browser, "#lamp").get_attribute("data-state") == "on"


def test_an_open_panel_and_the_focus_in_it_outlive_an_update(browser: Any, stand: Stand) -> None:
    made = stand.run(stand.call("enqueue", action="panelled", delay=3600))
    opened(browser, stand, f"/tasks/{made.id}")
    press(browser, "details[data-key=cancel] > summary")
    reason = css(browser, "details[data-key=cancel] input[name=reason]")
    reason.send_keys("because")
    before = int(browser.execute_script("return document.documentElement.dataset.updates"))
    stand.run(stand.call("reschedule", id=made.id, priority=9))
    wait(browser, lambda b: int(b.execute_script("return document.documentElement.dataset.updates")) > before)
    assert browser.switch_to.active_element.get_attribute("name") == "reason"
    assert reason.get_attribute("value") == "because"
    press(browser, "details[data-key=cancel] button")
    said(browser, f"Task {made.id} is cancelled")
    wait_text(browser, "because")


def test_a_task_is_rescheduled_cancelled_retried_and_run_again_edited(browser: Any, stand: Stand) -> None:
    made = stand.run(stand.call("enqueue", action="by-hand", payload={"n": 1}, delay=3600))
    opened(browser, stand, f"/tasks/{made.id}")
    press(browser, "details[data-key=move] > summary")
    css(browser, "details[data-key=move] input[name=delay]").send_keys("5")
    press(browser, "details[data-key=move] button")
    said(browser, f"Task {made.id} is rescheduled")
    wait_live(browser)
    press(browser, "details[data-key=cancel] > summary")
    press(browser, "details[data-key=cancel] button")
    said(browser, f"Task {made.id} is cancelled")
    wait_live(browser)
    press(browser, "#buttons form button.main")
    said(browser, f"Task {made.id} runs again")
    wait_live(browser)
    press(browser, "#buttons a[href$='/edit']")
    payload = css(browser, "textarea[name=payload]")
    payload.clear()
    payload.send_keys('{"n": ')
    press(browser, "main form button.main")
    said(browser, "payload is not JSON")
    css(browser, "textarea[name=payload]").send_keys("2}")
    press(browser, "main form button.main")
    again = int(said(browser, "Enqueued as task ").rsplit(" ", 1)[1])
    assert bytes(stand.run(stand.call("status", id=again, detail=True)).payload) == b'{"n":2}'
    assert stand.run(stand.call("status", id=made.id)).state == "CANCELLED"


def test_json_is_folded_by_a_click_without_a_line_too_many(browser: Any, stand: Stand) -> None:
    payload = {"first": {"a": [1, 2]}, "long": list(range(60)), "last": "x"}
    made = stand.run(stand.call("enqueue", action="folded", payload=payload, delay=3600))
    opened(browser, stand, f"/tasks/{made.id}")
    shown = css(browser, "#payload")
    assert json.loads(browser.execute_script("return arguments[0].textContent", shown)) == payload

    def lines(b: Any) -> int:
        measured = """
            const box = document.querySelector("#payload"), style = getComputedStyle(box);
            return (box.scrollHeight - 2 * parseFloat(style.paddingTop)) / parseFloat(style.lineHeight)"""
        return round(b.execute_script(measured))

    assert lines(browser) == 11  # the long array is folded at first
    press(browser, "#payload > details > details:nth-of-type(1) > summary")
    wait(browser, lambda b: lines(b) == 7)
    press(browser, "#payload > details > details:nth-of-type(2) > summary")
    wait(browser, lambda b: lines(b) == 67)


def test_ticked_tasks_are_cancelled_together(browser: Any, stand: Stand) -> None:
    ids = [stand.run(stand.call("enqueue", action="selected")).id for _ in range(3)]
    opened(browser, stand, "/tasks?action=selected")
    press(browser, "input[data-all]")
    wait(browser, lambda b: b.find_element("css selector", "[data-selected]").text == "3")
    browser.execute_script("window.barVanished = false")
    browser.execute_script("""new MutationObserver(() => {
        window.barVanished ||= document.querySelector("#selection").hidden;
    }).observe(document.querySelector("[data-live]"), {subtree: true, childList: true, attributes: true})""")
    before = int(browser.execute_script("return document.documentElement.dataset.updates"))
    stand.run(stand.call("enqueue", action="selected"))
    wait(browser, lambda b: int(b.execute_script("return document.documentElement.dataset.updates")) > before)
    assert css(browser, "[data-selected]").text == "3"
    assert not browser.execute_script("return window.barVanished")
    press(browser, "#selection button.danger")
    said(browser, "3 of 3 tasks cancelled")
    assert {stand.run(stand.call("status", id=one)).state for one in ids} == {"CANCELLED"}


def test_a_bulk_operation_is_counted_then_done(browser: Any, stand: Stand) -> None:
    for _ in range(4):
        stand.run(stand.call("enqueue", action="bulky"))
    opened(browser, stand, "/bulk")
    from selenium.webdriver.support.ui import Select

    Select(css(browser, "select[name=operation]")).select_by_value("bulk.cancel")
    css(browser, "input[name=action]").send_keys("bulky")
    press(browser, "button[name=count]")
    assert "4 tasks would be cancelled" in css(browser, "#count").text
    wait_live(browser)
    press(browser, "#count button")
    said(browser, "Job ")
    wait(browser, lambda b: "/jobs/" in b.current_url)


def test_schedules_are_paused_resumed_and_run_now(browser: Any, stand: Stand) -> None:
    opened(browser, stand, "/schedules/card-retries")
    for label, told in (("pause", "is paused"), ("resume", "is resumed"), ("run_now", "is created")):
        press(browser, f"form:has(input[value='schedule.{label}']) button")
        said(browser, told)
        wait_live(browser)
    wait_text(browser, "by hand")


def test_a_workflow_is_drawn_with_the_states_of_its_steps_and_cancelled(browser: Any, stand: Stand) -> None:
    opened(browser, stand, f"/workflows/{stand.ids['workflow']}")
    drawn = css(browser, "svg.graph")
    assert len(drawn.find_elements("css selector", "g.node")) == 11
    assert len(drawn.find_elements("css selector", "g.s-success")) == 4
    assert len(drawn.find_elements("css selector", "g.s-acquired")) == 1
    press(browser, "details[data-key^='workflow.cancel'] > summary")
    press(browser, "details[data-key^='workflow.cancel'] button")
    said(browser, "is cancelled")
    wait(browser, lambda b: b.find_elements("css selector", "svg.graph g.s-cancelled"))


def test_actions_are_paused_and_limited(browser: Any, stand: Stand) -> None:
    opened(browser, stand, "/actions")
    press(browser, "tr[data-key='asend-email'] form button")
    said(browser, "Action send-email is paused")
    wait_live(browser)
    press(browser, "tr[data-key='asend-email'] form button")
    said(browser, "Action send-email is resumed")
    wait_live(browser)
    press(browser, "tr[data-key='asend-email'] a[href^='/actions/']")
    css(browser, "input[name=max_in_flight]").send_keys("4")
    press(browser, "main form button.main")
    said(browser, "Limits of send-email are set")
    wait_text(browser, "0 of 4 in flight")


def test_a_tenant_is_limited_paused_and_its_rule_removed(browser: Any, stand: Stand) -> None:
    opened(browser, stand, "/tenants")
    css(browser, "main input[name=name]").send_keys("globex")
    press(browser, "main form[role=search] button")
    css(browser, "#limits input[name=max_in_flight]").send_keys("4")
    press(browser, "#limits button.main")
    said(browser, "Limits of globex are set")
    wait_text(browser, "4 in flight")
    wait_live(browser)
    press(browser, "tr[data-key='oglobex'] form button")
    said(browser, "Tenant globex is paused")
    wait_live(browser)
    press(browser, "details[data-key='tenant.delete-globex'] > summary")
    press(browser, "details[data-key='tenant.delete-globex'] button")
    said(browser, "The rule of globex is removed")


def test_rejected_messages_are_read_again_and_deleted(browser: Any, stand: Stand) -> None:
    made = stand.run(
        stand.sql.fetchval(
            "insert into penstock.rejected (source, body, reason) values ('inbound', '{', 'not JSON') returning id"
        )
    )
    opened(browser, stand, f"/rejected/{made}")
    press(browser, "main form:has(input[value='rejected.retry']) button")
    said(browser, "0 messages accepted")
    wait_live(browser)
    press(browser, "details[data-key^='rejected.purge'] > summary")
    press(browser, "details[data-key^='rejected.purge'] button")
    said(browser, "messages deleted")


def test_a_key_is_made_shown_once_and_revoked(browser: Any, stand: Stand) -> None:
    opened(browser, stand, "/keys")
    css(browser, "input[name=name]").send_keys("from-the-browser")
    press(browser, "input[name=permission][value=read]")
    press(browser, "main form button.main")
    assert css(browser, "#secret").text.startswith("pstk_")
    press(browser, "main a.button.main")
    wait_text(browser, "from-the-browser")
    wait_live(browser)
    press(browser, "details[data-key^='keys.revoke'] > summary")
    press(browser, "details[data-key^='keys.revoke'][open] button")
    said(browser, "Key from-the-browser is revoked")
    opened(browser, stand, "/audit")
    wait_text(browser, "keys.revoke")


PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}


@pytest.mark.parametrize("path", [*MAIN, "task", "edit", "workflow"])
def test_a_phone_needs_no_scrolling_sideways(browser: Any, stand: Stand, path: str) -> None:
    special = {
        "task": f"/tasks/{stand.ids['failure']}",
        "edit": f"/tasks/{stand.ids['failure']}/edit",
        "workflow": f"/workflows/{stand.ids['workflow']}",
    }
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    opened(browser, stand, special.get(path, path))
    assert browser.execute_script("return document.documentElement.scrollWidth") <= PHONE["width"]


NAME = "nightly_export_of_all_accounts_" * 6  # of a schedule, and a token: no blank to break it at


@pytest.fixture(scope="module")
def long_names(stand: Stand) -> dict[str, str]:
    """Paths of pages that show long names; their last part says of what."""

    async def make() -> dict[str, str]:
        await stand.sql.executemany(
            "insert into penstock.tally (action, event, count) values ($1, $2, $3)",
            [("generate-thumbnails1", "ERROR", 900), ("generate-thumbnails1", "CRITICAL_ERROR", 700)],
        )
        await stand.call("schedule.create", name=NAME, expression="0 3 * * *", action="generate-thumbnails1")
        waiting = await stand.call("enqueue", action="approve")
        await stand.sql.execute(
            "update penstock.task set state = 'WAITING', attempts = 1, claim = 1, claimed_at = now() where id = $1",
            waiting.id,
        )
        await stand.sql.execute(
            "insert into penstock.wait (token, task_id, claim, deadline, policy) "
            "values ($1, $2, 1, now() + interval '1 day', '{}')",
            NAME, waiting.id,
        )  # fmt: skip
        failed = await stand.call("workflow.create", name="failed", steps=[{"name": "one", "action": "a"}])
        await stand.sql.execute(
            "update penstock.workflow set state = 'FAILED', open = 0, finished_at = now() where id = $1", failed.id
        )
        return {
            "overview": "/", "token": f"/tasks/{waiting.id}", "schedule": f"/schedules/{NAME}",
            "schedules": "/schedules", "tasks": "/tasks", "workflows": "/workflows", "actions": "/actions",
        }  # fmt: skip

    made: dict[str, str] = stand.run(make())
    return made


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("page", ["overview", "token", "schedule", "schedules", "tasks", "workflows", "actions"])
def test_long_names_need_no_scrolling_sideways(
    browser: Any, stand: Stand, long_names: dict[str, str], page: str, width: int
) -> None:
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE | {"width": width, "mobile": width < 500})
    opened(browser, stand, long_names[page])
    if page in ("token", "schedule"):
        wait_text(browser, NAME)
    measured = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    scroll, client = browser.execute_script(measured)
    assert scroll <= client == width


@pytest.mark.parametrize("path", ["/", "/tasks", "/tenants"])
def test_a_search_field_and_its_button_are_in_one_row(browser: Any, stand: Stand, path: str) -> None:
    opened(browser, stand, path)
    field, button = (css(browser, f"form[role=search] {tag}").rect for tag in ("input", "button"))
    assert button["x"] >= field["x"] + field["width"]
    assert abs(button["y"] - field["y"]) < field["height"] / 2


def test_words_of_tables_are_whole_and_filters_show_their_choice(
    browser: Any, stand: Stand, long_names: dict[str, str]
) -> None:
    opened(browser, stand, "/")
    wait_text(browser, "generate-thumbnails1")
    lines = """
        const link = [...document.querySelectorAll('.plain a')].find(a => a.textContent === 'generate-thumbnails1');
        return link.getClientRects().length"""
    assert browser.execute_script(lines) == 1
    clipped = """
        return [...document.querySelectorAll('main select')].filter(select => {
          const text = document.createElement('span');
          text.style.font = getComputedStyle(select).font;
          text.style.whiteSpace = 'nowrap'; text.style.position = 'absolute';
          text.textContent = select.selectedOptions[0].textContent;
          document.body.append(text);
          const needed = text.getBoundingClientRect().width;
          text.remove();
          return needed > select.clientWidth - 30;
        }).map(select => select.name)"""
    for path in ("/workflows", "/tasks", "/schedules"):
        opened(browser, stand, path)
        assert browser.execute_script(clipped) == [], path


def test_the_bar_of_a_failed_workflow_is_not_that_of_success(
    browser: Any, stand: Stand, long_names: dict[str, str]
) -> None:
    opened(browser, stand, "/workflows?state=FAILED")
    colours = """
        const shown = getComputedStyle(document.querySelector('progress')).color;
        const probe = document.createElement('i');
        document.body.append(probe);
        const of = name => { probe.style.color = `var(${name})`; return getComputedStyle(probe).color; };
        return [shown, of('--bad-fill'), getComputedStyle(document.querySelector('progress')).appearance]"""
    shown, bad, appearance = browser.execute_script(colours)
    assert (shown, appearance) == (bad, "none")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(
    browser: Any, stand: Stand, long_names: dict[str, str], theme: str
) -> None:
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    )
    ratios = """
        const part = v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
        const lum = c => { const [r, g, b] = c.map(v => part(v / 255)); return .2126 * r + .7152 * g + .0722 * b; };
        const rgb = text => text.match(/[0-9.]+/g).map(Number);
        const found = {};
        const main = document.querySelector('main');
        main.insertAdjacentHTML('beforeend', '<p class="probe"><i class="faint">a</i><i class="soft">a</i>'
          + ['success', 'failed', 'error', 'running', 'waiting', 'cancelled']
            .map(state => `<i class="badge s-${state}">${state}</i>`).join('')
          + '<button class="danger main">b</button><button class="main">c</button><button class="danger">d</button></p>'
          + '<div class="card"><i class="faint">a</i></div>');
        for (const one of main.querySelectorAll('.probe > *, .card > i.faint')) {
          let behind = one;
          while (rgb(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
          const [a, b] = [getComputedStyle(one).color, getComputedStyle(behind).backgroundColor]
            .map(colour => lum(rgb(colour).slice(0, 3)));
          found[one.className + ' in ' + behind.className] = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
        }
        return found"""
    opened(browser, stand, "/keys")
    found = browser.execute_script(ratios)
    assert len(found) >= 10
    assert {name: ratio for name, ratio in found.items() if ratio < 4.5} == {}


def test_the_keyboard_alone_reaches_what_can_be_done(browser: Any, stand: Stand) -> None:
    from selenium.webdriver.common.keys import Keys

    made = stand.run(stand.call("enqueue", action="typed", delay=3600))
    opened(browser, stand, f"/tasks/{made.id}")
    reached = []
    for _ in range(60):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        active = browser.switch_to.active_element
        reached.append(active.text)
        if active.text == "Cancel":
            break
    assert {"Overview", "Edit and run again", "Reschedule", "Cancel"} <= set(reached)
    outline = browser.execute_script("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    wait(browser, lambda b: b.find_element("css selector", "input[name=reason]").is_displayed())
    browser.switch_to.active_element.send_keys(Keys.TAB)
    assert browser.switch_to.active_element.get_attribute("name") == "reason"
    browser.switch_to.active_element.send_keys("typed", Keys.ENTER)
    said(browser, f"Task {made.id} is cancelled")
    opened(browser, stand, "/tasks")
    browser.find_element("css selector", "body").send_keys("/")
    assert browser.switch_to.active_element.get_attribute("id") == "find"


def test_dark_and_light_follow_the_system_until_somebody_chooses(browser: Any, stand: Stand) -> None:
    def is_dark() -> bool:
        colour = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        return sum(map(int, colour[colour.index("(") + 1 : -1].split(",")[:3])) < 200

    opened(browser, stand, "/")
    assert not is_dark()
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    assert is_dark()
    press(browser, "button[data-do=theme]")
    assert not is_dark()
    opened(browser, stand, "/tasks")
    assert not is_dark()
    browser.execute_script("localStorage.clear()")
