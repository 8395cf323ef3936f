"""Build what starts ranks on hosts without Slurm: argument list, environment, hostfile."""

from __future__ import annotations

import os
import shlex
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stager.base.errors import LaunchError
from stager.base.hostnames import is_loopback, name_here
from stager.launch import flux, hydra, openmpi
from stager.launch.commands import search_path
from stager.launch.environment import rank_environment
from stager.launch.mpiexec import folder_of_launcher
from stager.launch.reach import ssh_agent
from stager.launch.remote import find_mpiexec, settle_library
from stager.launch.sharing import sharing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from stager.launch.hosts import Hosts
    from stager.request.items import StageRequest
    from stager.request.policy import Policy

#: What finds the user's keys for ssh, in mpiexec's environment.
_FOR_SSH = ("SSH_AUTH_SOCK",)
#: How variables begin by which mpiexec would believe that Slurm is to start the ranks, and those
#: that are not for the ranks: each host has its own.
_OF_SLURM = ("SLURM_", "_SLURM_")
_NOT_FOR_RANKS = ("PATH", *_FOR_SSH)
_TMPDIR = "TMPDIR"
#: Has ranks say that they have begun (`rank.__main__`).
_ON_HOSTS = "STAGE_ON_HOSTS"


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks that are to be started, one on each of the ``hosts``."""

    hosts: Hosts
    policy: Policy
    request: StageRequest
    #: The user's variables, and more that the ranks get.
    environment: Mapping[str, str]
    extra: Mapping[str, str]
    #: What they preload.
    library: str | None

    def variables(self, policy: Policy) -> dict[str, str]:
        """Return the ranks' environment. In ``policy`` the MPI library is settled."""
        found = rank_environment(self.environment, policy, self.request, self.extra)
        kept = {name: value for name, value in found.items() if not name.startswith(_OF_SLURM)}
        return {**kept, _ON_HOSTS: "1"}


@dataclass(frozen=True, slots=True)
class Launch:
    """What starts the ranks. ``agent`` asks hosts; empty if the launcher sees to it itself."""

    argv: list[str]
    environment: dict[str, str]
    #: What starts the ranks, as a line tells it.
    name: str
    agent: tuple[str, ...]


def others(hosts: Hosts) -> list[str]:
    """Return the hosts that are reached by ssh: all but this one."""
    own = name_here(hosts.names)
    return [name for name in hosts.names if name != own and not is_loopback(name)]


def find_agent(hosts: Hosts, policy: Policy) -> list[str]:
    """Return what reaches other hosts. Raise LaunchError if it is not installed."""
    return ssh_agent(shlex.join(hosts.agent) if hosts.agent else policy.launch.agent)


@contextmanager
def launch_by_mpiexec(ranks: Ranks) -> Iterator[Launch]:
    """Yield what starts one rank on each host; its hostfile and connections are gone at the end.

    Raise LaunchError, UsageError, PolicyRefusal.
    """
    hosts, environment, library = ranks.hosts, ranks.environment, ranks.library
    mpiexec = find_mpiexec(ranks.policy)
    agent = find_agent(hosts, ranks.policy)
    of_ranks = ranks.variables(settle_library(ranks.policy, mpiexec))
    names = [name for name in of_ranks if name not in _NOT_FOR_RANKS]
    kept = {name: environment[name] for name in _FOR_SSH if name in environment}
    with (
        folder_of_launcher() as folder,
        sharing(agent, others(hosts), folder, {**of_ranks, **kept}) as agents,
    ):
        path = f"{folder}/hosts"
        if mpiexec.abi == "openmpi":
            # mpiexec has another one, see `openmpi.variables`.
            given = [f"{name}={of_ranks[name]}" if name == _TMPDIR else name for name in names]
            argv = openmpi.command(mpiexec.path, hosts.names, path, given, library)
            text = openmpi.hostfile(hosts.names)
            own = openmpi.variables(hosts.names, agents.start, folder)
        else:
            argv = hydra.command(mpiexec.path, hosts.names, path, names, agents.start, library)
            text, own = hydra.hostfile(hosts.names), hydra.variables(agents.start)
        with open(path, "x", encoding="ascii") as file:
            file.write(text)
        yield Launch(
            argv, {**of_ranks, **own, **hosts.variables, **kept},
            f"mpiexec of {mpiexec.name}", agents.ask,
        )  # fmt: skip


@contextmanager
def launch_by_flux(ranks: Ranks) -> Iterator[Launch]:
    """Yield what starts one rank on each host, as `launch_by_mpiexec` does."""
    path = shutil.which("flux", path=search_path("flux"))
    if path is None:
        raise LaunchError(
            "flux is in none of the folders of PATH; add its folder, or name the nodes by --hosts",
            os.uname().nodename,
        )
    of_ranks = ranks.variables(ranks.policy)
    names = [name for name in of_ranks if name != "PATH"]
    argv = flux.command(path, ranks.hosts, names, ranks.library)
    yield Launch(argv, {**of_ranks, **ranks.hosts.variables}, "flux run", ())
