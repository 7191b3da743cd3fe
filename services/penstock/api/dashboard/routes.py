"""The routes of the dashboard: pages, their forms, the sign-in, assets."""

import hashlib
import math
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl, quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from penstock.api.access import Authenticator, Caller
from penstock.api.audit import set_actor
from penstock.api.dashboard import browser_sessions, formats, overview, requests
from penstock.api.dashboard.browser_sessions import SESSION_COOKIE, BrowserSession, local_path
from penstock.api.dashboard.pages import PAGES
from penstock.api.dashboard.requests import Page, PageRequest, cleaned
from penstock.api.dispatch import Methods
from penstock.api.http import read_body, status_of
from penstock.api.rpc import masked
from penstock.api.server import Part
from penstock.api.streams import EventStream, Expired, Streams, follow
from penstock.protocol import errors
from penstock.protocol.answers import WorkflowState
from penstock.protocol.api_key import Permission, bind
from penstock.protocol.task import State
from penstock.protocol.tenant import EVERY_TENANT
from penstock.protocol.version import __version__
from penstock.runtime.budget import in_hand
from penstock.settings.model import Settings

SIGN_IN_BYTES = 16 * 1024  # of a form that anyone may send
FORM_LIMIT_BYTES = 8 * 1024 * 1024  # the largest payload, as a form encodes it
_HEADERS = {
    # A browser must not frame a page, nor run foreign scripts in it.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    # The server sends no-referrer with all answers, with which a browser also hides the origin of forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}


class Dashboard(Part):
    def __init__(self, methods: Methods, authenticator: Authenticator, settings: Settings) -> None:
        self._methods = methods
        self._settings = settings
        self._sessions = browser_sessions.BrowserSessions(authenticator, methods.session, settings)
        self._streams = Streams()
        self._templates = _templates()
        self._overview = overview.Overview(settings)
        self.home = self._serve(Page("/", "overview.html", self._overview.load))
        # All but the one at ``/``: clients that are no browsers get another answer there.
        self.routes = [
            *(Route(page.path, self._serve(page), methods=["GET"]) for page in PAGES),
            Route("/do", self._guarded(self._do), methods=["POST"]),
            Route("/login", self._guarded(self._login_page), methods=["GET"]),
            Route("/login", self._guarded(self._login), methods=["POST"]),
            Route("/logout", self._guarded(self._logout), methods=["POST"]),
            Route("/assets/{name}", self._asset, methods=["GET"]),
        ]

    async def caller_of(self, request: Request) -> Caller | None:
        """The caller of a browser's session, to whose tenant the request is then bound; None outside of a session."""
        if SESSION_COOKIE not in request.cookies:
            return None
        browser = await self._identify(request)
        return browser.caller if browser.is_signed_in else None

    def warm(self) -> None:
        """Compile the templates that are opened first; may run in any thread."""
        for name in ("overview.html", "tasks.html", "task.html", "login.html", "base.html"):
            self._templates.get_template(name)

    def stop(self) -> None:
        """End the streams, so that open pages do not keep the api from stopping."""
        self._streams.stopping.set()
        self._overview.stop()

    async def _identify(self, request: Request) -> BrowserSession:
        browser = await self._sessions.identify(request)
        bind(browser.caller.tenant, browser.caller.actions)
        return browser

    def _guarded(
        self, handle: Callable[[Request, BrowserSession], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Identify the browser for a handler, render its errors as pages, and add the headers that every page has."""

        async def answer(request: Request) -> Response:
            browser: BrowserSession | None = None
            try:
                browser = await self._identify(request)
                browser.caller.charge(1)
                set_actor(browser.caller.key, browser.address, "dashboard")
                response = await handle(request, browser)
            except ClientDisconnect:
                return Response(status_code=400)
            except Exception as exc:
                response = self._failure(request, browser, exc)
            return _secured(response)

        return answer

    def _serve(self, page: Page) -> Callable[[Request], Awaitable[Response]]:
        async def serve(request: Request, browser: BrowserSession) -> Response:
            is_stream = "text/event-stream" in request.headers.get("accept", "")
            if not browser.is_signed_in:
                if is_stream:
                    return Response(status_code=401)
                return RedirectResponse("/login?next=" + quote(local_path(_address(request)), safe=""), 303)
            if not browser.may(page.method):
                raise errors.AccessDenied(
                    403, f"Your API key may not see this page: it needs the right to {page.method}"
                )
            if is_stream:
                return self._stream(page, request, browser)
            values = await page.load(self._page_request(request, browser))
            if "redirect" in values:
                return RedirectResponse(values["redirect"], 303)
            return self._html(request, browser, values.get("template", page.template), values, live=page.live)

        return self._guarded(serve)

    def _stream(self, page: Page, request: Request, browser: BrowserSession) -> Response:
        """A stream of the live part of a page. The browser is identified each time: its key may have been revoked."""
        if not page.live:
            return Response(status_code=204)  # which a browser does not ask again
        try:
            counted = self._streams.admit(browser.caller.key)
        except errors.TooManyWaits:
            return Response(status_code=503)

        async def render() -> str | None:
            in_hand().age_seconds = None
            try:
                current = await self._identify(request)
                if not current.may(page.method):
                    return None
                values = await page.load(self._page_request(request, current, is_stream=True))
                if "redirect" in values:
                    return None
            except errors.RateLimited:
                return None
            except (errors.RpcError, errors.Unavailable) as exc:
                if browser.by_proxy and isinstance(exc, errors.AccessDenied):
                    raise Expired from None
                away = "Postgres is unavailable; this page shows the last known state. Retrying."
                problem = exc.message if isinstance(exc, errors.RpcError) else away
                return self._templates.get_template("trouble.html").render(problem=problem)
            template = self._templates.get_template(values.get("template", page.template))
            context = template.new_context(self._context(request, current, values, live=page.live))
            return "".join([*template.blocks["live"](context), context["ui"].age(context["age_seconds"])])

        return EventStream(follow(self._streams, render), counted)

    async def _do(self, request: Request, browser: BrowserSession) -> Response:
        """Carry out a form; redirect to the next page with the outcome."""
        if not browser.is_signed_in:
            return RedirectResponse("/login", 303)
        form = await self._form(request, browser, FORM_LIMIT_BYTES)
        page_request = PageRequest(browser, {}, cleaned(form, strip=False), self._methods, self._settings)
        back = local_path(form.get("back", ""))
        try:
            outcome = await requests.carry_out(page_request, form)
        except errors.RpcError as exc:
            return browser_sessions.flashed(back, _sentence(exc), "failed")
        if isinstance(outcome, requests.ResultPage):
            return self._html(request, browser, outcome.template, outcome.values, status=outcome.status)
        return browser_sessions.flashed(outcome.next or back, outcome.text, "done" if outcome.complete else "failed")

    async def _login_page(self, request: Request, browser: BrowserSession) -> Response:
        next_path = local_path(request.query_params.get("next", "/"))
        if browser.is_signed_in:
            return RedirectResponse(next_path, 303)
        return self._html(request, browser, "login.html", {"next": next_path, "problem": None})

    async def _login(self, request: Request, browser: BrowserSession) -> Response:
        form = await self._form(request, browser, SIGN_IN_BYTES)
        next_path = local_path(form.get("next", ""))
        entered = await self._sessions.sign_in(form.get("key", "").strip())
        problem = "This key is not valid: it may be misspelt, revoked or expired."
        if entered is not None:
            caller, token = entered
            if caller.may("stats"):
                response = RedirectResponse(next_path, 303)
                browser_sessions.set_cookie(request, response, token, self._settings.dashboard_session_seconds)
                return response
            problem = "This key may not read; the dashboard needs the permission read, or admin to make changes."
        return self._html(request, browser, "login.html", {"next": next_path, "problem": problem}, status=401)

    async def _logout(self, request: Request, browser: BrowserSession) -> Response:
        await self._form(request, browser, SIGN_IN_BYTES)
        await self._sessions.sign_out(browser)
        response = RedirectResponse("/login", 303)
        response.delete_cookie(SESSION_COOKIE)
        return response

    async def _asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        found = _load_assets().get(name)
        if found is None:
            return _secured(Response("no such file\n", 404, media_type="text/plain"))
        body, version = found
        is_current = request.query_params.get("v") == version
        response = Response(body, media_type=_TYPES[name.rpartition(".")[2]])
        return _secured(response, "public, max-age=31536000, immutable" if is_current else "no-cache")

    async def _form(self, request: Request, browser: BrowserSession, limit_bytes: int) -> requests.Form:
        """Read a form that a page of the dashboard sent. Raises AccessDenied, InvalidParams, TooLarge, Overloaded."""
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != "application/x-www-form-urlencoded":
            raise errors.InvalidParams("form", f"must be application/x-www-form-urlencoded, not {media[:100]!r}")
        body = await read_body(request, limit_bytes, self._settings.request_timeout_seconds)
        try:
            pairs = parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=2000)
        except ValueError as exc:
            raise errors.InvalidParams("form", f"cannot be read: {exc}") from None
        form = requests.Form(pairs[::-1])
        browser_sessions.check_form(request, browser, form.get("csrf", ""))
        return form

    def _page_request(self, request: Request, browser: BrowserSession, *, is_stream: bool = False) -> PageRequest:
        path, query = cleaned(request.path_params, strip=False), cleaned(dict(request.query_params))
        return PageRequest(browser, path, query, self._methods, self._settings, is_stream)

    def _context(
        self, request: Request, browser: BrowserSession | None, values: Mapping[str, Any], *, live: bool
    ) -> dict[str, Any]:
        return {
            "me": browser,
            "here": request.url.path,
            "back": _address(request),
            "flash": browser_sessions.flash_of(request),
            "live": live,
            "age_seconds": in_hand().age_seconds,
            **values,
        }

    def _html(
        self, request: Request, browser: BrowserSession | None, template: str, values: Mapping[str, Any], *,
        status: int = 200, live: bool = False,
    ) -> Response:  # fmt: skip
        html = self._templates.get_template(template).render(self._context(request, browser, values, live=live))
        response = Response(html, status, media_type="text/html")
        if browser is not None and request.cookies.get(SESSION_COOKIE) != browser.token:
            browser_sessions.set_cookie(request, response, browser.token, None)
        if browser_sessions.FLASH_COOKIE in request.cookies:
            response.delete_cookie(browser_sessions.FLASH_COOKIE)
        return response

    def _failure(self, request: Request, browser: BrowserSession | None, exc: Exception) -> Response:
        status = status_of(exc, 409 if isinstance(exc, errors.RpcError) else 500)
        shown = masked(exc, "dashboard")
        reference = shown.data.get("ref") if isinstance(shown.data, dict) else None
        reloads = status == 503 and request.method == "GET"
        values = {"status": status, "problem": _sentence(shown), "reference": reference, "reloads": reloads}
        response = self._html(request, browser, "failure.html", values, status=status)
        if isinstance(exc, errors.RateLimited | errors.Overloaded):
            response.headers["Retry-After"] = str(max(1, math.ceil(exc.retry_after_seconds)))
        return response


def _address(request: Request) -> str:
    """The path as a browser sends it, with the query."""
    path, query = quote(request.scope["path"]), request.scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path


def _secured(response: Response, cache: str = "no-store") -> Response:
    response.headers.update(_HEADERS | {"Cache-Control": cache})
    return response


def _sentence(exc: errors.RpcError) -> str:
    return exc.message[:1].upper() + exc.message[1:]


@cache
def _load_assets() -> dict[str, tuple[bytes, str]]:
    """Each file with a version that depends on its content, so that browsers may cache it."""
    bodies = {path.name: path.read_bytes() for path in files(__package__).joinpath("assets").iterdir()}
    return {name: (body, hashlib.sha256(body).hexdigest()[:12]) for name, body in bodies.items()}


@cache
def _templates() -> Environment:
    versions = {name: version for name, (_, version) in _load_assets().items()}
    made = Environment(
        loader=PackageLoader("penstock.api.dashboard", "templates"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.filters |= formats.FILTERS
    made.globals |= {
        "asset": lambda name: f"/assets/{name}?v={versions[name]}", "query": formats.query, "version": __version__,
        "task_states": list(State), "workflow_states": list(WorkflowState), "permissions": list(Permission),
        "everyone": EVERY_TENANT,
    }  # fmt: skip
    # Globals, since a stream renders one block of a page, without the page's imports.
    made.globals["ui"] = made.get_template("macros.html").module
    made.globals["charts"] = made.get_template("charts.html").module
    return made
