"""Find the hosts that a user names: by ``--hosts`` or by ``--hostfile``. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stager.launch.hosts import Hosts, parse_list, read_hostfile

if TYPE_CHECKING:
    from stager.launch.hosts import Read


def named(hosts: str, hostfile: str, read: Read) -> Hosts | None:
    """Return the hosts that the options name, None if neither is given. Raise UsageError."""
    if hosts:
        return Hosts(parse_list(hosts, "--hosts"), "--hosts")
    if hostfile:
        return Hosts(read_hostfile(hostfile, hostfile, read), "--hostfile")
    return None
