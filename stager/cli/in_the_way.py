"""Say what keeps ranks from starting, if that can be seen.

PMIx makes a folder for each step in Slurm's TmpFS, by default /tmp. Where another user has made one
of that name first, or where no folder can be made, no rank starts, and Slurm does not say why.
Where no interface is there that the site named for MPI, ranks start, but do not find each other.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from stager.base.errors import StageError
from stager.cli.scope import Scope, read_answers
from stager.copies.upkeep import Action, Command
from stager.doctor.facts import NodeFacts, site_facts
from stager.doctor.node_rules import fits, unusable
from stager.launch import job
from stager.launch.commands import search_path

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stager.launch.job import JobContext
    from stager.request.policy import Launch, Policy


def what_is_in_the_way(context: JobContext, rules: Policy) -> str:
    """Return what keeps ranks from starting on the job's nodes, as a message; nothing if unknown.

    ``rules`` name the variables for the MPI library.
    """
    nodes = _ask(context, rules)
    return _taken_folder(nodes) or _unusable_folder(nodes) or absent_interface(nodes, rules.launch)


def _ask(context: JobContext, rules: Policy) -> dict[str, NodeFacts]:
    """Return the facts of the nodes that answer, by name."""
    tmpfs = site_facts(search_path(rules.launch.srun)).slurm.get("TmpFS", "")
    try:
        command = Command(Action.FACTS, (), tmpfs=tmpfs)
        scope = Scope(nodes=job.unfold(context.nodes), context=context)
        facts, _ = read_answers(scope.ask(command, rules, os.environ), NodeFacts.from_wire)
    except StageError:  # the failure to start is what the user must know
        return {}
    return facts


def _taken_folder(nodes: Mapping[str, NodeFacts]) -> str:
    for name, node in nodes.items():
        for folder in node.taken:
            return (
                f"MPI did not start: {name}: {folder.path} belongs to uid {folder.owner}, who "
                "keeps your jobs from starting there; tell the administrator, who can remove it "
                "and set TmpFS in slurm.conf to a folder in which only root can write"
            )
    return ""


def _unusable_folder(nodes: Mapping[str, NodeFacts]) -> str:
    for path, why in (one for node in nodes.values() for one in unusable(node)):
        names = [name for name, node in nodes.items() if (path, why) in unusable(node)]
        return (
            f"MPI did not start: {job.fold(names)}: Slurm can make no folder in {path}, its TmpFS "
            f"({why}); use other nodes (--exclude) and tell the administrator"
        )
    return ""


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
