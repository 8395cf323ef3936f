"""Find the mpiexec that starts ranks on hosts without Slurm, and which MPI it belongs to."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stager.base.errors import LaunchError
from stager.launch.commands import search_path
from stager.launch.mpi import ABI, installed_abis

if TYPE_CHECKING:
    from collections.abc import Collection

    from stager.request.policy import Policy

#: Seconds in which mpiexec must name its version.
_PATIENCE = 20.0
#: What the version of each MPI says, the kind of library as mpi4py calls it, and its name. Intel
#: MPI is of MPICH's kind.
_VERSIONS = (
    (re.compile(r"\(Open(?:RTE| MPI)\) (\S+)|prterun.* (\S+)"), "openmpi", "Open MPI"),
    (re.compile(r"HYDRA build details:\s+Version:\s+(\S+)"), "mpich", "MPICH"),
    (re.compile(r"Intel\(R\) MPI Library.*Version (\S+)"), "mpich", "Intel MPI"),
)
_REMEDY = "name one in stage.toml (mpiexec in [launch])"


@dataclass(frozen=True, slots=True)
class Mpiexec:
    """An mpiexec: its path, the kind of MPI library whose ranks it starts, and its name."""

    path: str
    abi: str
    name: str


def find_mpiexec(policy: Policy) -> Mpiexec:
    """Return the mpiexec of stage.toml; by default that beside this Python, else the system's.

    Raise LaunchError if there is none, or if ranks here would load another kind of MPI library.
    """
    named = policy.launch.mpiexec
    beside = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    path = named
    if "/" not in named:
        found = shutil.which(named, path=search_path(policy.launch.srun))
        path = beside if named == "mpiexec" and os.path.exists(beside) else found or ""
    if not path or not os.access(path, os.X_OK):
        raise LaunchError(
            f"{named}, which starts the ranks where Slurm does not, is not installed here; install "
            f"Open MPI or MPICH, or {_REMEDY}",
            os.uname().nodename,
        )
    mpiexec = recognise(path, _version_of(path))
    check_library(mpiexec, installed_abis(policy.launch.environment))
    return mpiexec


def recognise(path: str, version: str) -> Mpiexec:
    """Return the mpiexec at ``path`` that calls itself ``version``. Pure.

    Raise LaunchError if it is of neither Open MPI nor MPICH and its kin.

    >>> recognise("/usr/bin/mpiexec", "mpiexec (OpenRTE) 4.1.4").name
    'Open MPI 4.1.4'
    """
    for pattern, abi, name in _VERSIONS:
        if match := pattern.search(version):
            release = next(filter(None, match.groups()), "")
            return Mpiexec(path, abi, f"{name} {release}".strip())
    raise LaunchError(f"{path} is neither of Open MPI nor of MPICH; {_REMEDY}", os.uname().nodename)


def check_library(mpiexec: Mpiexec, abis: Collection[str]) -> None:
    """Raise LaunchError if ranks here load none of the libraries that ``mpiexec`` starts. Pure.

    ``abis`` are the kinds of the libraries here, none if that is not known.
    """
    if abis and mpiexec.abi not in abis:
        raise LaunchError(
            f"{mpiexec.path} is of {mpiexec.name}, but the MPI library of this node is of another "
            f"kind ({', '.join(sorted(abis))}); {_REMEDY}",
            os.uname().nodename,
        )


def settle_library(policy: Policy, mpiexec: Mpiexec) -> Policy:
    """Return ``policy`` with the library of ``mpiexec`` named in ``[launch]``, if there are two."""
    launch = policy.launch
    abis = installed_abis(launch.environment)
    if len(abis) < 2:
        return policy
    environment = {ABI: mpiexec.abi, **launch.environment}
    return policy.model_copy(
        update={"launch": launch.model_copy(update={"environment": environment})}
    )


def _version_of(path: str) -> str:
    try:
        return subprocess.run(
            [path, "--version"], capture_output=True, text=True, errors="replace",
            timeout=_PATIENCE, check=True, stdin=subprocess.DEVNULL,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
