"""Start the ranks of a stage by Open MPI's mpiexec, which reaches other hosts by ssh. Pure."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from stager.base.hostnames import is_address
from stager.launch.environment import RANK

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def hostfile(hosts: Sequence[str]) -> str:
    """Return the text of a hostfile by which each host takes one rank."""
    return "".join(f"{host} slots=1\n" for host in hosts)


def command(
    mpiexec: str, hosts: Sequence[str], path: str, names: Iterable[str], library: str | None = None
) -> list[str]:
    """Return the mpiexec that starts one rank on each of ``hosts``.

    ``path`` is that of the `hostfile`. The ranks get the values of the variables ``names``, where
    one may be ``NAME=VALUE``, and of those that begin with ``OMPI_``; ``library`` is preloaded. The
    last two options keep mpiexec from binding a rank's threads to one core, and from starting in a
    folder that is not everywhere.
    """
    preloading = ["/usr/bin/env", f"LD_PRELOAD={library}"] if library else []
    given = (word for name in names if not name.startswith("OMPI_") for word in ("-x", name))
    return [
        mpiexec, "-n", str(len(hosts)), "--hostfile", path, "--map-by", "ppr:1:node",
        "--bind-to", "none", "--wdir", "/", *given, *preloading, *RANK,
    ]  # fmt: skip


def variables(hosts: Sequence[str], agent: Sequence[str], folder: str) -> dict[str, str]:
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
