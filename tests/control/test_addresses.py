"""Where a process listens and where others find it."""

from __future__ import annotations

import errno
import socket

import pytest

from bytecheckpoint.control import addresses
from bytecheckpoint.control.acceptor import all_addresses
from bytecheckpoint.control.addresses import (
    ADDRESS_VARIABLE,
    EVERYWHERE,
    LOOPBACK,
    PORTS_VARIABLE,
    listen,
    own_addresses,
)
from bytecheckpoint.errors import ControlError, UsageError
from bytecheckpoint.testing import time_limit


@pytest.mark.parametrize(("address", "found"), [("127.0.0.1", "127.0.0.1"), ("lo", "127.0.0.1"), ("::1", "::1")])
def test_a_configured_address(monkeypatch: pytest.MonkeyPatch, address: str, found: str) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, address)
    if ":" in address:
        try:
            socket.create_server((address, 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("this host has no IPv6")
    assert own_addresses(["127.0.0.2"]) == [found]
    with listen() as listener:
        assert listener.getsockname()[0] == found


def test_a_configured_address_of_a_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others find this process there, and it listens everywhere."""
    monkeypatch.setenv(ADDRESS_VARIABLE, "192.0.2.7")
    assert own_addresses() == ["192.0.2.7"]
    with listen() as listener:
        assert listener.getsockname()[0] in EVERYWHERE


@pytest.mark.parametrize("address", ["", "0.0.0.0", "::"])
def test_all_addresses(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """The other side gets addresses to which it can connect."""
    monkeypatch.setenv(ADDRESS_VARIABLE, address)
    assert LOOPBACK in all_addresses()
    assert not set(EVERYWHERE) & set(own_addresses())
    with listen() as listener:
        if address == "0.0.0.0":
            assert listener.family == socket.AF_INET
            assert not any(":" in one for one in own_addresses())
        socket.create_connection((LOOPBACK, listener.getsockname()[1]), time_limit(5)).close()


def test_an_explicit_address_ignores_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, "192.0.2.7")
    monkeypatch.setenv(PORTS_VARIABLE, "1")
    with listen(LOOPBACK) as listener:
        assert listener.getsockname()[0] == LOOPBACK


def test_the_address_that_faces_a_host_comes_first() -> None:
    own = own_addresses()
    assert own_addresses(own[:1])[0] == own[0]
    assert own_addresses([LOOPBACK]) == own


def test_the_name_of_this_host_is_looked_up_only_if_no_interface_has_an_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a route to others too: as on hosts of an isolated network, whose name means 127.0.1.1 to themselves."""
    monkeypatch.setattr(addresses, "_OTHER_HOSTS", ())
    found = {"lo": "127.0.0.1", "eth0": "192.0.2.7", "eth1": ""}
    monkeypatch.setattr(addresses, "_address_of_interface", found.__getitem__)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [*enumerate(found)])
    monkeypatch.setattr(addresses, "_addresses_by_name", lambda: ["127.0.1.1", "name.of.this.host"])
    assert own_addresses(["127.0.0.1"]) == ["192.0.2.7"]
    found["eth0"] = ""
    assert own_addresses(["127.0.0.1"]) == ["name.of.this.host"]


def test_a_configured_range_of_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, LOOPBACK)
    with socket.create_server((LOOPBACK, 0)) as first:
        taken = first.getsockname()[1]
        monkeypatch.setenv(PORTS_VARIABLE, str(taken))
        with pytest.raises(ControlError, match=f"no port of {PORTS_VARIABLE}={taken} is free"):
            listen()
    with listen() as listener:
        assert listener.getsockname()[1] == taken


def test_another_fault_of_a_port_is_raised_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> socket.socket:
        raise OSError(errno.EACCES, "permission denied")

    monkeypatch.setattr(socket, "create_server", refuse)
    monkeypatch.setenv(PORTS_VARIABLE, "80-90")
    with pytest.raises(ControlError, match=r"cannot listen at any address, port \d+: .*permission denied"):
        listen()


@pytest.mark.parametrize(
    ("variable", "value"), [(PORTS_VARIABLE, "a-b"), (PORTS_VARIABLE, "9-1"), (PORTS_VARIABLE, "70000"),
                            (ADDRESS_VARIABLE, "no.such.host.invalid")]
)  # fmt: skip
def test_an_invalid_variable(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(UsageError, match=f"{variable}={value}"):
        listen()
