"""Users that an Application Load Balancer signs in to the dashboard: real signatures, and real keys over HTTP."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from penstock.api.dashboard.browser_sessions import SESSION_COOKIE, SIGNED_OUT, USER_HEADER, BrowserSession
from penstock.api.process import Api
from penstock.db.pool import Store
from penstock.protocol.errors import SettingsError
from penstock.settings.model import Settings, load_settings
from tests.integration.api.test_dashboard import Browser, history
from tests.integration.apis import running

ARN = "arn:aws:elasticloadbalancing:eu-central-1:123456789012:loadbalancer/app/web/50dc6c495c0c9188"
KID = "12345678-1234-1234-1234-123456789012"
READER = {"sub": "u-1", "email": "ann@example.com", "groups": ["dev", "others"]}
KEY = ec.generate_private_key(ec.SECP256R1())


def segment(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).decode("ascii")  # padded, as a load balancer does it


def pem(key: ec.EllipticCurvePrivateKey = KEY) -> bytes:
    return key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )  # fmt: skip


def signed(signing_input: str, key: ec.EllipticCurvePrivateKey) -> bytes:
    r, s = decode_dss_signature(key.sign(signing_input.encode("ascii"), ec.ECDSA(hashes.SHA256())))
    return r.to_bytes(32, "big") + s.to_bytes(32, "big")


def token(
    claims: dict[str, Any] = READER, *, key: ec.EllipticCurvePrivateKey = KEY,
    sign: Callable[[str], bytes] | None = None, **header: Any,
) -> str:  # fmt: skip
    """A token as the load balancer makes it; a header that is None is left out."""
    fields = {
        "typ": "JWT", "kid": KID, "alg": "ES256", "iss": "https://idp.example.com", "client": "web", "signer": ARN,
        "exp": int(time.time()) + 120,
    } | header  # fmt: skip
    given = {name: value for name, value in fields.items() if value is not None}
    head = ".".join(segment(json.dumps(part).encode("utf-8")) for part in (given, claims))
    return f"{head}.{segment(signed(head, key) if sign is None else sign(head))}"


class Keys:
    """The endpoint of public keys; asked: paths, in order."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        keys = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                keys.asked.append(self.path)
                self.send_response(200 if self.path == f"/{KID}" else 403)
                self.end_headers()
                self.wfile.write(pem() if self.path == f"/{KID}" else b"denied")

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def keys() -> Iterator[Keys]:
    made = Keys()
    yield made
    made.stop()


@pytest.fixture
def trusting(settings: Settings, keys: Keys) -> Settings:
    return settings.model_copy(
        update={
            "api_require_keys": True, "dashboard_alb_arn": ARN, "dashboard_alb_keys_url": keys.url,
            "dashboard_alb_client": "web", "dashboard_alb_groups": {"dev": "read", "ops": "admin"},
        }
    )  # fmt: skip


@pytest.fixture
async def api(store: Store, trusting: Settings) -> AsyncIterator[Api]:
    async with running(store, trusting) as made:
        yield made


@pytest.fixture
async def browser(api: Api) -> AsyncIterator[Browser]:
    made = Browser(api)
    yield made
    await made.http.aclose()


async def test_a_user_of_the_load_balancer_has_the_permissions_of_the_groups(browser: Browser, keys: Keys) -> None:
    browser.http.headers[USER_HEADER] = token()
    shown = await browser.get("/tasks")
    assert "alb:ann@example.com" in shown
    assert "read-only" in shown
    assert "Sign out" not in shown
    await browser.get("/keys", 403)
    csrf = BrowserSession(SIGNED_OUT, browser.http.cookies[SESSION_COOKIE], "", True).csrf
    answer = await browser.http.post("/do", data={"csrf": csrf, "method": "action.pause", "action": "a"})
    assert answer.status_code == 303
    assert "Your API key may not do this (action.pause)" in await browser.get("/tasks")
    browser.http.headers[USER_HEADER] = token({"sub": "u-2", "groups": "[ops, dev]"})
    assert await browser.do("action.pause", action="a") == "done: Action a is paused"
    assert (await history(browser))[0] == ("dashboard", "action.pause", "ok")
    assert "alb:u-2" in await browser.get("/audit")
    assert keys.asked == [f"/{KID}"]  # kept
    answer = await browser.http.post("/rpc", json={"jsonrpc": "2.0", "id": 1, "method": "list"})
    assert answer.status_code == 401


def hs256(head: str) -> bytes:
    """Signed with the public key as if it were a shared secret."""
    return hmac.new(pem(), head.encode("ascii"), hashlib.sha256).digest()


REFUSED: dict[str, tuple[Callable[[], str], str, int]] = {
    "another key": (lambda: token(key=ec.generate_private_key(ec.SECP256R1())), "Signature verification failed", 401),
    "no signature": (lambda: token(sign=lambda head: b""), "Signature verification failed", 401),
    "changed claims": (
        lambda: ".".join([*(one := token().split("."))[:1], segment(b'{"sub":"u-1","groups":["ops"]}'), one[2]]),
        "Signature verification failed", 401,
    ),
    "another signer": (lambda: token(signer=ARN.replace("web", "evil")), "its signer is", 401),
    "no signer": (lambda: token(signer=None), "its signer is None", 401),
    "another client": (lambda: token(client="other"), "its client is", 401),
    "expired": (lambda: token(exp=int(time.time()) - 1), "it expired at", 401),
    "expired claims": (lambda: token(READER | {"exp": int(time.time()) - 9}), "expired", 401),
    "no expiry": (lambda: token(exp=None), "it expired at None", 401),
    "an expiry that is text": (lambda: token(exp="9999999999"), "it expired at", 401),
    "alg none": (lambda: token(alg="none", sign=lambda head: b""), "its algorithm is", 401),
    "the public key as a secret": (lambda: token(alg="HS256", sign=hs256), "its algorithm is", 401),
    "an unknown key": (lambda: token(kid="another"), "has no key", 401),
    "a path as a key": (lambda: token(kid="../evil"), "its key id is", 401),
    "no token": (lambda: "abc", "is refused", 401),
    "too many parts": (lambda: token() + ".e", "is refused", 401),
    "no groups": (lambda: token({"sub": "u-1"}), "has no group of PENSTOCK_DASHBOARD_ALB_GROUPS", 403),
    "foreign groups": (lambda: token(READER | {"groups": ["sales", 7]}), "has no group of", 403),
    "no user": (lambda: token({"groups": ["ops"]}), "a user without email and sub", 403),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
async def test_a_header_that_does_not_prove_a_user_is_refused(browser: Browser, keys: Keys, case: str) -> None:
    make, reason, status = REFUSED[case]
    browser.http.headers[USER_HEADER] = make()
    for path in ("/tasks", "/"):
        assert reason in await browser.get(path, status)
    answer = await browser.http.get("/tasks", headers={"Accept": "text/event-stream"})
    assert answer.status_code == status
    assert set(keys.asked) <= {f"/{KID}", "/another"}


async def test_the_header_is_ignored_where_the_setting_is_off(store: Store, settings: Settings, keys: Keys) -> None:
    closed = settings.model_copy(update={"api_require_keys": True, "dashboard_alb_keys_url": keys.url})
    async with running(store, closed) as api:
        browser = Browser(api)
        browser.http.headers[USER_HEADER] = token(READER | {"groups": ["ops"]})
        assert (await browser.http.get("/tasks")).headers["location"].startswith("/login")
        await browser.http.aclose()
    assert keys.asked == []


async def test_without_the_header_keys_sign_in_and_without_the_key_endpoint_it_is_unavailable(
    browser: Browser, keys: Keys
) -> None:
    assert (await browser.http.get("/tasks")).headers["location"].startswith("/login")
    keys.stop()
    browser.http.headers[USER_HEADER] = token()
    assert "Unavailable" in await browser.get("/tasks", 503)


async def test_an_open_page_ends_with_the_header_so_that_the_browser_asks_again(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = {"Accept": "text/event-stream", USER_HEADER: token()}
    lines: list[str] = []
    async with browser.http.stream("GET", "/tasks", headers=headers) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            lines.append(line)
            monkeypatch.setattr("penstock.api.dashboard.browser_sessions.time", lambda: time.time() + 3600)
    assert any(line.startswith("data: ") for line in lines)
    assert "event: over" not in lines


@pytest.mark.parametrize(("given", "problem"), [
    ({"api_require_keys": False}, "dashboard_alb_arn needs PENSTOCK_API_REQUIRE_KEYS"),
    ({"dashboard_alb_groups": "{}"}, "needs dashboard_alb_groups"),
    ({"dashboard_alb_groups": '{"ops": "everything"}'}, "PENSTOCK_DASHBOARD_ALB_GROUPS: ops: "),
    ({"dashboard_alb_arn": "arn:aws:iam::1:role/x"}, "must be arn:aws:elasticloadbalancing"),
])  # fmt: skip
def test_settings_that_admit_all_or_none_are_refused(given: dict[str, Any], problem: str) -> None:
    good = {"api_require_keys": True, "dashboard_alb_arn": ARN, "dashboard_alb_groups": '{"ops": "admin"}'}
    assert load_settings(**good).dashboard_alb_groups == {"ops": "admin"}
    with pytest.raises(SettingsError, match=problem):
        load_settings(**good | given)
