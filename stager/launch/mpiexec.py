"""Start ranks on this machine by mpiexec, one for each simulated node."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from stager.base.errors import LaunchError
from stager.launch.environment import RANK
from stager.launch.openmpi import own_folder

_ALONE = (sys.executable, "-I", "-m", "stager.launch.alone")
#: Simulated nodes share one machine's cores, and a demonstration may run as root.
LOCAL_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def mpiexec_argv(count: int) -> list[str]:
    """Return the mpiexec for ``count`` ranks: the one beside this Python, if there is one.

    For root it is started in a network of its own.
    """
    embedded = _embedded()
    mpiexec = [str(embedded) if embedded.exists() else "mpiexec", "-n", str(count), *RANK]
    return [*_ALONE, *mpiexec] if os.getuid() == 0 else mpiexec


def simulated_names(count: int) -> list[str]:
    """Return the names by which the ranks of so many simulated nodes report (`rank.main`)."""
    return [f"node{number + 1}" for number in range(count)]


def mpiexec_environment(folder: str) -> dict[str, str]:
    """Return what mpiexec, with its files in ``folder``, needs besides any rank's environment."""
    # The search for networks takes a second, and ranks of one machine use shared memory.
    transports = {"OMPI_MCA_btl": "self,sm"} if _embedded().exists() else {}
    return LOCAL_ENVIRONMENT | transports | own_folder(folder)


def folder_of_launcher() -> tempfile.TemporaryDirectory[str]:
    """Return a new folder for the files of a launcher. Raise LaunchError if there can be none."""
    try:
        return tempfile.TemporaryDirectory(prefix="stage-", ignore_cleanup_errors=True)
    except OSError as error:
        raise LaunchError(
            f"no folder for the files of mpiexec can be made: {error.strerror}; set TMPDIR to one "
            "where you may write",
            os.uname().nodename,
        ) from None


def _embedded() -> Path:
    """Return the path of the mpiexec that the extra ``local`` installs beside this Python."""
    return Path(sys.executable).parent / "mpiexec"
