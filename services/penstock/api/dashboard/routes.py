"""The routes of the dashboard: pages, what is done from them, signing in, assets."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl, quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from penstock.api.access import Guard
from penstock.api.audit import doing
from penstock.api.dashboard import form_actions, formats, overview
from penstock.api.dashboard.browser_sessions import (
    FLASH_COOKIE,
    SESSION_COOKIE,
    Flash,
    Visitor,
    Visitors,
    check_form,
    flash_of,
    local_path,
    set_cookie,
    set_flash,
)
from penstock.api.dashboard.live import Streams
from penstock.api.dashboard.page_request import Ask, Page, cleaned
from penstock.api.dashboard.pages import PAGES
from penstock.api.dispatch import Methods
from penstock.api.http import read_body
from penstock.api.rpc import masked
from penstock.protocol.caller import bind
from penstock.protocol.errors import (
    AccessDenied,
    InvalidParams,
    Overloaded,
    RateLimited,
    RpcError,
    TooLarge,
    Unavailable,
)
from penstock.protocol.version import __version__
from penstock.settings.model import Settings

SIGN_IN_BYTES = 16 * 1024  # of a form that anyone may send
FORM_LIMIT_BYTES = 8 * 1024 * 1024  # a payload of the greatest size, as a form writes it
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
_TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}
_A_YEAR_SECONDS = 31_536_000

NAVIGATION = (
    ("/", "Overview", "stats"), ("/tasks", "Tasks", "list"), ("/schedules", "Schedules", "schedule.list"),
    ("/workflows", "Workflows", "workflow.list"), ("/queues", "Queues", "dlq.stats"),
    ("/actions", "Actions", "action.list"), ("/tenants", "Tenants", "tenant.list"),
    ("/bulk", "Bulk", "job.list"), ("/keys", "API keys", "keys.list"),
    ("/audit", "Audit", "audit.list"),
)  # fmt: skip


class Dashboard:
    """Serves the pages; ``routes`` are for a Starlette application."""

    def __init__(self, methods: Methods, guard: Guard, settings: Settings) -> None:
        self._methods = methods
        self._settings = settings
        self._visitors = Visitors(guard, methods.session, session_seconds=settings.dashboard_session_seconds)
        self._streams = Streams()
        self._assets = _load_assets()
        self._templates = _templates()
        self._overview = overview.Overview(settings)
        self.home = self._shows(Page("/", "overview.html", self._overview.load))

    @property
    def routes(self) -> list[Route]:
        """All but the one at ``/``, which is ``home``: others than browsers are shown something else there."""
        shown = [Route(page.path, self._shows(page), methods=["GET"]) for page in PAGES]
        return [
            *shown,
            Route("/do", self._guarded(self._do), methods=["POST"]),
            Route("/login", self._guarded(self._login_page), methods=["GET"]),
            Route("/login", self._guarded(self._login), methods=["POST"]),
            Route("/logout", self._guarded(self._logout), methods=["POST"]),
            Route("/assets/{name}", self._asset, methods=["GET"]),
        ]

    async def may_read(self, request: Request) -> bool | None:
        """Whether whoever has signed in may read tasks, which are then those of a tenant that the key is bound to; None
        for a request that is not of a browser's session."""
        if SESSION_COOKIE not in request.cookies:
            return None
        visitor = await self._visitors.who(request)
        bind(visitor.tenant, visitor.actions)
        return visitor.caller is not None and visitor.may("status")

    def warm(self) -> None:
        """Make the pages that people open first ready to be shown, which takes a while; from any thread."""
        for name in ("overview.html", "tasks.html", "task.html", "login.html"):
            self._templates.get_template(name)
        self._templates.get_template("base.html")

    def stop(self) -> None:
        """End the streams, so that nobody who only looks keeps the api from stopping."""
        self._streams.stop()
        self._overview.stop()

    def _guarded(
        self, handle: Callable[[Request, Visitor], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """A handler that is told who asks, and whose failures are pages too."""

        async def answer(request: Request) -> Response:
            visitor: Visitor | None = None
            try:
                visitor = await self._visitors.who(request)
                bind(visitor.tenant, visitor.actions)
                doing(visitor.name, visitor.address, "dashboard")
                return await handle(request, visitor)
            except ClientDisconnect:
                return Response(status_code=400)
            except RpcError as exc:
                return self._failure(request, visitor, exc)
            except Exception as exc:
                status = 503 if isinstance(exc, Unavailable) else 500
                return self._failure(request, visitor, masked(exc, "dashboard"), status)

        return answer

    def _shows(self, page: Page) -> Callable[[Request], Awaitable[Response]]:
        async def show(request: Request, visitor: Visitor) -> Response:
            follows = "text/event-stream" in request.headers.get("accept", "")
            if visitor.caller is None:
                if follows:
                    return Response(status_code=401)
                there = request.url.path + (f"?{request.url.query}" if request.url.query else "")
                return RedirectResponse("/login?next=" + quote(local_path(there), safe=""), 303)
            if not visitor.may(page.method):
                raise AccessDenied(403, f"Your API key may not see this page: it needs the right to {page.method}")
            if follows:
                return self._follow(page, request, visitor)
            shown = await page.load(self._ask(request, visitor))
            if "redirect" in shown:
                return _dressed(RedirectResponse(shown["redirect"], 303))
            template = self._templates.get_template(shown.get("template", page.template))
            html = template.render(self._context(request, visitor, page, shown))
            return self._html(request, visitor, html)

        return self._guarded(show)

    def _follow(self, page: Page, request: Request, visitor: Visitor) -> Response:
        """A stream of the live part of a page. Who looks is asked anew each time: a key may have been revoked."""
        if not page.live or self._streams.full(visitor.name):
            # 204 tells a browser not to come again; 503, to try later.
            return Response(status_code=503 if page.live else 204)

        async def render() -> str | None:
            try:
                looking = await self._visitors.who(request)
                bind(looking.tenant, looking.actions)
                if not looking.may(page.method):
                    return None
                shown = await page.load(self._ask(request, looking, follows=True))
                if "redirect" in shown:
                    return None
            except RateLimited:
                return None
            except RpcError as exc:
                return str(self._templates.get_template("trouble.html").render(problem=exc.message))
            except Unavailable:
                text = "Postgres is unavailable; this page shows the last known state. Retrying."
                return str(self._templates.get_template("trouble.html").render(problem=text))
            template = self._templates.get_template(shown.get("template", page.template))
            context = template.new_context(self._context(request, looking, page, shown))
            return "".join(template.blocks["live"](context))

        response = StreamingResponse(self._streams.follow(visitor.name, render), media_type="text/event-stream")
        return _dressed(response)

    async def _do(self, request: Request, visitor: Visitor) -> Response:
        """What a form asks for; back to its page with what came of it."""
        if visitor.caller is None:
            return RedirectResponse("/login", 303)
        form = await self._form(request, FORM_LIMIT_BYTES)
        check_form(request, visitor, form.text("csrf"))
        ask = Ask(visitor, {}, cleaned(form.first), self._methods, self._settings)
        back = local_path(form.text("back"))
        try:
            done = await form_actions.carry_out(ask, form)
        except RpcError as exc:
            again = form_actions.page_again(form, exc)
            if again is not None:
                return self._page(request, visitor, *again, status=422)
            return _flashed(back, Flash(_sentence(exc), "failed"))
        if isinstance(done, form_actions.Shown):
            return self._page(request, visitor, done.template, done.values)
        return _flashed(done.next or back, Flash(done.text, "done" if done.whole else "failed"))

    async def _login_page(self, request: Request, visitor: Visitor) -> Response:
        there = local_path(request.query_params.get("next", "/"))
        if visitor.caller is not None:
            return RedirectResponse(there, 303)
        return self._page(request, visitor, "login.html", {"next": there, "problem": None})

    async def _login(self, request: Request, visitor: Visitor) -> Response:
        form = await self._form(request, SIGN_IN_BYTES)
        check_form(request, visitor, form.text("csrf"))
        there = local_path(form.text("next"))
        entered = await self._visitors.sign_in(form.text("key").strip()) if visitor.signs_in else None
        problem = "This key is not valid: it may be misspelt, revoked or expired."
        if entered is not None:
            caller, token = entered
            if caller.may("stats"):
                response = RedirectResponse(there, 303)
                set_cookie(request, response, token, self._settings.dashboard_session_seconds)
                return _dressed(response)
            problem = "This key may not read; the dashboard needs the permission read, or admin to make changes."
        return self._page(request, visitor, "login.html", {"next": there, "problem": problem}, status=401)

    async def _logout(self, request: Request, visitor: Visitor) -> Response:
        form = await self._form(request, SIGN_IN_BYTES)
        check_form(request, visitor, form.text("csrf"))
        await self._visitors.sign_out(visitor)
        response = RedirectResponse("/login", 303)
        response.delete_cookie(SESSION_COOKIE)
        return _dressed(response)

    async def _asset(self, request: Request) -> Response:
        found = self._assets.get(request.path_params["name"])
        if found is None:
            return _dressed(Response("no such file\n", 404, media_type="text/plain"))
        body, version = found
        response = Response(body, media_type=_TYPES[request.path_params["name"].rpartition(".")[2]])
        kept = (
            f"public, max-age={_A_YEAR_SECONDS}, immutable" if request.query_params.get("v") == version else "no-cache"
        )
        return _dressed(response, cache=kept)

    async def _form(self, request: Request, limit_bytes: int) -> form_actions.Form:
        """Raises InvalidParams, TooLarge, Overloaded."""
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != "application/x-www-form-urlencoded":
            raise InvalidParams("form", f"must be application/x-www-form-urlencoded, not {media[:100]!r}")
        body = await read_body(request, limit_bytes, self._settings.request_timeout_seconds)
        try:
            pairs = parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=2000)
        except ValueError as exc:
            raise InvalidParams("form", f"cannot be read: {exc}") from None
        return form_actions.Form(pairs)

    def _ask(self, request: Request, visitor: Visitor, *, follows: bool = False) -> Ask:
        given, query = cleaned(request.path_params), cleaned(dict(request.query_params))
        return Ask(visitor, given, query, self._methods, self._settings, follows)

    def _context(self, request: Request, visitor: Visitor | None, page: Page | None, shown: Mapping[str, Any]) -> Any:
        return {
            "me": visitor,
            "navigation": [entry for entry in NAVIGATION if visitor is not None and visitor.may(entry[2])],
            "here": request.url.path,
            "back": request.url.path + (f"?{request.url.query}" if request.url.query else ""),
            "flash": flash_of(request),
            "live": page is not None and page.live,
            **shown,
        }

    def _page(
        self, request: Request, visitor: Visitor, template: str, shown: Mapping[str, Any], status: int = 200
    ) -> Response:
        """A page that no address leads to by itself."""
        html = self._templates.get_template(template).render(self._context(request, visitor, None, shown))
        return self._html(request, visitor, html, status)

    def _failure(self, request: Request, visitor: Visitor | None, exc: RpcError, status: int | None = None) -> Response:
        if status is None:
            status = _status_of(exc)
        data = exc.data if isinstance(exc.data, dict) else {}
        shown = {"status": status, "problem": _sentence(exc), "reference": data.get("ref")}
        html = self._templates.get_template("failure.html").render(self._context(request, visitor, None, shown))
        response = _dressed(Response(html, status, media_type="text/html"))
        if isinstance(exc, RateLimited | Overloaded):
            response.headers["Retry-After"] = str(max(1, math.ceil(exc.retry_after_seconds)))
        return response

    def _html(self, request: Request, visitor: Visitor, html: str, status: int = 200) -> Response:
        response = _dressed(Response(html, status, media_type="text/html"))
        if request.cookies.get(SESSION_COOKIE) != visitor.token:
            set_cookie(request, response, visitor.token, None)
        if FLASH_COOKIE in request.cookies:
            response.delete_cookie(FLASH_COOKIE)
        return response


def _flashed(there: str, flash: Flash) -> Response:
    response = RedirectResponse(there, 303)
    set_flash(response, flash)
    return _dressed(response)


def _dressed(response: Response, cache: str = "no-store") -> Response:
    """With what keeps a page from being framed, kept, or made to run what is not ours."""
    response.headers["Content-Security-Policy"] = _POLICY
    response.headers["Cache-Control"] = cache
    # The server says no-referrer for all answers, with which a browser hides the origin of forms as well.
    response.headers["Referrer-Policy"] = "same-origin"
    response.headers["Cross-Origin-Opener-Policy"] = "same-origin"
    return response


def _status_of(exc: RpcError) -> int:
    match exc:
        case AccessDenied(status=status):
            return status
        case RateLimited():
            return 429
        case Overloaded():
            return 503
        case TooLarge():
            return 413
        case InvalidParams():
            return 400
    return getattr(exc, "status", 404 if "NotFound" in type(exc).__name__ else 409)


def _sentence(exc: RpcError) -> str:
    return exc.message[:1].upper() + exc.message[1:]


@cache
def _load_assets() -> dict[str, tuple[bytes, str]]:
    """Each file of the folder with a version by its content, so that browsers may keep it."""
    found = {}
    for path in files(__package__).joinpath("assets").iterdir():
        if path.name.rpartition(".")[2] in _TYPES:
            body = path.read_bytes()
            found[path.name] = body, hashlib.sha256(body).hexdigest()[:12]
    return found


@cache
def _templates() -> Environment:
    """Those of this process; they are compiled when they are first shown, or by ``warm``."""
    versions = {name: version for name, (_, version) in _load_assets().items()}
    made = Environment(
        loader=PackageLoader("penstock.api.dashboard", "templates"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.filters |= formats.FILTERS
    made.globals |= {
        "asset": lambda name: f"/assets/{name}?v={versions[name]}", "query": formats.query, "version": __version__,
    }  # fmt: skip
    # Blocks are rendered by themselves too, where no import of their template has happened.
    made.globals["ui"] = made.get_template("macros.html").module
    return made
