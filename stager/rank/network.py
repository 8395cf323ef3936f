"""Choose the network by which ranks reach each other, from what the interfaces of all nodes are.

All ranks must choose the same, so they decide by the `Offer`s of all: the networks with the fastest
kind of interface come first, then those with the highest speed, then that of the nodes' own names.
A network counts as its slowest interface.

Keep MPI over TCP from interfaces that lead to no other node, such as those of containers: Open MPI
connects by all that are up, and ends all ranks where one leads nowhere.
"""

from __future__ import annotations

import os
import socket
from _socket import if_nameindex  # socket, which has it, is slow to import
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stager.base.codec import row_of
from stager.base.errors import LaunchError
from stager.base.interfaces import (
    FAST,
    NEAR,
    Interface,
    Kind,
    addresses_of,
    interfaces,
    is_in,
    network_of,
)
from stager.base.paths import INTERFACES, LIBFABRIC_INTERFACES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

#: What sites append to a node's name for its address in the fast network, as the managers of
#: Slingshot and InfiniBand do.
_FAST_NAMES = ("-hsn0", "-ib0")


@dataclass(frozen=True, slots=True)
class Offer:
    """An address at which a rank can listen: on the interface ``name``, in ``network``.

    ``speed`` is in megabits a second, 0 if not known. ``is_fast`` says that the address is in a
    fast network, by the kind of the interface or by the node's name for it; ``is_named`` that the
    node's own name leads to it.
    """

    name: str
    kind: Kind
    speed: int
    host: str
    network: str
    is_fast: bool = False
    is_named: bool = False


OFFERS = row_of(list[Offer])


def offers(wanted: str) -> list[Offer]:
    """Return what this node can offer of the ``wanted`` interface or network; of all if empty."""
    node = socket.gethostname()
    return offers_of(interfaces(), wanted, lambda end: addresses_of(f"{node}{end}"))


def offers_of(
    found: Iterable[Interface], wanted: str, look_up: Callable[[str], Collection[str]]
) -> list[Offer]:
    """Return what a node with these interfaces can offer. Pure but for ``look_up``.

    That returns the addresses of the node's name with such an end, of which there may be none.
    """
    own = look_up("")
    every = list(_every(found, own))
    if wanted:
        return [one for one in every if _is_wanted(one, wanted)]
    usable = [one for one in every if one.kind is not Kind.VIRTUAL or one.is_named]
    if not _is_undecided(usable):
        return usable
    fast = {address for end in _FAST_NAMES for address in look_up(end)}
    return [replace(one, is_fast=one.host in fast) for one in usable]


def _every(found: Iterable[Interface], own: Collection[str]) -> Iterator[Offer]:
    for one in found:
        for address in one.addresses:
            host = address.partition("/")[0]
            if not host.startswith(NEAR):
                yield Offer(
                    one.name, one.kind, one.speed, host, network_of(address), one.kind in FAST,
                    host in own,
                )  # fmt: skip


def _is_wanted(offer: Offer, wanted: str) -> bool:
    return is_in(offer.host, wanted) if "/" in wanted else offer.name == wanted


def _is_undecided(usable: Sequence[Offer]) -> bool:
    """Whether several interfaces have the same known speed, and no kind says which is the best.

    Only then other names are looked up: on a large job, the server of names has much to do, and one
    that does not answer is waited for. Virtual machines, whose speeds are not known, mostly have no
    such names.
    """
    if any(one.is_fast for one in usable):
        return False
    speeds = list({one.name: one.speed for one in usable}.values())
    highest = max(speeds, default=0)
    return highest > 0 and speeds.count(highest) > 1


def choose(ranks: Sequence[Sequence[Offer]]) -> list[Offer]:
    """Return the offer of each rank in the best network that all share; none if there is none.

    If two have the same address in a network, each node has it for itself, as that between a
    virtual machine and its host: it leads to no other node.
    """
    best = [_best_by_network(one) for one in ranks]
    common = set(best[0]).intersection(*best[1:])
    shared = {name for name in common if len({one[name].host for one in best}) == len(best)}
    if not shared:
        return []
    chosen = max(sorted(shared), key=lambda network: min(_worth(one[network]) for one in best))
    return [one[chosen] for one in best]


def missing(wanted: str) -> LaunchError:
    """Return the error for a node that has nothing to offer of what the site names."""
    what = f"no address in {wanted}" if "/" in wanted else f"no interface {wanted} with an address"
    return LaunchError(
        f"this node has {what} by which other nodes can reach it; tell the administrator "
        "(interface in [launch] of stage.toml)"
    )


def _best_by_network(offered: Iterable[Offer]) -> dict[str, Offer]:
    return {one.network: one for one in sorted(offered, key=_worth)}


def _worth(offer: Offer) -> tuple[bool, int, bool]:
    return offer.is_fast, offer.speed, offer.is_named


#: How the variables of Open MPI begin that name interfaces, or that exclude some.
_CHOICE = INTERFACES.removesuffix("include")
#: Where Open MPI reads the site's settings: of Linux distributions, and beneath its prefix.
_SETTINGS = ("/etc/openmpi*/openmpi-mca-params.conf", "{prefix}/etc/openmpi-mca-params.conf")


def keep_from_going_astray() -> None:
    """Set the variables that name the interfaces for MPI over TCP. Call it before MPI_Init.

    Do nothing if the site has chosen some, or if all interfaces lead to other nodes.
    """
    own = {name for _, name in if_nameindex()} - {"lo"}
    if len(own) == 1 or any(name.startswith(_CHOICE) for name in os.environ):
        return
    # Most nodes of a cluster have no others, and MPI_Init of all ranks waits for this one.
    from stager.base.interfaces import FAST, interfaces, known_addresses, leading

    led = leading(interfaces(), known_addresses())
    if not led or {one.name for one in led} == own or _site_chooses():
        return
    best = max(led, key=lambda one: (one.kind in FAST, one.speed))
    os.environ[INTERFACES] = ",".join(one.name for one in led)
    for variable in LIBFABRIC_INTERFACES:
        os.environ.setdefault(variable, best.name)


def _site_chooses() -> bool:
    """Whether Open MPI's own settings name or exclude interfaces: it takes one such setting."""
    chosen = _CHOICE.removeprefix("OMPI_MCA_")
    from glob import glob

    prefix = _prefix()
    for path in (path for one in _SETTINGS for path in glob(one.format(prefix=prefix))):
        with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            if any(line.lstrip().startswith(chosen) for line in file):
                return True
    return False


def _prefix() -> str:
    """Return the folder beneath which the MPI library that is loaded was installed."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        found = (line[line.index("/") :] for line in maps if "/libmpi.so" in line)
        return os.path.dirname(os.path.dirname(next(found, "")))
