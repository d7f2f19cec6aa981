"""The guard of the tests themselves: nothing beyond loopback is reached."""

import socket

import pytest

import loopback


@pytest.mark.parametrize("where", ["192.0.2.1", "2001:db8::1", "example.invalid"])
def test_a_connection_beyond_loopback_is_refused(where: str) -> None:
    family = socket.AF_INET6 if ":" in where else socket.AF_INET
    with socket.socket(family) as one, pytest.raises(loopback.BeyondLoopbackError):
        (_, _, _, _, address), *_ = socket.getaddrinfo(where, 9)
        one.connect(address)
    assert loopback.refused.pop() == where
