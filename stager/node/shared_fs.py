"""Start and stop a node's part of the filesystem of a job's disks, as root.

The site's driver does the work (``[shared_fs]`` in stage.toml); this gives it a folder for data on
the node's disk and a mount point, runs it, and takes everything away again, whatever it left. Root
makes and removes the folders by descriptors, and goes into none that is the user's.

All that the driver starts has one ancestor, the keeper, which ends with the last of it: the user,
as whom the driver runs, can hide no process from `stop`. What a driver starts by ssh, it has to end
itself.

A note (`base.shared_note`) tells the job's ranks how it stands. Without a note, there is nothing to
stop.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import stat
import syslog
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from stager.base import linux, paths
from stager.base.child import answer_as
from stager.base.linux import UnmountFlag
from stager.base.mounts import mounts
from stager.base.shared_note import FAILED, READY, STARTING, SharedNote
from stager.base.users import jobs_that_end, marked_jobs
from stager.node.as_user import groups_of
from stager.node.folders import UnsafeError, made, make_folder, opened, replace_file

if TYPE_CHECKING:
    from typing import NoReturn

    from stager.base.rules import SharedFs

#: Seconds for the driver's ``start`` and ``stop``. The plugin's own limit in stage.h is longer, and
#: so is that of `epilog`.
_START_LIMIT, _STOP_LIMIT = 30.0, 10.0
#: Seconds for killed processes to end, and for the removal of a job's data.
_KILL_LIMIT, _REMOVE_LIMIT = 2.0, 10.0
#: Seconds between two looks.
_PAUSE = 0.01
#: Characters of the driver's last line that a user is shown, and bytes that are kept of its output.
_TEXT, _OUTPUT = 300, 4096
#: Rounds in which mounts are removed that a user makes meanwhile.
_ROUNDS = 10
#: Most nodes of a job.
_MOST_NODES = 1 << 16
_PARTS = re.compile(r"[\w.-]+|\[[\d,-]+\]", re.ASCII)


def unfold(nodes: str) -> list[str]:
    """Return the names in a list of Slurm's, in its order. Raise ValueError.

    ClusterShell, which `launch.job` has, orders them by number, and is nothing for root.

    >>> unfold("login,n[08-10,12]"), unfold("r[1-2]c[1-2]")
    (['login', 'n08', 'n09', 'n10', 'n12'], ['r1c1', 'r1c2', 'r2c1', 'r2c2'])
    """
    names: list[str] = []
    for item in re.findall(r"(?:\[[^]]*\]|[^,[])+", nodes):
        parts = _PARTS.findall(item)
        if "".join(parts) != item:
            raise ValueError(f"{item!r} names no nodes")
        names += map("".join, product(*map(_numbers, parts)))
    if not names or len(names) > _MOST_NODES:
        raise ValueError(f"{nodes[:99]!r} names no nodes, or too many")
    return names


def _numbers(part: str) -> list[str]:
    if not part.startswith("["):
        return [part]
    found: list[str] = []
    for span in part[1:-1].split(","):
        first, _, last = span.partition("-")
        most = int(last or first)
        if most - int(first) >= _MOST_NODES:
            raise ValueError(f"{span} is too many nodes")
        found += [f"{number:0{len(first)}}" for number in range(int(first), most + 1)]
    return found


def start(site: SharedFs | None, job: int, uid: int, node: str, nodes: str) -> None:
    """Start this node's part for the job. How that went is in the job's note.

    Raise OSError if there can be no note.
    """
    with (
        opened(paths.RUN) as run,
        made(run, paths.RUN_NAME, 0o755) as parent,
        made(parent, os.path.basename(paths.SHARED_NOTES), 0o711) as notes,
    ):
        os.fchmod(notes, 0o711)
    environment = {
        "STAGE_JOB": str(job),
        "STAGE_NODE": node,
        "STAGE_UID": str(uid),
        "STAGE_GID": str(groups_of(uid)[0]),
    }
    note = SharedNote(STARTING, environment)
    try:
        if not stop(job):  # as before the job was requeued
            note = SharedNote.read(job) or note
            raise ValueError("its earlier one on this node does not end")
        if not site:
            raise ValueError("stage.toml has no [shared_fs]")
        environment["STAGE_NODES"] = " ".join(unfold(nodes))
        environment["STAGE_FOLDER"] = f"{site.folder}/{paths.SHARED_FOLDER}/{job}"
        environment["STAGE_MOUNT"] = f"{site.mount}/{job}"
        note = replace(note, driver=site.driver, uid=uid if site.user else 0)
        _write_note(note)
        _make_folders(site, job, note.uid)
        if failure := _run(note, "start", _START_LIMIT, keep=True):
            raise ValueError(failure)
    except (OSError, UnsafeError, ValueError) as error:
        syslog.syslog(syslog.LOG_ERR, f"the filesystem of job {job} does not start: {error}")
        state = f"{FAILED}{_one_line(str(error))}"
    else:
        state = READY
    # The keeper has noted itself.
    _write_note(replace(SharedNote.read(job) or note, state=state))


def _make_folders(site: SharedFs, job: int, uid: int) -> None:
    if moved := make_folder(site.folder, paths.SHARED_FOLDER):
        syslog.syslog(syslog.LOG_WARNING, moved)
    os.makedirs(site.mount, 0o755, exist_ok=True)
    gid = groups_of(uid)[0]
    for folder in (f"{site.folder}/{paths.SHARED_FOLDER}", site.mount):
        with opened(folder) as parent:
            facts = os.fstat(parent)
            if facts.st_uid != 0 or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise UnsafeError(f"others than root may write in {folder}; make it root's, 0755")
            with made(parent, str(job), 0o700, enter_mounts=False) as own:
                os.fchmod(own, 0o700)
                os.fchown(own, uid, gid)


def stop(job: int) -> bool:
    """Stop this node's part and remove all that is left of it. Return whether nothing is left.

    Nothing is raised. What is left is told in the system log, and the note stays for another try.
    """
    path = f"{paths.SHARED_NOTES}/{job}"
    try:
        with opened(path, flags=os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            note = SharedNote.read(job)
            if note and note.driver:
                _stop(note)
            os.unlink(path)
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False  # another process of root's does this now
    except (OSError, UnsafeError, ValueError, TypeError, LookupError) as error:
        syslog.syslog(
            syslog.LOG_ERR,
            f"the filesystem of job {job} is not gone: {error}; it is stopped again after the next "
            "job here",
        )
        return False
    return True


def _stop(note: SharedNote) -> None:
    """Raise OSError for what is left."""
    folder = note.environment["STAGE_FOLDER"]
    # Without the folder the driver has never run, or all is removed.
    if os.path.lexists(folder) and (failure := _run(note, "stop", _STOP_LIMIT)):
        what = f"job {note.environment['STAGE_JOB']}: {note.driver} stop"
        syslog.syslog(syslog.LOG_WARNING, f"{what}: {failure}")
    with ExitStack() as rest:  # each is tried, whatever becomes of the one before
        rest.callback(_remove, folder, note.uid)
        rest.callback(_remove, note.environment["STAGE_MOUNT"], note.uid)
        _kill(note.keeper)


def stop_leftovers(site: SharedFs | None, limit: float) -> None:
    """Stop what jobs left that have ended, and remove data without a note, as after a boot.

    No new try begins after ``limit`` seconds. Raise OSError.
    """
    deadline = time.monotonic() + limit
    # Before the marks are read: a job that begins is marked before it has a note.
    noted = _numbers_in(paths.SHARED_NOTES)
    running = {job for job, _ in (*marked_jobs(), *jobs_that_end())}
    for job in noted:
        if job not in running and time.monotonic() < deadline:
            stop(job)
    if not site:
        return
    folder = f"{site.folder}/{paths.SHARED_FOLDER}"
    with suppress(FileNotFoundError, UnsafeError):  # the disk may be missing
        make_folder(site.folder, paths.SHARED_FOLDER)
    for job in sorted({*_numbers_in(folder), *_numbers_in(site.mount)}):
        # The note comes before the folder, and goes after it.
        if os.path.lexists(f"{paths.SHARED_NOTES}/{job}") or time.monotonic() >= deadline:
            continue
        try:
            with suppress(FileNotFoundError):
                os.rmdir(f"{site.mount}/{job}")
            _remove(f"{folder}/{job}")
        except (OSError, UnsafeError) as error:
            syslog.syslog(syslog.LOG_ERR, f"data of job {job} is left: {error}")


def _numbers_in(folder: str) -> list[int]:
    with suppress(FileNotFoundError):
        return [int(name) for name in os.listdir(folder) if name.isdecimal()]
    return []


def _write_note(note: SharedNote) -> None:
    replace_file(f"{paths.SHARED_NOTES}/{note.environment['STAGE_JOB']}", note.to_json(), 0o644)


def _one_line(text: str) -> str:
    last = text.strip().splitlines()[-1:] or [""]
    return "".join(one if one.isprintable() else "?" for one in last[0])[:_TEXT]


def _run(note: SharedNote, action: str, limit: float, *, keep: bool = False) -> str:
    """Run the driver. Return why it failed, nothing if it did not.

    What it starts in the background is left running if it does not fail and ``keep`` is set.
    """
    reading, writing = os.pipe()
    syslog.closelog()  # else the keeper would hold it
    if not os.fork():
        try:
            _keep(note, action, limit, writing, keep=keep)
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8", errors="replace") as answer:
        return answer.read()


def _keep(note: SharedNote, action: str, limit: float, answer: int, *, keep: bool) -> NoReturn:
    """Be the ancestor of what the driver starts, and end with the last of it."""
    os.setsid()
    os.chdir("/")
    linux.adopt_orphans()
    if keep:
        _write_note(replace(note, keeper=f"{os.getpid()} {_begun(os.getpid())}"))
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    output, theirs = os.pipe()
    os.closerange(3, min(answer, output, theirs))
    driver = os.fork()
    if not driver:
        try:
            _exec(note, action, theirs)
        finally:
            os._exit(127)
    os.close(theirs)
    code, written = _wait(driver, output, time.monotonic() + limit)
    failure = ""
    if code is None:
        failure = f"{note.driver} {action} took longer than {limit:.0f} s"
    elif code:
        failure = _one_line(written) or f"{note.driver} {action} ended with {code}"
    if failure or not keep:
        _kill_below(os.getpid())
    os.write(answer, failure.encode())
    os.close(answer)
    while True:
        _reap()
        if not os.read(output, _OUTPUT):  # nobody has it any more
            os.waitid(os.P_ALL, 0, os.WEXITED)  # until none is left, which raises


def _exec(note: SharedNote, action: str, output: int) -> None:
    gid, groups = groups_of(note.uid)
    for number in (1, 2):
        os.dup2(output, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.setsid()
    for number in (signal.SIGPIPE, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    os.umask(0o022)
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(note.uid, note.uid, note.uid)
    try:
        note.become_driver(action)
    except OSError as error:
        os.write(2, f"{note.driver} cannot be run: {error.strerror}".encode())


def _wait(child: int, output: int, deadline: float) -> tuple[int | None, str]:
    """Return the driver's exit code, None if it is late, and the end of what it wrote."""
    written = b""
    code = None
    os.set_blocking(output, False)
    while code is None and time.monotonic() < deadline:
        select.select([output], [], [], _PAUSE)
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
        with suppress(BlockingIOError):
            while block := os.read(output, _OUTPUT):
                written = (written + block)[-_OUTPUT:]
        if not ended:
            time.sleep(_PAUSE)  # also where nobody has the pipe any more
    os.set_blocking(output, True)
    return code, written.decode(errors="replace")


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def _kill(keeper: str) -> None:
    """Kill all that the keeper has below it. Raise OSError for what does not end."""
    number, _, begun = keeper.partition(" ")
    if not number or _begun(int(number)) != begun:
        return  # it has ended, and another process may have its number
    deadline = time.monotonic() + _KILL_LIMIT
    while _begun(int(number)) == begun:
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes of its driver, below process {number}, do not end")
        _kill_below(int(number))
        time.sleep(_PAUSE)


def _kill_below(ancestor: int) -> None:
    """Kill the descendants of a process, also those that begin meanwhile, as long as it takes."""
    deadline = time.monotonic() + _KILL_LIMIT
    while (below := _below(ancestor)) and time.monotonic() < deadline:
        for number in below:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        if ancestor == os.getpid():
            _reap()
        time.sleep(_PAUSE)


def _below(ancestor: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and (fields := _stat(int(name))):
            children.setdefault(int(fields[1]), []).append(int(name))
    found = [ancestor]
    for number in found:  # grows while it is read
        found += children.get(number, [])
    return found[1:]


def _stat(number: int) -> list[str]:
    """Return the fields of /proc/NUMBER/stat from the state on (proc(5)); none if it has ended."""
    with (
        suppress(OSError),
        open(f"/proc/{number}/stat", encoding="utf-8", errors="replace") as file,
    ):
        return file.read().rpartition(")")[2].split()
    return []


def _begun(number: int) -> str:
    """Return when a process began, empty if it has ended."""
    fields = _stat(number)
    return fields[19] if fields and fields[0] not in "ZX" else ""


def _remove(path: str, uid: int | None = None) -> None:
    """Unmount what is mounted at ``path``, in root's folder, or beneath; remove it as the owner.

    Raise OSError for what stays.
    """
    folder, name = os.path.split(path)
    with suppress(FileNotFoundError), opened(folder) as parent:
        for _ in range(_ROUNDS):
            points = [one.point for one in mounts() if f"{one.point}/".startswith(f"{path}/")]
            for point in points:
                if point == path:
                    linux.unmount(path, UnmountFlag.DETACH | UnmountFlag.NOFOLLOW)
                else:
                    _unmount_in(parent, os.path.relpath(point, folder))
            if not points:
                break
        owner = os.stat(name, dir_fd=parent, follow_symlinks=False).st_uid if uid is None else uid
        gid, groups = groups_of(owner)
        answer_as(owner, gid, groups, lambda _: _empty(path), _REMOVE_LIMIT)
        os.rmdir(name, dir_fd=parent)


def _unmount_in(folder: int, path: str) -> None:
    """Unmount what is mounted beneath a user's folder: a link on the way leads nowhere."""
    with suppress(OSError):
        there = linux.open_beneath(folder, os.fsencode(path), os.O_PATH)
        try:
            # Only by this link does the kernel take the very mount that was opened.
            linux.unmount(f"/proc/self/fd/{there}", UnmountFlag.DETACH)
        finally:
            os.close(there)


def _empty(path: str) -> None:
    """Remove all that is in the folder, also where its owner has forbidden it.

    Folders come up to the top first: what lies deep has a longer path than the kernel takes.
    """
    os.chmod(path, 0o700)
    before: list[str] = []
    while (names := sorted(os.listdir(path))) != before:
        before = names
        for name in names:
            with suppress(OSError):
                _take(path, f"{path}/{name}")


def _take(top: str, path: str) -> None:
    """Remove a file, or a folder whose own folders get another name in ``top``. Raise OSError."""
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
        return
    _open_up(path)
    with suppress(PermissionError):  # another user's goes if it is empty
        for entry in os.scandir(path):
            if entry.is_dir(follow_symlinks=False):
                _open_up(entry.path)
                os.rename(entry.path, f"{top}/{os.urandom(8).hex()}")
            else:
                os.unlink(entry.path)
    os.rmdir(path)


def _open_up(folder: str) -> None:
    """Let the owner write in a folder: else nothing in it goes, nor can it be moved."""
    with suppress(PermissionError):
        os.chmod(folder, 0o700)
