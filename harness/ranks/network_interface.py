"""Choose gloo's network interface.

Left alone, gloo takes the one that this host's own name resolves to: that is the loopback on many
distributions, where the other nodes never arrive, and a name without an address stalls it. The interface
from which the rendezvous can be reached is the one from which the other nodes can be reached.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address

VARIABLE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "lo"
_SIOCGIFADDR = 0x8915  # the address of an interface, of netdevice(7)
_NAME_BYTES = 15  # and a zero
_ANY_PORT = 9  # nothing is sent


def use_interface_to(host: str) -> None:
    """Have gloo in this process use the interface that leads to `host`, unless the user has chosen one.

    Where none is found, a host that is reached by IPv6 only, the choice stays gloo's.
    """
    name = interface_to(host)
    if name is not None:
        os.environ.setdefault(VARIABLE, name)


def interface_to(host: str) -> str | None:
    """Return the interface whose IPv4 address packets to `host` would carry, `None` where there is none."""
    source = _source_address(host)
    if source is None:
        return None
    if source.is_loopback:  # 127.0.0.2 is on it as well, though it has another address
        return LOOPBACK
    return next((name for name, address in _interfaces() if address == source), None)


def cluster_address(hosts: Sequence[str]) -> str:
    """Return the numeric address of this machine on the network that leads to the other hosts.

    Args:
        hosts: names of all nodes, this one first; where the others' names lead nowhere, its own decides.

    Raises:
        OSError: none of the names has an address that can be reached.
    """
    problem = OSError("there is no other host")
    for host in (*hosts[1:], hosts[0]):
        try:
            return _source_towards(host)
        except OSError as error:
            problem = error
    raise OSError(f"no network leads to any of {', '.join(hosts)}: {problem}") from problem


def _source_towards(host: str) -> str:
    """Return the address that packets to `host` would carry, by IPv4 where that is possible."""
    found = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
    family, *_, target = min(found, key=lambda each: each[0] != socket.AF_INET)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _source_address(host: str) -> IPv4Address | None:
    """Ask the kernel's routes; connecting a datagram socket sends nothing."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _ANY_PORT))
        return IPv4Address(probe.getsockname()[0])
    return None


def _interfaces() -> Iterator[tuple[str, IPv4Address]]:
    """Yield names and addresses of the network interfaces with IPv4."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                request = struct.pack("256s", name.encode()[:_NAME_BYTES])
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
                yield name, IPv4Address(answer[20:24])  # sockaddr_in follows 16 bytes of name
