"""Say what keeps ranks from starting, if that can be seen.

Where no interface is there that the site named for MPI, ranks start, but do not find each other.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from stager.base.errors import StageError
from stager.cli.scope import Scope, read_answers
from stager.doctor.node_rules import fits
from stager.launch import job
from stager.node.agent import Facts
from stager.node.facts import NodeFacts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stager.launch.job import JobContext
    from stager.request.policy import Launch, Policy


def what_is_in_the_way(context: JobContext, rules: Policy) -> str:
    """Return what keeps ranks from starting on the job's nodes, as a message; nothing if unknown.

    ``rules`` name the variables for the MPI library.
    """
    try:
        scope = Scope(nodes=job.unfold(context.nodes), context=context)
        facts, _ = read_answers(scope.ask(Facts(), rules, os.environ), NodeFacts)
    except StageError:  # the failure to start is what the user must know
        return ""
    return absent_interface(facts, rules.launch)


def absent_interface(nodes: Mapping[str, NodeFacts], launch: Launch) -> str:
    """Return a message if some nodes have none of the interfaces that the site names for MPI."""
    where, named = launch.interfaces
    if not named:
        return ""
    wanted = named.split(",")
    lack = [
        name
        for name, node in nodes.items()
        if not any(fits(link, one) for link in node.links for one in wanted)
    ]
    if not lack:
        return ""
    return (
        f"MPI did not start: {job.fold(lack)} has no interface that is up and leads to other "
        f"nodes of those that {where} of stage.toml names ({named}); tell the administrator"
    )
