"""Keep MPI over TCP from interfaces that lead to no other node, such as those of containers.

Open MPI connects by all interfaces that are up, and ends all ranks where one leads nowhere.
"""

from __future__ import annotations

import os
from _socket import if_nameindex  # socket, which has it, is slow to import
from contextlib import suppress

from stager.base.launchers import INTERFACES, LIBFABRIC_INTERFACES

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
