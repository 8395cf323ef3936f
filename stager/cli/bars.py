"""Draw a bar for each item that is staged, on a terminal. Only this module needs rich for that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from stager.base.text import bytes_text, elided, printable, seconds_text

if TYPE_CHECKING:
    from typing import TextIO

    from stager.cli.render import SoFar

#: Bars that are shown at once; of more items, the latest.
_MOST_BARS = 8
#: Columns from which on there is room for words, and what words and the percentage then take.
_WIDE, _WORDS, _PERCENT = 70, 38, 14


class Bars:
    """One bar an item on the ``screen``, from the first word about it until `close` removes all."""

    def __init__(self, screen: TextIO) -> None:
        console = Console(file=screen, highlight=False)
        self._console = console
        self._bar = BarColumn(complete_style="cyan", finished_style="green", pulse_style="cyan")
        name, words = "{task.description}", "{task.fields[words]}"
        self._progress = Progress(
            TextColumn(name, markup=False), self._bar, TextColumn(words, markup=False),
            console=console, transient=True, refresh_per_second=4,
        )  # fmt: skip
        self._items: dict[str, TaskID] = {}
        self._progress.start()

    def close(self) -> None:
        """Remove all bars."""
        self._progress.stop()

    def move(self, so_far: SoFar) -> None:
        """Draw how far an item is, with rate and time left where there is room."""
        words = [f"{so_far.percent:>3} %"]
        is_wide = self._console.width >= _WIDE
        if so_far.idle:
            words.append(f"no data for {seconds_text(so_far.idle)}" if is_wide else "no data")
        elif is_wide:
            left, steady = so_far.left, so_far.steady
            known = f"{seconds_text(left)} left" if left is not None and steady else ""
            words += [f"{bytes_text(so_far.rate)}/s", known]
        self._draw(so_far.destination, "  ".join(words), so_far.size, so_far.sent)

    def wait(self, destination: str, words: str) -> None:
        """Draw what an item waits for before its first byte; nobody knows how long it takes."""
        self._draw(destination, printable(words), None, 0)

    def say(self, destination: str, words: str) -> None:
        """Draw what is done for an item while none of its bytes moves."""
        task = self._task(destination)
        known = next(one for one in self._progress.tasks if one.id == task)
        total = None if known.total is None else int(known.total)
        self._draw(destination, printable(words), total, int(known.completed))

    def _draw(self, destination: str, words: str, total: int | None, done: int) -> None:
        width = self._console.width
        of_words = _WORDS if width >= _WIDE else _PERCENT
        of_name = max(8, 3 * width // 10)
        self._bar.bar_width = max(4, width - of_name - of_words - 2)
        name = elided(printable(destination), of_name)
        self._progress.update(
            self._task(destination), description=name, total=total, completed=done, visible=True,
            words=f"{words[: of_words - 1]}…" if len(words) > of_words else words.ljust(of_words),
        )  # fmt: skip

    def _task(self, destination: str) -> TaskID:
        """Return the item's bar. Items are staged in turn: those before a new one are in place."""
        if destination not in self._items:
            for task in self._progress.tasks:
                total = task.total or 1
                self._progress.update(task.id, total=total, completed=total, words="100 %")
            for old in [*self._items.values()][: 1 - _MOST_BARS]:
                self._progress.update(old, visible=False)
            # It is shown with its name and words, by the caller.
            new = self._progress.add_task("", total=None, words="", visible=False)
            self._items[destination] = new
        return self._items[destination]
