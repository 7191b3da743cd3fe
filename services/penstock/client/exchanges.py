"""What clients share: address and headers, requests as text, answers as values or errors, and exchanges; without I/O.

An exchange is a generator. It yields the body of a request with the seconds that the api may take beyond the timeout of
a call, and is sent the parsed answer, or is thrown the error; or it yields None with the seconds of a pause. Its return
value is the result.
"""

import json
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any, Generic, TypeVar
from urllib.parse import unquote

import httpx

from penstock.protocol import errors, trace_context
from penstock.protocol.answers import Accepted
from penstock.protocol.json_text import decode_any, dumps
from penstock.protocol.record import Record, read
from penstock.protocol.requests import given, pack, prepared

BATCH_TASKS = 1000
BATCH_BYTES = 4 * 1024 * 1024  # half of what the api takes by default

Params = Mapping[str, Any] | Sequence[Any] | None
T = TypeVar("T")
Exchange = Generator[tuple[str | None, float], Any, T]

_AWAY = (errors.INTERNAL_ERROR, errors.OVERLOADED)  # of one entry: it was not done, or that is unknown

LIMITS = httpx.Limits(max_keepalive_connections=20)
"""Of connections: any number at once, for each long poll and each stream holds one."""

_KINDS: dict[int, type[errors.RpcError]] = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.RpcError) and "code" in vars(kind)
}


@dataclass(frozen=True, slots=True)
class Request(Generic[T]):
    """A call of one method, with or without an answer. record: of the answer. member: which part of it is wanted."""

    method: str
    params: Params
    record: type[Record] | None = None
    member: str | None = None


class Unfinished(errors.Unavailable):
    """Some tasks of several were not accepted, or it is unknown: a connection broke before the answer.

    results: answers so far, in the order of the tasks. unsent: the tasks to send again; give them a ``unique_key``
    if none may be added twice.
    """

    def __init__(self, message: str, results: Sequence[Any], unsent: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(message)
        self.results = list(results)
        self.unsent = list(unsent)


def address_of(url: str | None) -> tuple[str, httpx.BasicAuth | None]:
    """Return the address of the api: as given, else PENSTOCK_API_URL, else this machine; and the user and password in
    it, apart, for errors and logs show the address. Raises SettingsError."""
    given_url = url or os.environ.get("PENSTOCK_API_URL") or "http://127.0.0.1:8080"
    scheme, mark, rest = given_url.strip().rstrip("/").removesuffix("/rpc").rpartition("://")
    login, has_login, host = rest.rpartition("@")
    if "/" in login:
        raise errors.SettingsError("the URL of the api has an @ behind its host: write the / of a password as %2F")
    user, _, password = login.partition(":")
    return f"{scheme}{mark}{host}", httpx.BasicAuth(unquote(user), unquote(password)) if has_login else None


def http_headers(api_key: str | None) -> dict[str, str]:
    """Return the headers of every request. api_key: None for PENSTOCK_API_KEY, "" for no key. Raises SettingsError."""
    key = (os.environ.get("PENSTOCK_API_KEY", "") if api_key is None else api_key).strip()  # a file ends with a newline
    if not (key.isascii() and key.isprintable()):  # the error of the HTTP library would hold the key
        raise errors.SettingsError("the API key holds a line break, or a character that is not ASCII")
    return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})


def trace_headers() -> dict[str, str]:
    """Return the headers, or message attributes, that continue the caller's active span."""
    trace = trace_context.current()
    return {} if trace is None else trace.headers


@contextmanager
def reaching(url: str) -> Iterator[None]:
    """Translate errors of the connection to the api."""
    try:
        yield
    except httpx.TimeoutException as exc:
        problem = f"the api at {url} did not answer in time: try again, or raise the timeout"
        raise errors.Unavailable(problem) from exc
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        raise errors.Unavailable(
            f"the api at {url} cannot be reached ({exc}): start it with `penstock up` or `penstock api`, "
            "or name another URL"
        ) from exc


def asking(request: Request[T]) -> Exchange[T]:
    """The exchange that carries out a request."""
    answer = yield from calling(request.method, request.params)
    found: T = read(request.record, answer if request.member is None else answer[request.member])
    return found


def calling(method: str, params: Params, *, extra_seconds: float = 0.0) -> Exchange[Any]:
    """One request; returns its result. Raises RpcError, Unavailable."""
    answer = yield request_text(method, params, 0), extra_seconds
    if not isinstance(answer, dict):
        raise errors.Unavailable("the answer is a batch, and not that of a Penstock api: check the URL")
    if "error" in answer:
        raise error_of(answer["error"])
    return answer["result"]


def batching(calls: Iterable[tuple[str, Params]]) -> Exchange[list[Any]]:
    """Several requests in one; returns each one's result or its RpcError, in their order."""
    requests = [request_text(method, params, number) for number, (method, params) in enumerate(calls)]
    return (yield from _batch(requests)) if requests else []


def enqueueing(tasks: Iterable[Mapping[str, Any]]) -> Exchange[list[Accepted | errors.RpcError]]:
    """Tasks in few batches; returns as ``batching``. Raises Unfinished."""
    entries = list(tasks)
    texts = [request_text("enqueue", prepared(task), number) for number, task in enumerate(entries)]
    results: list[Any] = []
    # Text is ASCII here, so characters are bytes.
    todo = list(pack([len(text) for text in texts], max_bytes=BATCH_BYTES, max_items=BATCH_TASKS))[::-1]
    while todo:
        start, end = todo.pop()
        try:
            answers = read(Accepted, (yield from _batch(texts[start:end], first=start)))
        except (errors.Unavailable, errors.RateLimited) as exc:
            problem = f"{len(entries) - start} of {len(entries)} tasks were not accepted: {exc}"
            raise Unfinished(problem, results, entries[start:]) from exc
        except (errors.TooLarge, errors.InvalidRequest) as exc:
            # The api's limits are its operator's; it takes less at once than was tried here.
            if end - start == 1:
                results.append(exc)
                continue
            middle = (start + end) // 2
            todo += [(middle, end), (start, middle)]
            continue
        results += answers
        # To a batch, an api without its database says so in the answer of each entry.
        lost = [n for n, one in enumerate(answers, start) if isinstance(one, errors.RpcError) and one.code in _AWAY]
        if lost:
            unsent = [*(entries[n] for n in lost), *entries[end:]]
            problem = f"{len(unsent)} of {len(entries)} tasks were not accepted: {results[lost[0]]}"
            raise Unfinished(problem, results, unsent)
    return results


def _batch(requests: Sequence[str], first: int = 0) -> Exchange[list[Any]]:
    answers = yield f"[{','.join(requests)}]", 0.0
    if isinstance(answers, dict) and "error" in answers:
        raise error_of(answers["error"])
    by_id = {answer["id"]: answer for answer in answers}
    nameless = iter([answer for answer in answers if answer["id"] is None])  # of entries that are nested too deeply
    ordered = [by_id[n] if n in by_id else next(nameless) for n in range(first, first + len(requests))]
    return [error_of(answer["error"]) if "error" in answer else answer["result"] for answer in ordered]


def answer_of(url: str, status: int, content: bytes) -> Any:
    """Parse the body of an HTTP answer. Raises Unavailable if it is not the answer of a working api."""
    try:
        answer = _parsed(content)
    except ValueError:
        answer = None
    if status == 503:
        error = _error_in(answer)
        if error.get("code") == errors.OVERLOADED:
            raise errors.Unavailable(f"{url}: {error.get('message')}")
        reference = error.get("data")
        raise errors.Unavailable(f"the api at {url} is up, but not its database: try again later ({reference})")
    responses = answer if isinstance(answer, list) else [answer]
    if not responses or not all(map(_is_response, responses)):
        raise errors.Unavailable(f"{url}/rpc answers HTTP {status}, and not as a Penstock api: check the URL")
    return answer


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return decode_any(content)  # an integer of more digits than Python converts


def _is_response(answer: Any) -> bool:
    return isinstance(answer, dict) and "jsonrpc" in answer and ("result" in answer or "code" in _error_in(answer))


def _error_in(answer: Any) -> dict[str, Any]:
    """The error object of an answer; empty if it has none, as that of a proxy may not."""
    error = answer.get("error") if isinstance(answer, dict) else None
    return error if isinstance(error, dict) else {}


def downloaded(status: int, content: bytes) -> Any:
    """Parse a downloaded payload or result. Raises RpcError, Unavailable, PayloadLost."""
    try:
        decoded = _parsed(content)
    except ValueError:
        if status == 200:
            raise errors.PayloadUnavailable(
                "the answer is not JSON, so it is not from a Penstock api: check the URL"
            ) from None
        decoded = None
    if status == 200:
        return decoded
    error = _error_in(decoded)
    if isinstance(error.get("code"), int) and status != 503:
        raise error_of(error)
    kind = errors.PayloadLost if status == 410 else errors.PayloadUnavailable
    raise kind(str(error.get("message") or f"the api answers HTTP {status}"))


class EventReader:
    """Reads the lines of a stream of server-sent events. last_id: of the newest event."""

    def __init__(self) -> None:
        self.last_id = ""
        self._id = self._kind = self._data = ""
        self._failing_since: float | None = None

    @property
    def headers(self) -> dict[str, str]:
        """With which a stream goes on behind the newest event."""
        return {"Last-Event-ID": self.last_id} if self.last_id else {}

    @contextmanager
    def enduring(self, url: str, seconds: float) -> Iterator[None]:
        """End the block, of one stream, when the api is unavailable; raises Unavailable once nothing has come for so
        many seconds."""
        self._id, self._kind, self._data = self.last_id, "", ""  # an event that broke off comes again
        try:
            with reaching(url):
                yield
        except errors.Unavailable:
            self._failing_since = self._failing_since or monotonic()
            if monotonic() - self._failing_since > seconds:
                raise

    def read(self, line: str) -> tuple[str, Any] | None:
        """Kind and data of the event that a line ends."""
        self._failing_since = None
        name, _, value = line.partition(": ")
        if name == "id":
            self._id = value
        elif name == "event":
            self._kind = value
        elif name == "data":
            self._data = value
        elif not line and self._data:
            kind, data, self.last_id = self._kind, self._data, self._id
            self._kind = self._data = ""
            return kind, _parsed(data.encode())
        return None


def result_of(outcome: Mapping[str, Any]) -> Any:
    """Return the result in an answer of ``result``. Raises TaskFailed, ResultCancelled, ResultGone."""
    match outcome["state"]:
        case "SUCCESS" if outcome.get("result_gone"):
            raise errors.ResultGone(outcome["id"])
        case "SUCCESS":
            return outcome["result"]
        case "CANCELLED":
            raise errors.ResultCancelled(outcome["id"], outcome.get("reason"), outcome["error"])
    raise errors.TaskFailed(outcome["id"], outcome["error"])


def error_of(error: Mapping[str, Any]) -> errors.RpcError:
    """Turn an error object of the api into an exception; known codes have a class of their own."""
    kind = _KINDS.get(error["code"], errors.RpcError)
    made = kind.__new__(kind)
    errors.RpcError.__init__(made, str(error.get("message", "")), error.get("data"))
    made.code = error["code"]
    return made


def request_text(method: str, params: Params, number: int | None) -> str:
    """Return a request as JSON text. number: None for no answer. Raises ValueError, TypeError: not JSON."""
    return dumps({"jsonrpc": "2.0", "method": method} | given(params=params, id=number))
