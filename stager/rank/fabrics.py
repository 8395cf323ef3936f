"""TODO."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

#: What the Open MPI of Debian and Ubuntu calls itself, and where it reads the site's settings.
DEBIAN = "package: Debian OpenMPI"
_DEBIAN_SETTINGS = Path("/etc/openmpi/openmpi-mca-params.conf")
#: The variable by which Open MPI is told what fabrics to try, and the one that would forestall it.
FABRICS, LAYERS = "OMPI_MCA_mtl", "OMPI_MCA_pml"
#: Fabrics whose libraries measure the processor's clock for 0.1 s each as soon as they are opened,
#: hardware or not, and how the names of their devices in /dev begin: TrueScale, Omni-Path.
_SLOW = {"psm": "ipath", "psm2": "hfi1"}


def pass_over_absent_fabrics() -> None:
    with suppress(OSError):  # a file that Open MPI cannot read either
        settings = _DEBIAN_SETTINGS.read_text(errors="replace")
        fabrics = fabrics_to_try(settings, os.listdir("/dev"))
        if fabrics:
            os.environ[FABRICS] = fabrics


def fabrics_to_try(settings: str, devices: Iterable[str]) -> str:
    """Open MPI's own choice of fabrics without those that this node cannot have.

    ``settings`` is the text of openmpi-mca-params.conf, ``devices`` are the names in /dev. Returns
    a value of ``mtl``, empty where it needs none: a site that names the fabrics to use has them.
    """
    chosen = ""
    for line in settings.splitlines():
        name, _, value = line.partition("#")[0].partition("=")
        if name.strip() == "mtl":
            chosen = value.strip()
    if chosen and not chosen.startswith("^"):
        return ""
    names = tuple(devices)
    left_out = chosen.removeprefix("^").split(",") if chosen else []
    absent = [
        fabric
        for fabric, prefix in _SLOW.items()
        if fabric not in left_out and not any(name.startswith(prefix) for name in names)
    ]
    return "^" + ",".join([*left_out, *absent]) if absent else ""
