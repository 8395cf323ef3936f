"""Start the ranks of a stage by ``flux run`` on the nodes of a Flux job. Pure.

It was written by Flux's documents and has not been tried with Flux itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stager.launch.environment import RANK
from stager.launch.hosts import Hosts, parse_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from stager.launch.hosts import Read

_NODES, _JOB = "FLUX_JOB_NODELIST", "FLUX_JOB_ID"
#: What ``flux run`` needs to find the instance that it is to run in, and itself.
_NEEDED = ("FLUX_URI", "FLUX_EXEC_PATH", "FLUX_CONNECTOR_PATH", "FLUX_MODULE_PATH")


def find(environment: Mapping[str, str], _: Read) -> Hosts | None:
    """Return the nodes of this Flux job, None outside of one. Raise UsageError."""
    nodes = environment.get(_NODES)
    if not nodes or not environment.get(_JOB):
        return None
    variables = {name: environment[name] for name in _NEEDED if name in environment}
    return Hosts(parse_list(nodes, _NODES), _NODES, variables=variables)


def command(flux: str, hosts: Hosts, names: Iterable[str], library: str | None = None) -> list[str]:
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
