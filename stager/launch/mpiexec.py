"""Start ranks on this machine by mpiexec, one for each simulated node."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from stager.launch.environment import RANK

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


def mpiexec_environment() -> dict[str, str]:
    """Return what mpiexec needs besides the environment of any rank."""
    # The search for networks takes a second, and ranks of one machine use shared memory.
    transports = {"OMPI_MCA_btl": "self,sm"} if _embedded().exists() else {}
    return LOCAL_ENVIRONMENT | transports


def _embedded() -> Path:
    """Return the path of the mpiexec that the extra ``local`` installs beside this Python."""
    return Path(sys.executable).parent / "mpiexec"
