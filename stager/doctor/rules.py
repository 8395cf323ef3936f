"""Judge the facts of a site and its nodes: what is well, what is not, and what to do. Pure.

Each rule is a short function of `NODE_RULES` or `SITE_RULES` that yields findings.
"""

from __future__ import annotations

import re
import stat
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from stager.base.text import bytes_text
from stager.doctor.facts import ABSENT, MOUNTED, SYSCTLS, UNSEEN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from stager.doctor.disks import Disk
    from stager.doctor.facts import NodeFacts, Place, PluginLine, SiteFacts
    from stager.request.policy import Policy

#: Others than the owner may write there.
_OPEN = stat.S_IWGRP | stat.S_IWOTH
#: Users' folders that job_container makes anew for each job, unless the site says otherwise.
_PRIVATE = ("/tmp", "/dev/shm")  # noqa: S108 - nothing is written there
#: Filesystems that nodes share; those of FUSE may be such as well.
_SHARED = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "coda", "gpfs", "lustre", "nfs", "nfs4", "orangefs",
        "panfs", "pvfs2", "smb3", "virtiofs", "wekafs",
    }
)  # fmt: skip
#: Filesystems in memory.
_IN_MEMORY = frozenset({"ramfs", "tmpfs"})
#: The share of a disk, and of its files, below which it is told as full.
_FULL = 0.05
#: Seconds between clocks that are told: the nodes are not asked at the very same moment.
_CLOCKS = 60
#: The plugin of pyxis, which needs the image that it starts.
_PYXIS = "spank_pyxis.so"
#: Seconds that the clean-up after a job has: STAGE_CLEAN_UP_LIMIT in stage.h, and some for its end.
_CLEAN_UP = 50
#: The ranks of a `doctor.facts.Hello`.
_HELLO_RANKS = 2
_ELSEWHERE = "use -w NODE, or run this in a job or on a compute node"


class Verdict(StrEnum):
    """What a finding means."""

    OK = "ok"
    PROBLEM = "problem"
    #: Not wrong, but the site should have weighed it.
    NOTE = "note"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Finding:
    """What was found about one ``subject``, and what to do unless it is well."""

    subject: str
    verdict: Verdict
    text: str


@dataclass(frozen=True)
class Examined:
    """What the rules look at: the site, the site's stage.toml, and the facts of each node."""

    site: SiteFacts
    policy: Policy
    nodes: Mapping[str, NodeFacts]


def _ok(subject: str, text: str) -> Finding:
    return Finding(subject, Verdict.OK, text)


def _problem(subject: str, text: str) -> Finding:
    return Finding(subject, Verdict.PROBLEM, text)


def _note(subject: str, text: str) -> Finding:
    return Finding(subject, Verdict.NOTE, text)


def _unknown(subject: str, text: str) -> Finding:
    return Finding(subject, Verdict.UNKNOWN, text)


# One node


def sysctls(node: NodeFacts, _: Examined) -> Iterator[Finding]:
    """The kernel protects files in folders where several users may write."""
    for name in SYSCTLS:
        value = node.sysctls.get(name, -1)
        if value < 0:
            yield _unknown("sysctl", f"{name} cannot be read")
        elif value == 0:
            yield _problem("sysctl", f"{name} is 0: set it to 1 (in a file of /etc/sysctl.d)")
        else:
            yield _ok("sysctl", f"{name} is {value}")


def tmpfs(node: NodeFacts, _: Examined) -> Iterator[Finding]:
    """Nobody but root can make folders where PMIx makes those of job steps."""
    if not node.tmpfs:
        yield _unknown("TmpFS", "Slurm does not say where PMIx makes its folders (TmpFS)")
    for folder in node.tmpfs if node.computes else ():
        name = f"TmpFS={folder.path}"
        remedy = "set TmpFS in slurm.conf to a folder of root's with mode 0755"
        if folder.owner < 0:
            yield _seen_or_problem("TmpFS", folder, f"{name} is not there: {remedy}")
        elif folder.owner != 0 or folder.mode & _OPEN:
            yield _problem("TmpFS", f"{name}: users can keep jobs from starting there: {remedy}")
        else:
            yield _ok("TmpFS", f"{name}: only root can write there")


def taken(node: NodeFacts, _: Examined) -> Iterator[Finding]:
    """Nobody has taken the names of the folders that PMIx makes for this user's jobs."""
    for folder in node.taken:
        whose = f"belongs to uid {folder.owner}"
        if folder.owner == MOUNTED:
            whose = "is a mounted filesystem of somebody"
        yield _problem(
            "TmpFS",
            f"{folder.path} {whose}, who keeps your jobs from starting "
            "there: remove it, and set TmpFS in slurm.conf to a folder of root's with mode 0755",
        )


def roots(node: NodeFacts, _: Examined) -> Iterator[Finding]:
    """Staging roots exist, and are sticky where several users write."""
    if not node.computes:
        yield _unknown(
            "roots", f"this is no compute node, so its disks were not checked; {_ELSEWHERE}"
        )
        return
    for root in node.roots:
        if root.owner < 0:
            remedy = "mount the disk, or correct roots in stage.toml"
            yield _seen_or_problem("roots", root, f"{root.path} is not there: {remedy}")
        elif root.mode & _OPEN and not root.mode & stat.S_ISVTX:
            yield _problem(
                "roots",
                f"{root.path}: users can move each other's files: chmod +t {root.path}",
            )
        else:
            yield _ok("roots", f"{root.path}: users cannot move each other's files")


def disks(node: NodeFacts, _: Examined) -> Iterator[Finding]:
    """Copies can be written to the node's own disks."""
    for disk in node.disks if node.computes else ():
        room = f"{bytes_text(disk.free)} of {bytes_text(disk.size)} free"
        if _is_shared(disk):
            yield _problem(
                "disk",
                f"{disk.path} is on {disk.kind}, which nodes share: each would write its own copy "
                "there: name a folder on the node's own disk in stage.toml (roots)",
            )
        elif disk.fault:
            yield _problem(
                "disk",
                f"{disk.path}: no file can be made there ({disk.fault}): see to the disk, its "
                "mount and the folder's mode",
            )
        elif disk.free < _FULL * disk.size or disk.free_files < _FULL * disk.files:
            yield _note("disk", f"{disk.path} ({disk.kind}) is almost full: {room}")
        elif disk.kind in _IN_MEMORY:
            yield _note(
                "disk", f"{disk.path} is in memory ({disk.kind}), which copies take: {room}"
            )
        elif not disk.direct:
            text = f"{disk.path} ({disk.kind}) has no O_DIRECT: copies pass through the page cache"
            yield _note("disk", text)
        else:
            yield _ok("disk", f"{disk.path} ({disk.kind}): {room}")


def _is_shared(disk: Disk) -> bool:
    return disk.kind in _SHARED or disk.kind.startswith("fuse")


def prefix(node: NodeFacts, _: Examined) -> Iterator[Finding]:
    """The package is read from the node's own disk."""
    disk = node.prefix_disk
    if disk and _is_shared(disk):
        yield _note(
            "prefix",
            f"{node.prefix} is on {disk.kind}: all nodes of a job read it at once when ranks "
            "start: install it on each node's own disk",
        )


def records(node: NodeFacts, _: Examined) -> Iterator[Finding]:
    """The records of all users are in a folder of root's."""
    for root, folder in zip(node.roots, node.records, strict=False):
        if not node.computes or root.owner < 0:
            continue
        if folder.owner == MOUNTED:
            yield _problem(
                "records", f"a filesystem is mounted at {folder.path}: unmount it (umount -l)"
            )
        elif folder.owner == ABSENT and root.mode & _OPEN:
            yield _problem(
                "records",
                f"{folder.path} is not there, and any user could take the name: have it made at "
                "boot (a line in /etc/tmpfiles.d)",
            )
        elif folder.owner == ABSENT:
            yield _ok("records", f"{folder.path} is not there yet, and only root can make it")
        elif (folder.owner, folder.mode) != (0, stat.S_IFDIR | 0o755):
            yield _problem(
                "records",
                f"{folder.path} is not a folder of root's with mode 0755: remove it, and have it "
                "made at boot (a line in /etc/tmpfiles.d)",
            )
        else:
            yield _ok("records", f"{folder.path} belongs to root")


def shared_roots(node: NodeFacts, examined: Examined) -> Iterator[Finding]:
    """Only root and the site's account can write where files for all users are."""
    policy = examined.policy
    for root in node.shared_roots if node.computes else ():
        if root.owner < 0:
            remedy = f"make it for {policy.shared.owner}"
            yield _seen_or_problem("shared", root, f"{root.path} is not there: {remedy}")
        elif root.owner not in (0, policy.shared_owner) or root.mode & _OPEN:
            yield _problem(
                "shared",
                f"{root.path}: others than root and {policy.shared.owner} can write there: chown "
                f"{policy.shared.owner} {root.path}; chmod 755 {root.path}",
            )
        else:
            yield _ok("shared", f"{root.path}: only root and {policy.shared.owner} can write there")


def trusted(node: NodeFacts, examined: Examined) -> Iterator[Finding]:
    """Only root, and Slurm's own user, can write stage.toml, plugstack.conf, prefix and plugin."""
    slurm_user = re.search(r"\((\d+)\)", examined.site.slurm.get("SlurmUser", ""))
    owners = 0, int(slurm_user[1]) if slurm_user else 0
    bad = 0
    for one in node.trusted:
        # In a sticky folder, others cannot replace what is root's.
        is_open = one.mode & _OPEN and not (stat.S_ISDIR(one.mode) and one.mode & stat.S_ISVTX)
        if one.owner >= 0 and (one.owner not in owners or is_open):
            bad += 1
            yield _problem(
                "files", f"{one.path}: others than root can write it: chown root, chmod go-w"
            )
        elif one.owner == UNSEEN:
            bad += 1
            yield _unknown("files", f"{one.path} cannot be seen by this user")
    if not bad:
        yield _ok("files", "only root can write stage.toml, plugstack.conf, the prefix, the plugin")


def run_folder(node: NodeFacts, _: Examined) -> Iterator[Finding]:
    """The plugin's folders in /run are root's, and slurmd was started with the plugin."""
    if not node.computes:
        return
    if node.run.owner > 0 or (node.run.owner == 0 and node.run.mode & _OPEN):
        yield _problem("run", f"{node.run.path}: others than root can write there: remove it")
    elif node.jobs.owner == ABSENT:
        yield _problem(
            "run",
            f"{node.jobs.path} is not there, so nothing is evicted and jobs are not cleaned up "
            "after: restart slurmd (without the plugin: set Prolog and Epilog)",
        )
    else:
        yield _ok("run", f"{node.run.path} belongs to root, and jobs are marked there")


def plugins(node: NodeFacts, examined: Examined) -> Iterator[Finding]:
    """plugstack.conf names the plugin once, as installed with this package."""
    path = examined.site.slurm.get("PlugStackConfig", "")
    if not path:
        yield _unknown("plugin", "Slurm does not say where plugstack.conf is")
        return
    if len(node.plugins) != 1:
        how = "is not named" if not node.plugins else f"is named {len(node.plugins)} times"
        remedy = "name it once (without it, TaskProlog must stage)"
        yield _problem("plugin", f"spank_stage.so {how} in {path}: {remedy}")
    for line in node.plugins:
        yield from _plugin(line, node, examined)


def _plugin(line: PluginLine, node: NodeFacts, examined: Examined) -> Iterator[Finding]:
    install = "install plugin and package together (packaging/install)"
    version = line.version or "unknown"
    slurm = examined.site.slurm.get("SLURM_VERSION", "")
    if line.version != node.package:
        text = f"{line.plugin} has version {version}, this package {node.package}: {install}"
        yield _problem("plugin", text)
    elif line.python and not line.python.startswith(f"{node.prefix}/"):
        text = f"python={line.python} in plugstack.conf is not of {node.prefix}: {install}"
        yield _problem("plugin", text)
    elif line.slurm and slurm and not slurm.startswith(f"{line.slurm}."):
        yield _problem(
            "plugin",
            f"{line.plugin} is built for Slurm {line.slurm}, and this is {slurm}: build it with "
            "this Slurm's headers (packaging/install)",
        )
    else:
        yield _ok("plugin", f"{line.plugin} has version {version}, as this package")
    if _PYXIS in line.after:
        yield _problem(
            "plugin",
            f"{_PYXIS} is before spank_stage.so in plugstack.conf, so containers are started "
            "before their images are staged: list spank_stage.so first",
        )


def connections(node: NodeFacts, examined: Examined) -> Iterator[Finding]:
    """Ranks accept connections from each other alone."""
    if not examined.policy.launch.authenticate:
        text = "ranks accept connections from anyone: set authenticate = true in [launch]"
        yield _problem("connections", text)
    elif node.peers.owner == ABSENT:
        text = (
            f"{node.peers.path} is not there, so ranks accept connections from anyone: install by "
            "packaging/install"
        )
        yield _problem("connections", text)
    else:
        yield _ok("connections", "ranks accept connections from ranks of their stage alone")


def fuse(node: NodeFacts, _: Examined) -> Iterator[Finding]:
    """Users' own filesystems can stop answering."""
    if not node.fuse:
        yield _ok("fuse", "users cannot mount filesystems (fusermount is not setuid)")
        return
    others = ", which other users may enter (user_allow_other)" if node.fuse_for_others else ""
    yield _note(
        "fuse",
        f"users can mount filesystems by {' and '.join(node.fuse)}{others}: unless they need it, "
        "chmod u-s",
    )


def _seen_or_problem(subject: str, there: Place, text: str) -> Finding:
    if there.owner == UNSEEN:
        return _unknown(subject, f"{there.path} cannot be seen by this user")
    if there.owner == MOUNTED:
        text = f"a user mounted a filesystem at {there.path}: unmount it (umount -l)"
    return _problem(subject, text)


# The site


def same_config(examined: Examined) -> Iterator[tuple[Finding, list[str]]]:
    """All machines have the same stage.toml, and the same version of the package."""
    yield from _same(examined, "config", "stage.toml", lambda node: node.digest)
    yield from _same(examined, "version", "slurm-stage", lambda node: node.package)


def _same(
    examined: Examined, subject: str, what: str, of: Callable[[NodeFacts], str]
) -> Iterator[tuple[Finding, list[str]]]:
    values = {name: of(node) for name, node in examined.nodes.items()}
    if not values:
        return
    usual = Counter(values.values()).most_common(1)[0][0]
    for value in sorted({*values.values()} - {usual}):
        names = [name for name, own in values.items() if own == value]
        text = f"{what} is not as on the other machines: install the same everywhere"
        yield _problem(subject, text), names
    names = [name for name, own in values.items() if own == usual]
    if len(names) == len(values) > 1:
        yield _ok(subject, f"{what} is the same everywhere"), names


def clocks(examined: Examined) -> Iterator[tuple[Finding, list[str]]]:
    """All clocks show the same time."""
    times = {name: node.time for name, node in examined.nodes.items() if node.computes}
    middle = sorted(times.values())[len(times) // 2] if times else 0
    for name, time in times.items():
        if abs(time - middle) > _CLOCKS:
            off = f"{abs(time - middle):.0f} s {'ahead' if time > middle else 'behind'}"
            text = (
                f"the clock is {off}, so ages of copies are wrong: have it set (chrony, "
                "systemd-timesyncd)"
            )
            yield _problem("clock", text), [name]


def exclusive(examined: Examined) -> Iterator[tuple[Finding, list[str]]]:
    """Nodes are shared among users, or not."""
    if not examined.site.partitions:
        yield _unknown("sharing", "Slurm's partitions cannot be read"), []
    for name, keys in examined.site.partitions.items():
        alone = keys.get("OverSubscribe") == "EXCLUSIVE" or keys.get("ExclusiveUser") == "YES"
        if alone:
            yield _ok("sharing", f"partition {name}: a node has jobs of one user at a time"), []
        else:
            text = (
                f"partition {name}: users share nodes, and reach each other's ports: see "
                "SECURITY.md, or set ExclusiveUser=YES or OverSubscribe=EXCLUSIVE"
            )
            yield _note("sharing", text), []


def ports(examined: Examined) -> Iterator[tuple[Finding, list[str]]]:
    """Ranks and srun listen where other machines should not reach them."""
    chosen = [
        name for name in examined.policy.launch.environment if name.startswith("OMPI_MCA_btl_tcp_")
    ]
    if chosen:
        yield _ok("ports", f"the ranks' ports are chosen ({', '.join(chosen)})"), []
    else:
        text = (
            "ranks listen on all interfaces, on ports from 1024 on: choose an interface that only "
            "the nodes reach (OMPI_MCA_btl_tcp_if_include in [launch] environment), or close the "
            "nodes' ports to other machines"
        )
        yield _note("ports", text), []
    if not examined.site.slurm:
        return
    wanted = examined.site.slurm.get("SrunPortRange", "0-0")
    if wanted in ("0-0", "0", "(null)"):
        text = "srun listens on any port: set SrunPortRange, so that a firewall can tell its ports"
        yield _note("ports", text), []
    else:
        yield _ok("ports", f"srun listens on the ports {wanted}"), []


def mpi(examined: Examined) -> Iterator[tuple[Finding, list[str]]]:
    """Slurm has the plugin by which the ranks find each other."""
    name = examined.policy.launch.mpi
    if not examined.site.mpi:
        yield _unknown("mpi", "srun --mpi=list cannot be run"), []
    elif name in examined.site.mpi:
        yield _ok("mpi", f"srun has the MPI plugin {name}"), []
    else:
        text = f"srun has no MPI plugin {name}: correct mpi in [launch] (srun --mpi=list)"
        yield _problem("mpi", text), []


def mpi_library(examined: Examined) -> Iterator[tuple[Finding, list[str]]]:
    """The MPI library of the ranks knows that plugin: Open MPI pmix alone, MPICH mostly pmi2."""
    name, library = examined.policy.launch.mpi, examined.site.library
    wanted = "pmix" if library.startswith("Open MPI ") else "pmi2"
    if not library or name.startswith(wanted):
        return
    has_wanted = any(one.startswith(wanted) for one in examined.site.mpi)
    if wanted == "pmi2":
        if name.startswith("pmix") and has_wanted:
            text = f'ranks load {library}: if they do not start, set mpi = "pmi2" in [launch]'
            yield _note("mpi", text), []
        return
    remedy = 'set mpi = "pmix" in [launch]'
    if not has_wanted:
        remedy = (
            'srun has none, so install MPICH on all nodes, and in [launch] set mpi = "pmi2" and '
            'environment = { MPI4PY_MPIABI = "mpich" }'
        )
    yield _problem("mpi", f"ranks load {library}, which needs pmix: {remedy}"), []


def hello(examined: Examined) -> Iterator[tuple[Finding, list[str]]]:
    """Two ranks find each other, as those of a stage must."""
    told, name = examined.site.hello, examined.policy.launch.mpi
    if told is None:
        return
    if not told.nodes:
        yield _note("hello", f"MPI was not tried: {told.problem}"), []
    elif told.found == _HELLO_RANKS:
        yield _ok("hello", f"two ranks on {told.nodes} find each other by --mpi={name}"), []
    else:
        text = f"two ranks on {told.nodes} do not find each other by --mpi={name}"
        text += f" ({told.problem})" if told.problem else " (each is alone)"
        where = "-N1 -n2" if told.nodes in examined.nodes else "-N2"
        prefix = next((node.prefix for node in examined.nodes.values()), "PREFIX")
        remedy = (
            "correct mpi or environment in [launch]; this says more: "
            f"srun -w {told.nodes} {where} --mpi={name} {prefix}/bin/python3 -c "
            "'from mpi4py import MPI; print(MPI.COMM_WORLD.size)'"
        )
        yield _problem("hello", f"{text}: {remedy}"), []


def job_container(examined: Examined) -> Iterator[tuple[Finding, list[str]]]:
    """No staging root is in a folder that goes with each job."""
    kind = examined.site.slurm.get("JobContainerType", "job_container/none")
    inside = [
        root
        for root in examined.policy.roots
        if any(f"{root}/".startswith(f"{folder}/") for folder in _PRIVATE)
    ]
    if not kind.endswith("/none") and inside:
        text = f"{', '.join(inside)}: {kind} may remove it with each job: choose other roots"
        yield _note("job_container", text), []


def clean_up(examined: Examined) -> Iterator[tuple[Finding, list[str]]]:
    """Slurm waits for root's clean-up after a job as long as a user can make it last."""
    for key in ("PrologEpilogTimeout", "EpilogTimeout"):  # newer Slurm has the second
        seconds = re.match(r"\d+", examined.site.slurm.get(key, ""))
        if seconds and int(seconds[0]) < _CLEAN_UP:
            text = (
                f"{key} is {seconds[0]} s: Slurm drains a node whose clean-up takes longer, and a "
                f"user's process can make it last almost {_CLEAN_UP} s: set it to {_CLEAN_UP} or "
                "more, or remove it"
            )
            yield _problem("clean-up", text), []


def account(examined: Examined) -> Iterator[tuple[Finding, list[str]]]:
    """Files for all users belong to an account that is not root."""
    shared = examined.policy.shared
    if shared.roots:  # stage.toml is refused if this node does not know it, or if it is root
        uid = examined.policy.shared_owner
        yield _ok("shared", f"{shared.owner} (uid {uid}) stages for all users"), []


NODE_RULES = (
    sysctls, tmpfs, taken, roots, disks, records, shared_roots, trusted, prefix, run_folder,
    plugins, connections, fuse,
)  # fmt: skip
SITE_RULES = (
    same_config, clocks, account, exclusive, ports, mpi, mpi_library, hello, job_container,
    clean_up,
)  # fmt: skip


def examine(examined: Examined) -> dict[Finding, list[str]]:
    """Return all findings, each with the nodes that it is about; none for one about the site."""
    found: dict[Finding, list[str]] = {}
    for rule in NODE_RULES:
        for name, node in examined.nodes.items():
            for finding in rule(node, examined):
                found.setdefault(finding, []).append(name)
    for of_site in SITE_RULES:
        for finding, names in of_site(examined):
            found[finding] = names
    return found
