"""The guarded HTTP client: one pool of connections for a worker, public addresses alone unless settings allow more.

What is connected to is an address that was checked, with the name kept for TLS and the Host header; a redirect is
checked like the first request. Proxies, netrc and cookies of the environment are ignored.
"""

import asyncio
import errno
import random
import re
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import aiohttp  # the SQS client has loaded it already
from aiohttp.abc import AbstractResolver, ResolveResult
from multidict import CIMultiDict
from yarl import URL

from penstock.protocol.version import __version__
from penstock.runtime.logs import log
from penstock.settings.address_policy import AddressPolicy, address_of
from penstock.settings.model import Settings
from penstock.settings.values import PREFIX
from penstock.worker.deliveries.errors import NotDelivered, Undeliverable, short_text

MAX_URL_CHARS = 8192
MAX_REDIRECTS = 20
_HOST = re.compile(r"[A-Za-z0-9_.-]+|[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?")
# They belong to the connection, or would show the server another request than the one that was checked.
_OWN_HEADERS = {
    "connection", "content-length", "expect", "host", "keep-alive", "proxy-authorization", "proxy-connection", "te",
    "trailer", "transfer-encoding", "upgrade",
}  # fmt: skip
# Sent to another origin; any other header may be a secret meant for the first one.
_KEPT_FOR_OTHERS = frozenset(("accept", "accept-encoding", "accept-language", "content-type", "user-agent"))
_CONTENT = frozenset(("content-type", "content-encoding", "content-language"))


class AddressRefused(Undeliverable):
    """The host is, or leads to, an address that is not public."""


@dataclass(frozen=True, slots=True)
class Response:
    """An answer. body: its first bytes; is_whole: all. url: without query and fragment. redirects: followed ones."""

    status: int
    headers: CIMultiDict[str]
    body: bytes
    is_whole: bool
    url: str
    redirects: int


class HttpClient:
    """Makes requests to addresses that the settings allow; ``http_max_connections`` are open at once, to all hosts."""

    def __init__(self, settings: Settings, resolver: AbstractResolver | None = None) -> None:
        self._settings = settings
        self._policy = AddressPolicy(settings.http_allow)
        self._resolver = _Resolver(self._policy, resolver)

    async def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        timeout_seconds: float = 30,
        redirects: int = 0,
        limit_bytes: int = 65_536,
    ) -> Response:
        """One request and its answer, of any status. timeout_seconds: of it all. Raises Undeliverable, NotDelivered."""
        target, sent = read_url(url), _headers(headers or {})
        if not re.fullmatch(r"[A-Z][A-Z0-9_-]{0,31}", method) or method in ("CONNECT", "TRACE"):
            raise Undeliverable(f"method {method!r} cannot be sent: take one such as GET, POST, PUT, PATCH or DELETE")
        sent.setdefault("User-Agent", f"penstock/{__version__}")
        sent.setdefault("Accept", "*/*")
        sent["Accept-Encoding"] = "identity"  # nothing is unpacked here, so nothing can grow
        try:
            async with asyncio.timeout(timeout_seconds):
                return await self._follow(method, target, sent, body, redirects, limit_bytes)
        except TimeoutError:
            raise NotDelivered(f"{shown(target)} gave no whole answer within {timeout_seconds:g} s") from None

    async def _follow(
        self, method: str, url: URL, headers: CIMultiDict[str], body: bytes, redirects: int, limit_bytes: int
    ) -> Response:
        followed = 0
        while True:
            async with await self._send(method, url, headers, body) as reply:
                # The library hides bytes other than UTF-8 in half surrogate pairs, which JSON cannot hold.
                answered: CIMultiDict[str] = CIMultiDict()
                for name, value in reply.headers.items():
                    answered.add(name, value.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))
                location = answered.get("Location")
                if redirects == 0 or location is None or reply.status not in (301, 302, 303, 307, 308):
                    try:
                        with _ending_with_connection(reply):
                            kept = await reply.content.readexactly(limit_bytes + 1)
                    except asyncio.IncompleteReadError as exc:  # that was all of it
                        kept = exc.partial
                    except (aiohttp.ClientError, OSError) as exc:
                        raise NotDelivered(f"{shown(url)} broke off its answer: {short_text(exc)}") from None
                    is_whole = len(kept) <= limit_bytes
                    return Response(reply.status, answered, kept[:limit_bytes], is_whole, shown(url), followed)
                reply.close()
            followed += 1
            if followed > redirects:
                raise Undeliverable(f"{shown(url)} redirects for the {followed}th time; {redirects} are followed")
            following = _redirected(url, location)
            if reply.status == 303 or (reply.status in (301, 302) and method == "POST"):
                method, body = ("HEAD" if method == "HEAD" else "GET"), b""
                headers = CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _CONTENT)
            if following.origin() != url.origin():
                headers = CIMultiDict((n, value) for n, value in headers.items() if n.lower() in _KEPT_FOR_OTHERS)
            url = following

    async def _send(self, method: str, url: URL, headers: CIMultiDict[str], body: bytes) -> aiohttp.ClientResponse:
        host = url.raw_host or ""
        address = address_of(host)  # which goes past the resolver
        if address is not None and (kind := self._policy.refusal(address)) is not None:
            raise _refused(host, address, kind)
        for is_last in (False, True):
            try:
                return await self._session.request(
                    method, url, headers=headers, data=body or None, allow_redirects=False,
                    skip_auto_headers=("Content-Type",),
                )  # fmt: skip
            except aiohttp.InvalidURL:
                raise Undeliverable(f"{shown(url)} cannot be requested") from None
            except (aiohttp.ClientError, ssl.SSLError, OSError) as exc:
                # Mostly a connection of the pool that the server has closed meanwhile. In any other case the
                # pipeline would send the request again too.
                is_closed = isinstance(exc, aiohttp.ServerDisconnectedError) or (
                    isinstance(exc, OSError) and exc.errno in (errno.ECONNRESET, errno.EPIPE)
                )
                if is_last or not is_closed:
                    reason = short_text(exc).partition(", url=")[0]  # the whole one, of an answer that is not HTTP
                    raise NotDelivered(f"{shown(url)} cannot be reached: {reason}") from None
            except ValueError as exc:  # what the library refuses to put on the wire
                raise Undeliverable(f"the request to {shown(url)} cannot be sent: {exc}") from None
        raise AssertionError  # the loop returns or raises

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        """Opened by the first request, and again by one behind `close`."""
        context = ssl.create_default_context()
        if self._settings.http_ca_file is not None:
            context.load_verify_locations(self._settings.http_ca_file)
        connector = aiohttp.TCPConnector(
            limit=self._settings.http_max_connections,
            ssl=context,
            resolver=self._resolver,
            keepalive_timeout=30,
            socket_factory=self._socket,
        )
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None),  # of our own, over all redirects
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
        )

    def _socket(self, info: aiohttp.AddrInfoType) -> socket.socket:
        """A socket for an address about to be connected to: the last check, wherever it comes from."""
        family, kind, protocol, _, where = info
        address = str(where[0])
        if (refusal := self._policy.refusal(address)) is not None and address not in self._resolver.trusted:
            raise _refused(address, address, refusal)
        return socket.socket(family=family, type=kind, proto=protocol)

    async def close(self) -> None:
        if (session := self.__dict__.pop("_session", None)) is not None:
            await session.close()


class _Resolver(AbstractResolver):
    """Resolves names to addresses that may be reached. trusted: refused addresses of hosts that are allowed by name."""

    def __init__(self, policy: AddressPolicy, names: AbstractResolver | None) -> None:
        self._policy = policy
        self._names = names
        self.trusted: set[str] = set()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Raises AddressRefused when no address is allowed, OSError when there is none."""
        if self._names is None:
            self._names = aiohttp.ThreadedResolver()  # of the running loop
        found = await self._names.resolve(host, port, family)
        if not found:
            raise OSError(f"{host} has no address")
        refusals = {one["host"]: self._policy.refusal(one["host"]) for one in found}
        if self._policy.trusts(host):
            if len(self.trusted) > 10_000:
                self.trusted.clear()  # names of a domain may come and go; those in use are looked up again
            self.trusted.update(address for address, kind in refusals.items() if kind is not None)
        else:
            usable = [one for one in found if refusals[one["host"]] is None]
            if not usable:
                address = found[0]["host"]
                raise _refused(host, address, refusals[address] or "refused")
            found = usable
        random.shuffle(found)
        return found

    async def close(self) -> None:
        pass


def _refused(host: str, address: str, kind: str) -> AddressRefused:
    """Log a refusal; returns its error, which is no OSError, for the library would wrap that in its own."""
    log.warning("address_refused", host=host[:200], address=address, kind=kind)
    what = f"the address {host} is {kind}" if address_of(host) else f"{host} leads to an address that is {kind}"
    return AddressRefused(
        f"{what}, so it is not requested; an operator allows it by {PREFIX}HTTP_ALLOW, by host or network"
    )


def read_url(text: str) -> URL:
    """Raises Undeliverable."""
    if len(text) > MAX_URL_CHARS:
        raise Undeliverable(f"the URL has {len(text)} characters; {MAX_URL_CHARS} are the limit")
    try:
        # As it was written where possible: another quoting would break a signed URL.
        url = URL(text, encoded=text.isascii())
        wrong = url.scheme not in ("http", "https") or not _HOST.fullmatch(url.raw_host or "") or url.port == 0
    except ValueError:
        url, wrong = URL(), True
    if wrong or re.search(r"[\x00-\x20\x7f]", text):
        raise Undeliverable(f"{shown_text(text)!r} is no URL that can be requested: write http(s)://host[:port]/path")
    if url.user is not None or url.password is not None:
        raise Undeliverable("the URL holds a user or a password, which would be shown: send an Authorization header")
    return url.with_fragment(None)


@contextmanager
def _ending_with_connection(reply: aiohttp.ClientResponse) -> Iterator[None]:
    """For a read of the body: the library closes a connection over a broken chunk, and forgets who reads from it."""

    def end(_closed: object) -> None:
        if reply.content.exception() is None and not reply.content.is_eof():
            reply.content.set_exception(aiohttp.ClientPayloadError("it is not valid HTTP"))

    protocol = reply.connection and reply.connection.protocol  # None once all has come
    closed = None if protocol is None else protocol.closed
    if closed is not None:
        closed.add_done_callback(end)
    try:
        yield
    finally:
        if closed is not None:
            closed.remove_done_callback(end)


def _redirected(url: URL, location: str) -> URL:
    """Raises Undeliverable."""
    try:
        following = read_url(str(url.join(URL(location, encoded=location.isascii()))))
    except Undeliverable as exc:
        raise Undeliverable(f"{shown(url)} redirects: {exc}") from None
    except ValueError:
        raise Undeliverable(f"{shown(url)} redirects to {shown_text(location)!r}, which is no URL") from None
    if url.scheme == "https" and following.scheme == "http":
        raise Undeliverable(f"{shown(url)} redirects to {shown(following)}, out of TLS, which is not followed")
    return following


def _headers(given: Mapping[str, str]) -> CIMultiDict[str]:
    """Raises Undeliverable."""
    headers: CIMultiDict[str] = CIMultiDict()
    for name, value in given.items():
        if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,200}", name):
            raise Undeliverable(f"{name[:100]!r} is no name of a header")
        if name.lower() in _OWN_HEADERS:
            raise Undeliverable(f"the header {name} is the connection's own and cannot be given")
        if not re.fullmatch(r"[\t\x20-\x7e]*", value):
            raise Undeliverable(f"the value of the header {name} holds characters other than printable ASCII")
        if name in headers:
            raise Undeliverable(f"the header {name} is given twice, in two ways of writing it")
        headers[name] = value
    return headers


def shown(url: URL) -> str:
    """A URL for people: without its query, which may hold secrets."""
    return str(url.with_query(None).with_fragment(None))


def shown_text(text: str) -> str:
    """Likewise, of what may be no URL and may have a password."""
    return re.sub("//[^/]*@", "//", re.split("[?#]", text)[0])[:200]
