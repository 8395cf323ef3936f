"""Choose by what the ranks are started: as the user says, else by the environment. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stager.base.errors import UsageError
from stager.base.launchers import OTHERS, SLURM
from stager.launch import dstack, flux, hostfile, kubernetes, lsf, pbs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from stager.launch.hosts import Hosts, Read

    Find = Callable[[Mapping[str, str], Read], Hosts | None]

_FINDERS: tuple[Find, ...] = (flux.find, pbs.find, lsf.find, dstack.find, kubernetes.find)
#: What each of them sets in the environment of its jobs.
_SETS = {
    "flux": "FLUX_JOB_ID and FLUX_JOB_NODELIST",
    "pbs": "PBS_NODEFILE",
    "lsf": "LSB_DJOB_HOSTFILE",
    "dstack": "DSTACK_MPI_HOSTFILE or DSTACK_NODES_IPS",
    "kubernetes": "OMPI_MCA_orte_default_hostfile, I_MPI_HYDRA_HOST_FILE or HYDRA_HOST_FILE",
}


def choose(
    environment: Mapping[str, str], read: Read, *, hosts: str, file: str, launcher: str
) -> tuple[str, Hosts | None]:
    """Return the name of the launcher and the hosts, None for those that `launch.job` finds.

    ``hosts``, ``file`` and ``launcher`` are what the user named, or empty. Without any, a job of
    Slurm comes before all others; outside of all, the launcher is that of Slurm too. Raise
    UsageError if more than one is named, or if what is named is not there.
    """
    if sum(map(bool, (hosts, file, launcher))) > 1:
        raise UsageError("use only one of --hosts, --hostfile and --launcher")
    named = hostfile.named(hosts, file, read)
    if named:
        return "hosts", named
    if launcher == SLURM or (not launcher and environment.get("SLURM_JOB_ID")):
        return SLURM, None
    for name, find in zip(OTHERS, _FINDERS, strict=True):
        if launcher in ("", name):
            found = find(environment, read)
            if found:
                return name, found
            if launcher:
                raise UsageError(
                    f"not inside a job of {launcher}: {_SETS[launcher]} is not set; name the nodes "
                    "by --hostfile"
                )
    return SLURM, None
