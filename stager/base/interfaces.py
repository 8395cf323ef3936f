"""Gather the network interfaces of this machine: kind, speed and addresses, as the kernel shows.

What cannot be read counts as unknown. Only interfaces by which other machines can be reached are
returned: loopback ones, and those that are down, are not.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

#: Where the kernel shows interfaces; where it lists the addresses of IPv6 (proc(5)).
_INTERFACES = "/sys/class/net"
_IPV6 = "/proc/net/if_inet6"
#: Ask ioctl(2) for the flags of an interface, its address and its netmask (SIOCGIFFLAGS,
#: SIOCGIFADDR, SIOCGIFNETMASK), in a struct ifreq (netdevice(7)); where the answer is in it.
_GET_FLAGS, _GET_ADDRESS, _GET_MASK = 0x8913, 0x8915, 0x891B
_REQUEST, _FLAGS, _ADDRESS = struct.Struct("16s24x"), slice(16, 18), slice(20, 24)
#: The flags of an interface that is set up and has its cable; that of loopback ones.
_UP, _LOOPBACK = 0x1 | 0x40, 0x8
#: The ``type`` of an InfiniBand interface, and of those that are no Ethernet: the others of the
#: kernel are tunnels and the like (if_arp.h).
_ETHERNET, _INFINIBAND = "1", "32"
#: How the interfaces of Slingshot are named, and how their driver.
_SLINGSHOT_NAME, _SLINGSHOT_DRIVER = "hsn", "cxi"
#: The flags of an address of IPv6 that is not to be used: it is deprecated, tentative, or another
#: machine has it (if_addr.h); and the scope of those that lead everywhere.
_UNUSABLE, _GLOBAL = 0x20 | 0x40 | 0x08, "00"
#: How the addresses begin that other machines cannot use: loopback and link-local ones.
NEAR = ("127.", "::1", "169.254.", "fe80:")


class Kind(StrEnum):
    """What an interface is, as users know it."""

    SLINGSHOT = "Slingshot"
    INFINIBAND = "InfiniBand"
    ETHERNET = "Ethernet"
    #: A bridge, which mostly leads to containers on the same machine, or a tunnel.
    VIRTUAL = "virtual"


#: Kinds that were bought for speed, whatever speed the kernel tells.
FAST = frozenset({Kind.SLINGSHOT, Kind.INFINIBAND})


@dataclass(frozen=True, slots=True)
class Interface:
    """An interface that is up: megabits a second, 0 if they are not known.

    ``addresses`` are as in ``10.0.0.1/24``, those of IPv4 first.
    """

    name: str
    kind: Kind
    speed: int
    addresses: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The interface with its kind, unless that is Ethernet, and its speed."""
        kind = "" if self.kind is Kind.ETHERNET else f"{self.kind}, "
        return f"{self.name} ({kind}{speed_text(self.speed)})"


def speed_text(speed: int) -> str:
    """Return megabits a second as users read them.

    >>> speed_text(2500), speed_text(0)
    ('2.5 Gbit/s', 'speed not known')
    """
    return f"{speed / 1000:g} Gbit/s" if speed else "speed not known"


def interfaces() -> list[Interface]:
    """Return the interfaces of this machine by which other machines may be reached."""
    ipv6 = _ipv6_addresses()
    return [
        Interface(name, _kind(name), _speed(name), (*_ipv4_address(name), *ipv6.get(name, ())))
        for _, name in socket.if_nameindex()
        if _flags(name) & (_UP | _LOOPBACK) == _UP
    ]


def network_of(address: str) -> str:
    """Return the network of an address, both with the length of the prefix. Raise OSError.

    >>> network_of("10.1.2.3/16"), network_of("fd00::1:2/64")
    ('10.1.0.0/16', 'fd00::/64')
    """
    host, _, bits = address.partition("/")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    packed = socket.inet_pton(family, host)
    free = 8 * len(packed) - int(bits)
    number = int.from_bytes(packed, "big") >> free << free
    return f"{socket.inet_ntop(family, number.to_bytes(len(packed), 'big'))}/{bits}"


def is_in(address: str, network: str) -> bool:
    """Return whether an address is in a network. Raise OSError, and ValueError, if it is none.

    >>> is_in("10.1.2.3/24", "10.1.0.0/16"), is_in("10.2.0.1", "10.1.0.0/16")
    (True, False)
    """
    host, bits = address.partition("/")[0], network.partition("/")[2]
    is_of_family = (":" in host) == (":" in network)
    return is_of_family and network_of(f"{host}/{bits}") == network_of(network)


def _kind(name: str) -> Kind:
    folder = f"{_INTERFACES}/{name}"
    driver = ""
    with suppress(OSError):
        driver = os.path.basename(os.readlink(f"{folder}/device/driver"))
    if name.startswith(_SLINGSHOT_NAME) or driver.startswith(_SLINGSHOT_DRIVER):
        return Kind.SLINGSHOT
    kind = _read(f"{folder}/type")
    if kind == _INFINIBAND:
        return Kind.INFINIBAND
    is_bridge = os.path.exists(f"{folder}/bridge")
    return Kind.VIRTUAL if is_bridge or kind not in ("", _ETHERNET) else Kind.ETHERNET


def _speed(name: str) -> int:
    text = _read(f"{_INTERFACES}/{name}/speed")
    return int(text) if text.isdecimal() else 0  # -1 is written for what is not known


def _flags(name: str) -> int:
    with suppress(OSError):
        return int.from_bytes(_ask(name, _GET_FLAGS)[_FLAGS], sys.byteorder)
    return 0


def _ipv4_address(name: str) -> list[str]:
    with suppress(OSError):
        address, mask = (_ask(name, what)[_ADDRESS] for what in (_GET_ADDRESS, _GET_MASK))
        bits = int.from_bytes(mask, "big").bit_count()
        return [f"{socket.inet_ntoa(address)}/{bits}"]
    return []


def _ask(name: str, what: int) -> bytes:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        return fcntl.ioctl(any_socket, what, _REQUEST.pack(os.fsencode(name)))


def _ipv6_addresses() -> dict[str, list[str]]:
    """Return the usable global addresses of IPv6 by interface."""
    found: dict[str, list[str]] = {}
    for line in _read(_IPV6).splitlines():
        digits, _, bits, scope, flags, name = line.split()
        if scope == _GLOBAL and not int(flags, 16) & _UNUSABLE:
            address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
            found.setdefault(name, []).append(f"{address}/{int(bits, 16)}")
    return found


def _read(path: str) -> str:
    """Return what the kernel writes there, nothing if it does not."""
    with suppress(OSError), open(path, encoding="ascii", errors="replace") as file:
        return file.read().strip()
    return ""
