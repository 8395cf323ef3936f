"""What is well on one node, what is not, and what is to be done? Pure.

Each rule is a short function of `NODE_RULES` that yields findings. Only those `FOR_ALL` are for
machines that run no jobs.
"""

from __future__ import annotations

import re
import stat
from typing import TYPE_CHECKING

from stager.base.interfaces import FAST, Kind, leading
from stager.base.rules import amount_of
from stager.base.text import bytes_text
from stager.doctor.finding import closed_problem, note, ok, problem, seen_or_problem, unknown
from stager.doctor.plugin_rules import plugins
from stager.node.facts import ABSENT, MOUNTED, SYSCTLS, UNSEEN
from stager.node.probes import fits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stager.doctor.finding import Examined, Finding
    from stager.node.facts import NodeFacts, Place
    from stager.node.probes import Disk, Link
    from stager.request.policy import Policy

#: The variable that keeps Open MPI from interfaces; without it, from the loopback one.
_EXCLUDED = "OMPI_MCA_btl_tcp_if_exclude"
#: Others than the owner may write there.
_OPEN = stat.S_IWGRP | stat.S_IWOTH
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
#: What a rank reads beneath the prefix before it starts: 70 files (mpi4py 4.1, Python 3.11).
_RANK_BYTES = 15 << 20
#: What to do about a folder of root's that is not there.
_MAKE = "restart slurmd, which makes it (without the plugin, Prolog does)"


def sysctls(node: NodeFacts, _: Examined) -> Iterator[Finding]:
    """The kernel protects files in folders where several users may write."""
    for name in SYSCTLS:
        value = node.sysctls.get(name, -1)
        if value < 0:
            yield unknown("sysctl", f"{name} cannot be read")
        elif value == 0:
            remedy = f"write {name} = 1 into a file of /etc/sysctl.d, and run sysctl --system"
            yield problem("sysctl", f"{name} is 0", remedy)
        else:
            yield ok("sysctl", f"{name} is {value}")


def _lets_replace(mode: int) -> bool:
    """Whether others than the owner can replace what is in a folder: not if it is sticky."""
    return bool(mode & _OPEN and not mode & stat.S_ISVTX)


def no_jobs(node: NodeFacts, _: Examined) -> Iterator[Finding]:
    """A machine that runs no jobs is judged by few rules."""
    if not node.computes:
        text = "this is no compute node, so its disks, network and MPI were not checked"
        yield note("roots", text, "use -w NODE, or run this in a job or on a compute node")


def roots(node: NodeFacts, examined: Examined) -> Iterator[Finding]:
    """Staging roots exist, users can write there, and they are sticky where several users write."""
    private, hints = examined.policy.private_roots, examined.policy.hints
    for root in node.roots:
        if is_closed_store(root.path, examined.policy):
            continue  # `store` tells of it
        if root.owner == ABSENT and root.path in hints:
            text = f"{root.path} is not there: a job asks for it by {hints[root.path]}"
            yield note("roots", text)
        elif root.owner < 0:
            remedy = "mount the disk, or correct roots in stage.toml"
            yield seen_or_problem("roots", root, f"{root.path} is not there", remedy)
        elif _lets_replace(root.mode):
            text = f"{root.path}: users can move each other's files"
            yield problem("roots", text, f"chmod +t {root.path}")
        elif root.path in private:
            yield ok("roots", f"{root.path} is there for this job or user alone")
        elif root.owner == 0 and not (root.mode & _OPEN or examined.policy.destinations):
            text = f"{root.path}: users cannot make folders or files there"
            remedy = (
                f"see that its disk is mounted; then chmod 1777 {root.path}, or name the folders "
                "for them in destinations"
            )
            yield problem("roots", text, remedy)
        else:
            yield ok("roots", f"{root.path}: users cannot move each other's files")


def is_closed_store(path: str, policy: Policy) -> bool:
    """Return whether users are to make nothing at ``path`` but in what root makes for them."""
    return path == policy.store and path not in policy.open_roots


def store(node: NodeFacts, _: Examined) -> Iterator[Finding]:
    """The store is root's, on a disk of the node's own, and its copies are shared with jobs."""
    if node.store is None:
        return
    there, kind = node.store.place, node.store.kind
    path = there.path
    if there.owner < 0:
        text = f"{path} is not there, so that each job stages anew"
        remedy = f"mount its disk, where slurmd makes it, or mkdir -m 755 {path}"
        yield seen_or_problem("store", there, text, remedy)
    elif there.owner != 0 or _lets_replace(there.mode):
        text = f"{path}: others than root can replace what is there"
        yield problem("store", text, f"chown root {path}; chmod go-w {path}")
    elif node.store.by_system and kind not in _IN_MEMORY:
        text = f"{path} is on the system's own disk ({kind}), which copies can fill"
        yield note("store", text, "name a folder on another disk, or set size in [cache]")
    else:
        yield ok("store", f"{path} ({kind}) belongs to root")
    for root, way in node.store.ways.items():
        yield ok("store", f"copies in {root} are made of those in {path} by {way}")


def _absence(path: str, roots: Sequence[Place]) -> str:
    """Return what the absence of a folder of ``destinations`` means beneath its root."""
    above = (root for root in roots if path.startswith(f"{root.path.rstrip('/')}/"))
    if any(root.owner >= 0 and root.mode & _OPEN for root in above):
        return f"{path} is not there: who stages there first will own it, and nobody else can"
    return f"{path} is not there, so nobody can stage there"


def open_folders(node: NodeFacts, _: Examined) -> Iterator[Finding]:
    """Nobody but root and the owner of a copy can replace it, by a folder beneath a root."""
    named = {folder.path for folder in node.destinations}
    for folder in node.open_folders:
        path = folder.path
        if path in named:
            continue  # `destinations` tells it
        if folder.mode & stat.S_IWOTH:
            text = f"{path}: all users may write there, so a stage to it is refused"
            yield problem("roots", text, f"chmod +t {path}")
        else:
            text = f"{path}: members of its group can replace what others stage there"
            yield note("roots", text, f"chmod +t {path}, unless that is wanted")


def destinations(node: NodeFacts, _: Examined) -> Iterator[Finding]:
    """The folders in which users may stage belong to root: else only their owner can."""
    for folder in node.destinations:
        path = folder.path
        if folder.owner < 0:
            remedy = f"see that its disk is mounted; then mkdir -p -m 1777 {path}"
            text = _absence(path, node.roots)
            yield seen_or_problem("destinations", folder, text, remedy)
        elif stat.S_ISLNK(folder.mode):
            text = f"{path} is a symbolic link, and a stage follows none"
            yield problem("destinations", text, "correct destinations in stage.toml")
        elif not stat.S_ISDIR(folder.mode):
            text = f"{path} is not a folder"
            yield problem("destinations", text, "remove it, or correct destinations in stage.toml")
        elif folder.owner != 0:
            text = f"{path} belongs to uid {folder.owner}, so no other user can stage there"
            yield problem("destinations", text, f"chown root {path}; chmod 1777 {path}")
        elif _lets_replace(folder.mode):
            text = f"{path}: users can move each other's files"
            yield problem("destinations", text, f"chmod +t {path}")
        elif not folder.mode & _OPEN:
            text = f"{path}: users can stage only in folders of their own that you make there"
            yield note("destinations", text, f"chmod 1777 {path} lets them make their own")
        else:
            yield ok("destinations", f"{path} belongs to root")


def disks(node: NodeFacts, examined: Examined) -> Iterator[Finding]:
    """Copies can be written to the node's own disks."""
    cache = examined.policy.cache
    for disk in node.disks:
        kept = amount_of(cache.keep_free, disk.size)
        wanted = kept + amount_of(cache.headroom, disk.size)
        if 0 < disk.size <= kept:
            text = f"keep_free is {bytes_text(kept)}, and {disk.path} has only "
            text += f"{bytes_text(disk.size)}, so nothing can be staged there"
            yield problem("disk", text, "lower keep_free in stage.toml")
        elif cache.headroom and 0 < disk.size <= wanted:
            text = f"what to keep free and headroom are {bytes_text(wanted)}, and {disk.path} has "
            text += f"only {bytes_text(disk.size)}, so after a job all copies there may go"
            yield problem("disk", text, "lower headroom in stage.toml")
        if is_shared(disk):
            text = f"{disk.path} is on {disk.kind}, which nodes share: each would write its own "
            remedy = "name a folder on the node's own disk in stage.toml (roots)"
            yield problem("disk", f"{text}copy there", remedy)
        elif disk.fault and not is_closed_store(disk.path, examined.policy):
            text = f"{disk.path}: no file can be made there ({disk.fault})"
            yield problem("disk", text, "see to the disk, its mount and the folder's mode")
        else:
            yield from _worth_a_note(disk)


def _worth_a_note(disk: Disk) -> Iterator[Finding]:
    name, room = f"{disk.path} ({disk.kind})", room_text([disk])
    if disk.free < _FULL * disk.size or disk.free_files < _FULL * disk.files:
        yield note("disk", f"{name} is almost full: {room}")
    if disk.kind in _IN_MEMORY:
        yield note("disk", f"{disk.path} is in memory ({disk.kind}), which copies take: {room}")
    elif not disk.direct:
        yield note("disk", f"{name} has no O_DIRECT: copies pass through the page cache")
    if not disk.unnamed:
        text = f"{name} has no O_TMPFILE: what a killed stage leaves there stays until the next one"
        yield note("disk", text)


def is_good(disk: Disk) -> bool:
    """Return whether there is nothing to say against the disk."""
    return not is_shared(disk) and not disk.fault and not list(_worth_a_note(disk))


def is_shared(disk: Disk) -> bool:
    """Return whether several nodes may see the same filesystem."""
    return disk.kind in _SHARED or disk.kind.startswith("fuse")


def room_text(same: list[Disk]) -> str:
    """Return the least and the most free space, and size, of disks of the same kind."""

    def between(sizes: list[int]) -> str:
        texts = dict.fromkeys(map(bytes_text, sorted(sizes)))
        return " to ".join([*texts][:: max(1, len(texts) - 1)])

    return f"{between([one.free for one in same])} of {between([one.size for one in same])} free"


def prefix(node: NodeFacts, examined: Examined) -> Iterator[Finding]:
    """The package is read from the node's own disk."""
    disk = node.prefix_disk
    if disk and is_shared(disk):
        count = len(examined.computing)
        size = bytes_text(_RANK_BYTES * count)
        nodes = "the node reads" if count == 1 else f"{count} nodes read"
        yield note(
            "prefix",
            f"{node.prefix} is on {disk.kind}: when ranks start, {nodes} some {size} there at once",
            "install it on each node's own disk",
        )


def records(node: NodeFacts, examined: Examined) -> Iterator[Finding]:
    """The records of all users are in a folder of root's."""
    private = examined.policy.private_roots
    for root, folder in zip(node.roots, node.records, strict=False):
        if root.owner < 0 or root.path in private:
            continue
        if folder.owner == MOUNTED:
            text = f"a filesystem is mounted at {folder.path}"
            yield problem("records", text, "unmount it (umount -l)")
        elif folder.owner == ABSENT and root.mode & _OPEN:
            text = f"{folder.path} is not there, and any user could take the name"
            yield problem("records", text, _MAKE)
        elif folder.owner == ABSENT:
            yield ok("records", f"{folder.path} is not there yet, and only root can make it")
        elif (folder.owner, folder.mode) != (0, stat.S_IFDIR | 0o755):
            text = f"{folder.path} is not a folder of root's with mode 0755"
            yield problem("records", text, _records_remedy(folder))
        else:
            yield ok("records", f"{folder.path} belongs to root")


def _records_remedy(folder: Place) -> str:
    """Return what to do about a folder of records: root's own has those of all copies."""
    remove = f"remove it, and {_MAKE}"
    if not stat.S_ISDIR(folder.mode):
        return remove
    if folder.owner == 0:
        return f"chmod 0755 {folder.path}"
    return f"if it has folders of several users, chown root {folder.path}; else {remove}"


def shared_roots(node: NodeFacts, examined: Examined) -> Iterator[Finding]:
    """Only root and the site's account can write where files for all users are."""
    policy = examined.policy
    owner = policy.shared.owner
    for root in node.shared_roots:
        if root.owner < 0:
            text = f"{root.path} is not there"
            yield seen_or_problem("shared", root, text, f"make it for {owner}")
        elif root.owner not in (0, policy.shared_owner) or root.mode & _OPEN:
            text = f"{root.path}: others than root and {owner} can write there"
            yield problem("shared", text, f"chown {owner} {root.path}; chmod 755 {root.path}")
        elif root.owner != policy.shared_owner:
            text = f"{root.path} belongs to root, so {owner} cannot stage there"
            yield problem("shared", text, f"chown {owner} {root.path}")
        else:
            yield ok("shared", f"{root.path}: only root and {owner} can write there")


def metrics(node: NodeFacts, _: Examined) -> Iterator[Finding]:
    """Root, and nobody else, can write where the file for node_exporter is to be."""
    if (folder := node.metrics) is None:
        return
    if folder.owner < 0:
        text = f"metrics.textfile: folder {folder.path} is missing"
        yield seen_or_problem("metrics", folder, text, "make it")
    elif not stat.S_ISDIR(folder.mode):
        text = f"metrics.textfile: {folder.path} is not a folder"
        yield problem("metrics", text, "correct it in stage.toml")
    elif folder.owner != 0 or folder.mode & _OPEN:
        text = f"metrics.textfile: others than root can write in {folder.path}"
        remedy = f"chown root {folder.path}; chmod go-w {folder.path}"
        if folder.mode & stat.S_ISVTX:  # as /tmp is, which all users need
            remedy = "name a folder of root's alone"
        yield problem("metrics", text, remedy)
    else:
        yield ok("metrics", f"metrics.textfile: only root can write in {folder.path}")


def shared_fs(node: NodeFacts, _: Examined) -> Iterator[Finding]:
    """The driver for filesystems of jobs' disks is a program, and there is a folder for them."""
    if not node.shared_fs:
        return
    driver, folder = node.shared_fs
    if driver.owner < 0 or not (stat.S_ISREG(driver.mode) and driver.mode & 0o111):
        text = f"the driver {driver.path} is missing, or no program"
        remedy = "install it, or correct driver in stage.toml"
        yield seen_or_problem("shared_fs", driver, text, remedy)
    elif folder.owner < 0 or not stat.S_ISDIR(folder.mode):
        text = f"the folder {folder.path} is missing"
        yield seen_or_problem("shared_fs", folder, text, "make it on the node's disk, root's, 0755")
    else:
        yield ok("shared_fs", f"{driver.path} has a folder for the jobs' data: {folder.path}")
    if driver.path.endswith("/moosefs"):
        text = "MooseFS trusts its network: who has a process on a job's nodes reaches its files"
        yield note("shared_fs", text, "see SECURITY.md")


def trusted(node: NodeFacts, examined: Examined) -> Iterator[Finding]:
    """Only root, and Slurm's own user, can write what root runs or reads."""
    slurm_user = re.search(r"\((\d+)\)", examined.site.slurm.get("SlurmUser", ""))
    owners = 0, int(slurm_user[1]) if slurm_user else 0
    bad = 0
    for one in node.trusted:
        is_open = _lets_replace(one.mode) if stat.S_ISDIR(one.mode) else one.mode & _OPEN
        if one.owner >= 0 and (one.owner not in owners or is_open):
            bad += 1
            text = f"{one.path}: others than root can write it"
            yield problem("files", text, "chown root, chmod go-w")
        elif one.owner == UNSEEN:
            bad += 1
            yield unknown("files", f"{one.path} cannot be seen by this user")
    if not bad:
        seen = (one.path for one in node.scripts if one.owner >= 0)
        files = ", ".join(("stage.toml, plugstack.conf, the prefix, the plugin", *seen))
        yield ok("files", f"only root can write {files}")


def run_folder(node: NodeFacts, _: Examined) -> Iterator[Finding]:
    """The plugin's folders in /run are root's, and slurmd was started with the plugin."""
    if node.run.owner > 0 or (node.run.owner == 0 and node.run.mode & _OPEN):
        yield problem("run", f"{node.run.path}: others than root can write there", "remove it")
    elif node.jobs.owner == ABSENT:
        text = f"{node.jobs.path} is not there, so nothing is evicted and jobs are not cleaned up"
        remedy = "restart slurmd (without the plugin: set Prolog and Epilog)"
        yield problem("run", f"{text} after", remedy)
    elif node.plugin_ended:
        text = "slurmd was started without the plugin, so jobs are not cleaned up after"
        yield problem("run", text, "restart slurmd")
    else:
        yield ok("run", f"{node.run.path} belongs to root, and jobs are marked there")


def connections(node: NodeFacts, examined: Examined) -> Iterator[Finding]:
    """Ranks accept connections from each other alone."""
    if not examined.policy.launch.authenticate:
        text = "ranks accept connections from anyone"
        yield problem("connections", text, "set authenticate = true in [launch]")
    elif node.peers.owner == ABSENT:
        text = f"{node.peers.path} is not there, by which ranks know each other"
        yield problem("connections", text, "install by a package or by packaging/install")
    elif node.peers_closed:
        text = f"users cannot load {node.peers.path}, by which ranks know each other"
        yield closed_problem("connections", text, node.peers.path, node.peers_closed)
    else:
        yield ok("connections", "ranks accept connections from ranks of their stage alone")


def fuse(node: NodeFacts, _: Examined) -> Iterator[Finding]:
    """Users' own filesystems can stop answering."""
    if not node.fuse:
        yield ok("fuse", "users cannot mount filesystems (fusermount is not setuid)")
        return
    others = ", which other users may enter (user_allow_other)" if node.fuse_for_others else ""
    text = f"users can mount filesystems by {' and '.join(node.fuse)}{others}"
    yield note("fuse", text, "unless they need it, chmod u-s")


def library(node: NodeFacts, _: Examined) -> Iterator[Finding]:
    """Ranks can load an MPI library."""
    if not node.library:
        text = f"ranks cannot load an MPI library ({node.library_fault})"
        remedy = "install Open MPI or MPICH, and this package again if mpi4py is missing"
        yield problem("mpi", text, remedy)


def network(node: NodeFacts, examined: Examined) -> Iterator[Finding]:
    """Ranks use the fastest interface, and MPI over TCP no other."""
    if not node.links:
        return
    where, named = examined.policy.launch.interfaces
    wanted = list(filter(None, named.split(",")))
    named_at = dict.fromkeys(wanted, where)
    # Ranks watch each other over it, also where MPI is told of others.
    if watched := examined.policy.launch.named_interface:
        named_at.setdefault(watched, "interface in [launch]")
    for one, setting in named_at.items():
        if not any(fits(link, one) for link in node.links):
            text = f"there is no interface {one} that is up, which {setting} names"
            yield problem("network", text, "correct it, or see to the interface")
    usable = [link for link in node.links if link.is_usable] if wanted else _leading(node)
    used = [link for link in usable if any(fits(link, one) for one in wanted)]
    fastest = max(usable, key=_worth, default=None)
    if fastest is None or (wanted and not used):
        return
    devices = "".join(f"; {one.name} ({one.rate or 'rate not known'})" for one in node.fabrics)
    best = max(used, key=_worth) if used else fastest
    slower = [link.text for link in used or usable if _worth(link)[:2] < _worth(fastest)[:2]]
    if best is not fastest and slower:
        text = f"{fastest.text} is faster than {best.text}, which {where} names{devices}"
        remedy = f'if MPI should use it, set interface = "{fastest.name}" in [launch]'
        yield note("network", text, remedy)
    elif slower:
        text = f"MPI over TCP sends also by {' and '.join(slower)}, and not only by {fastest.text}"
        remedy = f'set interface = "{fastest.name}" in [launch], unless MPI does without TCP here'
        yield note("network", text + devices, remedy)
    else:
        yield ok("network", f"ranks use {best.text}{devices}")


def astray(node: NodeFacts, examined: Examined) -> Iterator[Finding]:
    """MPI over TCP is kept from interfaces that may lead nowhere, where the site names none."""
    environment = examined.policy.launch.environment
    if examined.policy.launch.interfaces[1] or _EXCLUDED in environment:
        return
    led = _leading(node)
    others = [one for one in node.links if not one.is_near and one not in led]
    if led and others:
        text = (
            f"MPI over TCP does not use {' and '.join(one.text for one in others)}, as other nodes "
            f"know this one by {' and '.join(one.name for one in led)}"
        )
        if all(one.kind is Kind.VIRTUAL for one in others):
            yield ok("network", text)
        else:
            yield note("network", text, "if it leads to them, name it (interface in [launch])")


def _leading(node: NodeFacts) -> list[Link]:
    """Return the interfaces that MPI over TCP uses where the site names none (`rank.network`)."""
    return leading(node.links, [host for link in node.links if link.named for host in link.hosts])


def excluded(node: NodeFacts, examined: Examined) -> Iterator[Finding]:
    """What the site keeps from MPI over TCP is the loopback interface, and not all others."""
    unwanted = examined.policy.launch.environment.get(_EXCLUDED, "").split(",")
    if not any(unwanted):
        return
    where = f"{_EXCLUDED} in [launch] environment"
    remedy = "remove it, and set interface in [launch]"
    if not any(one == "lo" or one.startswith("127.") for one in unwanted):
        text = f"{where} does not name lo, by which ranks then try to reach other nodes"
        yield problem("network", text, f"add lo, or {remedy}")
    usable = [link for link in node.links if link.is_usable]
    if usable and all(any(fits(link, one) for one in unwanted if one) for link in usable):
        text = f"{where} names every interface that leads to other nodes"
        yield problem("network", text, remedy)


def _worth(link: Link) -> tuple[bool, int, bool]:
    """Return what ranks go by when they choose an interface (`rank.network`)."""
    return link.kind in FAST, link.speed, link.named


#: The rules, in the order in which they are told, and those of them that are for all machines.
NODE_RULES = (
    sysctls, no_jobs, roots, open_folders, destinations, store, disks, records, shared_roots,
    metrics, shared_fs, trusted, prefix, run_folder, plugins, connections, fuse, library, network,
    astray, excluded,
)  # fmt: skip
FOR_ALL = frozenset({sysctls, no_jobs, trusted, prefix, plugins, connections, fuse})
