"""``stagectl doctor``: check that the site is set up for safe staging."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from stager.base.errors import LaunchError, PolicyRefusal, StageError, UsageError
from stager.base.text import folded, printable
from stager.cli.command import Command
from stager.cli.shared_options import json_option, real_node_options
from stager.cli.terminal import painted, print_json, width
from stager.doctor.finding import Examined, Finding, Verdict, problem, unknown
from stager.doctor.site_rules import examine
from stager.launch import job
from stager.launch.job import find_srun, search_path
from stager.launch.mpi import settle
from stager.launch.nodes import Scope, absent_interface, by_problem, read_answers
from stager.node.agent import Facts
from stager.node.facts import Hello, NodeFacts, own_scripts, site_facts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stager.cli.shared_options import NodeOptions
    from stager.request.policy import Policy

#: How each kind of finding is counted.
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
#: The exit code of each kind of finding, and these codes from the best to the worst.
_CODES = {
    Verdict.OK: 0, Verdict.NOTE: 0, Verdict.UNKNOWN: LaunchError.code, Verdict.PROBLEM: 1,
}  # fmt: skip
_WORSE = [0, LaunchError.code, 1]


@click.command(cls=Command, topics=("nodes",))
@real_node_options
@json_option
def doctor(where: NodeOptions, as_json: bool) -> int:
    """Check that this site is set up for safe staging.

    Says of each setting of the site and its nodes whether it is ok, a problem, or worth a note,
    and what to do. In a job, two ranks also try MPI. Root sees everything, but does not try MPI.
    Ends with code 1 if there is a problem; else with code 8 if something could not be checked.
    """
    from stager.request.policy import LOCAL  # neither the help nor completion needs pydantic

    if where.local_root:
        raise UsageError("simulated nodes have nothing to check; leave out --local-root")
    found: dict[Finding, list[str]] = {}
    try:
        rules = where.rules()
    except PolicyRefusal as error:
        rules = LOCAL.model_copy(update={"places": ()})
        found[problem("config", *_parts(str(error)))] = []
    subject = "srun"
    try:
        srun = find_srun(rules.launch.srun)
        subject = "mpi"
        rules = settle(rules, srun)
    except LaunchError as error:
        found[problem(subject, *_parts(error.message))] = []
    site = site_facts(search_path(rules.launch.srun))
    here = job.own_name(os.environ)
    local = Facts(
        rules.roots, rules.shared_roots, rules.destinations,
        config=str(where.config),
        plugstack=site.slurm.get("PlugStackConfig", ""),
        computes=bool(job.node_states(here, rules.launch.srun)),
        scripts=tuple(own_scripts(site.slurm)), environment=dict(rules.launch.environment),
        textfile=rules.metrics.textfile, store=rules.store,
        shared_driver=rules.shared_fs.driver, shared_folder=rules.shared_fs.folder,
        # One without a pattern has another meaning outside of the job.
        job_roots=(*rules.job_roots, *(root for root in rules.absent_roots if "%" in root)),
    )  # fmt: skip
    scope = where.scope(rules)
    # This machine too: its stage.toml must be that of the others.
    answers = [] if here in scope.nodes else Scope(disks={here: ""}).ask(local, rules, os.environ)
    if scope.nodes:
        answers += scope.ask(replace(local, computes=True), rules, os.environ)
    nodes, silent = read_answers(answers, NodeFacts)
    computing = {name: one for name, one in nodes.items() if one.computes}
    site = replace(site, hello=_say_hello(rules, computing))
    found |= examine(Examined(site, rules, nodes))
    states = {answer.node: answer.state for answer in answers}
    inside = set(job.unfold(scope.context.nodes)) if scope.context else set()
    for why, names in by_problem(silent).items():
        for name in names:
            told = _about_silent(why, states[name], by_ssh=name not in inside)
            found.setdefault(told, []).append(name)
    _print(found, as_json=as_json)
    return max((_CODES[finding.verdict] for finding in found), key=_WORSE.index)


def _parts(message: str) -> tuple[str, str]:
    """Return a message, and the remedy in it that is the administrator's."""
    text, _, remedy = message.rpartition("; tell the administrator")
    remedy = remedy.removeprefix(" to ")
    if remedy.startswith(" ("):
        remedy = remedy[2:-1]
    return (text, remedy) if text else (message, "")


def _about_silent(why: str, state: str, *, by_ssh: bool) -> Finding:
    """Return what is said of a node that did not answer, but is in this state in Slurm."""
    if job.is_away(state):
        return unknown("node", f"Slurm says that the node is {why}")
    remedy = "slurm-stage must be there, as here; if it is, look what keeps the node from working"
    if by_ssh:
        remedy = (
            "ssh must reach the node, and slurm-stage be there; without ssh, run this in a job "
            "(salloc -w NODES stagectl doctor)"
        )
    why = why.partition(";")[0]  # the remedy behind it is for users
    return problem("node", f"stagectl does not answer there: {why}", remedy)


def _say_hello(rules: Policy, nodes: Mapping[str, NodeFacts]) -> Hello:
    """Start two ranks on those of ``nodes`` that this job has. Nothing is raised."""
    from stager.launch.targets import smoke_test

    context = None
    with suppress(StageError):  # outside of a job
        context = job.find(os.environ, rules.launch.srun)
    ours = set(job.unfold(context.nodes)) if context else set()
    chosen = [name for name in nodes if name in ours][:2]
    if os.getuid() == 0 or os.geteuid() == 0:
        return Hello("", problem="root starts no ranks; run this as an ordinary user, in a job")
    if context is None or not chosen:
        return Hello("", problem="run this in a job, if you can of two nodes")
    try:
        return Hello(job.fold(chosen), smoke_test(chosen, context, rules, os.environ))
    except StageError as error:
        absent = absent_interface({name: nodes[name] for name in chosen}, rules.launch)
        remedy = "correct it, or see to the interface" if absent else ""
        return Hello(job.fold(chosen), problem=_reason(absent or error.message), remedy=remedy)


def _reason(message: str) -> str:
    """Return why ranks did not start, without the remedy for users and the launcher's own lines."""
    return message.partition(";")[0].removeprefix("MPI did not start: ")


def _print(found: Mapping[Finding, list[str]], *, as_json: bool) -> None:
    order = list(Verdict)
    findings = sorted(found, key=lambda finding: order.index(finding.verdict))
    if as_json:
        entries = [
            {
                "name": one.subject,
                "state": one.verdict,
                "nodes": found[one],
                "text": one.text,
                "remedy": one.remedy,
            }
            for one in findings
        ]
        print_json({"findings": entries})
        return
    for one in findings:
        where = f"{job.fold(found[one])}: " if found[one] else ""
        lines = [printable(where + one.line)]
        if columns := width():
            lines = folded(lines[0], max(1, columns - _INDENT))
        verdict = painted(f"{one.verdict:<{_INDENT - 1}}", _COLOURS[one.verdict])
        click.echo(f"{verdict} " + f"\n{'':{_INDENT}}".join(lines))
    counts = [(sum(one.verdict is kind for one in findings), *_COUNTED[kind]) for kind in order]
    total = ", ".join(f"{count} {one if count == 1 else many}" for count, one, many in counts)
    click.echo(f"stage: {total}")
