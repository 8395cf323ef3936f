"""What a user may do in a folder at any moment: write, edit, move, link and rename."""

from __future__ import annotations

import os
import random
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

#: What the names of folders and the lines of files of the user's own begin with.
_OWN = "own-"


class Meddler:
    """Does what a user may do in ``folder``, at random, and knows what must not be lost of it.

    ``own`` are the names and lines that only the user can have brought there. ``elsewhere`` is
    filled with older folders and files that are moved to ``folder``.
    """

    def __init__(self, folder: Path, elsewhere: Path, seed: int) -> None:
        self.own: set[str] = set()
        self._folder, self._elsewhere = folder, elsewhere
        self._random = random.Random(seed)
        self._count = 0
        for number in range(6):
            deep = elsewhere / f"tree{number}/deep/deeper"
            deep.mkdir(parents=True)
            for path in (elsewhere / f"file{number}", deep.parent / "a", deep / "b"):
                path.write_text(self._new())
        #: Open folders, as a program has that works there: it finds them under any name.
        self._opened = [os.open(path, os.O_RDONLY) for path in (folder, *folder.glob("*/*/"))]

    def close(self) -> None:
        """Leave the folders."""
        for descriptor in self._opened:
            os.close(descriptor)

    def act(self) -> None:
        """Do something. What finds its folder or file gone does nothing."""
        acts: list[Callable[[], object]] = [
            self._write, self._edit, self._replace, self._move_file, self._move_folder,
            self._copy_folder, self._make_folder, self._link, self._hard_link, self._rename_file,
            self._rename_folder,
        ]  # fmt: skip
        with suppress(FileNotFoundError, NotADirectoryError, shutil.Error):
            self._random.choice(acts)()

    def lost(self, *places: Path) -> set[str]:
        """Return what of the user's own is in none of the ``places``."""
        return self.own - {own for place in places for own in _own_in(place)}

    def _new(self) -> str:
        self._count += 1
        own = f"{_OWN}{self._count}"
        self.own.add(own)
        return f"{own}\n"

    def _name(self) -> str:
        self._count += 1
        return f"name-{self._count}"

    def _any_folder(self) -> str:
        """Return a folder: an open one, or one that is found by its path."""
        if self._random.random() < 0.3:
            return f"/proc/self/fd/{self._random.choice(self._opened)}"
        return self._folder_by_path()

    def _folder_by_path(self) -> str:
        places = [place for place, _, _ in os.walk(self._folder)]
        if not places:
            raise FileNotFoundError(self._folder)
        return self._random.choice(places)

    def _file_in(self, folder: str, *, is_own: bool | None = None) -> str:
        """Return a file in ``folder``; if told, one that is the user's own, or one that is not."""
        files = [entry.path for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False)]
        files = [path for path in files if is_own in (None, any(_own_in_file(path)))]
        if not files:
            raise FileNotFoundError(folder)
        return self._random.choice(files)

    def _write(self, path: str = "") -> None:
        descriptor = os.open(
            path or f"{self._any_folder()}/{self._name()}", os.O_WRONLY | os.O_CREAT
        )
        with open(descriptor, "w") as file:
            file.write(self._new())

    def _edit(self) -> None:
        """Write to a file. A staged one might be deleted after it is opened."""
        path = self._file_in(self._any_folder(), is_own=True)
        with open(os.open(path, os.O_WRONLY | os.O_APPEND), "a") as file:
            file.write(self._new())

    def _replace(self) -> None:
        """Put a new file in the place of a staged one, as editors do."""
        path = self._file_in(self._folder_by_path(), is_own=False)
        self._write(f"{path}~")
        os.rename(f"{path}~", path)

    def _move_file(self) -> None:
        number = self._random.randrange(6)
        os.rename(self._elsewhere / f"file{number}", f"{self._any_folder()}/{self._name()}")

    def _move_folder(self) -> None:
        """Move a folder with older files, into which something may have been written just before.

        Then its own times do not tell that it is moved.
        """
        tree = self._elsewhere / f"tree{self._random.randrange(6)}"
        if self._random.random() < 0.5:
            self._write(f"{tree}/{self._name()}")
        os.rename(tree, f"{self._any_folder()}/{self._name()}")

    def _copy_folder(self) -> None:
        number = self._random.randrange(6)
        shutil.copytree(self._elsewhere / f"tree{number}", f"{self._any_folder()}/{self._name()}")

    def _make_folder(self) -> None:
        self._count += 1
        name = f"{_OWN}{self._count}"
        os.mkdir(f"{self._any_folder()}/{name}")
        self.own.add(name)

    def _link(self) -> None:
        self._count += 1
        own = f"{_OWN}{self._count}"
        os.symlink(own, f"{self._any_folder()}/{self._name()}")
        self.own.add(own)

    def _hard_link(self) -> None:
        os.link(self._file_in(self._any_folder()), f"{self._any_folder()}/{self._name()}")

    def _rename_file(self) -> None:
        os.rename(self._file_in(self._any_folder()), f"{self._any_folder()}/{self._name()}")

    def _rename_folder(self) -> None:
        folder = self._any_folder()
        is_named = folder.startswith("/proc") or os.path.basename(folder).startswith(_OWN)
        if folder != str(self._folder) and not is_named:
            self._count += 1
            name = f"{_OWN}{self._count}"
            os.rename(folder, f"{self._folder}/{name}")
            self.own.add(name)


def _own_in(place: Path) -> Iterator[str]:
    """Yield all lines, links and names of folders in ``place`` that are a user's own."""
    for above, folders, files in os.walk(place):
        yield from filter(_is_own, folders)
        for name in (*folders, *files):
            path = os.path.join(above, name)
            if os.path.islink(path):
                yield from _own_of(os.readlink(path))
            elif os.path.isfile(path):
                yield from _own_in_file(path)


def _own_in_file(path: str) -> Iterator[str]:
    with open(path, errors="replace") as file:
        yield from _own_of(file.read())


def _own_of(text: str) -> Iterator[str]:
    return filter(_is_own, text.splitlines())


def _is_own(line: str) -> bool:
    return line.startswith(_OWN)
