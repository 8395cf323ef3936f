"""Which of Slurm's MPI plugins and which library do ranks load, by what is installed here?

`settle` looks in files alone: a job of one second would feel ``srun --mpi=list``, which is asked
only where Slurm's plugins are not found. `library_for` says which library authenticates the
connections between ranks (``prolog/peers``).
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from stager.base import paths
from stager.base.errors import NOT_LOADABLE, LaunchError
from stager.launch.job import answer

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from stager.request.policy import Policy

_KEY_BYTES = 16
#: How a library begins (elf(5)).
_ELF = b"\x7fELF"


def library_for(nodes: int, policy: Policy) -> str | None:
    """Return the library that the ranks on so many ``nodes`` preload, None if they need none.

    An installation by pip alone has none. Raise LaunchError if that for a site lacks it, or if this
    user cannot load it: the loader would go on without.
    """
    if nodes < 2 or not policy.launch.authenticate:
        return None
    library = os.path.join(sys.prefix, paths.PEERS_LIBRARY)
    if _is_loadable(library):
        return library
    of_a_site = (library, os.path.join(sys.prefix, paths.SITE_SCRIPT))
    if any(map(_may_be_there, of_a_site)):
        raise LaunchError(library + NOT_LOADABLE)
    return None


def _may_be_there(path: str) -> bool:
    """Whether ``path`` exists, or lies in a folder that this user may not look into."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    return True


def _is_loadable(library: str) -> bool:
    with suppress(OSError), open(library, "rb") as file:
        return file.read(len(_ELF)) == _ELF
    return False


def peer_key() -> dict[str, str]:
    """Return the variable with a new key, for the ranks of one stage alone."""
    return {paths.PEERS_KEY: os.urandom(_KEY_BYTES).hex()}


#: mpi4py's variables for the kind of its library, and for the library itself.
ABI, _LIBRARY = "MPI4PY_MPIABI", "MPI4PY_LIBMPI"
#: The folders that Debian names by the kind of machine.
_TRIPLET = f"{os.uname().machine}-linux-gnu"
#: The libraries that the loader finds by itself, by their own names (ldconfig(8)), and the folders
#: into which it looks for others, such as links (ld.so(8)).
_LOADER_CACHE = "/etc/ld.so.cache"
_LOADER_FOLDERS = (f"/usr/lib/{_TRIPLET}", "/usr/lib64", "/usr/lib")
_PLUGIN_FILE = re.compile(r"mpi_(\w+)\.so")
_PLUGIN_DIR = re.compile(rb"^[ \t]*PluginDir[ \t]*=[ \t]*(\S+)", re.MULTILINE | re.IGNORECASE)
#: Slurm's own library, which is in the folder of its plugins.
_SLURM_LIBRARY = "libslurmfull.so"
#: Seconds in which srun must name its plugins.
_PATIENCE = 10.0


class _Fit(NamedTuple):
    """A plugin, with its releases, and the kind of MPI library that it starts."""

    plugin: re.Pattern[str]
    #: mpi4py's name of the kind, and the file that mpi4py's wheels load.
    abi: str
    file: str


#: The first that is here is taken. Open MPI knows PMIx alone. MPICH and its kin know PMI-2; whether
#: they were built for PMIx too cannot be seen.
_FITS = (
    _Fit(re.compile(r"pmix(_v\d+)?"), "openmpi", "libmpi.so.40"),
    _Fit(re.compile(r"pmi2"), "mpich", "libmpi.so.12"),
)
#: The kind that no other plugin can start.
_PMIX_ALONE = "openmpi"
_UNFIT = (
    "no MPI plugin of Slurm ({}) fits the MPI library of this node ({}): Open MPI needs pmix, "
    "MPICH pmi2 or pmix; tell the administrator to install one that fits, or to name the plugin "
    "(mpi in [launch] of stage.toml)"
)


def choose_plugin(plugins: Iterable[str], abis: Collection[str]) -> str:
    """Return which of Slurm's MPI ``plugins`` starts the ranks.

    ``abis`` are the kinds of the MPI libraries here. The plugins alone decide if there is none, as
    on a login node, or only such as may know another plugin than their own: pmix, else pmi2. Raise
    LaunchError if none fits.

    >>> choose_plugin({"none", "pmi2", "pmix"}, {"mpich"})
    'pmi2'
    """
    names = sorted(plugins)
    found = [(fit.abi, name) for fit in _FITS for name in names if fit.plugin.fullmatch(name)]
    fitting = [name for abi, name in found if abi in abis]
    if not fitting and set(abis) != {_PMIX_ALONE}:
        fitting = [name for _, name in found]
    if fitting:
        return fitting[0]
    here = ", ".join(sorted(abis)) or "none found"
    text = _UNFIT.format(", ".join(names) or "none found", here)
    raise LaunchError(text, os.environ.get("SLURMD_NODENAME"))


def choose_abi(plugin: str, abis: Collection[str]) -> str | None:
    """Return which kind of MPI library the ranks load, None if there is nothing to choose.

    >>> choose_abi("pmi2", {"openmpi", "mpich"})
    'mpich'
    """
    fitting = (fit.abi for fit in _FITS if fit.plugin.fullmatch(plugin) and fit.abi in abis)
    return next(fitting, None) if len(abis) > 1 else None


def settle(policy: Policy, srun: str) -> Policy:
    """Return ``policy`` with plugin and library named in ``[launch]``.

    ``srun`` is its path. What the site names stays. Raise LaunchError if nothing fits.
    """
    launch = policy.launch
    abis = installed_abis(launch.environment)
    plugin = choose_plugin(_plugins(srun), abis) if launch.mpi == "auto" else launch.mpi
    abi = choose_abi(plugin, abis)
    environment = {**({ABI: abi} if abi else {}), **launch.environment}
    settled = launch.model_copy(update={"mpi": plugin, "environment": environment})
    return policy.model_copy(update={"launch": settled})


def installed_abis(environment: Mapping[str, str]) -> set[str]:
    """Return the kinds of the MPI libraries that ranks with ``environment`` may load here."""
    if ABI in environment:
        return {environment[ABI]}
    if _LIBRARY in environment:
        return set()  # mpi4py looks into it
    # mpi4py looks first for a library that is a Python package, and then for no other.
    packaged = _in_folders([f"{sys.prefix}/lib"])
    named = environment.get("LD_LIBRARY_PATH", "").split(":")
    return packaged or _in_folders([*named, *_LOADER_FOLDERS]) | _in_cache(_read(_LOADER_CACHE))


def _in_folders(folders: Iterable[str]) -> set[str]:
    paths = [(fit.abi, f"{folder}/{fit.file}") for folder in folders if folder for fit in _FITS]
    return {abi for abi, path in paths if os.path.exists(path)}


def _in_cache(cache: bytes) -> set[str]:
    """Return the kinds of the MPI libraries that are named in the loader's cache."""
    return {fit.abi for fit in _FITS if re.search(rb"[/\0]%b\0" % fit.file.encode(), cache)}


def _plugins(srun: str) -> set[str]:
    """Return the names of Slurm's MPI plugins."""
    for folders in _plugin_folders(srun):
        files = {file for folder in folders for file in _names(folder)}
        if found := {match[1] for match in map(_PLUGIN_FILE.fullmatch, files) if match}:
            return found
    with suppress(TimeoutError):
        return set(re.findall(r"\w+", answer([srun, "--mpi=list"], srun, _PATIENCE)))
    return set()


def _plugin_folders(srun: str) -> Iterator[list[str]]:
    """Yield the folders of Slurm's plugins: as slurm.conf names them, or beside srun's own."""
    prefix = os.path.dirname(os.path.dirname(os.path.realpath(srun)))
    named = os.environ.get("SLURM_CONF")
    places = [named] if named else [
        "/etc/slurm/slurm.conf", f"{prefix}/etc/slurm.conf", "/run/slurm/conf/slurm.conf"
    ]  # fmt: skip
    for place in places:
        if match := _PLUGIN_DIR.search(_read(place)):
            yield os.fsdecode(match[1]).split(":")
    debian = f"lib/{_TRIPLET}"
    for folder in ("lib64/slurm", "lib/slurm", f"{debian}/slurm-wlm", f"{debian}/slurm"):
        if os.path.exists(f"{prefix}/{folder}/{_SLURM_LIBRARY}"):
            yield [f"{prefix}/{folder}"]


def _read(path: str) -> bytes:
    with suppress(OSError), open(path, "rb") as file:
        return file.read()
    return b""


def _names(folder: str) -> list[str]:
    with suppress(OSError):
        return os.listdir(folder)
    return []
