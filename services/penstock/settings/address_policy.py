"""Addresses that a request made on a producer's behalf may reach: public ones, and those that an operator allows.

No I/O: the caller connects to the address that was checked here, and to no other.
"""

import ipaddress
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_HOST = re.compile(r"(?:\*\.)?[a-z0-9_](?:[a-z0-9_.-]{0,251}[a-z0-9_])?")

_REFUSED: list[tuple[Network, str]] = []
for _line in Path(__file__).with_name("special_networks.txt").read_text("utf-8").splitlines():
    if _line and not _line.startswith("#"):
        _network, _, _kind = _line.partition(" ")
        _REFUSED.append((ipaddress.ip_network(_network), _kind))
_PUBLIC_IPV6 = ipaddress.ip_network("2000::/3")  # the only block that is given out
# An IPv4 address in the last four bytes: mapped, translated (SIIT), and NAT64 by the prefix that is well known.
_CARRIES_IPV4 = [ipaddress.IPv6Network(text) for text in ("::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96")]


class AddressPolicy:
    """Says which addresses and hosts may be reached.

    allowed: networks (``10.1.0.0/16``), addresses, host names (``billing.internal``) and names of a domain
    (``*.internal``) that may be reached though they are not public. Raises ValueError for anything else.
    """

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        self._networks: list[Network] = []
        self._hosts: set[str] = set()
        for entry in allowed:
            with suppress(ValueError):
                self._networks.append(ipaddress.ip_network(entry.strip("[]")))
                continue
            # A resolver would take a last part that is a number for an address in one of the old forms, such as 127.1
            # or 0x7f000001.
            last = entry.rstrip(".").rpartition(".")[2].lower()
            if not _HOST.fullmatch(entry.lower()) or last.isdigit() or last.startswith("0x"):
                raise ValueError(
                    f"{entry!r} is neither a network such as 10.1.0.0/16, nor an address, nor a host such as "
                    "billing.internal or *.internal"
                )
            self._hosts.add(entry.lower())

    def trusts(self, host: str) -> bool:
        """Whether a host may be reached wherever its name leads."""
        name = host.lower().rstrip(".")
        return any(name.endswith(one[1:]) if one.startswith("*") else name == one for one in self._hosts)

    def refusal(self, address: str) -> str | None:
        """Why an address may not be reached, such as "private"; None where it may. Raises ValueError for no address."""
        forms = [ipaddress.ip_address(address)]
        if any(forms[0] in block for block in _CARRIES_IPV4):
            forms.append(ipaddress.IPv4Address(int(forms[0]) & 0xFFFFFFFF))
        if any(form in network for form in forms for network in self._networks):
            return None
        # The address that it leads to decides.
        other = "reserved" if forms[-1].version == 6 and forms[-1] not in _PUBLIC_IPV6 else None
        return next((kind for network, kind in _REFUSED if forms[-1] in network), other)


def address_of(host: str) -> str | None:
    """A host that is an address, without the brackets of a URL; None for a name."""
    bare = host.strip("[]")
    with suppress(ValueError):
        ipaddress.ip_address(bare)
        return bare
    return None
