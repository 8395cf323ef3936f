"""Gather the network interfaces of this machine: kind, speed and addresses, as the kernel shows.

What cannot be read counts as unknown. Only interfaces by which other machines can be reached are
returned: loopback ones, and those that are down, are not. By its addresses, this machine also finds
out which of several hosts it is.
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
from functools import cache
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

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
#: The variable in which Slurm tells the address of the node where a step was started (srun(1)).
_STARTER = "SLURM_LAUNCH_NODE_IPADDR"


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
    def hosts(self) -> list[str]:
        """The addresses without their prefixes."""
        return [one.partition("/")[0] for one in self.addresses]

    @property
    def is_near(self) -> bool:
        """Whether it has no address that other machines could use."""
        return all(one.startswith(NEAR) for one in self.addresses)

    @property
    def text(self) -> str:
        """The interface with its kind, unless that is Ethernet, and its speed."""
        kind = "" if self.kind is Kind.ETHERNET else f"{self.kind}, "
        return f"{self.name} ({kind}{speed_text(self.speed)})"


_Found = TypeVar("_Found", bound=Interface)


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


def leading(found: Iterable[_Found], known: Collection[str]) -> list[_Found]:
    """Return the interfaces by which other nodes can be reached, as far as one node can tell. Pure.

    ``known`` are the addresses by which the others know this node. Besides the interfaces that have
    one, fast fabrics lead to them, and Ethernet that is faster: nobody buys that for less. Another
    may be that of containers, of a service processor or of a cable to nowhere. Where nobody knows
    this node, none can be told apart but bridges and tunnels.
    """
    usable = [one for one in found if not one.is_near]
    named = [one for one in usable if not {*known}.isdisjoint(one.hosts)]
    if not named:
        return [one for one in usable if one.kind is not Kind.VIRTUAL]
    # Some resolvers give a node's own name all of its addresses.
    named = [one for one in named if one.kind is not Kind.VIRTUAL] or named
    slowest = min(one.speed for one in named)

    def leads(one: _Found) -> bool:
        is_faster = one.kind is Kind.ETHERNET and 0 < slowest < one.speed
        return one in named or one.kind in FAST or is_faster

    return [one for one in usable if leads(one)]


def known_addresses() -> Collection[str]:
    """Return the addresses by which other nodes know this one.

    They are those of its name. If it is an alias of the loopback, as on Debian, it is the address
    from which this node reaches the one where Slurm started this step.
    """
    found = addresses_of(socket.gethostname())
    if any(not one.startswith(NEAR) for one in found):
        return found
    starter = os.environ.get(_STARTER, "")
    with (
        suppress(OSError),
        socket.socket(
            socket.AF_INET6 if ":" in starter else socket.AF_INET, socket.SOCK_DGRAM
        ) as any_socket,
    ):
        any_socket.connect((starter, 1))  # nothing is sent
        return [any_socket.getsockname()[0]] if starter else []
    return []


@cache
def addresses_of(name: str) -> Collection[str]:
    """Return the addresses that a name has, none if it has none."""
    with suppress(OSError):
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return {str(address[0]) for *_, address in found}
    return ()


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


def name_here(hosts: Sequence[str]) -> str:
    """Return the one of ``hosts`` that means this machine; empty if none or several do.

    It has this machine's name, or the same name with more or less of the domain, or is one of its
    IPv4 addresses. A loopback one counts only if there is no other host: each machine would take it
    for itself. No name is looked up.
    """
    own = os.uname().nodename
    if own in hosts:
        return own
    found = [host for host in hosts if not is_address(host) and _is_same(host, own)]
    found = found or [host for host in hosts if not is_loopback(host) and _is_own_address(host)]
    found = found or [host for host in hosts if is_loopback(host) and len(hosts) == 1]
    return found[0] if len(found) == 1 else ""


def is_loopback(host: str) -> bool:
    """Return whether ``host`` means, on each machine, that machine itself.

    >>> is_loopback("127.0.1.1"), is_loopback("localhost"), is_loopback("127.site.org")
    (True, True, False)
    """
    return host == "localhost" or (is_address(host) and host.startswith("127."))


def _is_same(one: str, other: str) -> bool:
    """Return whether two names differ only in how much of the domain they have."""
    short, long = sorted((f"{one}.", f"{other}."), key=len)
    return long.startswith(short)


def is_address(host: str) -> bool:
    """Return whether ``host`` is an IPv4 address.

    >>> is_address("10.0.0.1"), is_address("n1")
    (True, False)
    """
    with suppress(OSError):
        socket.inet_pton(socket.AF_INET, host)
        return True
    return False


def _is_own_address(host: str) -> bool:
    """Return whether this machine has the address: only then a socket can be bound to it."""
    if is_address(host):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
            return True
    return False
