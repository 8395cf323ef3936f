"""Find the hosts of a job of PBS (OpenPBS, PBS Professional, Torque). Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stager.launch.hosts import from_variable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stager.launch.hosts import Hosts, Read


def find(environment: Mapping[str, str], read: Read) -> Hosts | None:
    """Return the hosts of this job, None outside of one. Raise UsageError.

    The file names a host once for each of its slots. The variables are what ``pbs_tmrsh``, an agent
    in the place of ssh, needs.
    """
    return from_variable(environment, "PBS_NODEFILE", ("PBS_",), read)
