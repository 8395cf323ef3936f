"""Gather facts of this node's network: interfaces with their speed, and faster fabrics."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stager.base.interfaces import NEAR, Interface, Kind, interfaces

#: Where the kernel shows devices by their class.
_CLASSES = Path("/sys/class")
#: The classes of faster fabrics: InfiniBand, RoCE and Omni-Path; Slingshot.
_FABRICS = ("infiniband", "cxi")


@dataclass(frozen=True, slots=True)
class Link(Interface):
    """An interface, and whether this node's name leads to it."""

    named: bool = False

    @property
    def is_usable(self) -> bool:
        """Whether other nodes can be reached by it."""
        has_address = any(not one.startswith(NEAR) for one in self.addresses)
        return has_address and (self.named or self.kind is not Kind.VIRTUAL)


@dataclass(frozen=True)
class Fabric:
    """A device of a fabric, such as ``mlx5_0``; its rate as the kernel writes it, or nothing."""

    name: str
    rate: str


def links() -> list[Link]:
    """Return the interfaces of this machine that are up, but for the loopback ones."""
    own = f"{_own_address()}/"
    return [
        Link(
            one.name, one.kind, one.speed, one.addresses,
            named=any(address.startswith(own) for address in one.addresses),
        )
        for one in interfaces()
    ]  # fmt: skip


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


def _own_address() -> str:
    with suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return ""


def _read(path: Path) -> str:
    """Return what the kernel writes there, nothing if it does not."""
    with suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""
