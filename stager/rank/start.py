"""Find out before MPI_Init whether a rank may run here, and end it if not, or with its parent.

This imports little, as MPI_Init of all ranks waits for it. MPI libraries listen on TCP ports and
trust what comes there, so root's ranks are refused, and ranks without the library by which they
know each other (``prolog/peers``): the loader goes on without one that it cannot read. Of the ports
that a site names, any user of the node can hold all, if they are few, and Open MPI does not say so.

A rank whose parent, slurmstepd, was killed ends by itself under Open MPI, whose PMIx slurmstepd
serves. MPICH needs PMI-2 for its start alone and would go on, out of Slurm's sight: the stage would
succeed, and nothing would end such a rank when its job is cancelled.
"""

from __future__ import annotations

import _socket  # socket is slow to import
import os
import sys
import time
from _thread import start_new_thread  # threading is slow to import
from contextlib import closing, suppress
from errno import EADDRINUSE
from typing import TYPE_CHECKING, NoReturn

from stager.base import linux, paths
from stager.base.errors import Failure, PolicyRefusal
from stager.base.events import event
from stager.base.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable

_MESSAGE = (
    "root cannot stage: submit as an ordinary user; to stage for all users, submit as the owner in "
    "[shared] of stage.toml"
)


def refuse_root() -> None:
    """End this process, which is root's, and tell the launcher why.

    Do nothing on a simulated node: `launch.mpiexec` starts root's in a network of their own. That
    is looked up here, because nothing in the environment could prove it.
    """
    if linux.is_alone():
        return
    refuse(PolicyRefusal.code, _MESSAGE)


def require_library() -> None:
    """End this process and tell the launcher why, if the library is wanted here and not loaded.

    It is wanted where the environment has a key for it.
    """
    if paths.PEERS_KEY not in os.environ:
        return
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        if any(f"/{paths.PEERS_LIBRARY}" in line for line in maps):  # or "… (deleted)" by an update
            return
    from stager.base.errors import NOT_LOADABLE, LaunchError  # only for this failure

    refuse(LaunchError.code, os.path.join(sys.prefix, paths.PEERS_LIBRARY) + NOT_LOADABLE)


#: Seconds in which the report reaches the launcher: srun drops what comes as it ends the step.
_REPORT_LEAD = 0.5


def refuse(code: int, message: str) -> NoReturn:
    """End this process with the exit ``code``; the ``message`` is the stage's failure."""
    node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    outcome = Outcome([], [Failure(code, message, node)], 0.0)
    sys.stdout.write(event("result", outcome=outcome.to_json()) + "\n")
    sys.stdout.flush()
    time.sleep(_REPORT_LEAD)
    os._exit(code)


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


#: Where Debian's Open MPI reads the site's settings.
_DEBIAN_SETTINGS = "/etc/openmpi/openmpi-mca-params.conf"
#: The variable that tells it which fabrics to try, and one by which others are never tried.
_FABRICS, _LAYERS = "OMPI_MCA_mtl", "OMPI_MCA_pml"
#: Fabrics whose libraries measure the processor's clock for 0.1 s each when they are opened, with
#: or without hardware, and how the names of their devices in /dev begin: TrueScale, Omni-Path.
_SLOW = {"psm": "ipath", "psm2": "hfi1"}


def pass_over_absent_fabrics() -> None:
    """Set the variable that excludes slow fabrics without devices here. Call it before MPI_Init.

    Do nothing if the administrator or the user has set it.
    """
    if {_FABRICS, _LAYERS} & os.environ.keys():
        return
    with suppress(OSError):  # Open MPI cannot read the file either
        with open(_DEBIAN_SETTINGS, encoding="utf-8", errors="replace") as file:
            settings = file.read()
        fabrics = fabrics_to_try(settings, os.listdir("/dev"))
        if fabrics:
            os.environ[_FABRICS] = fabrics


def fabrics_to_try(settings: str, devices: Iterable[str]) -> str:
    """Return a value of ``mtl`` that also excludes absent fabrics, or nothing. Pure.

    ``settings`` is the text of openmpi-mca-params.conf, ``devices`` are the names in /dev. Nothing
    is returned if no fabric is absent, or if the site has chosen the fabrics to use by name.
    """
    chosen = ""
    for line in settings.splitlines():
        name, _, value = line.partition("#")[0].partition("=")
        if name.strip() == "mtl":
            chosen = value.strip()
    if chosen and not chosen.startswith("^"):
        return ""
    names = tuple(devices)
    excluded = chosen.removeprefix("^").split(",") if chosen else []
    absent = [
        fabric
        for fabric, prefix in _SLOW.items()
        if fabric not in excluded and not any(name.startswith(prefix) for name in names)
    ]
    return "^" + ",".join([*excluded, *absent]) if absent else ""


#: The variable in which the plugin names slurmstepd's process (gate.c); mpiexec's ranks have none.
_PARENT = "STAGE_PARENT"
#: Seconds between two looks. The kernel would tell at once, by a pidfd, but not that of RHEL 8.
_PERIOD = 1.0


def is_started_by_plugin() -> bool:
    """Return whether the plugin acted on this node, without which no task waits for the rank.

    A folder beneath /run does not show that: an earlier job may have left it.
    """
    return _PARENT in os.environ


def end_with_parent() -> None:
    """End this process, with code 1, soon after its parent has ended. Return at once.

    A parent that has ended before is only noticed if the plugin has named it. So this is what a
    rank does first.
    """
    start_new_thread(_watch, (int(os.environ.get(_PARENT) or os.getppid()),))


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PERIOD)
    os._exit(1)
