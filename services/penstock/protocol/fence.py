"""Tokens of claim ids: a keyed digest of task and claim, made by schedulers, which cannot be guessed."""

import math
from collections.abc import Sequence
from hashlib import blake2b
from hmac import compare_digest
from time import monotonic
from typing import Any, NamedTuple

_TOKEN_BYTES = 10


class ClaimKey(NamedTuple):
    """secret: None: accepts ids without a token. signs: may sign now. seconds_left: until it expires; None: never."""

    secret: bytes | None
    signs: bool
    seconds_left: float | None


class Fence:
    def __init__(self, keys: Sequence[ClaimKey] = ()) -> None:
        self.set(keys)

    def set(self, keys: Sequence[ClaimKey]) -> None:
        """keys: newest first; the first one that may sign does."""
        self._signer: Any = None
        self._checkers: list[tuple[Any, float]] = []
        self._unsigned_until = 0.0
        for key in keys:
            until = math.inf if key.seconds_left is None else monotonic() + key.seconds_left
            if key.secret is None:
                self._unsigned_until = until
                continue
            digest = blake2b(key=key.secret, digest_size=_TOKEN_BYTES)
            self._checkers.append((digest, until))
            if self._signer is None and key.signs:
                self._signer = digest

    def name(self, task_id: int, claim: int) -> str:
        """The claim id that a worker returns unchanged; without a token if no key signs."""
        plain = f"{task_id}:{claim}"
        if self._signer is None:
            return plain
        digest = self._signer.copy()
        digest.update(plain.encode())
        return f"{plain}:{digest.hexdigest()}"

    def problem(self, name: str) -> str | None:
        """Why a claim id was not made by a scheduler of this pipeline; None if it was."""
        plain, _, token = name.rpartition(":")
        if ":" not in plain:
            if monotonic() < self._unsigned_until:
                return None
            return f"id {name} lacks the token that its request carried: a worker returns the id unchanged"
        encoded = plain.encode()
        for checker, until in self._checkers:
            digest = checker.copy()
            digest.update(encoded)
            if compare_digest(digest.hexdigest(), token):
                return None if monotonic() < until else f"the token of id {plain} has expired"
        return f"the token of id {plain} is of no key in use: it is forged, or older than the last change of the key"
