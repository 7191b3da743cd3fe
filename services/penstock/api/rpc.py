"""A body of JSON-RPC requests to its answer: split and checked here, the methods found and called by jsonrpcserver.

The entries of a batch that name the same method are one call to it: an enqueue in a batch of 1000 then takes 18 us of
this process, and 55 one by one (both on two busy cores, nothing stored).
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Signature
from typing import Any

import msgspec
from jsonrpcserver import Success
from jsonrpcserver.async_main import dispatch_to_response
from jsonrpcserver.utils import identity

from penstock.api.access import Caller
from penstock.protocol.errors import AccessDenied, InternalError, MethodNotFound, Overloaded, RpcError, Unavailable
from penstock.protocol.requests import Invalid, Request, decode_body
from penstock.runtime import metrics
from penstock.runtime.logs import log

Outcome = Any
"""A result, or an exception instead: RpcError is answered, any other is masked."""

Handler = Callable[[Sequence[Request]], Awaitable[Sequence[Outcome]]]
"""Carries out requests of one method; one outcome each, in their order."""

ENTRIES_AT_ONCE = 2000  # of one batch; the others wait, so a batch cannot fill the memory with half-done work


class ErrorObject(msgspec.Struct, frozen=True, omit_defaults=True):
    code: int
    message: str
    data: Any = None


class _Response(msgspec.Struct, frozen=True, kw_only=True):
    jsonrpc: str = "2.0"
    result: Any = msgspec.UNSET
    error: ErrorObject | msgspec.UnsetType = msgspec.UNSET
    id: msgspec.Raw = msgspec.Raw(b"null")


_encode = msgspec.json.Encoder().encode


def error_body(error: RpcError, request_id: bytes = b"null") -> bytes:
    return _encode(_Response(error=ErrorObject(error.code, error.message, error.data), id=msgspec.Raw(request_id)))


def result_body(result: Any, request_id: bytes) -> bytes:
    return _encode(_Response(result=result, id=msgspec.Raw(request_id)))


def each(handle: Callable[[Request], Awaitable[Any]], *, at_once: int = ENTRIES_AT_ONCE) -> Handler:
    """A handler of many requests from one that takes a single request and raises; so many run at the same time."""

    async def handle_all(requests: Sequence[Request]) -> Sequence[Outcome]:
        turns = asyncio.Semaphore(at_once)

        async def one(request: Request) -> Any:
            async with turns:
                return await handle(request)

        return await asyncio.gather(*map(one, requests), return_exceptions=True)

    return handle_all


class _AnyArguments(Signature):
    """Takes any arguments: jsonrpcserver would read a signature at every call and answer with Python's TypeError."""

    def bind(self, *_args: Any, **_kwargs: Any) -> Any:
        return None


@dataclass(slots=True)
class _Method:
    """A handler as jsonrpcserver calls it. ``label``: its name in the metrics."""

    __signature__ = _AnyArguments()
    label: str
    handler: Handler

    async def __call__(self, requests: Sequence[Request]) -> Any:
        try:
            return Success(await self.handler(requests))
        except Exception as exc:
            return Success([exc] * len(requests))


class Dispatcher:
    """Answers bodies. A handler whose name ends in a colon is that of every method whose name begins so."""

    def __init__(self, handlers: Mapping[str, Handler], *, batch_limit: int) -> None:
        self._methods = {name: _Method(name.removesuffix(":"), handler) for name, handler in handlers.items()}
        self._batch_limit = batch_limit

    async def answer(self, body: bytes, caller: Caller) -> tuple[int, bytes | None]:
        """Answer one body: HTTP status and body, None when all entries are notifications.

        Raises nothing that the body is to blame for, but RateLimited if it holds too many requests. A request that the
        caller may not make is answered so, and harms no neighbour.
        """
        try:
            is_batch, entries = decode_body(body, batch_limit=self._batch_limit)
        except RpcError as exc:
            caller.charge(1)
            metrics.REQUESTS.labels("unknown", str(exc.code)).inc()
            return 200, error_body(exc)
        caller.charge(len(entries))
        outcomes = await self._dispatch(entries, caller)
        answers: list[_Response] = []
        counts: Counter[tuple[str, str]] = Counter()
        status = 200
        for entry, (label, outcome) in zip(entries, outcomes, strict=True):
            request_id = msgspec.Raw(entry.id) if isinstance(entry, Invalid) else entry.id
            error = masked(outcome, label) if isinstance(outcome, BaseException) else None
            counts[label, "ok" if error is None else str(error.code)] += 1
            if isinstance(outcome, Unavailable | Overloaded):
                status = 503
            elif isinstance(outcome, AccessDenied):
                status = outcome.status
            if request_id:
                answers.append(
                    _Response(result=outcome, id=request_id)
                    if error is None
                    else _Response(error=ErrorObject(error.code, error.message, error.data), id=request_id)
                )
        for (label, code), count in counts.items():
            metrics.REQUESTS.labels(label, code).inc(count)
        if is_batch:
            return (200, _encode(answers)) if answers else (204, None)
        if not answers:
            return status if status != 200 else 204, None
        return status, _encode(answers[0])

    async def call(self, name: str, params: bytes, caller: Caller) -> Any:
        """Carry out a request that came in the body of another protocol, which has been charged. Raises RpcError."""
        ((label, outcome),) = await self._dispatch([Request("2.0", name, msgspec.Raw(params))], caller)
        error = masked(outcome, label) if isinstance(outcome, BaseException) else None
        metrics.REQUESTS.labels(label, "ok" if error is None else str(error.code)).inc()
        if error is not None:
            raise error
        return outcome

    async def _dispatch(self, entries: Sequence[Request | Invalid], caller: Caller) -> list[tuple[str, Outcome]]:
        """Label and outcome of every entry, in their order."""
        outcomes: list[tuple[str, Outcome]] = [("unknown", None)] * len(entries)
        for start in range(0, len(entries), ENTRIES_AT_ONCE):
            places: dict[str, list[int]] = {}
            for place, entry in enumerate(entries[start : start + ENTRIES_AT_ONCE], start):
                if isinstance(entry, Invalid):
                    outcomes[place] = "unknown", entry.error
                else:
                    places.setdefault(entry.method, []).append(place)
            methods: dict[str, Any] = {}
            calls: list[dict[str, Any]] = []
            for name, group in places.items():
                prefix, colon, _ = name.partition(":")
                method = self._methods.get(name) or self._methods.get(prefix + colon)
                try:
                    if method is None:
                        raise MethodNotFound("Method not found", {"method": name[:200]})
                    caller.check_method(name)
                    methods[name] = method
                    calls.append({"method": name, "params": [[entries[place] for place in group]], "id": name})
                except RpcError as exc:
                    for place in group:
                        outcomes[place] = "unknown" if method is None else method.label, exc
            if not calls:
                continue
            # Calls in a list get a task each, which one alone does without.
            given: Any = calls[0] if len(calls) == 1 else calls
            answer: Any = await dispatch_to_response(given, methods, deserializer=identity, validator=identity)
            responses = [answer] if len(calls) == 1 else answer
            for (name, method), response in zip(methods.items(), responses, strict=True):
                for place, outcome in zip(places[name], response._value.result, strict=True):
                    outcomes[place] = method.label, outcome
        return outcomes


def masked(exc: BaseException, label: str) -> RpcError:
    """What to answer to an exception: itself, or one with a reference to its line in the log. label: the method."""
    if isinstance(exc, RpcError):
        return exc
    reference: str | None = getattr(exc, "reference", None)
    away = isinstance(exc, Unavailable)
    if reference is None:
        reference = exc.reference = secrets.token_hex(8)  # type: ignore[attr-defined]
        if away:
            log.warning("request_unavailable", ref=reference, method=label, reason=str(exc))
        else:
            log.error("request_failed", ref=reference, method=label, error=type(exc).__name__, exc_info=exc)
    message = "Temporarily unavailable, try again" if away else "Internal error"
    return InternalError(message, {"ref": reference})
