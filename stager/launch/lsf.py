"""Find the hosts of a job of LSF. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stager.launch.hosts import Hosts, read_hostfile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stager.launch.hosts import Read

_HOSTFILE = "LSB_DJOB_HOSTFILE"


def find(environment: Mapping[str, str], read: Read) -> Hosts | None:
    """Return the hosts of this job, None outside of one. Raise UsageError.

    The file names a host once for each of its slots. The variables are what ``blaunch``, an agent
    in the place of ssh, needs.
    """
    path = environment.get(_HOSTFILE)
    if not path:
        return None
    variables = {
        name: environment[name] for name in environment if name.startswith(("LSB_", "LSF_", "LS_"))
    }
    return Hosts(read_hostfile(path, _HOSTFILE, read), _HOSTFILE, variables=variables)
