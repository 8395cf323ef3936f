"""``stagectl verify``, ``evict``, ``pin`` and ``unpin``: do something with the copies on all nodes.

What was done and what failed is reported by copy, with the nodes.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from stager.base.errors import Failure, LaunchError, UsageError
from stager.base.rules import byte_size
from stager.base.text import bytes_range, bytes_text, listed, printable
from stager.base.users import name_or_uid
from stager.cli.arguments import user_option, whose
from stager.cli.command import Command
from stager.cli.complete import copies
from stager.cli.render import failure_lines, nodes_text
from stager.cli.shared_options import json_option, node_options
from stager.cli.terminal import complain, print_json, say
from stager.launch import job
from stager.launch.nodes import read_answers
from stager.node.agent import Evict, NodeResult, OfCopies, Pin, Unpin, Verify
from stager.request.grammar import NO_PATH, SHARED
from stager.request.items import SHARED_VARIABLE
from stager.request.names import absolute
from stager.source.schemes import Scheme
from stager.store.cache import caches_in
from stager.store.locks import Locks
from stager.store.states import copies_of
from stager.store.verify import NODE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from stager.cli.shared_options import NodeOptions
    from stager.launch.nodes import Answer

#: Copies that are named one by one.
_MOST_NAMED = 20
#: What the lines say of a copy with which an action was done.
_DONE = {
    Verify.verb: "verified",
    Evict.verb: "evicted",
    Pin.verb: "pinned",
    Unpin.verb: "unpinned",
}

#: Digits of the largest job number, which has 32 bits.
_MOST_DIGITS = 10


def run_action(
    make: Callable[..., OfCopies],
    destinations: Iterable[str],
    where: NodeOptions,
    *,
    as_json: bool,
    user: int | None = None,
) -> int:
    """Do what ``make`` returns on all nodes that ``where`` means; print results, return the code.

    It is about the copies of ``user``, or of this user if that is None.

    Raise StageError if the nodes cannot be asked at all.
    """
    # As in records.
    typed = {_in_records(name): name for name in destinations}
    rules = where.rules()
    scope = where.scope(rules)
    command = make(rules.copy_roots, rules.shared_roots, rules.shared_owner, user, tuple(typed))
    if not _is_dry(command):
        command = replace(command, turn=os.urandom(8).hex())
    answers = scope.ask(command, rules, os.environ)
    results, problems = read_answers(answers, NodeResult)
    hints = {path: _hint(text) for path, text in typed.items()}
    failures = _failures(command, results, problems, hints)
    code = failures[0].code if failures else 0
    if as_json:
        print_json(_to_json(command, answers, results, problems, code))
    else:
        _print(command, results, failures)
    if hint := scope.without_ssh(_words(command), answers):
        complain(hint)
    return code


def _in_records(name: str) -> str:
    """Return a destination or a source as it is in records. Raise UsageError."""
    if name.startswith(SHARED):
        if not name.startswith(f"{SHARED}/"):
            raise UsageError(f"{name}: {NO_PATH}")
        if SHARED_VARIABLE not in os.environ:
            raise UsageError(
                f"{name}: this is not in the script of a job that has a filesystem of its disks; "
                "give the path, as stagectl status names it"
            )
        name = os.environ[SHARED_VARIABLE] + name.removeprefix(SHARED)
    return name.rstrip("/") if Scheme.of(name).is_url else absolute(name)


def _words(command: OfCopies) -> list[str]:
    """Return the words behind ``stagectl`` by which ``command`` is given."""
    words = f"{command.verb}{command.option}".split()
    if isinstance(command, Evict):
        words += ["--older", f"{command.older}s"] if command.older else []
        words += ["--to-free", f"{command.to_free}B"] if command.to_free else []
        words += ["--dry-run"] if command.dry_run else []
    return [*words, *command.destinations]


def _is_dry(command: OfCopies) -> bool:
    return isinstance(command, Evict) and command.dry_run


def _hint(typed: str) -> str:
    """Return what to add to the message if nothing is staged at a path that was ``typed``."""
    if Scheme.of(typed).is_url:
        return ""
    if not os.path.isabs(typed):
        return f"; write the whole path, as {typed} was looked for in the current folder"
    if any(char in typed for char in "*?["):
        return "; patterns are not expanded, so name each copy"
    return ""


def _own_job(environment: Mapping[str, str]) -> int:
    text = environment.get("SLURM_JOB_ID", "")
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else 0


def _to_json(
    command: OfCopies,
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
    return {"nodes": nodes, "dry_run": _is_dry(command), "code": code}


def _print(
    command: OfCopies, results: Mapping[str, NodeResult], failures: Iterable[Failure]
) -> None:
    failed = failure_lines(list(failures))
    done = f"would be {_DONE[command.verb]}" if _is_dry(command) else _DONE[command.verb]
    rest = *_kept_lines(results, dry_run=_is_dry(command)), *_enough_lines(results)
    for line in [*_done_lines(command, results, done), *rest]:
        say(line)
    for line in failed:
        complain(line)
    idle = [name for name, result in results.items() if not (result.stay or result.enough)]
    if idle and not failed and not any(result.done for result in results.values()):
        of = "" if command.user is None else f"of {name_or_uid(command.user)} "
        say(f"nothing {of}to {command.verb} on {nodes_text(idle)}")


def _failures(
    command: OfCopies,
    results: Mapping[str, NodeResult],
    problems: Mapping[str, str],
    hints: Mapping[str, str],
) -> list[Failure]:
    """Return what could not be done, and on which nodes; ``hints`` are for absent paths."""
    absent = Counter(one.absent for result in results.values() for one in result.refused)
    # A copy to evict or unpin may be absent on some of the nodes, but not on all.
    tolerated: set[str] = set()
    if command.verb in (Evict.verb, Unpin.verb):
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


def _done_lines(command: OfCopies, results: Mapping[str, NodeResult], done: str) -> list[str]:
    """Return a line for each copy with its nodes; of many copies, what was done with all."""
    nodes: dict[tuple[str, str], list[str]] = {}
    for name, result in results.items():
        for one in result.done:
            what = f"{done}, but for files of yours," if one.kept else done
            what = "was gone already" if one.gone else what
            nodes.setdefault((one.destination, what), []).append(name)
    if len(nodes) > _MOST_NAMED and not _is_dry(command):
        return [*_sum_lines(results, done)]
    return [f"{path}: {what} on {nodes_text(names)}" for (path, what), names in nodes.items()]


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
        where = nodes_text([*dict.fromkeys(name for name, _ in copies)])
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
    return [f"{done} on {nodes_text(names)}: {listed(kept)}" for kept, names in nodes.items()]


def _enough_lines(results: Mapping[str, NodeResult]) -> list[str]:
    """Return how much was free already on disks where nothing had to be evicted for that."""
    free: dict[str, dict[str, int]] = {}
    for name, result in results.items():
        for one in result.enough:
            free.setdefault(one.root, {})[name] = one.free
    return [
        f"{root}: {bytes_range(sizes.values())} are free on "
        f"{nodes_text([*sizes])} already, so nothing had to be evicted there"
        for root, sizes in free.items()
    ]


@click.command(cls=Command, topics=("nodes",))
@click.argument("destinations", metavar="DST...", shell_complete=copies, nargs=-1, required=True)
@node_options
@json_option
def pin(destinations: tuple[str, ...], where: NodeOptions, as_json: bool) -> int:
    """Protect your copies at DST from eviction.

    Until you unpin them, they are not removed, whatever space is needed. Staging to DST still
    replaces them.
    """
    return run_action(Pin, destinations, where, as_json=as_json)


@click.command(cls=Command, topics=("nodes",))
@click.argument("destinations", metavar="DST...", shell_complete=copies, nargs=-1, required=True)
@user_option
@node_options
@json_option
def unpin(
    destinations: tuple[str, ...], user: str | None, where: NodeOptions, as_json: bool
) -> int:
    """Allow your copies at DST to be evicted again.

    They are then kept or removed as any other copy.
    """
    return run_action(Unpin, destinations, where, as_json=as_json, user=whose(user))


@click.command(cls=Command, topics=("nodes",))
@click.argument("destinations", metavar="[DST]...", shell_complete=copies, nargs=-1)
@node_options
@json_option
def verify(destinations: tuple[str, ...], where: NodeOptions, as_json: bool) -> int:
    """Read your copies again and compare them with their checksums.

    Reads the copies at DST, or all of your copies. If one is damaged or was changed, the exit code
    is 7, and the message says what to do. Files that were added to a folder are named, too.
    """
    return run_action(Verify, destinations, where, as_json=as_json)


#: Seconds in which a step's first task begins to evict what all are told to, and between looks.
_FIRST_TASK_LIMIT, _PAUSE = 10.0, 0.1
_DURATION = re.compile(r"([0-9]{1,9})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@click.command(cls=Command, topics=("nodes",))
@click.argument("destinations", metavar="[DST]...", shell_complete=copies, nargs=-1)
@click.option(
    "--older",
    metavar="TIME",
    default="",
    help="Delete copies that were not used for this time: 90m, 12h or 7d.",
)
@click.option(
    "--to-free",
    metavar="SIZE",
    default="",
    help="Delete copies until this much of each disk is free: 200G or 200GiB. Those with "
    "lifetime=job go first, then the least recently used; none goes where all would not do.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be deleted, without deleting it.")
@user_option
@node_options
@json_option
def evict(
    destinations: tuple[str, ...], older: str, to_free: str, dry_run: bool,
    user: str | None, where: NodeOptions, as_json: bool,
) -> int:  # fmt: skip
    """Delete your copies from the disks of the nodes.

    Choose them by exactly one of DST, --older and --to-free. Copies that are pinned or used by a
    running job are kept; by DST, a job may delete what it alone uses. Files that you added or
    changed there stay.
    """
    if sum(map(bool, (destinations, older, to_free))) != 1:
        raise UsageError("choose what to evict by exactly one of DST, --older and --to-free")
    if destinations and _does_first_task(destinations, where):
        return 0
    uid = whose(user)
    make = partial(
        Evict,
        older=_seconds(older) if older else 0,
        to_free=_bytes(to_free) if to_free else 0,
        dry_run=dry_run,
        job=_own_job(os.environ) if uid is None else 0,
    )
    return run_action(make, destinations, where, as_json=as_json, user=uid)


def _does_first_task(destinations: Iterable[str], where: NodeOptions) -> bool:
    """Wait until the copies are gone from this node, if the step's first task evicts them, too.

    As in ``srun stagectl evict DST``: each of its tasks would evict on all nodes of the job. Return
    False if they stay and nobody works on them: the first task may be another program.
    """
    if where.is_given or not job.is_later_task(os.environ):
        return False
    names = [*map(_in_records, destinations)]
    caches = [*caches_in(where.rules().copy_roots, os.getuid())]
    last_work = time.monotonic()
    with ExitStack() as stack:
        locks = [stack.enter_context(closing(Locks(cache))) for cache in caches]
        while found := [record for name in names for _, record in copies_of(caches, name)]:
            if any(lock.is_held(record.destination) for lock in locks for record in found):
                last_work = time.monotonic()
            elif time.monotonic() - last_work > _FIRST_TASK_LIMIT:
                return False
            time.sleep(_PAUSE)
    return True


def _seconds(text: str) -> int:
    found = _DURATION.fullmatch(text)
    if not found:
        raise UsageError(f"--older {printable(text)} is not a time; write it like 90m, 12h or 7d")
    if not int(found[1]):
        raise UsageError(
            f"--older {text} is too short: write at least 1s, or name the copies to delete (DST)"
        )
    return int(found[1]) * _SECONDS[found[2]]


def _bytes(text: str) -> int:
    size = 0
    with suppress(ValueError, OverflowError):
        size = byte_size(text)  # as in stage.toml
    if not 0 < size < 1 << 63:
        raise UsageError(f"--to-free {printable(text)} is not a size; write it like 200G or 1.5TiB")
    return size
