"""This machine's addresses, and the interface by which it reaches another machine. Linux; no packages."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFCONF = 0x8912
_ENTRY = 40
"""Bytes of one `struct ifreq` on 64-bit Linux: a name of 16, then a `sockaddr`. Source: netdevice(7)."""
_MOST_INTERFACES = 512
_LOOPBACK = "lo"
_IPV6 = Path("/proc/net/if_inet6")


def address_of(name: str, port: int) -> str:
    """The first address that a host's name has, as numbers. Raises OSError where it has none here."""
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return str(found[0][4][0])


def is_own(address: str) -> bool:
    """True if the address, as numbers, is one of this machine's."""
    with _socket(address, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def is_loopback(address: str) -> bool:
    """True if the address, as numbers, never leaves this machine."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface_to(address: str, port: int) -> str:
    """Name of the interface by which this machine reaches an address, as numbers; empty where none is known.

    Of an address of this machine it is the interface that has it: others come in by that one. No packet is
    sent. Raises OSError where there is no route.
    """
    own = ipaddress.ip_address((address if is_own(address) else _source_to(address, port)).partition("%")[0])
    return interfaces().get(own, _LOOPBACK if own.is_loopback else "")


def interfaces() -> dict[ipaddress.IPv4Address | ipaddress.IPv6Address, str]:
    """Names of this machine's interfaces by their addresses."""
    found: dict[ipaddress.IPv4Address | ipaddress.IPv6Address, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        room = array.array("B", bytes(_MOST_INTERFACES * _ENTRY))
        request = struct.pack("iL", len(room), room.buffer_info()[0])
        size, _ = struct.unpack("iL", fcntl.ioctl(any_socket.fileno(), _SIOCGIFCONF, request))
        told = room.tobytes()[:size]
    for start in range(0, size, _ENTRY):
        name = told[start : start + 16].partition(b"\0")[0].decode()
        # an alias as eth0:1 is one interface with several addresses
        found[ipaddress.IPv4Address(told[start + 20 : start + 24])] = name.partition(":")[0]
    if _IPV6.is_file():
        for line in _IPV6.read_text().splitlines():
            digits, *_, name = line.split()
            found[ipaddress.IPv6Address(bytes.fromhex(digits))] = name
    return found


def _source_to(address: str, port: int) -> str:
    """The address that this machine would send from."""
    with _socket(address, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        return str(probe.getsockname()[0])


def _socket(address: str, kind: socket.SocketKind) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, kind)
