"""Find the hosts of a job of PBS (OpenPBS, PBS Professional, Torque). Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stager.launch.hosts import Hosts, read_hostfile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stager.launch.hosts import Read

_NODEFILE = "PBS_NODEFILE"


def find(environment: Mapping[str, str], read: Read) -> Hosts | None:
    """Return the hosts of this job, None outside of one. Raise UsageError.

    The file names a host once for each of its slots. The variables are what ``pbs_tmrsh``, an agent
    in the place of ssh, needs.
    """
    path = environment.get(_NODEFILE)
    if not path:
        return None
    variables = {name: environment[name] for name in environment if name.startswith("PBS_")}
    return Hosts(read_hostfile(path, _NODEFILE, read), _NODEFILE, variables=variables)
