"""Start ranks on this machine by mpiexec, one for each simulated node."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from stager.base.errors import LaunchError
from stager.launch.environment import RANK
from stager.launch.openmpi import own_folder

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
    """Return the names by which the ranks of so many simulated nodes report (`rank.main`)."""
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
