"""Gather what `doctor.site_rules` judges: the facts of this node, and those of the whole site.

Nothing is changed, and a fact that cannot be seen is told as such. A `NodeFacts` travels to the
user's node as JSON.
"""

from __future__ import annotations

import difflib
import errno
import glob
import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from stager.base import linux, paths
from stager.base.mounts import stranger_at
from stager.fs import clone
from stager.fs.files import who_could_replace
from stager.node.probes import Disk, Fabric, Link, disk_of, fabrics, links

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from stager.node.agent import Facts

#: The sysctls that protect files in folders where several users may write.
SYSCTLS = ("fs.protected_symlinks", "fs.protected_hardlinks", "fs.protected_regular")
#: The programs by which users mount filesystems of their own, if they are setuid.
_MOUNTERS = ("fusermount", "fusermount3")
#: The owner of what is not there, of what this user cannot see, and of what is not looked at
#: because a filesystem is mounted there, which may never answer.
ABSENT, UNSEEN, MOUNTED = -1, -2, -3
#: The name of the plugin's file.
PLUGIN = "spank_stage.so"
#: How the plugin names its version, and that of the Slurm it was built for (spank_stage.c).
_PLUGIN_VERSION = re.compile(rb"slurm-stage ([0-9][^\0]{0,40})\0")
_PLUGIN_SLURM = re.compile(rb"slurm-stage for Slurm 0x([0-9a-fA-F]{1,8})\0")
#: An argument that the plugin knows, and the Python that it runs without one (config.c).
_ARGUMENT = re.compile(r"(python|config)=/")
_PYTHON = "/opt/slurm-stage/bin/python3"
#: How the line of a plugin begins (spank(8)).
_KINDS = _REQUIRED, _ = "required", "optional"
#: Bytes of a file that are read, and depth to which plugstack.conf is followed.
_MOST_BYTES, _MOST_DEEP = 1 << 20, 4
#: Open folders of a root that are told, and entries of it that are looked at for them.
_MOST_OPEN, _MOST_ENTRIES = 5, 10_000
#: How the files of Slurm's plugins for namespaces name the folders.
_DIRS = re.compile(r"""\b(?:dirs|path)\s*[=:]\s*["']?([\w./,-]+)""", re.IGNORECASE)
#: Prints the MPI library that mpi4py loads, and its version.
_LIBRARY = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
name, version = MPI.get_vendor()
print(name, ".".join(map(str, version)))
"""
#: Seconds in which Slurm's commands must end.
_PATIENCE = 10


@dataclass(frozen=True)
class Place:
    """A file or folder: the uid of its owner, or one of the above, and its mode."""

    path: str
    owner: int
    mode: int


@dataclass(frozen=True)
class Argument:
    """A file that this plugin uses: ``python=PATH`` or ``config=PATH``, unless the default."""

    key: str
    place: Place
    #: The file, or the folder above it, that is closed to users who must run or read the file.
    closed: str = ""
    #: The SHA-256 of stage.toml.
    digest: str = ""
    #: Whether plugstack.conf names it.
    given: bool = True


@dataclass(frozen=True)
class PluginLine:
    """A line of plugstack.conf for this plugin; an argument that it lacks is the default."""

    plugin: str
    python: str
    config: str
    #: Of the file ``plugin``; empty if it names none.
    version: str
    #: The major version of the Slurm that it was built for, such as ``24.11``; empty likewise.
    slurm: str = ""
    #: The plugins that are listed before it.
    after: tuple[str, ...] = ()
    #: The SHA-256 of the file.
    digest: str = ""
    #: What is at ``python`` and ``config``, and the words that the plugin does not know.
    arguments: tuple[Argument, ...] = ()
    unknown: tuple[str, ...] = ()
    #: Whether Slurm's commands fail if the plugin does: the line says required, and not optional.
    required: bool = True
    #: Where the line stands: in plugstack.conf, or in a file that it includes.
    file: str = "plugstack.conf"


@dataclass(frozen=True)
class AbsentPlugin:
    """This plugin, or one that Slurm needs, which plugstack.conf names; its file is not there."""

    plugin: str
    required: bool
    #: Where its line stands, as that of a PluginLine.
    file: str = "plugstack.conf"


@dataclass(frozen=True)
class StoreFacts:
    """The folder of the node's store, and the type of its filesystem, such as ``xfs``.

    ``by_system`` tells whether that is the filesystem of ``/``. The ``ways`` in which copies for
    the folders of jobs are made of it are those that could be tried.
    """

    place: Place
    kind: str = ""
    by_system: bool = False
    ways: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeFacts:
    """What one machine is like."""

    #: Whether Slurm runs jobs here.
    computes: bool
    #: The version of this package, and the prefix that it is installed in.
    package: str
    prefix: str
    #: The SHA-256 of stage.toml; empty if it cannot be read.
    digest: str
    #: By name; -1 for one that cannot be read.
    sysctls: dict[str, int]
    #: The staging roots, and what is at the place of their records.
    roots: list[Place]
    records: list[Place]
    shared_roots: list[Place]
    #: What only root may write: stage.toml, plugstack.conf, the prefix, the plugin and the scripts.
    trusted: list[Place]
    #: `paths.RUN_FOLDER` and `paths.JOBS_FOLDER`.
    run: Place
    jobs: Place
    plugins: list[PluginLine]
    #: The library that ranks preload.
    peers: Place
    #: Whether the slurmd that last loaded the plugin has ended: that which runs now has not.
    plugin_ended: bool = False
    #: The folders in which alone users may stage, without the roots.
    destinations: list[Place] = field(default_factory=list)
    #: The first folders of root's beneath the roots in which others could replace what is staged.
    open_folders: list[Place] = field(default_factory=list)
    #: The setuid programs by which users mount filesystems, and whether others may see those.
    fuse: list[str] = field(default_factory=list)
    fuse_for_others: bool = False
    #: The filesystems of the roots, and of the prefix.
    disks: list[Disk] = field(default_factory=list)
    prefix_disk: Disk | None = None
    #: The clock: seconds since 1970.
    time: float = 0.0
    #: The SHA-256 of the package's own files.
    code: str = ""
    #: What `mpi_library` found, such as "Open MPI 4.1.4", or why mpi4py cannot be used.
    library: str = ""
    library_fault: str = ""
    #: The network.
    links: list[Link] = field(default_factory=list)
    fabrics: list[Fabric] = field(default_factory=list)
    #: Slurm's TaskProlog, Prolog and Epilog, if they are scripts of this package.
    scripts: list[Place] = field(default_factory=list)
    #: The path of stage.toml.
    config: str = ""
    absent_plugins: list[AbsentPlugin] = field(default_factory=list)
    #: Lines with this plugin that Slurm ignores because of their first word, after their file.
    ignored_lines: list[str] = field(default_factory=list)
    #: plugstack.conf and the plugin, if users cannot read them, each with the file, or the folder
    #: above it, that is closed to them.
    closed: dict[str, str] = field(default_factory=dict)
    #: The same of the library of ``peers``.
    peers_closed: str = ""
    #: The folder of metrics.textfile; None if stage.toml names no file.
    metrics: Place | None = None
    store: StoreFacts | None = None
    #: The driver and the folder of [shared_fs].
    shared_fs: list[Place] = field(default_factory=list)


@dataclass(frozen=True)
class Hello:
    """A trial of two ranks, started as a stage starts its own."""

    #: The nodes that they were started on, as Slurm writes them; empty if they were not.
    nodes: str
    #: How many of the ranks found each other.
    found: int = 0
    #: Why they did not start, or were not started; and what to do, where that is known.
    problem: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class SiteFacts:
    """What is the same for all nodes: Slurm's configuration. Empty without Slurm."""

    #: The keys of `scontrol show config`, and of each partition by its name.
    slurm: dict[str, str] = field(default_factory=dict)
    partitions: dict[str, dict[str, str]] = field(default_factory=dict)
    #: What `srun --mpi=list` names.
    mpi: frozenset[str] = frozenset()
    #: The folders of which Slurm's plugin for namespaces makes another one for each job.
    private: tuple[str, ...] = ()
    #: None if nobody wanted to know.
    hello: Hello | None = None


def node_facts(asked: Facts) -> NodeFacts:
    """Return the facts of this machine."""
    roots, plugstack = asked.roots, asked.plugstack
    plugins = list(_plugin_lines(plugstack))
    peers = f"{sys.prefix}/{paths.PEERS_LIBRARY}"
    programs = (*asked.scripts, *filter(None, [asked.shared_driver]))
    library, library_fault = mpi_library(asked.environment) if asked.computes else ("", "")
    return NodeFacts(
        computes=asked.computes,
        package=metadata.version("slurm-stage"),
        prefix=sys.prefix,
        digest=_digest(asked.config),
        sysctls={name: _sysctl(name) for name in SYSCTLS},
        roots=[place(root or "/") for root in roots],
        records=[place_here(root or "/", paths.RECORDS_FOLDER) for root in roots],
        shared_roots=[place(root) for root in asked.shared_roots],
        destinations=[
            place(path, follow=False) for path in asked.destinations if path not in roots
        ],
        open_folders=[
            one for root in roots for one in islice(_open_folders(root or "/"), _MOST_OPEN)
        ],
        trusted=[place(path) for path in _trusted(asked.config, plugstack, plugins, programs)],
        run=place(paths.RUN_FOLDER),
        jobs=place(paths.JOBS_FOLDER),
        plugins=plugins,
        plugin_ended=bool(plugins) and _plugin_ended(),
        peers=place(peers),
        fuse=[
            path
            for path in map(shutil.which, _MOUNTERS)
            if path and place(path).mode & stat.S_ISUID
        ],
        fuse_for_others=b"\nuser_allow_other" in b"\n" + _read("/etc/fuse.conf"),
        disks=[disk for root in roots if (disk := disk_of(root or "/"))],
        prefix_disk=disk_of(sys.prefix),
        time=time.time(),
        code=_code(),
        library=library,
        library_fault=library_fault,
        links=links(),
        fabrics=fabrics(),
        scripts=[place(path) for path in asked.scripts],
        config=asked.config,
        absent_plugins=list(dict.fromkeys(_absent_plugins(plugstack))),
        ignored_lines=[
            f"{file}: {' '.join(words)}"
            for file, words in _plugstack_lines(plugstack)
            if words[0] not in _KINDS and any(word.endswith(f"/{PLUGIN}") for word in words)
        ],
        closed=_closed([*_plugstack_files(plugstack), *(line.plugin for line in plugins)]),
        peers_closed=_closed_at(peers, stat.S_IROTH),
        metrics=place(os.path.dirname(asked.textfile)) if asked.textfile else None,
        store=_store(asked.store, asked.job_roots) if asked.store else None,
        shared_fs=[place(one) for one in (asked.shared_driver, asked.shared_folder) if one],
    )


def _store(path: str, job_roots: Iterable[str]) -> StoreFacts:
    there, disk = place(path), disk_of(path)
    if disk is None:
        return StoreFacts(there)
    own = f"{path}/{paths.RECORDS_FOLDER}/{os.getuid()}"
    ways = {}
    for root in job_roots:
        # Outside of a job, its folder is not there: what it lies in tells the way, most likely.
        folder = os.path.dirname(root.partition("%")[0]) if "%" in root else root
        with suppress(OSError):
            ways[root] = _way(own if os.path.isdir(own) else path, folder)
    return StoreFacts(there, disk.kind, os.stat(path).st_dev == os.stat("/").st_dev, ways)


def _way(store: str, folder: str) -> str:
    """Return how a copy in ``folder`` is made of one of the store, and why. Raise OSError."""
    way, reason = clone.way_between(store, folder)
    return f"{way} ({reason})" if reason else f"{way}"


def _plugin_ended() -> bool:
    """Return whether the slurmd that last loaded the plugin (room.c notes it) has ended."""
    pid = _read(f"{paths.RUN_FOLDER}/slurmd").partition(b" ")[0]
    if not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass  # it is root's
    return _read(f"/proc/{int(pid)}/comm") not in (b"", b"slurmd\n")  # /proc may hide it


def place(path: str, *, follow: bool = True) -> Place:
    """Return what is at ``path``, following links unless ``follow`` says otherwise."""
    try:
        if stranger_at(path):
            return Place(path, MOUNTED, 0)
        facts = os.stat(path, follow_symlinks=follow)
    except (FileNotFoundError, NotADirectoryError):
        return Place(path, ABSENT, 0)
    except OSError:
        return Place(path, UNSEEN, 0)
    return Place(path, facts.st_uid, facts.st_mode)


def place_here(folder: str, name: str) -> Place:
    """Return what is at ``name`` in ``folder``, where users may have put anything."""
    path = f"{folder.rstrip('/')}/{name}"
    try:
        facts = linux.facts_here(folder, name)
    except FileNotFoundError:
        return Place(path, ABSENT, 0)
    except OSError as error:
        return Place(path, MOUNTED if error.errno == errno.EXDEV else UNSEEN, 0)
    return Place(path, facts.st_uid, facts.st_mode)


def _open_folders(root: str) -> Iterator[Place]:
    """Yield the folders of root's in ``root`` in which others could replace what is staged."""
    with suppress(OSError), os.scandir(root) as entries:
        for entry in islice(entries, _MOST_ENTRIES):
            there = place_here(root, entry.name)
            if there.owner == 0 and stat.S_ISDIR(there.mode):
                with suppress(OSError):
                    if who_could_replace(os.lstat(there.path), {0}):
                        yield there


def _trusted(
    config: str, plugstack: str, plugins: Iterable[PluginLine], programs: Iterable[str]
) -> list[str]:
    """Return the paths that only root may write, and the folders above them, each once."""
    package = str(Path(__file__).parents[1])
    files = [config, *_plugstack_files(plugstack), *programs, *map(os.path.realpath, programs)]
    files += [sys.prefix, sys.executable, os.path.realpath(sys.executable)]
    files += [package, f"{package}/__main__.py"]
    files += [line.plugin for line in plugins if os.path.isabs(line.plugin)]
    files += [path for line in plugins for path in (line.python, line.config)]
    found: dict[str, None] = {}
    for path in filter(None, files):
        found |= dict.fromkeys([path, *map(str, Path(path).parents)])
    return list(found)


def _plugin_lines(path: str) -> Iterator[PluginLine]:
    """Yield the lines for this plugin in plugstack.conf and in the files that it includes."""
    before: list[str] = []
    for file, (word, plugin, *arguments) in _plugstack(path):
        if os.path.basename(plugin) == PLUGIN:
            given = dict(word.split("=", 1) for word in arguments if _ARGUMENT.match(word))
            python, config = given.get("python", _PYTHON), given.get("config", paths.SITE_CONFIG)
            library = _read(plugin)
            version, slurm = _PLUGIN_VERSION.search(library), _PLUGIN_SLURM.search(library)
            yield PluginLine(
                plugin=plugin,
                python=python,
                config=config,
                version=version[1].decode(errors="replace") if version else "",
                slurm=_major(int(slurm[1], 16)) if slurm else "",
                after=tuple(before),
                digest=hashlib.sha256(library).hexdigest() if library else "",
                arguments=(
                    Argument(
                        "python",
                        place(python),
                        _closed_at(python, stat.S_IXOTH),
                        given="python" in given,
                    ),
                    Argument(
                        "config",
                        place(config),
                        _closed_at(config, stat.S_IROTH),
                        _digest(config),
                        given="config" in given,
                    ),
                ),
                unknown=tuple(word for word in arguments if not _ARGUMENT.match(word)),
                required=word == _REQUIRED,
                file=file,
            )
        before.append(os.path.basename(plugin))


def is_mistyped(plugin: str) -> bool:
    """Whether the path of a plugin was probably meant for this one."""
    return bool(difflib.get_close_matches(os.path.basename(plugin), [PLUGIN], n=1, cutoff=0.8))


def _absent_plugins(path: str) -> Iterator[AbsentPlugin]:
    """Yield the plugins whose file is not there. Slurm looks for a mere name elsewhere."""
    for file, (word, plugin, *_) in _plugstack(path):
        matters = word == _REQUIRED or is_mistyped(plugin)
        if matters and os.path.isabs(plugin) and place(plugin).owner == ABSENT:
            yield AbsentPlugin(plugin, word == _REQUIRED, file)


def _closed(files: Iterable[str]) -> dict[str, str]:
    """Return those of ``files`` that users cannot read, each with what is closed to them."""
    closed = {path: _closed_at(path, stat.S_IROTH) for path in files if os.path.isabs(path)}
    return {path: at for path, at in closed.items() if at}


def _closed_at(path: str, right: int) -> str:
    """Return the file, or the folder above it, that others may not use; empty if there is none.

    ``right`` is the bit of the mode that they need of the file.
    """
    real = os.path.realpath(path)
    folders = [str(one) for of in (path, real) for one in reversed(Path(of).parents)]
    for one, bit in [*((folder, stat.S_IXOTH) for folder in folders), (real, right)]:
        with suppress(OSError):
            if not os.stat(one).st_mode & bit:
                return one
    return ""


def _plugstack(path: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the file and the words of each line for a plugin, in the order in which Slurm loads
    them.

    Slurm ignores a line that begins with another word than these.
    """
    for file, words in _plugstack_lines(path):
        if len(words) > 1 and words[0] in _KINDS:
            yield file, words


def _plugstack_lines(path: str, depth: int = 0) -> Iterator[tuple[str, list[str]]]:
    """Yield the file and the words of each line of plugstack.conf and of what it includes."""
    if not path or depth > _MOST_DEEP:
        return
    for words in _lines(path):
        if words[0] == "include":
            for name in _included(path, words):
                yield from _plugstack_lines(name, depth + 1)
        else:
            yield path, words


def _plugstack_files(path: str) -> list[str]:
    """Return plugstack.conf and the files that it includes."""
    files = [path] if path else []
    for file in files:  # grows while it is read
        for words in _lines(file):
            named = _included(file, words) if words[0] == "include" else []
            files += [name for name in named if name not in files]
    return files


def _lines(path: str) -> Iterator[list[str]]:
    """Yield the words of each line that has any."""
    for line in _read(path).decode(errors="replace").splitlines():
        if words := line.partition("#")[0].split():
            yield words


def _included(path: str, words: Sequence[str]) -> list[str]:
    """Return the files that a line of ``path`` includes."""
    folder = os.path.dirname(path)
    return [
        name for pattern in words[1:] for name in sorted(glob.glob(os.path.join(folder, pattern)))
    ]


def _major(number: int) -> str:
    """Return the major version in a SLURM_VERSION_NUMBER (slurm_version.h)."""
    return f"{number >> 16 & 0xFF:02}.{number >> 8 & 0xFF:02}"


def _sysctl(name: str) -> int:
    with suppress(ValueError):
        return int(_read(f"/proc/sys/{name.replace('.', '/')}"))
    return -1


def _digest(path: str) -> str:
    text = _read(path)
    return hashlib.sha256(text).hexdigest() if text else ""


def _code() -> str:
    """Return the SHA-256 of the package's modules, whose names are part of it."""
    folder = Path(__file__).parents[1]
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        total.update(f"{path.relative_to(folder)}\0".encode())
        total.update(hashlib.sha256(_read(str(path))).digest())
    return total.hexdigest()


def _read(path: str) -> bytes:
    """Return the beginning of a file, nothing if it cannot be read."""
    with suppress(OSError), open(path, "rb") as file:
        return file.read(_MOST_BYTES)
    return b""


def mpi_library(environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the MPI library that ranks would load on this machine, or nothing and why not.

    ``environment`` is what the site gives the ranks besides.
    """
    command = [sys.executable, "-I", "-c", _LIBRARY]
    try:
        done = _run(command, environment)
    except (OSError, subprocess.SubprocessError) as error:
        return "", str(error)
    if done.returncode == 0:
        return done.stdout.strip(), ""
    lines = done.stderr.split("\n")
    errors = [line.strip() for line in lines if re.match(r"\w+(Error|Exception): ", line)]
    return "", next(reversed(errors), f"python3 ended with code {done.returncode}")


def own_scripts(slurm: Mapping[str, str]) -> list[str]:
    """Return those of Slurm's TaskProlog, Prolog and Epilog that are scripts of this package.

    Newer versions of Slurm write ``Prolog[0]``.
    """
    own = {"task_prolog", "job_prolog", "job_epilog"}
    keys = ("TaskProlog", "Prolog", "Prolog[0]", "Epilog", "Epilog[0]")
    paths = (slurm.get(key, "") for key in keys)
    return [path for path in paths if path.rpartition("/")[2] in own]


def site_facts(path: str) -> SiteFacts:
    """Return what Slurm's commands say of the whole site; they are looked for in ``path``."""
    told = _slurm(path, "scontrol", "show", "config")
    config = (line.partition("=") for line in told.splitlines())
    slurm = {key.strip(): value.strip() for key, sign, value in config if sign}
    if slurm.get("PlugStackConfig") == "(null)":  # slurm.conf does not name it: beside slurm.conf
        folder = os.path.dirname(slurm.get("SLURM_CONF", ""))
        slurm["PlugStackConfig"] = f"{folder}/plugstack.conf" if folder else ""
    partitions = {}
    for line in _slurm(path, "scontrol", "--oneliner", "show", "partition").splitlines():
        keys = dict(word.split("=", 1) for word in line.split() if "=" in word)
        partitions[keys.get("PartitionName", "")] = keys
    return SiteFacts(
        slurm,
        partitions,
        frozenset(re.findall(r"[\w./-]+", _slurm(path, "srun", "--mpi=list"))),
        _private_folders(os.path.dirname(slurm.get("SLURM_CONF", ""))),
    )


def _private_folders(folder: str) -> tuple[str, ...]:
    """Return what is private if a plugin for namespaces is configured, by its file in ``folder``.

    In job_container.conf it is ``Dirs=/tmp,/var/tmp``, in namespace.yaml ``dirs: "/tmp,/var/tmp"``,
    or from Slurm 26.05 on a ``path: /tmp`` for each.
    """
    named: list[str] = []
    for name in ("job_container.conf", "namespace.yaml"):
        with (
            suppress(OSError),
            open(f"{folder}/{name}", encoding="utf-8", errors="replace") as file,
        ):
            named += _DIRS.findall(re.sub("#.*", "", file.read()))
    default, always = "/tmp", "/dev/shm"  # noqa: S108 - nothing is written there
    found = (one.rstrip("/") for text in named or [default] for one in text.split(","))
    return tuple(sorted({always, *filter(None, found)}))


def _slurm(path: str, *command: str) -> str:
    return _output(command, {"PATH": path})


def _output(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return what a command prints, on both streams; nothing if it fails."""
    with suppress(OSError, subprocess.SubprocessError):
        done = _run(command, environment)
        return done.stdout + done.stderr if done.returncode == 0 else ""
    return ""


def _run(
    command: Sequence[str], environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=_PATIENCE,
        check=False, env={**os.environ, **environment},
    )  # fmt: skip
