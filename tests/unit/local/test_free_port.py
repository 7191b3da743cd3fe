"""Ports that one process chooses and another one listens on a moment later."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from penstock.local.service import HOST, free_port, is_free
from tests.ipv6 import has_ipv6


def test_no_port_is_given_out_twice_though_nobody_listens_on_it_yet() -> None:
    ports = [free_port() for _ in range(200)]
    assert len(set(ports)) == 200
    assert all(is_free(port) for port in ports)


def test_no_port_is_one_that_the_system_gives_to_a_connection() -> None:
    assert all(20_000 <= free_port() < 32_768 for _ in range(50))


def test_a_port_that_is_taken_is_passed_over() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, free_port() + 1))
        taken.listen()
        following = {free_port() for _ in range(5)}
        assert taken.getsockname()[1] not in following
        assert not is_free(taken.getsockname()[1])


def test_a_preferred_port_is_taken_again_while_it_is_free() -> None:
    port = free_port()
    assert free_port(port) == port
    with socket.socket() as taken:
        taken.bind((HOST, port))
        taken.listen()
        assert free_port(port) != port


def test_two_processes_begin_at_different_places() -> None:
    code = "from penstock.local.service import free_port; print(free_port())"
    command = [sys.executable, "-c", code]
    found = {subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(4)}
    assert len(found) > 1


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_an_address_of_ipv6_is_looked_at_as_one() -> None:
    port = free_port()
    assert is_free(port, "::1")
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("::1", port))
        taken.listen()
        assert not is_free(port, "::1")
