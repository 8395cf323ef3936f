"""Report to the launching process: events while the ranks work, and what became of each item.

Events go to stdout (`base.events`): ``alive``, ``started``, ``unwatched``, ``waiting``,
``progress``, ``pulse``, ``evicted`` or ``rate``, at last ``result``; or ``crashed``, for a rank
that failed unexpectedly. `launch.run` reads them.
"""

from __future__ import annotations

import os
import sys
import time
from _thread import allocate_lock  # threading is slow to import
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stager.base.events import event
from stager.base.options import Via
from stager.base.outcome import Counts, ItemReport, Note, NoteKind
from stager.base.text import listed, printable
from stager.store.validity import Reason

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stager.base.outcome import Pace
    from stager.rank.plan import Task
    from stager.store.validity import Survey

#: Seconds between two progress events of an item.
_PROGRESS_PERIOD = 1.0
#: The least bytes of a file, on average, with which the bytes tell how long the rest of a folder
#: takes: smaller ones take as long as they are many.
_LARGE_FILES = 1 << 20
#: Nodes that a note names.
_MOST_NAMED = 3
#: One line at a time: a long one is written in several pieces.
_line = allocate_lock()


@dataclass(frozen=True, slots=True)
class Delivered:
    """What all ranks together did for one item.

    ``readers`` are the ranks that read what was sent, ``source_bytes_read`` the bytes that all of
    them read from the source, ``peak_memory`` the most bytes of memory that one rank used. ``tree``
    counts the files of a folder; ``note`` is for the user. ``retries`` are requests to a store that
    had to be repeated.
    """

    digest: str
    readers: tuple[int, ...] = ()
    source_bytes_read: int = 0
    peak_memory: int = 0
    tree: Counts | None = None
    note: str = ""
    retries: int = 0
    #: How fast each node wrote it, in rank order; nothing if nothing moved.
    paces: tuple[Pace, ...] = ()


def tell(kind: str, **fields: object) -> None:
    """Print one event: the launcher merges the output of all ranks by lines."""
    with _line:
        sys.stdout.write(event(kind, **fields) + "\n")
        sys.stdout.flush()


def tell_at_once(kind: str, **fields: object) -> None:
    """Print one event from a thread that may be at work when Python ends. Raise OSError.

    Python must not end while a thread holds its stdout.
    """
    line = event(kind, **fields) + "\n"
    with _line:
        os.write(1, line.encode())


class Progress:
    """Reports how many bytes of an item were sent, at most once in `_PROGRESS_PERIOD`."""

    def __init__(self, destination: str) -> None:
        self._destination = destination
        self._begun = self._last = time.monotonic()

    def tell(self, sent: int, size: int, files: int) -> None:
        """Print a progress event, unless the last one is too recent.

        ``files`` of a folder are sent, 0 for a file.
        """
        now = time.monotonic()
        if now - self._last < _PROGRESS_PERIOD:
            return
        self._last = now
        tell(
            "progress", destination=self._destination, sent=sent, size=size,
            seconds=now - self._begun, steady=files * _LARGE_FILES <= size,
        )  # fmt: skip


def item_report(
    task: Task,
    surveys: Sequence[Survey],
    delivered: Delivered,
    seconds: float,
    *,
    dry_run: bool = False,
) -> ItemReport:
    """Return the report of one item. ``surveys`` are in rank order and name the nodes."""
    item, plan = task.item, task.plan
    names = [survey.node for survey in surveys]
    # What all see is new for all, whoever has written it.
    is_for_all = plan.is_shared and plan.receivers
    receivers = [*surveys] if is_for_all else [surveys[rank] for rank in plan.receivers]
    return ItemReport(
        source=item.source,
        destination=item.destination,
        size=plan.size,
        received=[survey.node for survey in receivers],
        current=[names[rank] for rank in plan.current],
        senders=[] if plan.from_source else [names[rank] for rank in delivered.readers],
        reasons=_reasons(receivers),
        digest=delivered.digest,
        source_bytes_read=delivered.source_bytes_read,
        peak_memory=delivered.peak_memory,
        seconds=seconds,
        tree=delivered.tree or _counts(task, surveys),
        shard_list="" if plan.is_shared else item.shard_list,
        once=plan.is_shared,
        retries=delivered.retries,
        notes=[
            *_fates(receivers, dry_run=dry_run),
            *([] if dry_run else _stays(surveys)),
            *(Note(NoteKind.REMARK, text) for text in _remarks(task, surveys, delivered) if text),
        ],
    )


def view_report(
    report: ItemReport, task: Task, surveys: Sequence[Survey], *, dry_run: bool
) -> ItemReport:
    """Return the report of a view, from that of the entry that it is made of."""
    made = [surveys[rank] for rank in task.plan.receivers]
    notes = [*_fates(made, dry_run=dry_run), *report.notes]
    ways = {f"{one.way} ({one.why})" if dry_run and one.why else one.way for one in made}
    remarks = (*_open_notes(surveys), task.source.environment_note, _link_note(task))
    notes += [Note(NoteKind.REMARK, text) for text in remarks if text]
    return replace(
        report, source=task.item.source, destination=task.item.destination,
        shard_list=task.item.shard_list, ways=sorted(ways), notes=notes,
    )  # fmt: skip


def _link_note(task: Task) -> str:
    """Return the note on environments in an entry that is linked to: no path in it is changed."""
    if task.item.options.via is not Via.LINK or not task.source.environments:
        return ""
    return (
        f"note: the Python environment in {printable(task.item.source)} runs from there: a link "
        "changes no paths; remove via=link"
    )


def _reasons(receivers: Sequence[Survey]) -> list[str]:
    reasons: list[str] = sorted({survey.reason for survey in receivers if survey.reason})
    # Every node may have a current part, but of different splits.
    return reasons or [Reason.OTHER_NODES] if receivers else []


def _counts(task: Task, surveys: Sequence[Survey]) -> Counts | None:
    """Count the files of a folder of which nothing was sent."""
    if task.source.is_tree:
        return Counts(task.source.files)
    return Counts(max(survey.files for survey in surveys)) if task.item.options.extract else None


def _fates(receivers: Sequence[Survey], *, dry_run: bool) -> Iterator[Note]:
    """Yield what is told of old copies that were replaced, and of the user's own among them."""
    sources = {one.node: one.replaces for one in receivers if one.replaces}
    if sources:
        was = "would be" if dry_run else "was"
        text = f"a copy of {next(iter(sources.values()))} {was} replaced"
        yield Note(NoteKind.REPLACED, text, [*sources])
    if changed := [one.node for one in receivers if one.changed]:
        text = (
            "what is yours there would be deleted, because of the option replace"
            if dry_run
            else "what was not staged, or was changed since, was replaced; write what you want to "
            "keep elsewhere"
        )
        yield Note(NoteKind.CHANGED, text, changed)


def _stays(surveys: Sequence[Survey]) -> Iterator[Note]:
    """Yield why a copy stays in spite of lifetime=job, if it does."""
    if pinned := [one.node for one in surveys if one.pinned]:
        yield Note(NoteKind.PINNED, "it is pinned (stagectl unpin lets it go)", pinned)


def _remarks(task: Task, surveys: Sequence[Survey], delivered: Delivered) -> Iterator[str]:
    """Yield further notes to the user on one item; some may be empty."""
    yield from _open_notes(surveys)
    yield _damaged_note(surveys)
    yield _unmatched_note(task)
    if task.source.leaving and task.plan.receivers:
        yield _leaving_note(task)
    yield _fuse_note(task)
    recorded = next((one.note for one in surveys if one.note), "")
    yield delivered.note or task.source.environment_note or recorded


def _open_notes(surveys: Sequence[Survey]) -> Iterator[str]:
    """Yield who else could replace the copies, and the nodes if it is not the same on all."""
    nodes: dict[str, list[str]] = {}
    for one in surveys:
        nodes.setdefault(one.open_to, []).append(one.node)
    for text, names in nodes.items():
        where = f"on {listed(names[:_MOST_NAMED], of=len(names))}, " if len(nodes) > 1 else ""
        if text:
            yield (
                f"note: {where}{text}; choose another destination, or have its owner set the "
                "sticky bit (chmod +t), unless that is wanted"
            )


def _damaged_note(surveys: Sequence[Survey]) -> str:
    """Return the note on copies whose bytes a disk, or a program, has changed unseen."""
    names = [one.node for one in surveys if one.reason is Reason.DAMAGED]
    if not names:
        return ""
    where = listed(names[:_MOST_NAMED], of=len(names))
    return f"note: on {where}, the copy was damaged: its bytes were not those that were staged"


def _fuse_note(task: Task) -> str:
    """Return the note on a source of which its filesystem keeps less than others."""
    if task.item.scheme.is_url or task.source.facts.inode or not task.plan.receivers:
        return ""
    return (
        f"note: {printable(task.item.source)} is on a FUSE filesystem: a change that leaves sizes "
        "and times as they were is not noticed"
    )


def _unmatched_note(task: Task) -> str:
    """Return the note on options with a pattern that matches nothing."""
    options = task.source.unmatched
    if not options:
        return ""
    shown = printable(", ".join(options))
    what, them = ("matches", "it") if len(options) == 1 else ("match", "them")
    return (
        f"note: {shown} {what} nothing in {printable(task.item.source)}; correct or remove {them}"
    )


def _leaving_note(task: Task) -> str:
    """Return the note on links that may lead to nothing on the nodes."""
    number = task.source.leaving
    links, lead = ("1 link", "leads") if number == 1 else (f"{number:,} links", "lead")
    where = printable(task.item.source)
    what = "what is there is not in the copy without links=follow"
    return f"note: {links} in {where} {lead} out of it; {what}"
