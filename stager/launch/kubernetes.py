"""Find the hosts of an MPIJob of Kubernetes, from the variables that mpi-operator sets. Pure."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from stager.base.errors import UsageError
from stager.launch.hosts import Hosts, read_hostfile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stager.launch.hosts import Read

#: The hostfile's variables for Open MPI, Intel MPI and MPICH, and Open MPI's for its agent.
_HOSTFILES = ("OMPI_MCA_orte_default_hostfile", "I_MPI_HYDRA_HOST_FILE", "HYDRA_HOST_FILE")
_AGENT, _ARGUMENTS = "OMPI_MCA_plm_rsh_agent", "OMPI_MCA_plm_rsh_args"


def find(environment: Mapping[str, str], read: Read) -> Hosts | None:
    """Return the workers of this MPIJob, None elsewhere. Raise UsageError.

    With its first versions the agent is a script that runs kubectl, later ssh.
    """
    variable = next((name for name in _HOSTFILES if environment.get(name)), None)
    if variable is None:
        return None
    try:
        agent = shlex.split(environment.get(_AGENT, ""))
        arguments = shlex.split(environment.get(_ARGUMENTS, ""))
    except ValueError as error:
        raise UsageError(f"{_AGENT} or {_ARGUMENTS} cannot be read: {error}") from None
    if arguments and not agent:
        agent = ["ssh"]
    names = read_hostfile(environment[variable], variable, read)
    return Hosts(names, variable, (*agent, *arguments))
