"""How does mpiexec start ranks, on hosts without Slurm and on simulated nodes of this machine?

`launch_by_mpiexec` and `launch_by_flux` build argument list, environment and hostfile; which MPI
an mpiexec is of, Open MPI or MPICH and its kin (Hydra), it says itself.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stager.base.errors import LaunchError
from stager.base.interfaces import is_address, is_loopback, name_here
from stager.launch.environment import RANK, rank_environment
from stager.launch.job import search_path
from stager.launch.mpi import ABI, installed_abis

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from stager.launch.schedulers import Hosts
    from stager.request.items import StageRequest
    from stager.request.policy import Policy


def openmpi_hostfile(hosts: Sequence[str]) -> str:
    """Return the text of a hostfile by which each host takes one rank."""
    return "".join(f"{host} slots=1\n" for host in hosts)


def openmpi_command(
    mpiexec: str, hosts: Sequence[str], path: str, names: Iterable[str], library: str | None = None
) -> list[str]:
    """Return the mpiexec that starts one rank on each of ``hosts``.

    ``path`` is that of the `openmpi_hostfile`. The ranks get the values of the variables
    ``names``, where one may be ``NAME=VALUE``, and of those that begin with ``OMPI_``; ``library``
    is preloaded. The last two options keep mpiexec from binding a rank's threads to one core, and
    from starting in a folder that is not everywhere.
    """
    preloading = ["/usr/bin/env", f"LD_PRELOAD={library}"] if library else []
    given = (word for name in names if not name.startswith("OMPI_") for word in ("-x", name))
    return [
        mpiexec, "-n", str(len(hosts)), "--hostfile", path, "--map-by", "ppr:1:node",
        "--bind-to", "none", "--wdir", "/", *given, *preloading, *RANK,
    ]  # fmt: skip


def openmpi_variables(hosts: Sequence[str], agent: Sequence[str], folder: str) -> dict[str, str]:
    """Return the variables of mpiexec itself: of release 4, and those of 5 (PRTE).

    It would shorten names with a domain, and so take two hosts for one. For ``folder``, see
    `own_folder`; in that of temporary files, release 4 has ``ompi.HOST.UID``, which another user
    may have made first.
    """
    keep = any("." in host and not is_address(host) for host in hosts)
    by_release = (
        {"plm": "rsh", "plm_rsh_agent": shlex.join(agent)},
        {"plm": "ssh", "plm_ssh_agent": shlex.join(agent)},
    )
    found = {**own_folder(folder), "TMPDIR": folder}
    for (prefix, own), settings in zip(
        (("OMPI_MCA_", "orte"), ("PRTE_MCA_", "prte")), by_release, strict=True
    ):
        found |= {f"{prefix}{name}": value for name, value in settings.items()}
        if keep:
            found[f"{prefix}{own}_keep_fqdn_hostnames"] = "1"
    return found


def own_folder(folder: str) -> dict[str, str]:
    """Return the variable by which mpiexec of release 5 has its files in ``folder``.

    In the folder of temporary files, their names are those of process ids alone. What a killed
    mpiexec left, or another user made there, stops one that has the same id. (Release 4 has a
    folder for each user, and its ranks would not start with such a variable.)
    """
    return {"PRTE_MCA_prte_local_tmpdir_base": folder}


def hydra_hostfile(hosts: Sequence[str]) -> str:
    """Return the text of a hostfile by which each host takes one rank."""
    return "".join(f"{host}:1\n" for host in hosts)


def hydra_command(
    mpiexec: str,
    hosts: Sequence[str],
    path: str,
    names: Iterable[str],
    agent: Sequence[str],
    library: str | None = None,
) -> list[str]:
    """Return the mpiexec that starts one rank on each of ``hosts``.

    ``path`` is that of the `hydra_hostfile`, ``agent`` the absolute path of ssh or what stands in
    for it, with its options, which are in `hydra_variables`. The ranks get the values of the
    variables ``names``, and no others; ``library`` is preloaded.
    """
    preloading = ["/usr/bin/env", f"LD_PRELOAD={library}"] if library else []
    return [
        mpiexec, "-n", str(len(hosts)), "-f", path, "-ppn", "1", "-launcher", "ssh",
        "-launcher-exec", agent[0], "-bind-to", "none", "-wdir", "/",
        "-genvlist", ",".join(names), *preloading, *RANK,
    ]  # fmt: skip


def hydra_variables(agent: Sequence[str]) -> dict[str, str]:
    """Return the variables of mpiexec itself."""
    return {"HYDRA_LAUNCHER_EXTRA_ARGS": shlex.join(agent[1:])} if agent[1:] else {}


_ALONE = (sys.executable, "-I", "-m", "stager.launch.alone")
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a new folder there is only the user's own
#: Bytes without which ranks do not start there.
_LEAST_SHARED = 32 << 20
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
    """Return the names by which the ranks of so many simulated nodes report (`rank.program`)."""
    return [f"node{number + 1}" for number in range(count)]


def mpiexec_environment(folder: str) -> dict[str, str]:
    """Return what mpiexec, with its files in ``folder``, needs besides any rank's environment.

    The ranks share memory by files there. In /dev/shm itself, Open MPI gives them names of 16 bits:
    two stages at one time could write into one file, and crash.
    """
    # The search for networks takes a second, and ranks of one machine use shared memory.
    transports = {"OMPI_MCA_btl": "self,sm"} if _embedded().exists() else {}
    # "sm" in release 5, "vader" in release 4.
    shared = {f"OMPI_MCA_btl_{name}_backing_directory": folder for name in ("sm", "vader")}
    return LOCAL_ENVIRONMENT | transports | shared | own_folder(folder)


def folder_of_launcher(*, is_shared_memory: bool = False) -> tempfile.TemporaryDirectory[str]:
    """Return a new folder for the files of a launcher. Raise LaunchError if there can be none.

    If it ``is_shared_memory``, it is in memory if possible.
    """
    if is_shared_memory:
        with suppress(OSError):
            room = os.statvfs(_SHARED_MEMORY)
            if room.f_bavail * room.f_frsize >= _LEAST_SHARED:
                return _new_folder(_SHARED_MEMORY)
    try:
        return _new_folder()
    except OSError as error:
        raise LaunchError(
            f"no folder for the files of mpiexec can be made: {error.strerror}; set TMPDIR to one "
            "where you may write",
            os.uname().nodename,
        ) from None


def _new_folder(place: str | None = None) -> tempfile.TemporaryDirectory[str]:
    """Return a new folder in ``place``, or in the folder of temporary files."""
    return tempfile.TemporaryDirectory(prefix="stage-", dir=place, ignore_cleanup_errors=True)


def _embedded() -> Path:
    """Return the path of the mpiexec that the extra ``local`` installs beside this Python."""
    return Path(sys.executable).parent / "mpiexec"


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


class Mpiexec(NamedTuple):
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


#: What finds the user's keys for ssh, in mpiexec's environment.
_FOR_SSH = ("SSH_AUTH_SOCK",)
#: How variables begin by which mpiexec would believe that Slurm is to start the ranks, and those
#: that are not for the ranks: each host has its own.
_OF_SLURM = ("SLURM_", "_SLURM_")
_NOT_FOR_RANKS = ("PATH", *_FOR_SSH)
_TMPDIR = "TMPDIR"
#: Has ranks say that they have begun (`rank.__main__`).
_ON_HOSTS = "STAGE_ON_HOSTS"


class Ranks(NamedTuple):
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


class Launch(NamedTuple):
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
    from stager.launch.reach import ssh_agent  # needed without Slurm only, and slow to import

    return ssh_agent(shlex.join(hosts.agent) if hosts.agent else policy.launch.agent)


@contextmanager
def launch_by_mpiexec(ranks: Ranks) -> Iterator[Launch]:
    """Yield what starts one rank on each host; its hostfile and connections are gone at the end.

    Raise LaunchError, UsageError, PolicyRefusal.
    """
    from stager.launch.reach import sharing  # as in `find_agent`

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
            # mpiexec has another one, see `openmpi_variables`.
            given = [f"{name}={of_ranks[name]}" if name == _TMPDIR else name for name in names]
            argv = openmpi_command(mpiexec.path, hosts.names, path, given, library)
            text = openmpi_hostfile(hosts.names)
            own = openmpi_variables(hosts.names, agents.start, folder)
        else:
            argv = hydra_command(mpiexec.path, hosts.names, path, names, agents.start, library)
            text, own = hydra_hostfile(hosts.names), hydra_variables(agents.start)
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
    from stager.launch.schedulers import flux_command  # needed within Flux only

    of_ranks = ranks.variables(ranks.policy)
    names = [name for name in of_ranks if name != "PATH"]
    argv = flux_command(path, ranks.hosts, names, ranks.library)
    yield Launch(argv, {**of_ranks, **ranks.hosts.variables}, "flux run", ())
