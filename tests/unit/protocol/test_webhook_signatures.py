from __future__ import annotations

import base64
import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.webhook_signatures import signature_headers, signing_key


def test_a_signature_is_the_one_of_the_specifications_example() -> None:
    """The vector of the reference libraries of Standard Webhooks."""
    headers = signature_headers(
        ["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"],
        message_id="msg_p5jXN8AQM9LWM0D4loKWxJek",
        timestamp=1614265330,
        body=b'{"test": 2432232314}',
    )
    assert headers == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }


@given(st.text(min_size=1).filter(lambda text: not text.startswith("whsec_")), st.binary())
def test_a_signature_is_the_hmac_of_id_timestamp_and_body(secret: str, body: bytes) -> None:
    expected = hmac.new(secret.encode(), b"penstock-1.5." + body, hashlib.sha256).digest()
    headers = signature_headers([secret, "other"], message_id="penstock-1", timestamp=5, body=body)
    first, second = headers["webhook-signature"].split()
    assert base64.b64decode(first.removeprefix("v1,")) == expected
    assert second != first


def test_a_secret_with_a_prefix_and_no_base64_behind_it_is_refused() -> None:
    with pytest.raises(ValueError, match="base64"):
        signing_key("whsec_***")
