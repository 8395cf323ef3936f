"""Keep Debian's Open MPI from trying network fabrics that this node does not have."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

#: How the Open MPI of Debian and Ubuntu names itself, and where it reads the site's settings.
DEBIAN = "package: Debian OpenMPI"
_DEBIAN_SETTINGS = "/etc/openmpi/openmpi-mca-params.conf"
#: The variable that tells Open MPI which fabrics to try, and the one whose user has already chosen.
FABRICS, LAYERS = "OMPI_MCA_mtl", "OMPI_MCA_pml"
#: Fabrics whose libraries measure the processor's clock for 0.1 s each when they are opened, with
#: or without hardware, and how the names of their devices in /dev begin: TrueScale, Omni-Path.
_SLOW = {"psm": "ipath", "psm2": "hfi1"}


def pass_over_absent_fabrics() -> None:
    """Set the variable that excludes slow fabrics without devices here. Call it before MPI_Init."""
    with suppress(OSError):  # Open MPI cannot read the file either
        with open(_DEBIAN_SETTINGS, encoding="utf-8", errors="replace") as file:
            settings = file.read()
        fabrics = fabrics_to_try(settings, os.listdir("/dev"))
        if fabrics:
            os.environ[FABRICS] = fabrics


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
