"""Addresses and interfaces of this machine, compared with what the kernel says of them."""

from __future__ import annotations

import ipaddress
import socket

import pytest

from trainer.machine import network


def test_loopback_is_ours_and_its_interface_is_lo() -> None:
    assert network.is_own("127.0.0.1") and network.interface_to("127.0.0.1", 29400) == "lo"
    assert network.interface_to("127.0.0.9", 29400) == "lo"  # of the same network, on no list
    # of a block that is for documents: RFC 5737
    assert not network.is_own("203.0.113.7")


def test_every_address_lies_on_an_interface_that_the_kernel_has() -> None:
    found, names = network.interfaces(), {name for _, name in socket.if_nameindex()}
    assert found[ipaddress.ip_address("127.0.0.1")] == "lo"
    assert set(found.values()) <= names
    for address, name in found.items():
        if not address.is_link_local:
            assert network.is_own(str(address))
            assert network.interface_to(str(address), 29400) == name


def test_the_way_out_is_by_an_interface_with_the_address_that_the_kernel_would_send_from() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.7", 29400))
        except OSError:  # a machine without a route: told as it is
            with pytest.raises(OSError, match="unreachable"):
                network.interface_to("203.0.113.7", 29400)
            return
        own = ipaddress.ip_address(probe.getsockname()[0])
    assert network.interface_to("203.0.113.7", 29400) == network.interfaces()[own]


def test_a_name_becomes_numbers_or_an_error() -> None:
    assert ipaddress.ip_address(network.address_of("localhost", 29400)).is_loopback
    with pytest.raises(OSError, match=r".+"):
        network.address_of("no-such-host.invalid", 29400)
