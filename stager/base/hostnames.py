"""Find out which of several hosts this machine is."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_LOCALHOST = "localhost"


def name_here(hosts: Sequence[str]) -> str:
    """Return the one of ``hosts`` that means this machine; empty if none or several do.

    It has this machine's name, or the same name without the domain, or is one of its IPv4
    addresses. No name is looked up.
    """
    own = os.uname().nodename
    if own in hosts:
        return own
    short = own.partition(".")[0]
    found = [host for host in hosts if not is_address(host) and host.partition(".")[0] == short]
    found = found or [host for host in hosts if host == _LOCALHOST or _is_own_address(host)]
    return found[0] if len(found) == 1 else ""


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
