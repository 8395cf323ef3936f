"""Refuse to run a rank where none of the ports is free that the site names for MPI over TCP.

Any user of the node can hold them all, if they are few, and Open MPI does not say so. This is
called before MPI_Init, and imports little, as MPI_Init of all ranks waits for it.
"""

from __future__ import annotations

import _socket  # socket is slow to import
import os
from contextlib import closing
from errno import EADDRINUSE

_FIRST, _COUNT = "OMPI_MCA_btl_tcp_port_min_", "OMPI_MCA_btl_tcp_port_range_"
_FAMILIES = {"v4": _socket.AF_INET, "v6": _socket.AF_INET6}
#: One more than the last port.
_END = 65_536


def require_free_port() -> None:
    """End this process and tell the launcher why, if no port is free for MPI over TCP."""
    for version, family in _FAMILIES.items():
        ports = named_ports(version)
        if ports and not any(is_free(family, port) for port in ports):
            from stager.base.errors import LaunchError  # only for this failure
            from stager.rank.refusal import refuse

            refuse(
                LaunchError.code,
                f"MPI cannot start here: each port from {ports[0]} to {ports[-1]} is taken, and "
                f"{_FIRST}{version} and {_COUNT}{version} in [launch] environment of stage.toml "
                "name no others; use other nodes (--exclude), and tell the administrator to see "
                "whose they are, and to name some ten thousands",
            )


def named_ports(version: str) -> range:
    """Return the ports that the environment names for this version of IP, none if it names none."""
    first, count = (os.environ.get(name + version, "") for name in (_FIRST, _COUNT))
    if not first.isdecimal():
        return range(0)
    end = int(first) + int(count) if count.isdecimal() else _END
    return range(int(first), min(end, _END))


def is_free(family: int, port: int) -> bool:
    """Whether a process may listen on the port, as far as can be seen."""
    try:
        with closing(_socket.socket(family, _socket.SOCK_STREAM)) as any_socket:
            any_socket.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
            any_socket.bind(("", port))
    except OSError as error:
        return error.errno != EADDRINUSE
    return True
