"""Gather facts of this node's network: interfaces with their speed, and faster fabrics."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stager.base.interfaces import Interface, Kind, interfaces, known_addresses

#: Where the kernel shows devices by their class.
_CLASSES = Path("/sys/class")
#: The classes of faster fabrics: InfiniBand, RoCE and Omni-Path; Slingshot.
_FABRICS = ("infiniband", "cxi")


@dataclass(frozen=True, slots=True)
class Link(Interface):
    """An interface, and whether other nodes know this one by its address."""

    named: bool = False

    @property
    def is_usable(self) -> bool:
        """Whether other nodes can be reached by it."""
        return not self.is_near and (self.named or self.kind is not Kind.VIRTUAL)


@dataclass(frozen=True)
class Fabric:
    """A device of a fabric, such as ``mlx5_0``; its rate as the kernel writes it, or nothing."""

    name: str
    rate: str


def links() -> list[Link]:
    """Return the interfaces of this machine that are up, but for the loopback ones."""
    known = known_addresses()
    return [
        Link(
            one.name, one.kind, one.speed, one.addresses,
            named=not set(known).isdisjoint(one.hosts),
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


def _read(path: Path) -> str:
    """Return what the kernel writes there, nothing if it does not."""
    with suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""
