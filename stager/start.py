"""A rank's process from its start to `rank.main`: MPI begun as it suits one rank a node, and ended.

It stands in for mpi4py's runner, `python -m mpi4py -m stager.rank`, whose one promise it keeps: an
exception that nobody caught ends all ranks, where the others would wait for ever.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import mpi4py

if TYPE_CHECKING:
    from collections.abc import Iterable

#: What the Open MPI of Debian and Ubuntu calls itself, and where it reads the site's settings.
_DEBIAN = "package: Debian OpenMPI"
_DEBIAN_SETTINGS = Path("/etc/openmpi/openmpi-mca-params.conf")
#: The variable by which Open MPI is told what fabrics to try, and the one that would forestall it.
_FABRICS, _LAYERS = "OMPI_MCA_mtl", "OMPI_MCA_pml"
#: Fabrics whose libraries measure the processor's clock for 0.1 s each as soon as they are opened,
#: hardware or not, and how the names of their devices in /dev begin: TrueScale, Omni-Path.
_SLOW = {"psm": "ipath", "psm2": "hfi1"}


def main() -> None:
    """Begin MPI and run the rank; should it raise, end the ranks of all nodes."""
    # One thread alone calls MPI, which spares the library its locks.
    mpi4py.rc(initialize=False, finalize=True, thread_level="funneled")
    from mpi4py import MPI
    from mpi4py.run import set_abort_status

    if _DEBIAN in MPI.Get_library_version() and not {_FABRICS, _LAYERS} & os.environ.keys():
        _pass_over_absent_fabrics()
    MPI.Init_thread(MPI.THREAD_FUNNELED)
    try:
        from stager import rank  # which takes a while, and is no reason to come late to the others

        rank.main()
    except BaseException as error:
        _tell_why(error)
        set_abort_status(error)
        raise


def _tell_why(error: BaseException) -> None:
    """Say it to the launching process, for what MPI prints of the abort buries the traceback."""
    from stager import report

    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    text = "".join(traceback.format_exception_only(error)).strip()
    sys.stdout.write(report.event("crashed", node=node, error=text) + "\n")
    sys.stdout.flush()


def _pass_over_absent_fabrics() -> None:
    with suppress(OSError):  # a file that Open MPI cannot read either
        settings = _DEBIAN_SETTINGS.read_text(errors="replace")
        fabrics = fabrics_to_try(settings, os.listdir("/dev"))
        if fabrics:
            os.environ[_FABRICS] = fabrics


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


if __name__ == "__main__":
    main()
