"""Tell the launching process every few seconds what this rank has done, and what it is doing.

`launch.health` finds out by these *pulses* that a stage does not move any more, and because of
which node. They do not pass through MPI, and come from a thread of their own.
"""

from __future__ import annotations

import os
import time
from _thread import start_new_thread  # threading is slow to import
from contextlib import suppress
from typing import TYPE_CHECKING

from stager.base.telemetry import Kind, Phase, counted, current, doing, writing
from stager.rank.report import tell_at_once

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stager.base.telemetry import Activity, Stopwatch
    from stager.rank.agree import Node
    from stager.request.items import StageRequest

#: Pulses within the time limit, and the seconds between two of them: at least, at most.
_PULSES, _SHORTEST, _LONGEST = 6, 1.0, 10.0
#: For how many times the limit what the disks do counts while this rank itself counts nothing: they
#: also work for others, who could keep a rank that hangs from being noticed.
_MOST_FOREIGN = 10
_VERBS = {
    Kind.READ: "reading", Kind.WRITE: "writing", Kind.RECEIVE: "receiving", Kind.SEND: "sending",
}  # fmt: skip
_STEPS = {
    Phase.FSYNC: "syncing", Phase.VERIFY: "reading back", Phase.PUBLISH: "publishing",
}  # fmt: skip
#: Blocks that all disks of the node have read and written, among other things (proc(5)).
_ALL_DISKS = "/proc/vmstat"
#: Places of the numbers of completed reads, writes, discards and flushes in the ``stat`` of a disk
#: (Documentation/block/stat.rst of Linux).
_COMPLETED = (0, 4, 11, 15)


class Pulse:
    """The pulses of one rank, in a thread that ends with the process.

    While the rank writes, or syncs or removes files, one system call may take minutes and nothing
    is counted: then what the disk gets done counts.
    """

    def __init__(self, node: Node, request: StageRequest, watch: Stopwatch) -> None:
        self._node = node
        self._roots = request.space.roots
        self._watch = watch
        self._disks: list[str] = []
        self._on_disk = False
        self._seen = self._of_disks = 0
        self._most = _MOST_FOREIGN * request.stall_timeout
        #: The count of this rank itself, and when it last changed.
        self._own, self._own_at = 0, time.monotonic()
        self._period = period(request.silence or request.stall_timeout)

    def start(self) -> None:
        """Send the first pulse after the period."""
        start_new_thread(self._beat, ())

    def find_disks(self) -> None:
        """Find the disks whose work counts. If one does not answer, the pulses tell."""
        with doing(Kind.STEP):
            self._disks = disk_files(self._node.path(root) for root in self._roots)

    def _beat(self) -> None:
        with suppress(OSError):  # the launcher is gone
            while True:
                time.sleep(self._period)
                activity = current()
                tell_at_once(
                    "pulse", node=self._node.name, count=counted() + self._done_by_disks(activity),
                    activity=activity.kind, doing=text_of(activity, self._watch.phase),
                    pace=writing.figures(),
                )  # fmt: skip

    def _done_by_disks(self, activity: Activity) -> int:
        """Return the requests that the disks have completed while this rank waited for them."""
        if counted() != self._own:
            self._own, self._own_at = counted(), time.monotonic()
        waits = activity.kind in (Kind.WRITE, Kind.STEP)
        on_disk = waits and time.monotonic() - self._own_at < self._most
        now = requests_done(self._disks) if on_disk else 0
        if on_disk and self._on_disk:
            self._of_disks += now - self._seen
        self._on_disk, self._seen = on_disk, now
        return self._of_disks


def period(limit: float) -> float:
    """Return the seconds between two pulses, given those after which a silent node is given up.

    >>> period(60), period(5), period(3600)
    (10.0, 1.0, 10.0)
    """
    return min(_LONGEST, max(_SHORTEST, limit / _PULSES))


def text_of(activity: Activity, phase: Phase) -> str:
    """Return an activity as a message names it. Pure.

    >>> from stager.base.telemetry import Activity
    >>> text_of(Activity(Kind.READ, "/shared/data"), Phase.BROADCAST)
    'reading /shared/data'
    """
    kind, what = activity
    if kind is Kind.WAIT:
        return "waiting for other nodes"
    if not what:
        return "using its disks"
    return f"{_VERBS.get(kind) or _STEPS.get(phase, 'preparing')} {what}"


def disk_files(folders: Iterable[str]) -> list[str]:
    """Return the files in which the kernel counts what the disks of ``folders`` do."""
    found: set[str] = set()
    for folder in folders:
        with suppress(OSError):
            device = os.stat(folder).st_dev
            path = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat"
            # Some filesystems, such as btrfs and ZFS, do not name their disk.
            found.add(path if os.path.exists(path) else _ALL_DISKS)
    return sorted(found)


def requests_done(files: Iterable[str]) -> int:
    """Return a number that grows with each request that these disks complete."""
    done = 0
    for path in files:
        with suppress(OSError), open(path, "rb") as file:
            done += _of_node(file.read()) if path == _ALL_DISKS else _of_disk(file.read())
    return done


def _of_disk(text: bytes) -> int:
    """Return the requests completed, from the ``stat`` of a block device."""
    fields = text.split()
    return sum(int(fields[place]) for place in _COMPLETED if place < len(fields))


def _of_node(text: bytes) -> int:
    """Return the blocks that were read and written, from ``/proc/vmstat``."""
    lines = (line.split() for line in text.splitlines())
    return sum(int(value) for name, value in lines if name in (b"pgpgin", b"pgpgout"))
