"""Say who keeps ranks from starting, if that can be seen.

PMIx makes a folder for each step in Slurm's TmpFS, by default /tmp. Where another user has made one
of that name first, no rank starts, and Slurm does not say why.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from stager.base.errors import StageError
from stager.cli.scope import Scope, read_answers
from stager.copies.upkeep import Action, Command
from stager.doctor.facts import NodeFacts, site_facts
from stager.launch import job
from stager.launch.commands import search_path

if TYPE_CHECKING:
    from stager.launch.job import JobContext
    from stager.request.policy import Policy


def who_is_in_the_way(context: JobContext, rules: Policy) -> str:
    """Return the first such folder on the job's nodes, as a message; nothing if there is none."""
    tmpfs = site_facts(search_path(rules.launch.srun)).slurm.get("TmpFS", "")
    if not tmpfs:
        return ""
    nodes = job.unfold(context.nodes)
    try:
        command = Command(Action.FACTS, (), tmpfs=tmpfs)
        answers = Scope(nodes=nodes, context=context).ask(command, rules, os.environ)
    except StageError:  # the failure to start is what the user must know
        return ""
    facts, _ = read_answers(answers, NodeFacts.from_wire)
    for name, node in facts.items():
        for folder in node.taken:
            return (
                f"MPI did not start: {name}: {folder.path} belongs to uid {folder.owner}, who "
                "keeps your jobs from starting there; tell the administrator, who can remove it "
                "and set TmpFS in slurm.conf to a folder in which only root can write"
            )
    return ""
