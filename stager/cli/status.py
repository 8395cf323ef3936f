"""``stagectl status``: show what the nodes hold."""

from __future__ import annotations

import json
import os
import pwd
import time
from typing import TYPE_CHECKING, Any

import click

from stager.base.errors import LaunchError
from stager.base.text import printable
from stager.cli.options import WHICH_NODES, json_option, node_options
from stager.cli.scope import Scope, read_answers
from stager.cli.tables import (
    FILE_HEADERS,
    HEADERS,
    USER_HEADERS,
    file_rows,
    missing,
    room_lines,
    rows,
    silent_lines,
    table,
    total_line,
    unread_lines,
    user_rows,
)
from stager.copies.status import NodeStatus
from stager.copies.upkeep import Action, Command
from stager.launch import job

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stager.cli.options import NodeOptions
    from stager.launch.answers import Answer
    from stager.request.policy import Policy


@click.command(epilog=WHICH_NODES)
@click.option(
    "--by",
    type=click.Choice(["node", "file", "user"]),
    default="node",
    show_default=True,
    help="Show one row for each of these. For root, --by user shows the copies of all users.",
)
@node_options
@json_option
def status(by: str, where: NodeOptions, as_json: bool) -> int:
    """Show what is staged for you, and how much space is free.

    Drained nodes are queried and marked. A node that does not answer within 4 s is reported.
    """
    rules = where.rules()
    return show_status(Scope.find(where, os.environ, rules.launch.srun), rules, by, as_json=as_json)


def show_status(scope: Scope, rules: Policy, by: str = "node", *, as_json: bool = False) -> int:
    """Print what the nodes hold. Return 8 if none of them answered, else 0."""
    command = Command(
        Action.STATUS, rules.roots, rules.shared_roots, everyone=by == "user",
        shared_owner=rules.shared_owner,
    )  # fmt: skip
    answers = scope.ask(command, rules, os.environ)
    known, problems = read_answers(answers, NodeStatus.from_wire)
    if as_json:
        lacking = missing(known) if scope.whole_job else {}
        click.echo(json.dumps(_to_json(answers, known, problems, lacking), indent=1))
    else:
        if known:
            _print(known, by, rules, whole_job=scope.whole_job)
        for line in _node_lines(answers, problems):
            click.echo(line)
    return 0 if known else LaunchError.code


def _print(known: Mapping[str, NodeStatus], by: str, rules: Policy, *, whole_job: bool) -> None:
    headers, found = _table(known, by, whole_job=whole_job)
    if found:
        lines = [*table(headers, found), total_line(known)]
    else:
        where = " or ".join(root or "/" for root in (*rules.roots, *rules.shared_roots))
        lines = [f"stage: nothing is staged for you beneath {where} on {job.fold([*known])}"]
    lines += [*room_lines(known, job.fold), *unread_lines(known)]
    lines += silent_lines(known, _user_name)
    # In one piece, since click flushes at each call.
    click.echo("\n".join(lines))


def _table(
    known: Mapping[str, NodeStatus], by: str, *, whole_job: bool
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    if by == "file":
        return FILE_HEADERS, file_rows(known, whole_job=whole_job)
    if by == "user":
        return USER_HEADERS, user_rows(known, job.fold, _user_name)
    return HEADERS, rows(known, time.time(), job.fold, whole_job=whole_job)


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _node_lines(answers: Sequence[Answer], problems: Mapping[str, str]) -> list[str]:
    """Return which nodes did not answer and which are drained, one line for nodes of one kind."""
    remarks = dict(problems)
    for answer in answers:
        if answer.node not in problems and job.is_drained(answer.state):
            remarks[answer.node] = answer.state.rstrip("*")
    nodes: dict[str, list[str]] = {}
    for name, remark in remarks.items():
        nodes.setdefault(remark, []).append(name)
    return [printable(f"{job.fold(names)}: {remark}") for remark, names in nodes.items()]


def _to_json(
    answers: Sequence[Answer],
    known: Mapping[str, NodeStatus],
    problems: Mapping[str, str],
    lacking: dict[str, list[str]],
) -> dict[str, Any]:
    nodes = [
        {
            "node": answer.node,
            "state": answer.state,
            "problem": problems.get(answer.node, ""),
            **known.get(answer.node, NodeStatus()).to_json(),
        }
        for answer in answers
    ]
    return {"nodes": nodes, "missing": lacking}
