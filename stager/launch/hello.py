"""Try MPI: start two ranks exactly as a stage starts its own, and see whether they find each other.

They stage nothing. `stagectl doctor` says what came of it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from stager.base.errors import LaunchError
from stager.launch.environment import rank_environment
from stager.launch.health import Pulses
from stager.launch.job import JobContext, find_srun, own_name
from stager.launch.mpi import library_for, peer_key
from stager.launch.run import run
from stager.launch.srun import HELLO_RANKS, hello_argv
from stager.request.items import StageRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stager.request.policy import Policy

#: Seconds in which both ranks must start, and then answer. A stage's may take longer, since there
#: may be thousands of them.
PATIENCE = 20.0


def hello(
    nodes: Sequence[str], job: JobContext, policy: Policy, environment: Mapping[str, str]
) -> int:
    """Start two ranks on one or two ``nodes`` of the job. Return how many found each other.

    Raise LaunchError if a rank does not start or ends early.
    """
    worlds: list[int] = []

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "started":
            worlds.append(event["nodes"])

    request = StageRequest(
        (), HELLO_RANKS, policy.lock_timeout, PATIENCE, job=job.job, dry_run=True, hello=True,
        # A stage on one node needs none.
        interface=policy.launch.named_interface if len(nodes) > 1 else "",
    )  # fmt: skip
    library = None
    with suppress(LaunchError):  # that it is missing is another finding
        library = library_for(len(nodes), policy)
    for_srun = job.variables | (peer_key() if library else {})
    outcome = run(
        hello_argv(find_srun(policy.launch.srun), job, policy, nodes, library),
        rank_environment(environment, policy, request, for_srun),
        min(policy.launch.start_timeout, PATIENCE),
        on_event,
        Pulses(lambda: [*nodes], own_name(environment), PATIENCE),
    )
    found = min(worlds, default=0)
    if outcome.failures and found in (0, HELLO_RANKS):  # a rank refused to begin, or both are there
        raise LaunchError(outcome.failures[0].message)
    return found
