"""Tell the tasks of a job on this node how its stage ended, by files beneath /run.

``JOB.RESTART.STEP`` holds, for the tasks that wait in one step, lines with the exit code of the
stage, the first place that was staged to, and the variables that they get. While a rank has it
locked, they wait.

Likewise for processes that run one command line on all nodes, of which one stages: its rank here
leaves the code in the user's cache, which exists also where root's part does not run. Each of the
others here notes which one it has taken: if the same line runs again, that is not its own.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING

from stager.base import paths
from stager.base.errors import LaunchError, StageError
from stager.base.paths import RECORDS_FOLDER
from stager.fs.files import (
    READ_FILE,
    as_room_error,
    opened,
    stage_errors,
    write_all,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

#: Seconds after which a status is removed: longer than jobs run.
_KEPT = 30 * 24 * 3600
#: What a user can do about a folder that the plugin has not made, and about others.
_MADE_BY_PLUGIN = (
    "slurm-stage could not make this folder; tell the administrator (slurmd's log there says why)"
)
_CHECK = "tell the administrator to check this folder"
#: Seconds between two looks at a status that others wait for.
_PAUSE = 0.05
#: More bytes than a code and a path, or the names of nodes, have.
_LONGEST = 1 << 17


@contextmanager
def _launch_errors(path: str, remedy: str, absent: str = "") -> Iterator[None]:
    """Turn an OSError into a LaunchError that names ``path`` and the ``remedy``.

    ``absent`` is the remedy if the folder above is not there, or not the user's. Raise SpaceError
    instead where the user's room is full.
    """
    try:
        yield
    except OSError as error:
        if full := as_room_error(error, path):
            raise full from None
        if absent and isinstance(error, FileNotFoundError | PermissionError):
            remedy = absent
        raise LaunchError(f"{path}: {error.strerror}; {remedy}") from None


class StepStatus:
    """The status that one rank leaves for the tasks of its step."""

    def __init__(self, uid: int, folder: str = "") -> None:
        """Use the user's folder beneath /run, or another ``folder``."""
        self._uid = uid
        self._folder = folder or f"{paths.RUN_FOLDER}/{uid}"
        self._path = ""
        self._descriptor: int | None = None

    def hold(self, job: str, step: str) -> None:
        """Lock the step's file, without a code. Raise LaunchError or SpaceError if that fails."""
        self._path = f"{self._folder}/{job}.{step}"
        with _launch_errors(self._path, _CHECK, absent=_MADE_BY_PLUGIN):
            self._sweep()
            self._descriptor = os.open(
                self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
            # No other rank of this step is on this node, so this waits for nobody.
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            os.ftruncate(self._descriptor, 0)
            # The code replaces this in the same block: there will be room for it.
            write_all(self._descriptor, b"\n", 0)

    def write(self, code: int, place: str = "", variables: Mapping[str, str] | None = None) -> None:
        """Write the exit code for waiting tasks and, if it is 0, what was staged.

        Raise LaunchError or SpaceError. A code that was written before is replaced.
        """
        assert self._descriptor is not None
        text = f"{code}\n" if code else f"{code}\n{place}\n{exports(variables or {})}"
        with _launch_errors(self._path, _CHECK):
            # The code comes last: without it, the rest counts for nothing.
            write_all(self._descriptor, os.fsencode(text[1:]), 1)
            os.ftruncate(self._descriptor, len(os.fsencode(text)))
            write_all(self._descriptor, os.fsencode(text[:1]), 0)

    def close(self) -> None:
        """Release the file: waiting tasks read the code, or find none and fail."""
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _sweep(self) -> None:
        """Remove the files of jobs that must have ended long ago."""
        for entry in os.scandir(self._folder):
            with suppress(FileNotFoundError):  # root may clean up after another job
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > _KEPT:
                    os.unlink(entry.path)


def exports(variables: Mapping[str, str]) -> str:
    """Return the lines by which TaskProlog, or the plugin, sets variables of a task."""
    return "".join(f"export {name}={value}\n" for name, value in variables.items())


def wait_for_code(
    uid: int, jobs: Sequence[str], step: str, patience: float, folder: str = "", since: int = -1
) -> tuple[int, str] | None:
    """Wait for the exit code that a rank leaves on this node for tasks of the step.

    Return it, from the first of ``jobs`` by which statuses are named that has one, and the place
    that is told with it. Return None
    if no rank works here for ``patience`` seconds; with 0, if none works now. The files are in the
    ``folder`` of `StepStatus`; those count that were written after ``since``, in nanoseconds.
    """
    folder = folder or f"{paths.RUN_FOLDER}/{uid}"
    last_work = time.monotonic()
    while True:
        is_held = False
        for job in jobs:
            with suppress(OSError), opened(f"{folder}/{job}.{step}", READ_FILE) as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    is_held = True
                else:
                    code, _, place = os.read(file, _LONGEST).partition(b"\n")
                    facts = os.fstat(file)
                    is_own = facts.st_uid == uid and facts.st_mtime_ns > since
                    if code.isdigit() and is_own:
                        return int(code), os.fsdecode(place.partition(b"\n")[0])
        now = time.monotonic()
        if is_held:
            last_work = now
        elif now - last_work >= patience:
            return None
        time.sleep(_PAUSE)


_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_NOTE = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def hold_line(line: str, root: str, uid: int, *, by_user: bool) -> Iterator[Callable[[int], None]]:
    """Keep the others of the ``line`` here waiting. Yield what tells them the exit code.

    ``root`` is a cache root, ``by_user`` is for `RootFacts`. Where no file can be made there, as
    on a full disk, they are told nothing: that is no reason not to stage.
    """
    from stager.store.cache import RootFacts, open_cache  # needed without Slurm only

    is_held = False
    with closing(StepStatus(uid, _folder(root, uid))) as status:
        with suppress(StageError):
            open_cache(root, uid, of_root=RootFacts(by_user=by_user))
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
