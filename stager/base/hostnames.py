"""Find out which of several hosts this machine is."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


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
