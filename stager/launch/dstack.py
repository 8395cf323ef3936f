"""Find the hosts of a distributed task of dstack, which runs the same commands on each. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stager.launch.hosts import Hosts, parse_lines, read_hostfile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stager.launch.hosts import Read

_HOSTFILE, _ADDRESSES = "DSTACK_MPI_HOSTFILE", "DSTACK_NODES_IPS"


def find(environment: Mapping[str, str], read: Read) -> Hosts | None:
    """Return the hosts of this task, None outside of one. Raise UsageError."""
    path, addresses = environment.get(_HOSTFILE), environment.get(_ADDRESSES)
    if not path and not addresses:
        return None
    if path:
        return Hosts(read_hostfile(path, _HOSTFILE, read), _HOSTFILE)
    return Hosts(parse_lines((addresses or "").split(), _ADDRESSES), _ADDRESSES)
