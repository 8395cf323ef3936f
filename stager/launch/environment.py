"""Build the environment of the ranks, and of other steps, from an allow-list. Pure.

A job's own SLURM_, PMIX_ and OMPI_ variables are meant for the user's program, and would change how
the ranks are started.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from stager.base.errors import PolicyRefusal, SourceError
from stager.base.paths import INTERFACES, LIBFABRIC_INTERFACES
from stager.launch.job import FOLDERS
from stager.request.items import REQUEST_VARIABLE
from stager.source.schemes import Scheme, is_endpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from stager.request.items import StageRequest
    from stager.request.policy import Policy

#: The command of a rank, for any launcher. -I keeps the user's PYTHON* and site folder out.
RANK = (sys.executable, "-I", "-m", "stager.rank")
#: Tells the plugin in the nested srun that this step is the helper. Slurm reads it as the plugin's
#: hidden option --stage-helper, and ignores it if there is no such plugin.
HELPER_OPTION = "_SLURM_SPANK_OPTION_slurm_stage_stage_helper"
#: The same for programs that see only the step's environment; its value is the job's id.
HELPER_SENTINEL = "STAGE_HELPER"
#: Has the plugin in the nested srun pass on, to each node's prolog, that the job asks for the
#: filesystem of its nodes' disks: the helper's step is the first one on most of them.
_SHARED = "SLURM_SPANK_STAGE_SHARED"
#: What a nested srun needs to find its job and controller, and what names the job to others, but
#: nothing that changes the step.
_KEPT = (
    "LANG", "LOGNAME", "TMPDIR", "TZ", "USER",
    "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID",
    "SLURM_CLUSTER_NAME", "SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOB_NODELIST",
    "SLURM_JOB_NUM_NODES", "SLURM_NODE_ALIASES", "SLURM_STEPMGR", "SLURM_WORKING_CLUSTER",
)  # fmt: skip
#: The variable that may have a whole file, with its lines.
_FORMATTED = ("GOOGLE_SERVICE_ACCOUNT_KEY",)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
#: The ends of the names of the vendors' endpoints.
_VENDORS = (".amazonaws.com", ".core.windows.net", ".googleapis.com", ".huggingface.co")


def rank_environment(
    environment: Mapping[str, str],
    policy: Policy,
    request: StageRequest,
    for_launcher: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the environment of launcher and ranks, with the request in it.

    ``for_launcher`` is what this launcher needs besides. Raise UsageError if the request is too
    long, PolicyRefusal for a store's endpoint that the site does not allow.
    """
    # Simulated nodes need no network, and this machine may lack the interface of the site's nodes.
    interface = {} if request.local_root else _interface(policy.launch.named_interface)
    for_launcher = {**interface, **(for_launcher or {})}
    schemes = dict.fromkeys(item.scheme for item in request.items)
    return {
        **_credentials(environment, policy, schemes),
        **step_environment(environment, policy, request.job, for_launcher),
        **({_SHARED: "1"} if request.shared_mount else {}),
        REQUEST_VARIABLE: request.to_json(),
    }


def _credentials(
    environment: Mapping[str, str], policy: Policy, schemes: Iterable[Scheme]
) -> dict[str, str]:
    """Return what opens stores of these kinds: it reaches the ranks by their environment alone."""
    found = opening(environment, schemes)
    _check_endpoints(found, policy, (name for scheme in Scheme for name in scheme.endpoints))
    return found


def opening(environment: Mapping[str, str], schemes: Iterable[Scheme]) -> dict[str, str]:
    """Return the variables that open stores of these kinds.

    Raise SourceError for one that has a control character, which can be in no request.
    """
    names = [
        name
        for scheme in schemes
        for name in (*scheme.credentials, *scheme.endpoints)
        if name in environment
    ]
    for name in names:
        if name not in _FORMATTED and _CONTROL.search(environment[name]):
            raise SourceError(
                f"{name} has a line end or another control character, which no value of it has; "
                "set it to the value alone, in the job's environment or in your file of "
                "credentials"
            )
    return {name: environment[name] for name in names}


def _check_endpoints(environment: Mapping[str, str], policy: Policy, names: Iterable[str]) -> None:
    """Raise PolicyRefusal if one of the variables has an endpoint that the site does not allow."""
    for name in names:
        endpoint = environment.get(name, "").rstrip("/")
        if endpoint and not _is_vendors(endpoint) and endpoint not in policy.source.endpoints:
            if not is_endpoint(endpoint):
                raise PolicyRefusal(
                    f"{name} is not the URL of a server; write https://HOST, perhaps with a port "
                    "and a path, but without user, password and query"
                )
            allowed = " or ".join(policy.source.endpoints) or "none but the vendors'"
            # Others may see the first line, and nothing of a user's environment may be there.
            raise PolicyRefusal(
                f"{name} names an endpoint that this site does not allow: it allows {allowed}; ask "
                f"the administrator (endpoints in [source] of stage.toml)\n  {endpoint}"
            )


def _is_vendors(endpoint: str) -> bool:
    scheme, _, rest = endpoint.partition("://")
    host = rest.partition("/")[0].partition(":")[0]
    return scheme == "https" and is_endpoint(endpoint) and f".{host}".endswith(_VENDORS)


def step_environment(
    environment: Mapping[str, str],
    policy: Policy,
    job: int,
    for_launcher: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the environment of a step of ``job`` that the plugin lets pass without a stage."""
    kept = {name: environment[name] for name in _KEPT if name in environment}
    return {
        **kept,
        # Open MPI wants one, and would read settings there that are meant for the user's program.
        "HOME": "/",
        "PATH": ":".join(FOLDERS),
        # Waiting ranks spin otherwise, on cores that readers and writers need.
        "OMPI_MCA_mpi_yield_when_idle": "1",
        # MPI_Init ends with a barrier. By Slurm's other kind, a tree, a rank may leave it before
        # the last has come (seen with 22.05): what it sends then crashes Open MPI there.
        "SLURM_PMIX_FENCE": "ring",
        **(for_launcher or {}),
        **policy.launch.environment,
        HELPER_OPTION: "1",
        HELPER_SENTINEL: str(job),
    }


def _interface(named: str) -> dict[str, str]:
    """Return the variables by which MPI over TCP uses the interface, or the network, of the site.

    Without them Open MPI spreads each message over all interfaces, the slow ones too. Libraries
    for faster fabrics do not read them. libfabric takes no network.
    """
    if not named:
        return {}
    of_libfabric = () if "/" in named else LIBFABRIC_INTERFACES
    return dict.fromkeys((INTERFACES, *of_libfabric), named)
