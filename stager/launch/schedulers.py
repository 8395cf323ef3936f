"""Which hosts does a user or a scheduler other than Slurm name, and who of them stages?

Flux, PBS (OpenPBS, PBS Professional, Torque), LSF, dstack and Kubernetes are known. What is read
here becomes arguments of mpiexec and ssh, so a host must look like one. Where a launcher runs one
command line on all nodes, its first process stages for all. What is said of Flux is from its
documents; it has not been tried with Flux itself.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import xxhash

from stager.base.errors import Failure, LaunchError, UsageError
from stager.base.outcome import Outcome
from stager.base.paths import OTHERS, SLURM
from stager.base.text import printable
from stager.launch import job
from stager.launch.environment import RANK
from stager.node.job_state import wait_for_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stager.request.items import StageRequest

#: Returns the text of a file. Raises OSError or UnicodeError.
Read = Callable[[str], str]

#: The most hosts, and characters of the longest name (RFC 1035).
MOST_HOSTS, _LONGEST_NAME = 65_536, 253
#: A name or an IPv4 address. The first character keeps options of ssh from being taken for one.
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
#: What may stand behind a host: Open MPI's ``slots=2``, and the ``:2`` of MPICH.
_SETTING = re.compile(r"[A-Za-z_-]+=\S*")
_RANKS = re.compile(r":[0-9]+$")
#: A range in a list of hosts, such as the ``1-4`` of ``n[1-4]``.
_RANGE = re.compile(r"([0-9]{1,18})-([0-9]{1,18})")


#: Characters of a hostfile that are read: MOST_HOSTS lines with long names.
_LONGEST_FILE = 16 << 20


@dataclass(frozen=True, slots=True)
class Hosts:
    """Hosts on which ranks are to be started, each once, and what named them."""

    names: tuple[str, ...]
    #: What the user knows it by: an option, a variable.
    origin: str
    #: The program by which mpiexec starts its part on another host; empty for the site's.
    agent: tuple[str, ...] = ()
    #: Variables of the job's environment that mpiexec or this program needs.
    variables: Mapping[str, str] = field(default_factory=dict)


def read_text(path: str) -> str:
    """Return the text of the file, up to a limit: the `Read` of all but tests."""
    with open(path, encoding="ascii") as file:
        return file.read(_LONGEST_FILE)


def read_hostfile(path: str, origin: str, read: Read) -> tuple[str, ...]:
    """Return the hosts in the file ``path``, which ``origin`` names.

    Raise UsageError if it cannot be read, names no host, or has a line that is none of a hostfile.
    """
    try:
        text = read(path)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a text"
        raise UsageError(f"{_named(path, origin)} cannot be read: {why}; check the path") from None
    return parse_hostfile(text, _named(path, origin))


def from_variable(
    environment: Mapping[str, str], variable: str, prefixes: tuple[str, ...], read: Read
) -> Hosts | None:
    """Return the hosts in the file that ``variable`` names, None if it names none.

    The scheduler's own agent in the place of ssh needs the variables that begin with one of the
    ``prefixes``. Raise UsageError as `read_hostfile` does.
    """
    path = environment.get(variable)
    if not path:
        return None
    needed = {name: value for name, value in environment.items() if name.startswith(prefixes)}
    return Hosts(read_hostfile(path, variable, read), variable, variables=needed)


def parse_hostfile(text: str, where: str) -> tuple[str, ...]:
    """Return the hosts in the ``text`` of a hostfile, in their order, each once.

    A line has a host, or several as ``n[1-4]``, and how many ranks it takes, which is ignored:
    ``n1 slots=2`` of Open MPI, ``n1:2`` of MPICH. Behind ``#`` is a comment. Raise UsageError,
    which names the file as ``where``.

    >>> parse_hostfile("n1 slots=2\\nn2:2\\n# n3\\nn1\\n", "the hostfile")
    ('n1', 'n2')
    """
    found: dict[str, None] = {}
    left = MOST_HOSTS
    for number, line in enumerate(text.splitlines(), 1):
        host, *settings = line.partition("#")[0].split() or [""]
        if not all(map(_SETTING.fullmatch, settings)):
            raise UsageError(
                f"{where}, line {number}: {printable(line)} is not a host with its slots; write "
                "one host on each line, such as n1 or n1 slots=2"
            )
        if host:
            names = _unfolded(_RANKS.sub("", host), f"{where}, line {number}", left)
            if len(names) > 1:  # a scheduler names a host alone once for each of its ranks
                left -= len(names)
            found.update(dict.fromkeys(names))
        if len(found) > MOST_HOSTS:
            raise _too_many(where)
    if not found:
        raise UsageError(f"{where} names no host; write one host on each line")
    return tuple(found)


def parse_list(text: str, where: str) -> tuple[str, ...]:
    """Return the hosts of a list such as ``n[1-4],login``. Raise UsageError."""
    return tuple(_unfolded(text, where))


def parse_lines(lines: Iterable[str], where: str) -> tuple[str, ...]:
    """Return the hosts of a list with one on each line. Raise UsageError."""
    return parse_hostfile("\n".join(lines), where)


def _unfolded(text: str, where: str, most: int = MOST_HOSTS) -> list[str]:
    """Return the hosts of a list, which are counted before they are made. Raise UsageError."""
    names = [text]
    if "[" in text or "," in text:
        size = 1
        for first, last in _RANGE.findall(text):
            size *= max(1, int(last) - int(first) + 1)
        if size > most:
            raise _too_many(where)
        # A '@' would name a group of the site's, which a command may look up.
        names = job.unfold(text) if "@" not in text else [text]
    for name in names:
        if not _HOST.fullmatch(name) or len(name) > _LONGEST_NAME:
            raise UsageError(
                f"{where}: {printable(name[:_LONGEST_NAME])} is not the name of a host; names have "
                "letters, digits, '.', '-' and '_', and do not begin with '-'"
            )
    return names


def _too_many(where: str) -> UsageError:
    return UsageError(f"{where} names more than {MOST_HOSTS} hosts; name fewer")


def _named(path: str, origin: str) -> str:
    return printable(f"the hostfile {path}" if origin == path else f"{path} ({origin})")


def named_hosts(hosts: str, hostfile: str, read: Read) -> Hosts | None:
    """Return the hosts that the options name, None if neither is given. Raise UsageError."""
    if hosts:
        return Hosts(parse_list(hosts, "--hosts"), "--hosts")
    if hostfile:
        return Hosts(read_hostfile(hostfile, hostfile, read), "--hostfile")
    return None


_NODES, _JOB = "FLUX_JOB_NODELIST", "FLUX_JOB_ID"
#: What ``flux run`` needs to find the instance that it is to run in, and itself.
_NEEDED = ("FLUX_URI", "FLUX_EXEC_PATH", "FLUX_CONNECTOR_PATH", "FLUX_MODULE_PATH")


def find_flux(environment: Mapping[str, str], _: Read) -> Hosts | None:
    """Return the nodes of this Flux job, None outside of one. Raise UsageError."""
    nodes = environment.get(_NODES)
    if not nodes or not environment.get(_JOB):
        return None
    variables = {name: environment[name] for name in _NEEDED if name in environment}
    return Hosts(parse_list(nodes, _NODES), _NODES, variables=variables)


def flux_command(
    flux: str, hosts: Hosts, names: Iterable[str], library: str | None = None
) -> list[str]:
    """Return the ``flux run`` that starts one rank on each of ``hosts``.

    ``flux`` is its path. The ranks get the variables ``names``, and no others; ``library`` is
    preloaded.
    """
    count = str(len(hosts.names))
    preloading = ["/usr/bin/env", f"LD_PRELOAD={library}"] if library else []
    return [
        flux, "run", f"--nodes={count}", f"--ntasks={count}", "--job-name=stage", "--cwd=/",
        f"--requires=host:{','.join(hosts.names)}", "--env=-*",
        *(f"--env={name}" for name in names), *preloading, *RANK,
    ]  # fmt: skip


def find_pbs(environment: Mapping[str, str], read: Read) -> Hosts | None:
    """Return the hosts of this job, None outside of one. Raise UsageError.

    The file names a host once for each of its slots. The variables are what ``pbs_tmrsh``, an agent
    in the place of ssh, needs.
    """
    return from_variable(environment, "PBS_NODEFILE", ("PBS_",), read)


def find_lsf(environment: Mapping[str, str], read: Read) -> Hosts | None:
    """Return the hosts of this job, None outside of one. Raise UsageError.

    The file names a host once for each of its slots. The variables are what ``blaunch``, an agent
    in the place of ssh, needs.
    """
    return from_variable(environment, "LSB_DJOB_HOSTFILE", ("LSB_", "LSF_", "LS_"), read)


_HOSTFILE, _ADDRESSES = "DSTACK_MPI_HOSTFILE", "DSTACK_NODES_IPS"


def find_dstack(environment: Mapping[str, str], read: Read) -> Hosts | None:
    """Return the hosts of this task, None outside of one. Raise UsageError."""
    path, addresses = environment.get(_HOSTFILE), environment.get(_ADDRESSES)
    if not path and not addresses:
        return None
    if path:
        return Hosts(read_hostfile(path, _HOSTFILE, read), _HOSTFILE)
    return Hosts(parse_lines((addresses or "").split(), _ADDRESSES), _ADDRESSES)


#: The hostfile's variables for Open MPI, Intel MPI and MPICH, and Open MPI's for its agent.
_HOSTFILES = ("OMPI_MCA_orte_default_hostfile", "I_MPI_HYDRA_HOST_FILE", "HYDRA_HOST_FILE")
_AGENT, _ARGUMENTS = "OMPI_MCA_plm_rsh_agent", "OMPI_MCA_plm_rsh_args"


def find_kubernetes(environment: Mapping[str, str], read: Read) -> Hosts | None:
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


#: Finds the hosts of a job, None outside of one of its kind.
Find = Callable[[Mapping[str, str], Read], Hosts | None]

_FINDERS: tuple[Find, ...] = (find_flux, find_pbs, find_lsf, find_dstack, find_kubernetes)
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
    named = named_hosts(hosts, file, read)
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


#: What numbers the nodes: dstack, an Indexed Job of Kubernetes, the options of torchrun
#: by variables, torchrun for its workers, and other launchers of torch; and the workers of a node.
_NODE_RANKS = (
    "DSTACK_NODE_RANK",
    "JOB_COMPLETION_INDEX",
    "PET_NODE_RANK",
    "GROUP_RANK",
    "NODE_RANK",
)
_LOCAL_RANK = "LOCAL_RANK"
#: What tells the jobs of one user on the same nodes apart. All have the same value on all nodes.
_OF_RUN = ("DSTACK_RUN_ID", "TORCHELASTIC_RUN_ID")


@dataclass(frozen=True, slots=True)
class Line:
    """A command line that several processes run: the first stages for all, the others wait."""

    #: The same for all of them.
    name: str
    #: The variables that tell them apart, and the numbers of this process in them.
    ranks: Mapping[str, str]

    @property
    def later(self) -> str:
        """What says that this process is not the first; empty if it is.

        >>> Line("a", {"NODE_RANK": "0", "LOCAL_RANK": "3"}).later
        'LOCAL_RANK is 3'
        """
        return next((f"{name} is {rank}" for name, rank in self.ranks.items() if int(rank)), "")

    @property
    def task(self) -> str:
        """What this process is called among those of its node."""
        return "-".join(self.ranks.values())


def find_line(
    environment: Mapping[str, str], hosts: Sequence[str], values: Iterable[str]
) -> Line | None:
    """Return the line that this process runs to stage ``values``; None if it alone runs it.

    ``hosts`` are those on which ranks are started without Slurm.
    """
    node = next((name for name in _NODE_RANKS if _is_number(environment, name)), "")
    if not (node and hosts):
        return None
    names = [name for name in (node, _LOCAL_RANK) if _is_number(environment, name)]
    ranks = {name: environment[name] for name in names}
    same = [*hosts], [environment.get(name, "") for name in _OF_RUN], [*values]
    return Line(xxhash.xxh3_128_hexdigest(json.dumps(same).encode()), ranks)


def _is_number(environment: Mapping[str, str], name: str) -> bool:
    text = environment.get(name, "")
    return text.isascii() and text.isdecimal()


def wait_for_first(line: Line, request: StageRequest, patience: float) -> Outcome:
    """Wait until the first process of the ``line`` has staged the ``request`` to this node.

    Return its outcome, which has no items. Raise LaunchError if no stage of the line works on this
    node for ``patience`` seconds.
    """
    begun = time.monotonic()
    code = wait_for_line(request.line, request.line_root, os.getuid(), line.task, patience)
    if code is None:
        raise LaunchError(
            f"{line.later}, so this waited for the first to stage, but for {patience:g} s no stage "
            "of this line ran on this node; see what the first says, and run the same line on all"
        )
    failures = []
    if code:
        text = (
            f"{line.later}: the first, which stages for all, failed (exit code {code}) and says why"
        )
        failures = [Failure(code, text, "")]
    return Outcome([], failures, time.monotonic() - begun)
