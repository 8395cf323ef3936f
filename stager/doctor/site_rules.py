"""What is well at the whole site and its nodes, what is not, and what is to be done? Pure.

Each rule is a short function of `_SITE_RULES` that yields findings, each with the nodes that it is
about, or none.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from stager.doctor.finding import note, ok, problem, unknown
from stager.doctor.node_rules import FOR_ALL, NODE_RULES, is_good, room_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from stager.doctor.finding import Examined, Finding
    from stager.node.facts import NodeFacts
    from stager.node.probes import Disk

#: What the plugins begin with that give each job other folders under the same names.
_NAMESPACES = ("job_container/tmpfs", "namespace/tmpfs", "namespace/linux")
#: Seconds between clocks that are told: the nodes are not asked at the very same moment.
_CLOCKS = 60
#: Ports for MPI that are too few where one of its users holds them: a process may open 1024 files.
_FEW = 4096
#: Seconds that the clean-up after a job has: STAGE_CLEAN_UP_LIMIT in stage.h, and some for its end.
_CLEAN_UP = 50
#: The ranks of a `node.facts.Hello`.
_HELLO_RANKS = 2


def same_everywhere(examined: Examined) -> Iterator[tuple[Finding, list[str]]]:
    """All machines have the same stage.toml, package and plugin, and all nodes the same network."""
    same, nodes = "install the same everywhere", examined.nodes
    yield from _same(nodes, "config", "stage.toml", lambda node: node.digest, same)
    yield from _same(nodes, "version", "slurm-stage", lambda node: (node.package, node.code), same)
    # A machine without the plugin's line, or its file, is told of as such.
    with_plugin = {name: one for name, one in nodes.items() if any(_plugins(one))}
    yield from _same(with_plugin, "plugin", "spank_stage.so", _plugins, same)
    with_library = {name: node for name, node in examined.computing.items() if node.library}
    yield from _same(with_library, "mpi", "the MPI library", lambda node: node.library, same)
    yield from _same(
        examined.computing, "network", "the network",
        lambda node: ([(link.name, link.kind, link.speed) for link in node.links], node.fabrics),
        "see to cables and drivers", told=note,
    )  # fmt: skip


def _plugins(node: NodeFacts) -> list[str]:
    return sorted({line.digest for line in node.plugins})


def _same(
    nodes: Mapping[str, NodeFacts],
    subject: str,
    what: str,
    of: Callable[[NodeFacts], object],
    remedy: str,
    told: Callable[[str, str, str], Finding] = problem,
) -> Iterator[tuple[Finding, list[str]]]:
    values = {name: repr(of(node)) for name, node in nodes.items()}
    if len(values) < 2:
        return
    usual = Counter(values.values()).most_common(1)[0][0]
    if others := [name for name, own in values.items() if own != usual]:
        yield told(subject, f"{what} is not as on the other machines", remedy), others
    else:
        yield ok(subject, f"{what} is the same everywhere"), [*values]


def rooms(examined: Examined) -> Iterator[tuple[Finding, list[str]]]:
    """The disks have room, and what staging can use."""
    same: dict[str, dict[str, Disk]] = {}
    for name, node in examined.computing.items():
        for disk in filter(is_good, node.disks):
            abilities = "O_DIRECT, O_TMPFILE, reflink" if disk.clones else "O_DIRECT, O_TMPFILE"
            same.setdefault(f"{disk.path} ({disk.kind}, {abilities})", {})[name] = disk
    for text, by_node in same.items():
        yield ok("disk", f"{text}: {room_text([*by_node.values()])}"), [*by_node]


def clocks(examined: Examined) -> Iterator[tuple[Finding, list[str]]]:
    """All clocks show the same time."""
    times = {name: node.time for name, node in examined.computing.items()}
    middle = sorted(times.values())[(len(times) - 1) // 2] if times else 0
    wrong = {name: time for name, time in times.items() if abs(time - middle) > _CLOCKS}
    for name, time in wrong.items():
        off = f"{abs(time - middle):.0f} s {'ahead' if time > middle else 'behind'}"
        text = f"the clock is {off}, so ages of copies are wrong"
        yield problem("clock", text, "have it set (chrony, systemd-timesyncd)"), [name]
    if not wrong and len(times) > 1:
        yield ok("clock", "the clocks agree"), [*times]


def exclusive(examined: Examined) -> Iterator[tuple[Finding, list[str]]]:
    """Nodes are shared among users, or not."""
    if not examined.site.partitions:
        yield unknown("sharing", "Slurm's partitions cannot be read"), []
    for name, keys in examined.site.partitions.items():
        alone = keys.get("OverSubscribe") == "EXCLUSIVE" or keys.get("ExclusiveUser") == "YES"
        if alone:
            yield ok("sharing", f"partition {name}: a node has jobs of one user at a time"), []
        else:
            text = f"partition {name}: users share nodes, and reach each other's ports"
            remedy = "see SECURITY.md, or set ExclusiveUser=YES or OverSubscribe=EXCLUSIVE"
            yield note("sharing", text, remedy), []


def ports(examined: Examined) -> Iterator[tuple[Finding, list[str]]]:
    """Ranks and srun listen where other machines should not reach them."""
    # Open MPI sends over the interfaces that it is told, but listens on all.
    environment = examined.policy.launch.environment
    chosen = [name for name in environment if name.startswith("OMPI_MCA_btl_tcp_port_")]
    few = [
        f"{name} = {environment[name]}"
        for name in chosen
        if "_range_" in name and environment[name].isdecimal() and int(environment[name]) < _FEW
    ]
    if few:
        text = f"{' and '.join(few)}: who listens on so few ports stops all stages on a node"
        yield note("ports", text, "name some ten thousands"), []
    elif chosen:
        yield ok("ports", f"the ranks' ports are chosen ({', '.join(chosen)})"), []
    else:
        remedy = (
            "close the nodes' ports to other machines; OMPI_MCA_btl_tcp_port_min_v4 in [launch] "
            "environment chooses Open MPI's"
        )
        text = "ranks listen on all interfaces, on ports from 1024 on"
        yield note("ports", text, remedy), []
    if not examined.site.slurm:
        return
    wanted = examined.site.slurm.get("SrunPortRange", "0-0")
    if wanted in ("0-0", "0", "(null)"):
        remedy = "set SrunPortRange, so that a firewall can tell its ports"
        yield note("ports", "srun listens on any port", remedy), []
    else:
        yield ok("ports", f"srun listens on the ports {wanted}"), []


def mpi(examined: Examined) -> Iterator[tuple[Finding, list[str]]]:
    """Slurm has the plugin by which the ranks find each other."""
    name = examined.policy.launch.mpi
    if name == "auto":  # nothing that is installed fits, which `launch.mpi` told
        return
    if not examined.site.mpi:
        yield unknown("mpi", "srun --mpi=list cannot be run"), []
    elif name in examined.site.mpi:
        yield ok("mpi", f"srun has the MPI plugin {name}"), []
    else:
        remedy = "correct mpi in [launch] (srun --mpi=list)"
        yield problem("mpi", f"srun has no MPI plugin {name}", remedy), []


def mpi_library(examined: Examined) -> Iterator[tuple[Finding, list[str]]]:
    """The MPI library of the ranks knows that plugin: Open MPI pmix alone, MPICH mostly pmi2."""
    for library in sorted({node.library for node in examined.computing.values()} - {""}):
        nodes = [name for name, node in examined.computing.items() if node.library == library]
        for finding in _library(library, examined):
            yield finding, nodes


def _library(library: str, examined: Examined) -> Iterator[Finding]:
    name = examined.policy.launch.mpi
    wanted = "pmix" if library.startswith("Open MPI ") else "pmi2"
    has_wanted = any(one.startswith(wanted) for one in examined.site.mpi)
    if name == "auto":
        return
    if name.startswith(wanted):
        yield ok("mpi", f"ranks load {library}, which knows {name}")
    elif wanted == "pmi2":
        if name.startswith("pmix") and has_wanted:
            remedy = 'if they do not start, set mpi = "auto" in [launch]'
            yield note("mpi", f"ranks load {library}, which may not know {name}", remedy)
    else:
        remedy = 'set mpi = "auto" in [launch]'
        if not has_wanted:
            remedy = "srun has none, so install MPICH on all nodes"
        yield problem("mpi", f"ranks load {library}, which needs pmix", remedy)


def hello(examined: Examined) -> Iterator[tuple[Finding, list[str]]]:
    """Two ranks find each other, as those of a stage must."""
    told, name = examined.site.hello, examined.policy.launch.mpi
    if told is None:
        return
    if not told.nodes:
        yield note("hello", "MPI was not tried", told.problem), []
    elif told.found == _HELLO_RANKS:
        yield ok("hello", f"two ranks on {told.nodes} find each other by --mpi={name}"), []
    else:
        text = f"two ranks on {told.nodes} do not find each other by --mpi={name}"
        text += f" ({told.problem})" if told.problem else " (each is alone)"
        where = "-N1 -n2" if told.nodes in examined.nodes else "-N2"
        prefix = next((node.prefix for node in examined.nodes.values()), "PREFIX")
        remedy = told.remedy or (
            "correct interface, mpi or environment in [launch]; this says more: "
            f"srun -w {told.nodes} {where} --mpi={name} {prefix}/bin/python3 -c "
            "'from mpi4py import MPI; print(MPI.COMM_WORLD.size)'"
        )
        yield problem("hello", text, remedy), []


def private_folders(examined: Examined) -> Iterator[tuple[Finding, list[str]]]:
    """Where each job has a folder of its own under one name, stage.toml says so."""
    site, rules = examined.site, examined.policy
    kinds = (site.slurm.get(f"{key}Type", "none") for key in ("Namespace", "JobContainer"))
    kind = next((kind for kind in kinds if kind.startswith(_NAMESPACES)), "")
    for root in (*rules.roots, *rules.absent_roots) if kind else ():
        above = [one for one in site.private if f"{root}/".startswith(f"{one}/")]
        if not above:
            continue
        text = f"{root}: {kind} gives each job another {above[0]}"
        if root in (*rules.private_roots, *rules.absent_roots):
            yield ok("private", text), []
        elif root == rules.store:
            yield problem("private", text, "name another folder as store in [cache]"), []
        else:
            table = f'[[roots]] with path = "{above[0]}" and private = true'
            yield problem("private", text, f"write {table}"), []


def of_jobs(examined: Examined) -> Iterator[tuple[Finding, list[str]]]:
    """The folders that the site makes for jobs were looked at."""
    for root in examined.policy.absent_roots:
        yield note("roots", f"{root} is there in a job only", "run this in a job"), []


def clean_up(examined: Examined) -> Iterator[tuple[Finding, list[str]]]:
    """Slurm waits for root's work before and after a job as long as a user can make it last."""
    keys = {"PrologEpilogTimeout": "clean-up", "EpilogTimeout": "clean-up"}  # newer: the second
    if examined.policy.shared_fs.mount:
        keys["PrologTimeout"] = "start of a job's filesystem"
    for key, what in keys.items():
        seconds = re.match(r"\d+", examined.site.slurm.get(key, ""))
        if seconds and int(seconds[0]) < _CLEAN_UP:
            text = (
                f"{key} is {seconds[0]} s: Slurm drains a node whose {what} takes longer, and a "
                f"user's process can make it last almost {_CLEAN_UP} s"
            )
            yield problem("clean-up", text, f"set it to {_CLEAN_UP} or more, or remove it"), []


def account(examined: Examined) -> Iterator[tuple[Finding, list[str]]]:
    """Files for all users belong to an account that is not root."""
    shared = examined.policy.shared
    if shared.roots:  # stage.toml is refused if this node does not know it, or if it is root
        uid = examined.policy.shared_owner
        yield ok("shared", f"{shared.owner} (uid {uid}) stages for all users"), []


def shared_fs(examined: Examined) -> Iterator[tuple[Finding, list[str]]]:
    """Each node's prolog runs when a job begins, also when it begins once more."""
    flags = examined.site.slurm.get("PrologFlags", "Alloc")
    if examined.policy.shared_fs.mount and "Alloc" not in re.split(r"\W+", flags):
        text = "PrologFlags lacks Alloc: a requeued job gets no filesystem of its disks"
        yield problem("shared_fs", text, "add Alloc to PrologFlags in slurm.conf"), []


_SITE_RULES = (
    same_everywhere, rooms, clocks, account, exclusive, ports, mpi, mpi_library, hello,
    private_folders, of_jobs, clean_up, shared_fs,
)  # fmt: skip


def examine(examined: Examined) -> dict[Finding, list[str]]:
    """Return all findings, each with the nodes that it is about; none for one about the site."""
    found: dict[Finding, list[str]] = {}
    for rule in NODE_RULES:
        for name, node in examined.nodes.items():
            for finding in rule(node, examined) if node.computes or rule in FOR_ALL else ():
                found.setdefault(finding, []).append(name)
    for of_site in _SITE_RULES:
        found.update(of_site(examined))
    return found
