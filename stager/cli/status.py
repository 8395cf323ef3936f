"""``stagectl status``: show what the nodes hold."""

from __future__ import annotations

import os
import re
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from stager.base.errors import LaunchError, UsageError
from stager.base.text import printable
from stager.base.users import name_or_uid
from stager.cli.arguments import user_option, whose
from stager.cli.command import Command
from stager.cli.shared_options import json_option, node_options
from stager.cli.tables import (
    BAR,
    FILE_HEADERS,
    FILE_HEADERS_WITH_BAR,
    HEADERS,
    USER_HEADERS,
    file_rows,
    missing,
    room_lines,
    rows,
    shared_lines,
    silent_lines,
    table,
    total_line,
    unread_lines,
    user_rows,
    with_shared,
)
from stager.cli.terminal import Blocks, complain, painted, print_json, watch, width
from stager.launch import job
from stager.launch.nodes import Scope, by_problem, read_answers
from stager.node.agent import Status
from stager.store.states import NodeStatus

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from stager.cli.shared_options import NodeOptions
    from stager.launch.nodes import Answer
    from stager.request.policy import Policy


#: Seconds between two looks with ``--watch``, each of which is a step of the job.
_PERIOD = 5
_NOT_READY = re.compile("outdated|changed|damaged|missing")
#: Variables that Slurm sets in a job, and on a node.
_IN_JOB = {"SLURM_JOB_ID", "SLURMD_NODENAME"}


@click.command(cls=Command, topics=("nodes",))
@click.option(
    "--by",
    type=click.Choice(["node", "file", "user"]),
    default="node",
    show_default=True,
    help="Show one row for each of these. For root, --by user shows the copies of all users.",
)
@click.option(
    "--watch", "period", type=click.FloatRange(1, 86400), is_flag=False, flag_value=_PERIOD,
    metavar="[SECONDS]",
    help=f"Show it again every so many seconds, or every {_PERIOD}, until Ctrl-C.",
)  # fmt: skip
@user_option
@node_options
@json_option
def status(
    by: str, period: float | None, user: str | None, where: NodeOptions, as_json: bool
) -> int:
    """Show what is staged for you, and how much space is free.

    A node that does not answer within 10 s is reported. On a terminal, long names and paths lose
    their middle; in a pipe they are whole.
    """
    rules = where.rules()
    uid = whose(user)
    if period and as_json:
        raise UsageError("--watch shows text; leave out --json")
    scope = where.scope(rules)
    if period:
        watch(lambda: _ask(scope, rules, by, uid).lines(width()), period)
    return show_status(scope, rules, by, uid, as_json=as_json)


def show_status(
    scope: Scope,
    rules: Policy,
    by: str = "node",
    user: int | None = None,
    *,
    as_json: bool = False,
) -> int:
    """Print what the nodes hold. Return 8 if none of them answered, else 0."""
    found = _ask(scope, rules, by, user)
    if as_json:
        print_json(found.to_json())
    else:  # in one piece, since click flushes at each call
        click.echo("\n".join(found.lines(width())))
    if os.getuid() == 0 and scope.other_job and user is None:
        by = "user"  # root has no copies
    words = ["status"] if by == "node" else ["status", "--by", by]
    words += [] if user is None else ["--user", name_or_uid(user)]
    if hint := scope.without_ssh(words, found.answers):
        complain(hint)
    return 0 if found.known else LaunchError.code


def _ask(scope: Scope, rules: Policy, by: str, user: int | None) -> _Found:
    number = scope.other_job or (scope.context.job if scope.context else 0)
    number = number or int(os.environ.get("SLURM_JOB_ID", "0"))
    command = Status(
        rules.roots, rules.shared_roots, rules.shared_owner, user,
        everyone=by == "user" and user is None, job=number,
    )  # fmt: skip
    answers = scope.ask(command, rules, os.environ)
    known, problems = read_answers(answers, NodeStatus)
    name = "you" if user is None else name_or_uid(user)
    if command.everyone and os.getuid() == 0:  # others see their own
        name = "anybody"
    is_outside = scope.is_here_alone and not os.environ.keys() & _IN_JOB
    return _Found(by, rules, answers, known, problems, scope.whole_job, name, is_outside, number)


@dataclass(frozen=True, slots=True)
class _Found:
    """What the nodes answered: their statuses, and why others have none. Shown ``by`` this."""

    by: str
    rules: Policy
    answers: Sequence[Answer]
    known: Mapping[str, NodeStatus]
    problems: Mapping[str, str]
    whole_job: bool
    #: Whose copies were asked for.
    user: str
    #: Whether this machine alone was asked, outside of a job: it may be no compute node.
    is_outside: bool
    #: The job whose folders were looked into, 0 outside of a job.
    job: int

    def to_json(self) -> dict[str, Any]:
        nodes = [
            {
                "node": answer.node,
                "state": answer.state,
                "problem": self.problems.get(answer.node, ""),
                **self.known.get(answer.node, NodeStatus()).to_json(),
            }
            for answer in self.answers
        ]
        return {"nodes": nodes, "missing": missing(self.known) if self.whole_job else {}}

    def lines(self, columns: int) -> list[str]:
        """Return the text; the table within so many ``columns``, unless that is 0."""
        known = self._known_lines(columns) if self.known else ()
        return [*known, *_node_lines(self.answers, self.problems)]

    def _known_lines(self, columns: int) -> Iterator[str]:
        blocks = Blocks.of(sys.stdout) if columns else None
        headers, found = self._table(blocks)
        if found:
            yield from table(headers, found, columns, paint=_paint)
            yield total_line(with_shared(self.known))
        elif not any(one.unread or one.silent for one in self.known.values()):
            roots = (*self.rules.roots, *self.rules.shared_roots)
            where = " or ".join(root or "/" for root in roots) or "any folder"
            nodes = job.fold([*self.known])
            elsewhere = "; ask other nodes by -w NODES, or in a job" if self.is_outside else ""
            yield f"stage: nothing is staged for {self.user} beneath {where} on {nodes}{elsewhere}"
        yield from room_lines(self.known)
        yield from shared_lines(self.known)
        if self.rules.job_roots and self.job:
            yield f"{', '.join(self.rules.job_roots)}: as seen in job {self.job}"
        elif self.rules.absent_roots:
            folders = ", ".join(self.rules.absent_roots)
            yield f"{folders}: there in a job only; ask in it, or by --job ID"
        yield from unread_lines(self.known)
        yield from silent_lines(self.known, name_or_uid)

    def _table(self, blocks: Blocks | None) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        known, whole_job = with_shared(self.known), self.whole_job
        if self.by == "file":
            headers = FILE_HEADERS_WITH_BAR if blocks else FILE_HEADERS
            return headers, file_rows(known, whole_job=whole_job, blocks=blocks)
        if self.by == "user":
            return USER_HEADERS, user_rows(known, name_or_uid)
        return HEADERS, rows(known, time.time(), whole_job=whole_job)


def _paint(header: str, cell: str) -> str:
    """Return a cell in a colour if it is a bar, or says that the next job will not use the copy."""
    if header == BAR != cell:
        return painted(cell, "cyan")
    return painted(cell, "yellow") if header == "STATE" and _NOT_READY.search(cell) else cell


def _node_lines(answers: Sequence[Answer], problems: Mapping[str, str]) -> list[str]:
    """Return which nodes did not answer and which are drained, one line for nodes of one kind."""
    remarks = dict(problems)
    for answer in answers:
        if answer.node not in problems and job.is_drained(answer.state):
            remarks[answer.node] = answer.state.rstrip("*")
    nodes = by_problem(remarks)
    return [printable(f"{job.fold(names)}: {remark}") for remark, names in nodes.items()]
