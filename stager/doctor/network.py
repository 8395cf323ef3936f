"""Gather facts of this node's network: interfaces with their speed, and faster fabrics."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

#: Where the kernel shows devices by their class.
_CLASSES = Path("/sys/class")
#: The classes of faster fabrics: InfiniBand, RoCE and Omni-Path; Slingshot.
_FABRICS = ("infiniband", "cxi")
#: Asks ioctl(2) for the address of an interface (SIOCGIFADDR), in a struct ifreq (netdevice(7)).
_GET_ADDRESS, _INTERFACE, _ADDRESS = 0x8915, struct.Struct("16s24x"), slice(20, 24)


@dataclass(frozen=True)
class Link:
    """A network interface that is up: megabits a second, 0 if the kernel does not tell them."""

    name: str
    speed: int
    #: Whether this node's name leads to it: by it the ranks watch each other (`rank.guard`).
    named: bool = False


@dataclass(frozen=True)
class Fabric:
    """A device of a fabric, such as ``mlx5_0``; its rate as the kernel writes it, or nothing."""

    name: str
    rate: str


def links() -> list[Link]:
    """Return the interfaces of this machine that are up, but for the loopback ones."""
    own = _own_address()
    return [
        Link(name, _speed(name), named=_address(name) == own != b"")
        for _, name in socket.if_nameindex()
        if _read(_CLASSES / "net" / name / "operstate") != "down" and not _is_loopback(name)
    ]


def fabrics() -> list[Fabric]:
    """Return the devices of fabrics."""
    found: list[Fabric] = []
    for kind in _FABRICS:
        with suppress(OSError):
            for name in sorted(os.listdir(_CLASSES / kind)):
                device = _CLASSES / kind / name
                rates = (_read(path) for path in sorted(device.glob("ports/*/rate")))
                speed = _read(device / "device/port/speed")
                found.append(Fabric(name, next(filter(None, rates), speed)))
    return found


def _is_loopback(name: str) -> bool:
    return name == "lo" or _address(name)[:1] == b"\x7f"


def _speed(name: str) -> int:
    text = _read(_CLASSES / "net" / name / "speed")
    return int(text) if text.isdecimal() else 0  # -1 is written for what is not known


def _own_address() -> bytes:
    with suppress(OSError):
        return socket.inet_aton(socket.gethostbyname(socket.gethostname()))
    return b""


def _address(name: str) -> bytes:
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = _INTERFACE.pack(os.fsencode(name))
        return fcntl.ioctl(any_socket, _GET_ADDRESS, asked)[_ADDRESS]
    return b""


def _read(path: Path) -> str:
    """Return what the kernel writes there, nothing if it does not."""
    with suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""
