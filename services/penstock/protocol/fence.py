"""Tokens of claim ids: a keyed digest of task and claim, made by schedulers, which cannot be guessed."""

import math
from collections.abc import Sequence
from hashlib import blake2b
from hmac import compare_digest
from time import monotonic
from typing import Any, NamedTuple


class ClaimKey(NamedTuple):
    """seconds_left: until it expires; None: never."""

    secret: bytes
    seconds_left: float | None = None


class Fence:
    """keys: newest first, which signs."""

    def __init__(self, keys: Sequence[ClaimKey] = ()) -> None:
        self._checkers: list[tuple[Any, float]] = []
        for key in keys:
            until = math.inf if key.seconds_left is None else monotonic() + key.seconds_left
            self._checkers.append((blake2b(key=key.secret, digest_size=10), until))

    def name(self, task_id: int, claim: int) -> str:
        """The claim id that a worker returns unchanged."""
        return self.sign(f"{task_id}:{claim}")

    def sign(self, plain: str) -> str:
        """A name with its token; without one if there is no key."""
        if not self._checkers:
            return plain
        digest = self._checkers[0][0].copy()
        digest.update(plain.encode())
        return f"{plain}:{digest.hexdigest()}"

    def problem(self, name: str) -> str | None:
        """Why a claim id, or a pack id, was not made by a scheduler of this pipeline; None if it was."""
        plain, _, token = name.rpartition(":")
        if ":" not in plain:
            return f"id {name[:100]} lacks the token that its request carried: a worker returns the id unchanged"
        shown = plain[:100]
        encoded, given = plain.encode(), token.encode()  # compare_digest takes text of ASCII alone
        for checker, until in self._checkers:
            digest = checker.copy()
            digest.update(encoded)
            if compare_digest(digest.hexdigest().encode(), given):
                return None if monotonic() < until else f"the token of id {shown} has expired"
        return f"the token of id {shown} is of no key in use: it is forged, or older than the last change of the key"
