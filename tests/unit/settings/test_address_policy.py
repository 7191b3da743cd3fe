"""Which addresses may be reached, with the ipaddress module as an oracle."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.settings.address_policy import AddressPolicy, address_of

EVERYWHERE = AddressPolicy(["0.0.0.0/0", "::/0"])


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0", "10.1.2.3", "100.64.0.1", "127.0.0.1", "127.255.255.254", "168.63.129.16", "169.254.169.254",
        "172.16.0.1", "172.31.255.255", "192.0.0.8", "192.0.2.1", "192.168.1.1", "198.18.0.1", "198.51.100.7",
        "203.0.113.9", "224.0.0.1", "240.0.0.1", "255.255.255.255",
        "::", "::1", "::127.0.0.1", "fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1",
        "2001::1", "2001:db8::1", "2002:7f00:1::", "3fff::1", "4000::1", "100::1",
        "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:0:10.0.0.1", "64:ff9b::10.0.0.1", "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::1",
    ],
)  # fmt: skip
def test_an_address_that_is_not_public_is_refused_in_each_form(address: str) -> None:
    assert AddressPolicy().refusal(address)
    assert EVERYWHERE.refusal(address) is None


@pytest.mark.parametrize(
    "address",
    ["1.1.1.1", "8.8.8.8", "100.128.0.1", "172.32.0.1", "2606:4700:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"],
)
def test_a_public_address_may_be_reached(address: str) -> None:
    assert AddressPolicy().refusal(address) is None


@given(st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)))
def test_whatever_python_holds_not_to_be_public_is_refused(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    public = address.is_global and not address.is_multicast
    # 192.0.0.9 and .10, and some of 2001::/23, are public by their letter; no server is there.
    if not public and not str(address).startswith("64:ff9b:"):
        assert AddressPolicy().refusal(str(address))


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_within_an_ipv6_one_is_judged_as_itself(address: ipaddress.IPv4Address) -> None:
    number = int(address)
    for prefix in ("::ffff:0:0", "::ffff:0:0:0", "64:ff9b::"):
        carrying = ipaddress.IPv6Address(int(ipaddress.IPv6Address(prefix)) + number)
        assert AddressPolicy().refusal(str(carrying)) == AddressPolicy().refusal(str(address))


def test_a_network_that_is_allowed_is_allowed_in_each_form_of_its_addresses() -> None:
    policy = AddressPolicy(["10.1.0.0/16", "fd12::/16", "127.0.0.1"])
    assert policy.refusal("10.1.9.9") is None
    assert policy.refusal("::ffff:10.1.9.9") is None
    assert policy.refusal("fd12::7") is None
    assert policy.refusal("127.0.0.1") is None
    assert policy.refusal("10.2.0.1") == "private"
    assert policy.refusal("fd13::7") == "private"
    assert policy.refusal("127.0.0.2") == "loopback"


@pytest.mark.parametrize(
    ("host", "is_trusted"),
    [
        ("billing.internal", True), ("BILLING.internal.", True), ("x.billing.internal", False), ("internal", False),
        ("a.svc.local", True), ("a.b.svc.local", True), ("svc.local", False), ("asvc.local", False), ("", False),
        ("billing.internal.example.com", False),
    ],
)  # fmt: skip
def test_a_host_is_trusted_by_its_name_or_its_domain(host: str, is_trusted: bool) -> None:
    assert AddressPolicy(["billing.internal", "*.svc.local"]).trusts(host) is is_trusted


@pytest.mark.parametrize(
    "entry",
    ["10.0.0.0/33", "10.0.0.1/8", "http://x", "a b", "", "*", "*.", "127.1", "0x7f000001", "10.0.0.0/8/8", "a/b"],
)
def test_an_entry_that_is_no_network_and_no_host_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match=r"neither a network"):
        AddressPolicy([entry])


def test_a_host_that_is_an_address_is_told_from_a_name() -> None:
    assert address_of("127.0.0.1") == "127.0.0.1"
    assert address_of("[::1]") == "::1"
    assert address_of("127.1") is None
    assert address_of("example.com") is None
