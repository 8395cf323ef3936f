"""Show the progress that ranks report: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Self

from stager.base.text import printable, seconds_text
from stager.cli.render import progress_line

if TYPE_CHECKING:
    from collections.abc import Callable

#: Seconds between two lines about the same stage.
_LINE_PERIOD = 5.0


class Progress:
    """Shows events of the ranks until the block is left.

    Lines are printed by ``say``; a ``bar`` is drawn instead if stdout is a terminal. If
    ``verbose``, nodes that do not watch each other are named.
    """

    def __init__(self, say: Callable[[str], None], *, bar: bool, verbose: bool = False) -> None:
        self._say = say
        self._verbose = verbose
        self._draws = bar and sys.stdout.isatty()
        self._last_line = time.monotonic()
        self._waiting = False
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, event: dict[str, Any]) -> None:
        """Show one event; events that are not about progress are ignored."""
        if event["event"] == "progress" and self._draws:
            self._draw(event)
        elif event["event"] == "progress" and self._is_time():
            self._say(
                progress_line(event["destination"], event["sent"], event["size"], event["seconds"])
            )
        elif event["event"] == "waiting" and (not self._waiting or self._is_time()):
            self._waiting = True
            where = f"{event['holder']} on {event['node']}"
            seconds = seconds_text(event["seconds"])
            self._say(f"{event['destination']}: waiting for {where}, {seconds} so far")
        elif event["event"] == "making" and self._is_time():
            doing = f"{event['node']} makes a file of the image"
            self._say(f"{event['destination']}: {doing}, {seconds_text(event['seconds'])} so far")
        elif event["event"] == "restarted":
            self._say("Slurm lost a connection between the nodes; the staging starts again")
        elif event["event"] == "unwatched" and self._verbose:
            self._say(
                f"{event['node']} does not watch {event['neighbour']}: no TCP connection could be "
                "made; if that node fails, the stage ends only after stall_timeout"
            )

    def _is_time(self) -> bool:
        now = time.monotonic()
        due = now - self._last_line >= _LINE_PERIOD
        if due:
            self._last_line = now
        return due

    def _draw(self, event: dict[str, Any]) -> None:
        from rich import progress as bars

        if self._bar is None:
            self._bar = bars.Progress(
                bars.TextColumn("{task.description}", markup=False), bars.BarColumn(),
                bars.DownloadColumn(), bars.TransferSpeedColumn(), bars.TimeRemainingColumn(),
                transient=True,
            )  # fmt: skip
            self._bar.start()
        name = printable(event["destination"])
        if self._task is None or self._bar.tasks[self._task].description != name:
            self._task = self._bar.add_task(name, total=event["size"])
        self._bar.update(self._task, completed=event["sent"])
