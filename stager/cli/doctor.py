"""``stagectl doctor``: check what the safety of staging rests on."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from stager.base.errors import LaunchError, PolicyRefusal, UsageError
from stager.base.text import folded, printable
from stager.cli.console import painted, width
from stager.cli.options import WHICH_NODES, json_option, node_options
from stager.cli.scope import Scope, read_answers
from stager.copies.upkeep import Action, Command
from stager.doctor.facts import NodeFacts, mpi_library, site_facts
from stager.doctor.rules import Examined, Finding, Verdict, examine
from stager.launch import job
from stager.launch.commands import find_srun, search_path

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stager.cli.options import NodeOptions

#: The order in which findings are printed, and how each kind is counted.
_COUNTED = {
    Verdict.PROBLEM: ("problem", "problems"),
    Verdict.UNKNOWN: ("could not be checked", "could not be checked"),
    Verdict.NOTE: ("note", "notes"),
    Verdict.OK: ("ok", "ok"),
}
#: The columns before a finding's text.
_INDENT = 9
_COLOURS = {
    Verdict.PROBLEM: "red",
    Verdict.UNKNOWN: "yellow",
    Verdict.NOTE: "yellow",
    Verdict.OK: "green",
}


@click.command(epilog=WHICH_NODES)
@node_options
@json_option
def doctor(where: NodeOptions, as_json: bool) -> int:
    """Check what the safety of staging rests on.

    Says of each setting of the site and its nodes whether it is ok, a problem, or worth a note,
    and what to do. What your permissions hide is told; root sees everything. Ends with code 1 if
    there is a problem.
    """
    from stager.request.policy import LOCAL  # neither the help nor completion needs pydantic

    if where.local_root:
        raise UsageError("simulated nodes have nothing to check; leave out --local-root")
    found: dict[Finding, list[str]] = {}
    try:
        rules = where.rules()
    except PolicyRefusal as error:
        rules = LOCAL.model_copy(update={"roots": ()})
        found[Finding("config", Verdict.PROBLEM, str(error))] = []
    try:
        find_srun(rules.launch.srun)
    except LaunchError as error:
        found[Finding("srun", Verdict.PROBLEM, error.message)] = []
    site = replace(
        site_facts(search_path(rules.launch.srun)), library=mpi_library(rules.launch.environment)
    )
    here = job.own_name(os.environ)
    local = Command(
        Action.FACTS, rules.roots, rules.shared_roots, config=str(where.config),
        plugstack=site.slurm.get("PlugStackConfig", ""), tmpfs=site.slurm.get("TmpFS", ""),
        computes=bool(job.node_states(here, rules.launch.srun)),
    )  # fmt: skip
    scope = Scope.find(where, os.environ, rules.launch.srun)
    # This machine too: its stage.toml must be that of the others.
    answers = [] if here in scope.nodes else Scope(disks={here: ""}).ask(local, rules, os.environ)
    if scope.nodes:
        answers += scope.ask(replace(local, computes=True), rules, os.environ)
    nodes, problems = read_answers(answers, NodeFacts.from_wire)
    found |= examine(Examined(site, rules, nodes))
    for name, problem in problems.items():
        found.setdefault(Finding("node", Verdict.UNKNOWN, problem), []).append(name)
    _print(found, as_json=as_json)
    return int(any(finding.verdict is Verdict.PROBLEM for finding in found))


def _print(found: Mapping[Finding, list[str]], *, as_json: bool) -> None:
    order = list(_COUNTED)
    findings = sorted(found, key=lambda finding: order.index(finding.verdict))
    if as_json:
        entries = [
            {"subject": one.subject, "verdict": one.verdict, "nodes": found[one], "text": one.text}
            for one in findings
        ]
        click.echo(json.dumps({"findings": entries}, indent=1))
        return
    for one in findings:
        where = f"{job.fold(found[one])}: " if found[one] else ""
        lines = [printable(where + one.text)]
        if columns := width():
            lines = folded(lines[0], max(1, columns - _INDENT))
        verdict = painted(f"{one.verdict:<{_INDENT - 1}}", _COLOURS[one.verdict])
        click.echo(f"{verdict} " + f"\n{'':{_INDENT}}".join(lines))
    counts = [(sum(one.verdict is kind for one in findings), *_COUNTED[kind]) for kind in order]
    total = ", ".join(f"{count} {one if count == 1 else many}" for count, one, many in counts)
    click.echo(f"stage: {total}")
