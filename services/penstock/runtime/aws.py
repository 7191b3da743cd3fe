"""A client of an AWS service by aiobotocore: made when first used, and again once its credentials are refused."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from time import monotonic
from typing import Any

_BAD_CREDENTIALS = {
    "ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId", "InvalidClientTokenId", "InvalidSecurity",
    "InvalidToken", "NoCredentialsError", "SignatureDoesNotMatch", "UnrecognizedClientException",
}  # fmt: skip
_RENEW_SECONDS = 5.0  # between two new clients


class AwsClient:
    """make: opens a client, given the stack that closes it."""

    def __init__(self, make: Callable[[AsyncExitStack], Awaitable[Any]]) -> None:
        self._make = make
        self._client: Any = None
        self._stack = AsyncExitStack()
        self._retired = AsyncExitStack()
        self._opening = asyncio.Lock()
        self._renew_at = float("-inf")

    async def __call__(self) -> Any:
        async with self._opening:
            if self._client is None:
                async with AsyncExitStack() as opened:
                    client = await self._make(opened)
                    await self._stack.enter_async_context(opened.pop_all())
                    self._client = client
        return self._client

    async def renew(self, refused: Any, code: str) -> bool:
        """Have the next call make a client: one keeps the credentials that it found in the environment or a file.

        refused: the client whose call failed. code: AWS's of the error, or the class of one that is not of AWS.
        False: it is not of the credentials, or a new client was just made.
        """
        async with self._opening:
            if code not in _BAD_CREDENTIALS:
                return False
            if refused is not self._client:
                return True
            if monotonic() < self._renew_at:
                return False
            self._renew_at = monotonic() + _RENEW_SECONDS
            before, self._retired = self._retired, self._stack  # calls of other tasks may still be under way by it
            self._stack, self._client = AsyncExitStack(), None
        await before.aclose()
        return True

    async def close(self) -> None:
        self._client = None
        await self._stack.aclose()
        await self._retired.aclose()
