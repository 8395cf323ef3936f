"""Tell processes that run one command line on all nodes how its stage has ended on this node.

One of them stages. Its rank here leaves a `StepStatus` in the user's cache, which exists also where
root's part does not run. Each of the others here notes which status it has taken: if the same line
runs again, that one is not its own.
"""

from __future__ import annotations

import os
import time
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING

from stager.base.errors import StageError
from stager.base.paths import RECORDS_FOLDER
from stager.disk.cache import open_cache
from stager.disk.files import opened, stage_errors
from stager.disk.step_status import StepStatus, wait_for_code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_NOTE = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def hold_line(line: str, root: str, uid: int, *, by_user: bool) -> Iterator[Callable[[int], None]]:
    """Keep the others of the ``line`` here waiting. Yield what tells them the exit code.

    ``root`` is a cache root, ``by_user`` is for `open_cache`. Where no file can be made there, as
    on a full disk, they are told nothing: that is no reason not to stage.
    """
    is_held = False
    with closing(StepStatus(uid, _folder(root, uid))) as status:
        with suppress(StageError):
            open_cache(root, uid, by_user=by_user)
            with stage_errors(_folder(root, uid)), suppress(FileExistsError):
                os.mkdir(_folder(root, uid), 0o700)
            status.hold(line, _boot())
            is_held = True

        def tell(code: int) -> None:
            with suppress(StageError):
                if is_held:
                    status.write(code)

        yield tell


def wait_for_line(line: str, root: str, uid: int, task: str, patience: float) -> int | None:
    """Wait for the exit code of the ``line`` on this node; ``task`` is who waits here.

    A stage that ended up to ``patience`` seconds before counts, too. Return None if none works here
    for as long.
    """
    folder, boot = _folder(root, uid), _boot()
    note = f"{folder}/{line}.{boot}.{task}"
    since = max(_changed(note), time.time_ns() - int(patience * 1e9))
    found = wait_for_code(uid, [line], boot, patience, folder, since)
    if found is None:
        return None
    taken = _changed(f"{folder}/{line}.{boot}")
    with suppress(OSError), opened(note, _NOTE) as file:  # on a full disk it is not noted
        os.utime(file, ns=(taken, taken))
    return found[0]


def _folder(root: str, uid: int) -> str:
    return f"{root}/{RECORDS_FOLDER}/{uid}/lines"


def _changed(path: str) -> int:
    """Return when the file was changed, in nanoseconds since 1970; 0 if it is not there."""
    with suppress(OSError):
        return os.lstat(path).st_mtime_ns
    return 0


def _boot() -> str:
    with open(_BOOT_ID, encoding="ascii") as file:
        return file.read().strip()
