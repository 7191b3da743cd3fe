from __future__ import annotations

import asyncio
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from penstock.protocol.errors import SettingsError
from penstock.runtime import health as health_module
from penstock.runtime import metrics
from penstock.runtime.health import DEFAULT_PORT, SATURATED, Health, HealthServer, ready, serve_health


@pytest.fixture
def health() -> Health:
    return Health("tested")


@pytest.fixture
def server(health: Health) -> Iterator[HealthServer]:
    server = serve_health([health], "127.0.0.1", 0)
    yield server
    server.close()


def get(server: HealthServer, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(server.url + path, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_ready_follows_the_last_pass_and_says_why_not(health: Health, server: HealthServer) -> None:
    assert get(server, "/readyz") == (503, "starting\n")
    health.succeeded()
    assert get(server, "/readyz") == (200, "ok\n")
    health.failed("Postgres is unavailable")
    assert get(server, "/readyz") == (503, "Postgres is unavailable\n")
    health.succeeded()
    assert get(server, "/readyz") == (200, "ok\n")


def test_a_saturated_process_is_ready_and_says_so() -> None:
    told: list[str | None] = ["a task waits", None]
    one, other = Health("worker", lambda: told[0]), Health("api")
    one.succeeded()
    assert one.ready() == (True, f"{SATURATED}a task waits")
    assert ready([one, other]) == (False, f"worker: {SATURATED}a task waits; api: starting")
    other.succeeded()
    assert ready([one, other]) == (True, f"worker: {SATURATED}a task waits")
    told[0] = None
    assert ready([one, other]) == (True, "ok")


async def test_a_blocked_loop_lags() -> None:
    health = Health("lagging")
    pulse = asyncio.create_task(health.pulse())
    await asyncio.sleep(0)
    time.sleep(1.2)
    await asyncio.sleep(0.1)
    pulse.cancel()
    labels = {"process": "lagging"}
    assert metrics.REGISTRY.get_sample_value("penstock_loop_lag_seconds_sum", labels) >= 0.15  # type: ignore[operator]


def test_connections_that_say_nothing_take_so_many_threads_and_no_more(health: Health, server: HealthServer) -> None:
    health.succeeded()
    before = threading.active_count()
    parts = urlsplit(server.url)
    held = [socket.create_connection((parts.hostname, parts.port)) for _ in range(40)]
    try:
        assert held[-1].recv(1) == b"", "what is one too many is closed"
        assert threading.active_count() - before <= 16
    finally:
        for one in held:
            one.close()
    assert get(server, "/readyz") == (200, "ok\n")


def test_the_ready_gauge_follows_too(health: Health, server: HealthServer) -> None:
    for change, expected in ((health.succeeded, 1.0), (lambda: health.failed("x"), 0.0), (health.succeeded, 1.0)):
        change()
        assert metrics.REGISTRY.get_sample_value("penstock_ready", {"process": "tested"}) == expected
        assert f'penstock_ready{{process="tested"}} {expected}' in get(server, "/metrics")[1]


def test_a_process_that_has_not_begun_is_not_ready_by_its_gauge(server: HealthServer) -> None:
    Health("beginning")
    assert metrics.REGISTRY.get_sample_value("penstock_ready", {"process": "beginning"}) == 0.0


async def test_healthz_holds_while_the_event_loop_turns_and_not_when_it_stalls(
    health: Health, server: HealthServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulse = asyncio.create_task(health.pulse())
    try:
        assert await asyncio.to_thread(get, server, "/healthz") == (200, "ok\n")
        monkeypatch.setattr(health_module, "_STALLED_AFTER_SECONDS", 0.0)
        # The loop is blocked by this very call, and the answer comes all the same: it is served by a thread.
        code, text = get(server, "/healthz")
        assert code == 503
        assert "event loop stalled" in text
    finally:
        pulse.cancel()


@pytest.mark.parametrize("kind", ["text/plain", "application/openmetrics-text"])
def test_metrics_are_given_whatever_version_is_asked_for(server: HealthServer, kind: str) -> None:
    request = urllib.request.Request(server.url + "/metrics", headers={"Accept": f"{kind};version=x.1"})
    with urllib.request.urlopen(request, timeout=10) as response:
        assert "# TYPE penstock_passes" in response.read().decode()


def test_healthz_holds_over_a_stall_that_the_process_ends_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_module, "_STALLED_AFTER_SECONDS", 0.0)
    ends = [True]
    health = Health("worker", ends_stalls=lambda: ends[0])
    assert health.alive() == (True, "ok")
    ends[0] = False
    assert not health.alive()[0]


def test_metrics_are_prometheus_text_and_other_paths_name_the_right_ones(server: HealthServer) -> None:
    code, text = get(server, "/metrics")
    assert code == 200
    assert "# TYPE penstock_passes_total counter" in text
    code, text = get(server, "/")
    assert code == 404
    assert "/metrics, /healthz and /readyz" in text


def test_several_probes_are_answered_while_one_connection_hangs(server: HealthServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))):
        assert get(server, "/healthz")[0] == 200


def test_a_taken_port_that_was_asked_for_is_a_mistake_with_the_setting(health: Health) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"127.0.0.1:{port} .*PENSTOCK_METRICS_PORT"):
            serve_health([health], "127.0.0.1", port)


def test_without_a_port_a_second_process_takes_a_free_one(health: Health) -> None:
    first = serve_health([health], "127.0.0.1", None)
    second = serve_health([Health("second")], "127.0.0.1", None)
    try:
        assert first.url != second.url
        assert not second.url.endswith(f":{DEFAULT_PORT}")
        assert get(first, "/healthz")[0] == get(second, "/healthz")[0] == 200
    finally:
        first.close()
        second.close()


def test_closing_frees_the_port(health: Health) -> None:
    server = serve_health([health], "127.0.0.1", 0)
    port = int(server.url.rsplit(":", 1)[1])
    server.close()
    again = serve_health([health], "127.0.0.1", port)
    again.close()
    assert again.url == server.url


def test_an_address_of_ipv6_is_listened_on_and_stands_in_brackets(health: Health) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:  # a machine without IPv6
        with pytest.raises(SettingsError, match="::1:0"):
            serve_health([health], "::1", 0)
        return
    server = serve_health([health], "::1", 0)
    try:
        assert server.url.startswith("http://[::1]:")
        assert get(server, "/healthz") == (200, "ok\n")
    finally:
        server.close()


def test_an_address_that_is_not_this_machines_is_a_mistake_with_the_setting(health: Health) -> None:
    for port in (0, None):
        with pytest.raises(SettingsError, match=r"192\.0\.2\.1:0 .*PENSTOCK_METRICS_PORT.*PENSTOCK_METRICS_HOST"):
            serve_health([health], "192.0.2.1", port)


def test_answers_do_not_tell_what_serves_them(server: HealthServer) -> None:
    for path in ("/metrics", "/healthz", "/nothing"):
        try:
            headers = urllib.request.urlopen(server.url + path, timeout=10).headers
        except urllib.error.HTTPError as error:
            headers = error.headers
            error.close()
        assert headers["server"] == "penstock"
        assert headers["x-content-type-options"] == "nosniff"


def test_request_that_never_comes_is_given_up_without_a_word(
    server: HealthServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(health_module._Handler, "timeout", 0.1)
    port = int(server.url.rpartition(":")[2])
    for said in (b"", b"GET /metr"):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as slow:
            slow.sendall(said)
            assert slow.recv(100) == b""
    assert get(server, "/healthz")[0] == 200
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err


def test_exemplars_come_to_those_who_ask_for_openmetrics(server: HealthServer) -> None:
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    metrics.QUEUE_WAIT_SECONDS.labels("exemplary").observe_many(
        [0.2, 99999.0, 0.3], [(0.2, trace_id), (99999.0, trace_id)]
    )
    asked = urllib.request.Request(
        server.url + "/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0"}
    )
    with urllib.request.urlopen(asked, timeout=10) as response:
        kind, text = response.headers["Content-Type"], response.read().decode()
    assert kind.startswith("application/openmetrics-text")
    mine = [line for line in text.splitlines() if 'action="exemplary"' in line and "bucket" in line]
    assert [line.split('le="')[1].split('"')[0] for line in mine if f'# {{trace_id="{trace_id}"}}' in line] == [
        "0.25",
        "+Inf",
    ]
    status, plain = get(server, "/metrics")
    assert (status, trace_id in plain) == (200, False)
    assert 'action="exemplary",le="0.25"} 1.0' in plain


def test_a_thread_that_cannot_be_started_costs_no_later_probe(
    server: HealthServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(health_module._REQUESTS_AT_ONCE):
            with pytest.raises(OSError):
                get(server, "/healthz")
    assert get(server, "/healthz")[0] == 200
