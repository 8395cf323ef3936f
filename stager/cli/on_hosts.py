"""Run a request on hosts that the user names, or that another scheduler than Slurm names."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from stager.base import linux
from stager.base.errors import HOSTS_REMEDY, PolicyRefusal
from stager.base.interfaces import name_here
from stager.launch.credentials import with_stores
from stager.launch.health import Pulses
from stager.launch.mpi import library_for, peer_key
from stager.launch.mpiexec import Ranks, launch_by_flux, launch_by_mpiexec, others
from stager.launch.reach import wait_for
from stager.launch.run import run, with_evictions

if TYPE_CHECKING:
    from collections.abc import Callable

    from stager.base.outcome import Outcome
    from stager.launch.schedulers import Hosts
    from stager.request.items import StageRequest
    from stager.request.policy import Policy

    OnEvent = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class HostNodes:
    """Hosts on which ``launcher`` starts the ranks, once all answer within ``wait`` seconds."""

    rules: Policy
    launcher: str
    hosts: Hosts
    wait: float

    def check_user(self) -> None:
        """Raise PolicyRefusal for root."""
        if (os.getuid() == 0 or os.geteuid() == 0) and not linux.is_alone():
            raise PolicyRefusal("root cannot stage: stage as an ordinary user")

    def run(self, request: StageRequest, on_event: OnEvent) -> Outcome:
        """Run ``request`` on these hosts.

        Raise LaunchError, UsageError if it is too long, PolicyRefusal for root.
        """
        self.check_user()
        names = list(self.hosts.names)
        request = replace(
            request, nodes=len(names), hosts=self.hosts.names,
            log_user=str(os.getuid()) if self.rules.report.syslog else "",
        )  # fmt: skip
        library = library_for(len(names), self.rules)
        by = launch_by_flux if self.launcher == "flux" else launch_by_mpiexec
        extra = peer_key() if library else {}
        ranks = Ranks(self.hosts, self.rules, request, with_stores(request), extra, library)
        known = list(names)

        def on_rank_event(event: dict[str, Any]) -> None:
            if event["event"] == "started":
                known[:] = map(str, event["names"])
            on_event(event)

        with by(ranks) as launch:
            nodes = "1 node" if len(names) == 1 else f"{len(names)} nodes"
            on_event(
                {"event": "hosts", "line": f"by {launch.name} on {nodes}, from {self.hosts.origin}"}
            )
            if launch.agent and self.wait:
                wait_for(
                    others(self.hosts), launch.agent, launch.environment, self.wait,
                    lambda silent, seconds: on_event(
                        {"event": "silent", "nodes": silent, "seconds": seconds}
                    ),
                )  # fmt: skip
            pulses = Pulses(
                names=lambda: known,
                own=name_here(names),
                limit=request.stall_timeout,
                launcher=launch.name,
            )
            limit = self.rules.launch.start_timeout
            start = partial(run, launch.argv, launch.environment, limit, on_rank_event, pulses)
            return with_evictions(partial(start, HOSTS_REMEDY))
