"""Carry out a command on all its nodes, and report what was done and what failed.

The commands verify, evict, pin and unpin end here.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from stager.base.errors import Failure, LaunchError
from stager.base.text import bytes_range, bytes_text, listed
from stager.base.users import name_or_uid
from stager.cli.absolute import absolute
from stager.cli.console import complain, say
from stager.cli.render import failure_lines, nodes_text
from stager.cli.scope import Scope, read_answers
from stager.copies.upkeep import Action, Command, NodeResult
from stager.copies.verify import NODE
from stager.launch import job

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from stager.cli.options import NodeOptions
    from stager.launch.answers import Answer

#: Copies that are named one by one.
_MOST_NAMED = 20
#: What the lines say of a copy with which an action was done.
_DONE = {
    Action.VERIFY: "verified",
    Action.EVICT: "evicted",
    Action.PIN: "pinned",
    Action.UNPIN: "unpinned",
}

#: Digits of the largest job number, which has 32 bits.
_MOST_DIGITS = 10


def run_action(
    action: Action,
    destinations: Iterable[str],
    where: NodeOptions,
    *,
    as_json: bool,
    older: int = 0,
    to_free: int = 0,
    dry_run: bool = False,
    user: int | None = None,
) -> int:
    """Do ``action`` on all nodes that ``where`` means; print the results, return the exit code.

    It is about the copies of ``user``, or of this user if that is None.

    Raise StageError if the nodes cannot be asked at all.
    """
    # As in records.
    typed = {absolute(path): path for path in destinations}
    rules = where.rules()
    scope = Scope.find(where, os.environ, rules.launch.srun)
    command = Command(
        action,
        rules.roots,
        rules.shared_roots,
        destinations=tuple(typed),
        older=older,
        to_free=to_free,
        dry_run=dry_run,
        shared_owner=rules.shared_owner,
        job=_own_job(os.environ),
        user=user,
    )
    answers = scope.ask(command, rules, os.environ)
    results, problems = read_answers(answers, NodeResult.from_wire)
    hints = {path: _hint(text) for path, text in typed.items()}
    failures = _failures(command, results, problems, hints)
    code = failures[0].code if failures else 0
    if as_json:
        click.echo(json.dumps(_to_json(command, answers, results, problems, code), indent=1))
    else:
        _print(command, results, failures)
    if hint := scope.without_ssh(_words(command), answers):
        complain(hint)
    return code


def _words(command: Command) -> list[str]:
    """Return the words behind ``stagectl`` by which ``command`` is given."""
    return [
        *f"{command.action}{command.option}".split(),
        *(["--older", f"{command.older}s"] if command.older else ()),
        *(["--to-free", f"{command.to_free}B"] if command.to_free else ()),
        *(["--dry-run"] if command.dry_run else ()),
        *command.destinations,
    ]


def _hint(typed: str) -> str:
    """Return what to add to the message if nothing is staged at a path that was ``typed``."""
    if not os.path.isabs(typed):
        return f"; write the whole path, as {typed} was looked for in the current folder"
    if any(char in typed for char in "*?["):
        return "; patterns are not expanded, so name each copy"
    return ""


def _own_job(environment: Mapping[str, str]) -> int:
    text = environment.get("SLURM_JOB_ID", "")
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else 0


def _to_json(
    command: Command,
    answers: Iterable[Answer],
    results: Mapping[str, NodeResult],
    problems: Mapping[str, str],
    code: int,
) -> dict[str, Any]:
    nodes = [
        {
            "node": answer.node,
            "problem": problems.get(answer.node, ""),
            **asdict(results.get(answer.node, NodeResult())),
        }
        for answer in answers
    ]
    return {"nodes": nodes, "dry_run": command.dry_run, "code": code}


def _print(
    command: Command, results: Mapping[str, NodeResult], failures: Iterable[Failure]
) -> None:
    failed = failure_lines(list(failures), job.fold)
    done = f"would be {_DONE[command.action]}" if command.dry_run else _DONE[command.action]
    rest = *_kept_lines(results, dry_run=command.dry_run), *_enough_lines(results)
    for line in [*_done_lines(command, results, done), *rest]:
        say(line)
    for line in failed:
        complain(line)
    idle = [name for name, result in results.items() if not (result.stay or result.enough)]
    if idle and not failed and not any(result.done for result in results.values()):
        of = "" if command.user is None else f"of {name_or_uid(command.user)} "
        say(f"nothing {of}to {command.action} on {nodes_text(idle, job.fold)}")


def _failures(
    command: Command,
    results: Mapping[str, NodeResult],
    problems: Mapping[str, str],
    hints: Mapping[str, str],
) -> list[Failure]:
    """Return what could not be done, and on which nodes; ``hints`` are for absent paths."""
    absent = Counter(one.absent for result in results.values() for one in result.refused)
    # A copy to evict or unpin may be absent on some of the nodes, but not on all.
    tolerated: set[str] = set()
    if command.action in (Action.EVICT, Action.UNPIN):
        tolerated = {path for path, count in absent.items() if path and count < len(results)}
    refused = [
        Failure(one.code, one.message + hints.get(one.absent, ""), name)
        for name, result in results.items()
        for one in result.refused
        if one.absent not in tolerated
    ]
    return [
        *_with_names(refused),
        *(Failure(LaunchError.code, problem, name) for name, problem in problems.items()),
    ]


def _with_names(failures: Sequence[Failure]) -> list[Failure]:
    """Write the node's name into commands to type, if a message is about one node alone."""
    nodes = Counter(one.message for one in failures)
    return [
        replace(one, message=one.message.replace(NODE, f"-w {one.node}"))
        if nodes[one.message] == 1
        else one
        for one in failures
    ]


def _done_lines(command: Command, results: Mapping[str, NodeResult], done: str) -> list[str]:
    """Return a line for each copy with its nodes; of many copies, what was done with all."""
    nodes: dict[tuple[str, str], list[str]] = {}
    for name, result in results.items():
        for one in result.done:
            what = f"{done}, but for files of yours," if one.kept else done
            what = "was gone already" if one.gone else what
            nodes.setdefault((one.destination, what), []).append(name)
    if len(nodes) > _MOST_NAMED and not command.dry_run:
        return [*_sum_lines(results, done)]
    return [
        f"{path}: {what} on {nodes_text(names, job.fold)}" for (path, what), names in nodes.items()
    ]


def _sum_lines(results: Mapping[str, NodeResult], done: str) -> Iterator[str]:
    """Yield how many copies ``done`` is said of, and how many were gone already."""
    for gone in (False, True):
        copies = [
            (name, one.size)
            for name, result in results.items()
            for one in result.done
            if one.gone is gone
        ]
        if not copies:
            continue
        where = nodes_text([*dict.fromkeys(name for name, _ in copies)], job.fold)
        count = f"{len(copies)} cop{'y' if len(copies) == 1 else 'ies'}"
        if gone:
            yield f"{count} {'was' if len(copies) == 1 else 'were'} gone already on {where}"
        else:
            size = bytes_text(sum(size for _, size in copies))
            yield f"{count} {done} on {where}: {size} in all"


def _kept_lines(results: Mapping[str, NodeResult], *, dry_run: bool) -> list[str]:
    """Return which copies could not be evicted, one line for nodes with the same ones."""
    nodes: dict[tuple[str, ...], list[str]] = {}
    for name, result in results.items():
        if result.stay:
            kept = tuple(f"{one.destination} ({one.why})" for one in result.stay)
            nodes.setdefault(kept, []).append(name)
    done = "would be kept" if dry_run else "kept"
    return [
        f"{done} on {nodes_text(names, job.fold)}: {listed(kept)}" for kept, names in nodes.items()
    ]


def _enough_lines(results: Mapping[str, NodeResult]) -> list[str]:
    """Return how much was free already on disks where nothing had to be evicted for that."""
    free: dict[str, dict[str, int]] = {}
    for name, result in results.items():
        for one in result.enough:
            free.setdefault(one.root, {})[name] = one.free
    return [
        f"{root}: {bytes_range(sizes.values())} are free on "
        f"{nodes_text([*sizes], job.fold)} already, so nothing had to be evicted there"
        for root, sizes in free.items()
    ]
