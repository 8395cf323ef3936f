"""Start the ranks of a stage by Hydra, the mpiexec of MPICH and its kin. Pure."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from stager.launch.environment import RANK

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def hostfile(hosts: Sequence[str]) -> str:
    """Return the text of a hostfile by which each host takes one rank."""
    return "".join(f"{host}:1\n" for host in hosts)


def command(
    mpiexec: str,
    hosts: Sequence[str],
    path: str,
    names: Iterable[str],
    agent: Sequence[str],
    library: str | None = None,
) -> list[str]:
    """Return the mpiexec that starts one rank on each of ``hosts``.

    ``path`` is that of the `hostfile`, ``agent`` the absolute path of ssh or what stands in for it,
    with its options, which are in `variables`. The ranks get the values of the variables ``names``,
    and no others; ``library`` is preloaded.
    """
    preloading = ["/usr/bin/env", f"LD_PRELOAD={library}"] if library else []
    return [
        mpiexec, "-n", str(len(hosts)), "-f", path, "-ppn", "1", "-launcher", "ssh",
        "-launcher-exec", agent[0], "-bind-to", "none", "-wdir", "/",
        "-genvlist", ",".join(names), *preloading, *RANK,
    ]  # fmt: skip


def variables(agent: Sequence[str]) -> dict[str, str]:
    """Return the variables of mpiexec itself."""
    return {"HYDRA_LAUNCHER_EXTRA_ARGS": shlex.join(agent[1:])} if agent[1:] else {}
