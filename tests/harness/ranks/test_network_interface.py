from __future__ import annotations

import os
import socket

import pytest

from harness.ranks.network_interface import VARIABLE, cluster_address, interface_to, use_interface_to


@pytest.mark.parametrize(
    ("host", "name"),
    [
        pytest.param("127.0.0.1", "lo", id="this host"),
        pytest.param("127.0.0.2", "lo", id="another address of this host"),
        pytest.param("localhost", "lo", id="a name"),
        pytest.param("::1", None, id="no IPv4 address"),
    ],
)
def test_the_interface_to(host: str, name: str | None) -> None:
    assert interface_to(host) == name


def test_a_routed_host_is_reached_by_the_interface_whose_address_packets_carry() -> None:
    """Whatever interfaces this machine has: packets to the address of one carry that address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # of no network: documentation only, RFC 5737
        except OSError:
            pytest.skip("this machine has no route to other networks")
        own = probe.getsockname()[0]
    found = interface_to(own)
    assert found == interface_to("192.0.2.1")
    assert found in {name for _, name in socket.if_nameindex()}


@pytest.mark.parametrize(
    ("users", "expected"),
    [
        pytest.param({}, "lo", id="nothing: the one to the rendezvous"),
        pytest.param({VARIABLE: "ib0"}, "ib0", id="another"),
    ],
)
def test_gloo_uses_what_the_user_has_chosen(
    monkeypatch: pytest.MonkeyPatch, users: dict[str, str], expected: str
) -> None:
    monkeypatch.setattr(os, "environ", dict(users))
    use_interface_to("127.0.0.2")
    assert os.environ == {VARIABLE: expected}


def test_where_no_interface_is_found_the_choice_stays_with_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    use_interface_to("::1")
    assert os.environ == {}


@pytest.mark.parametrize(
    ("hosts", "address"),
    [
        pytest.param(("127.0.0.2", "127.0.0.3"), "127.0.0.1", id="that leads to the other host"),
        pytest.param(("localhost", "nobody.invalid"), "127.0.0.1", id="of its own name"),
        pytest.param(("nobody.invalid", "::1"), "::1", id="without IPv4"),
    ],
)
def test_the_address_on_the_network_of_the_cluster(hosts: tuple[str, ...], address: str) -> None:
    assert cluster_address(hosts) == address


def test_hosts_that_nobody_knows_are_named() -> None:
    with pytest.raises(OSError, match=r"no network leads to any of a\.invalid, b\.invalid"):
        cluster_address(("a.invalid", "b.invalid"))
