"""The commands of ``stagectl`` about what is staged already: on this node, a job's, or any."""

from __future__ import annotations

import json
import os
import pwd
import re
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource
from pydantic import ByteSize, TypeAdapter, ValidationError

from stager.base.errors import Failure, LaunchError, StageError, UsageError
from stager.base.text import bytes_text, printable
from stager.cli.console import complain, config_option, json_option, say
from stager.cli.render import failure_lines
from stager.cli.tables import (
    FILE_HEADERS,
    HEADERS,
    USER_HEADERS,
    file_rows,
    missing,
    room_lines,
    rows,
    table,
    total_line,
    unread_lines,
    user_rows,
)
from stager.copies import upkeep
from stager.copies.status import NodeStatus, look
from stager.copies.upkeep import Action, Command
from stager.launch import gather, job
from stager.launch.answers import Answer, frames, hello
from stager.request import policy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from stager.launch.job import JobContext
    from stager.request.policy import Policy

_Command = TypeVar("_Command", bound="Callable[..., Any]")
_Understood = TypeVar("_Understood", "NodeStatus", "upkeep.NodeResult")
_DURATION = re.compile(r"([0-9]{1,9})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
#: Copies that are named one by one.
_MOST_NAMED = 20


def _not_empty(context: click.Context, parameter: click.Parameter, value: str) -> str:
    # As by an unset variable: all nodes of the job are not what was meant then.
    given = parameter.name and context.get_parameter_source(parameter.name)
    if given is ParameterSource.COMMANDLINE and not value.strip():
        raise UsageError("--nodes is empty: name the nodes that are meant")
    return value


_nodes_option = click.option(
    "-w", "--nodes", metavar="NODES", default="", callback=_not_empty,
    help="The nodes that are meant, such as n[1-4] or @group.",
)  # fmt: skip
_job_option = click.option(
    "--job", "job_id", type=click.IntRange(1), metavar="ID",
    help="The nodes of this job are meant.",
)  # fmt: skip
_local_root_option = click.option(
    "--local-root", type=click.Path(path_type=Path),
    help="What `stage --local` keeps here is meant.",
)  # fmt: skip
_dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Tell what would go, and do nothing."
)
_destinations = click.argument("destinations", metavar="DST...", nargs=-1, required=True)
_perhaps_destinations = click.argument("destinations", metavar="[DST]...", nargs=-1)


def _where(command: _Command) -> _Command:
    """The options that say which nodes are meant."""
    for option in (json_option, config_option, _local_root_option, _job_option, _nodes_option):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class Scope:
    """The nodes that are meant.

    ``disks`` has the nodes whose disks are seen from here, and where; ``nodes`` are to be asked,
    those of ``context`` by a step. ``whole_job``: they are all nodes of one job.
    """

    disks: dict[str, str] = field(default_factory=dict)
    nodes: list[str] = field(default_factory=list)
    context: JobContext | None = None
    whole_job: bool = False

    @classmethod
    def find(
        cls, nodes: str, job_id: int | None, local_root: Path | None, environment: Mapping[str, str]
    ) -> Scope:
        """What the options and the environment mean. Raises StageError."""
        if sum(map(bool, (nodes, job_id, local_root))) > 1:
            raise UsageError("--nodes, --job and --local-root exclude each other: choose one")
        if local_root:
            return cls(disks=simulated_disks(local_root))
        here = job.own_name(environment)
        context = None
        whole_job = True
        if nodes:
            names = job.unfold(nodes)
            whole_job = False
            with suppress(StageError):  # outside of a job, as it seems
                context = job.find(environment)
        elif job_id:
            found = job.look_up(job_id, environment)
            names = job.unfold(found.nodes)
            context = found if environment.get("SLURM_JOB_ID") == str(job_id) else None
        elif environment.get("SLURM_JOB_ID"):
            context = job.find(environment)
            names = job.unfold(context.nodes)
        else:
            names = [here]
        if names == [here]:
            return cls(disks={here: ""})
        return cls(nodes=names, context=context, whole_job=whole_job)

    def ask(self, order: Command, rules: Policy, environment: Mapping[str, str]) -> list[Answer]:
        """What each node answers."""
        answers = [Answer(node, _carry_out(order, disk)) for node, disk in self.disks.items()]
        if self.nodes:
            answers += gather.ask(self.nodes, order, self.context, rules, environment)
        return answers


def simulated_disks(root: Path) -> dict[str, str]:
    """The nodes of `stage --local`, each with the folder that is its disk."""
    disks = [path for path in root.absolute().glob("node*") if path.is_dir()]
    return {path.name: str(path) for path in sorted(disks, key=lambda p: (len(p.name), p.name))}


def _carry_out(order: Command, disk: str) -> dict[str, Any]:
    if order.action is Action.STATUS:
        seen = look(disk, order.roots, order.shared_roots, everyone=order.everyone)
        return seen.to_wire()
    return upkeep.carry_out(order, disk).to_wire()


def _rules(config: Path, local_root: Path | None) -> Policy:
    if local_root:
        return policy.load_if_present(config) or policy.LOCAL
    return policy.load(config)


def _order(action: Action, rules: Policy, **too: Any) -> Command:
    return Command(action, rules.roots, rules.shared_roots, **too)


@click.command(hidden=True)
@click.argument("order")
def node(order: str) -> int:
    """Carry out an order of another node's stagectl, and answer it."""
    name = job.own_name(os.environ)
    wanted = Command.from_text(order)
    click.echo(hello(name))
    for line in frames(name, _carry_out(wanted, "")):
        click.echo(line)
    return 0


# status


@click.command("status")
@click.option(
    "--by", type=click.Choice(["node", "file", "user"]), default="node", show_default=True,
    help="One row for each of these; for root, --by user shows the copies of all users.",
)  # fmt: skip
@_where
def status_command(
    by: str, nodes: str, job_id: int | None, local_root: Path | None, config: Path, as_json: bool
) -> int:
    """Show what is staged for you, and what room is left.

    On all nodes of the job that this runs in, else on this node, or on those that you name.
    """
    rules = _rules(config, local_root)
    scope = Scope.find(nodes, job_id, local_root, os.environ)
    return show_status(scope, rules, by, as_json=as_json)


def show_status(scope: Scope, rules: Policy, by: str = "node", *, as_json: bool = False) -> int:
    """Print what the nodes hold; 8 where none of them answered."""
    answers = scope.ask(_order(Action.STATUS, rules, everyone=by == "user"), rules, os.environ)
    known, problems = _read(answers, NodeStatus.from_wire)
    if as_json:
        lacking = missing(known) if scope.whole_job else {}
        click.echo(json.dumps(_status_json(answers, known, problems, lacking), indent=1))
    else:
        if known or not answers:
            _print_status(known, by, rules, whole_job=scope.whole_job)
        for line in _node_lines(answers, problems):
            click.echo(line)
    return 0 if known or not answers else LaunchError.code


def _read(
    answers: Iterable[Answer], read: Callable[[dict[str, Any]], _Understood]
) -> tuple[dict[str, _Understood], dict[str, str]]:
    """What ``read`` makes of the answers, and the problems of the others, both by node."""
    known: dict[str, _Understood] = {}
    problems: dict[str, str] = {}
    for answer in answers:
        if answer.content is None:
            problems[answer.node] = answer.problem
            continue
        try:
            known[answer.node] = read(answer.content)
        except (KeyError, TypeError, ValueError):
            problems[answer.node] = "its slurm-stage is of another version than this one"
    return known, problems


def _print_status(
    known: Mapping[str, NodeStatus], by: str, rules: Policy, *, whole_job: bool
) -> None:
    headers, found = _table(known, by, whole_job=whole_job)
    if found:
        lines = [*table(headers, found), total_line(known)]
    else:
        where = " or ".join(root or "/" for root in (*rules.roots, *rules.shared_roots))
        on = job.fold([*known]) or "any node"
        lines = [f"stage: nothing is staged for you beneath {where} on {on}"]
    lines += [*room_lines(known, job.fold), *unread_lines(known)]
    # In one piece: click flushes at each call.
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
    """Which nodes did not answer, and which take no new jobs: one line for all of one kind."""
    told = dict(problems)
    for answer in answers:
        if answer.node not in problems and job.is_drained(answer.state):
            told[answer.node] = answer.state.rstrip("*")
    nodes: dict[str, list[str]] = {}
    for name, text in told.items():
        nodes.setdefault(text, []).append(name)
    return [printable(f"{job.fold(names)}: {text}") for text, names in nodes.items()]


def _status_json(
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


# verify, evict, pin, unpin


@click.command()
@_perhaps_destinations
@_where
def verify(
    destinations: tuple[str, ...], nodes: str, job_id: int | None, local_root: Path | None,
    config: Path, as_json: bool,
) -> int:  # fmt: skip
    """Read your copies again, and compare them with their digests.

    All of them, or those at DST.
    """
    rules = _rules(config, local_root)
    scope = Scope.find(nodes, job_id, local_root, os.environ)
    order = _order(Action.VERIFY, rules, destinations=_plain(destinations))
    return _act(scope, order, rules, "verified", as_json=as_json)


@click.command()
@_perhaps_destinations
@click.option("--older", metavar="TIME", default="", help="What was not used for 90m, 12h or 7d.")
@click.option(
    "--to-free", metavar="SIZE", default="",
    help="The least recently used, until 200G or 1.5TiB are free on each disk.",
)  # fmt: skip
@_dry_run_option
@_where
def evict(
    destinations: tuple[str, ...], older: str, to_free: str, dry_run: bool, nodes: str,
    job_id: int | None, local_root: Path | None, config: Path, as_json: bool,
) -> int:  # fmt: skip
    """Remove copies of yours.

    Those at DST, or what --older or --to-free say. What a running job uses or what is pinned
    stays.
    """
    if sum(map(bool, (destinations, older, to_free))) != 1:
        raise UsageError("say what is to go: either DST, or --older TIME, or --to-free SIZE")
    seconds, size = (_seconds(older) if older else 0), (_bytes(to_free) if to_free else 0)
    rules = _rules(config, local_root)
    scope = Scope.find(nodes, job_id, local_root, os.environ)
    order = _order(
        Action.EVICT, rules, destinations=_plain(destinations), older=seconds, to_free=size,
        dry_run=dry_run,
    )  # fmt: skip
    done = "would be evicted" if dry_run else "evicted"
    return _act(scope, order, rules, done, as_json=as_json)


@click.command()
@_destinations
@_where
def pin(
    destinations: tuple[str, ...], nodes: str, job_id: int | None, local_root: Path | None,
    config: Path, as_json: bool,
) -> int:  # fmt: skip
    """Have the copies at DST stay until you unpin them."""
    return _pin(Action.PIN, destinations, nodes, job_id, local_root, config, as_json=as_json)


@click.command()
@_destinations
@_where
def unpin(
    destinations: tuple[str, ...], nodes: str, job_id: int | None, local_root: Path | None,
    config: Path, as_json: bool,
) -> int:  # fmt: skip
    """Let the copies at DST go again when room is needed."""
    return _pin(Action.UNPIN, destinations, nodes, job_id, local_root, config, as_json=as_json)


def _pin(
    action: Action, destinations: tuple[str, ...], nodes: str, job_id: int | None,
    local_root: Path | None, config: Path, *, as_json: bool,
) -> int:  # fmt: skip
    rules = _rules(config, local_root)
    scope = Scope.find(nodes, job_id, local_root, os.environ)
    order = _order(action, rules, destinations=_plain(destinations))
    return _act(scope, order, rules, f"{action}ned", as_json=as_json)


COMMANDS = (status_command, verify, evict, pin, unpin, node)


def _plain(destinations: Iterable[str]) -> tuple[str, ...]:
    # The nodes are somewhere else. Records have their paths without '.', '..' and '//'.
    return tuple(dict.fromkeys(os.path.abspath(path) for path in destinations))


def _seconds(text: str) -> int:
    found = _DURATION.fullmatch(text)
    if not found or not int(found[1]):
        raise UsageError(f"--older {printable(text)}: say a time such as 90m, 12h or 7d")
    return int(found[1]) * _SECONDS[found[2]]


def _bytes(text: str) -> int:
    size = 0
    with suppress(ValidationError, OverflowError):
        size = int(TypeAdapter(ByteSize).validate_python(text))  # as in stage.toml
    if not 0 < size < 1 << 63:
        raise UsageError(f"--to-free {printable(text)}: say a size such as 200G or 1.5GiB")
    return size


def _act(scope: Scope, order: Command, rules: Policy, done: str, *, as_json: bool) -> int:
    """Have the order carried out on all nodes that are meant, and tell what came of it."""
    answers = scope.ask(order, rules, os.environ)
    known, problems = _read(answers, upkeep.NodeResult.from_wire)
    failures = _failures(order, known, problems)
    code = failures[0].code if failures else 0
    if as_json:
        told = [
            {
                "node": answer.node,
                "problem": problems.get(answer.node, ""),
                **asdict(known.get(answer.node, upkeep.NodeResult())),
            }
            for answer in answers
        ]
        click.echo(json.dumps({"nodes": told, "dry_run": order.dry_run, "code": code}, indent=1))
        return code
    for line in _done_lines(known, done):
        say(printable(line))
    for line in failure_lines(failures, job.fold):
        complain(printable(line))
    if not failures and not any(result.done for result in known.values()):
        say(f"nothing is there to be {done.removeprefix('would be ')}")
    return code


def _failures(
    order: Command, known: Mapping[str, upkeep.NodeResult], problems: Mapping[str, str]
) -> list[Failure]:
    """What could not be done, and where."""
    absent = Counter(one.absent for result in known.values() for one in result.refused)
    # What is to go, or to be let go, may well lack on some of the nodes.
    may_lack = order.action in (Action.EVICT, Action.UNPIN)
    lacks = {path for path, count in absent.items() if may_lack and path and count < len(known)}
    refused = [
        Failure(one.code, one.message, name)
        for name, result in known.items()
        for one in result.refused
        if one.absent not in lacks
    ]
    return [
        *refused,
        *(Failure(LaunchError.code, problem, name) for name, problem in problems.items()),
    ]


def _done_lines(known: Mapping[str, upkeep.NodeResult], done: str) -> list[str]:
    """What was done with which copy on which nodes; a long list in one line."""
    nodes: dict[str, list[str]] = {}
    for name, result in known.items():
        for one in result.done:
            nodes.setdefault(one.destination, []).append(name)
    lines = [f"{path}: {done} on {_named(names)}" for path, names in nodes.items()]
    if len(lines) > _MOST_NAMED:
        everywhere = [name for name, result in known.items() if result.done]
        size = sum(one.size for result in known.values() for one in result.done)
        lines = [f"{len(nodes)} files {done} on {_named(everywhere)}: {bytes_text(size)} in all"]
    stay: dict[int, list[str]] = {}
    for name, result in known.items():
        if result.stay:
            stay.setdefault(result.stay, []).append(name)
    return lines + [
        f"{count} {'copy stays' if count == 1 else 'copies stay'} on {_named(names)}: "
        "pinned or in use"
        for count, names in stay.items()
    ]


def _named(names: list[str]) -> str:
    folded = job.fold(names)
    return f"{folded} ({len(names)} nodes)" if len(names) > 1 else folded
