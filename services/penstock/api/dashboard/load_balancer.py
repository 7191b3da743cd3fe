"""Users that an Application Load Balancer has signed in, by its header ``x-amzn-oidc-data``."""

import re
from collections.abc import Mapping
from functools import partial
from time import time
from typing import Any

import httpx

from penstock.api.access import Lookups
from penstock.protocol.api_key import Permission, implied
from penstock.protocol.errors import AccessDenied, Unavailable, needing
from penstock.runtime.logs import printable
from penstock.settings.model import Settings

HEADER = "x-amzn-oidc-data"
_KEY_SECONDS, _KEY_BYTES, _KEYS_KEPT = 5.0, 16 * 1024, 16
_KEY_ID = re.compile(r"[\w-]{1,100}", re.ASCII)
_USER_CHARS = 100


class LoadBalancerUsers:
    """Verifies the header of one load balancer. Raises SettingsError without the library."""

    def __init__(self, settings: Settings, arn: str) -> None:
        with needing("PENSTOCK_DASHBOARD_ALB_ARN", "encryption"):
            import cryptography  # noqa: F401  that PyJWT takes for ES256
            import jwt
        self._jwt = jwt
        self._arn = arn
        self._settings = settings
        region = arn.split(":")[3]
        self._keys_url = settings.dashboard_alb_keys_url or f"https://public-keys.auth.elb.{region}.amazonaws.com"
        self._keys: dict[str, str] = {}
        self._lookups = Lookups()

    async def identify(self, token: str, address: str) -> tuple[str, frozenset[Permission]]:
        """The user and what the groups permit. Raises AccessDenied, Unavailable without the public key, RateLimited."""
        claims = await self._verify(token, address)
        user = printable(str(claims.get("email") or claims.get("sub") or ""))[:_USER_CHARS]
        claim, known = self._settings.dashboard_alb_groups_claim, self._settings.dashboard_alb_groups
        permissions = implied(known[group] for group in _groups(claims.get(claim)) if group in known)
        if not user or not permissions:
            who = user or "a user without email and sub"
            reason = f"whose claim {claim!r} has no group of PENSTOCK_DASHBOARD_ALB_GROUPS"
            raise AccessDenied(403, f"The load balancer signed in {who}, {reason}")
        return user, permissions

    async def _verify(self, token: str, address: str) -> dict[str, Any]:
        """The claims of a token that this load balancer signed and that has not expired."""
        try:
            header = self._jwt.get_unverified_header(token)
            kid = self._check_header(header)
            key = await self._lookups.find(kid.encode("ascii"), address, partial(self._look, kid))
            if key is None:
                raise _refusal(f"{self._keys_url} has no key {kid!r}")
            claims: dict[str, Any] = self._jwt.decode(
                token, key, algorithms=["ES256"], options={"verify_aud": False, "verify_iat": False}
            )
        except self._jwt.PyJWTError as exc:
            raise _refusal(str(exc)) from None
        # The load balancer has the time in the header, which is signed as the claims are.
        expires = header.get("exp", claims.get("exp"))
        if not isinstance(expires, int | float) or expires <= time():
            raise _refusal(f"it expired at {expires!r}")
        return claims

    def _check_header(self, header: Mapping[str, Any]) -> str:
        """The id of the key to be fetched for it. Raises AccessDenied."""
        signer, client, kid = header.get("signer"), header.get("client"), header.get("kid")
        if header.get("alg") != "ES256":
            raise _refusal(f"its algorithm is {header.get('alg')!r}, not 'ES256'")
        if signer != self._arn:
            raise _refusal(f"its signer is {signer!r}, not that of PENSTOCK_DASHBOARD_ALB_ARN")
        if self._settings.dashboard_alb_client not in (None, client):
            raise _refusal(f"its client is {client!r}, not that of PENSTOCK_DASHBOARD_ALB_CLIENT")
        if not isinstance(kid, str) or _KEY_ID.fullmatch(kid) is None:
            raise _refusal(f"its key id is {kid!r}")
        return kid

    async def _look(self, kid: str) -> str | None:
        """The public key, as PEM; None for an unknown one."""
        if kid in self._keys:
            return self._keys[kid]
        try:
            async with httpx.AsyncClient(timeout=_KEY_SECONDS) as client:
                answer = await client.get(f"{self._keys_url}/{kid}")
        except httpx.HTTPError as exc:
            raise Unavailable(f"the load balancer's public key cannot be fetched: {type(exc).__name__}") from None
        if answer.status_code >= 500:
            raise Unavailable(f"the load balancer's public key cannot be fetched: HTTP {answer.status_code}")
        if answer.status_code != 200 or len(answer.content) > _KEY_BYTES:
            return None
        if len(self._keys) >= _KEYS_KEPT:
            del self._keys[next(iter(self._keys))]
        self._keys[kid] = answer.text
        return answer.text


def _refusal(reason: str) -> AccessDenied:
    return AccessDenied(401, f"The header {HEADER} is refused: {printable(reason)[:300]}")


def _groups(value: Any) -> list[str]:
    """Names of groups: a list, or text such as ``ops, dev`` or ``[ops, dev]``."""
    if isinstance(value, str):
        return [part.strip(' "') for part in value.strip(" []").split(",")]
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []
