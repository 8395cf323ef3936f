"""Keep what a publication replaces until all of the user's own was moved out of it.

It is kept in a folder among the partial files, where nobody else reaches it. If the process dies,
`Cache.sweep` calls `put_back`, which moves it beside the destination: it may hold what its user has
written there a moment before.

=============  ================================================================
in the folder
=============  ================================================================
``to-INODE``   a link to the destination; INODE is that of what is published
``new``        what is published, and what it replaced once the two are exchanged
``old``        what was replaced
=============  ================================================================
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stager.base.errors import DestinationError
from stager.disk.aside import Aside, rename_to_free
from stager.disk.files import opened_beneath, remove_tree
from stager.disk.unnamed import make_partial_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

#: What the names of these folders begin with.
PREFIX = "replaced-"
_LINK = "to-"


class Replaced:
    """The ``folder`` for one publication at ``path``, beneath ``root``."""

    def __init__(self, folder: str, path: str, root: str) -> None:
        self.new, self.old = f"{folder}/new", f"{folder}/old"
        self._path, self._root = path, root

    def put_beside(self) -> str:
        """Move what was replaced to a free name beside its old place. Return its new path.

        Raise OSError or DestinationError.
        """
        return _put_beside(self.old, self._path, self._root)


@contextmanager
def replacing(partial: str, path: str, root: str, inode: int) -> Iterator[Replaced]:
    """Make a folder for the publication of what has the ``inode`` at ``path``, beneath ``root``.

    ``partial`` is the folder of partial files. What was replaced and is still there at the end is
    put beside its old place. Raise OSError or DestinationError.
    """
    folder, descriptor = make_partial_folder(partial, PREFIX)
    try:
        os.symlink(path, f"{folder}/{_LINK}{inode}")
        yield Replaced(folder, path, root)
    finally:
        try:
            put_back(folder, root)
        finally:
            os.close(descriptor)


def put_back(folder: str, root: str) -> None:
    """Move what was replaced beside its old place, and remove the ``folder``.

    Raise OSError or DestinationError if that cannot be moved; then it is left as it is.
    """
    names = os.listdir(folder)
    link = next((name for name in names if name.startswith(_LINK)), "")
    inodes = {name: os.lstat(f"{folder}/{name}").st_ino for name in ("new", "old") if name in names}
    published = int(link.removeprefix(_LINK)) if link.removeprefix(_LINK).isdigit() else 0
    # If what was to be published is here, and what was there too, then nothing is at that place.
    is_vacant = len(inodes) > 1
    for name, inode in inodes.items():
        if link and inode != published:
            path = os.readlink(f"{folder}/{link}")
            _put_beside(f"{folder}/{name}", path, root, is_vacant=is_vacant)
    remove_tree(folder)


def _put_beside(kept: str, path: str, root: str, *, is_vacant: bool = False) -> str:
    """Move what is ``kept`` beside ``path``, or to it if that ``is_vacant``. Return its new path.

    If its user has moved or removed the folder there, it gets to the next one above.
    """
    above, name = os.path.split(path)
    if not is_vacant:
        name = Aside.STAGING.name_of(name)
    while True:
        try:
            with opened_beneath(root, above) as folder:
                return f"{above}/{rename_to_free(kept, name, folder)}"
        except (OSError, DestinationError):
            if above in (root, "/"):
                raise
            above = os.path.dirname(above)
