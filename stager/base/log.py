"""Write a line into this node's system log, without ever waiting for it."""

from __future__ import annotations

import socket
from contextlib import suppress

from stager.base.text import printable

#: Where syslogd or journald listens on every Linux system (syslog(3)).
_LOG_SOCKET = "/dev/log"
#: Facility "user" and severity "info": 1 * 8 + 6 (RFC 3164, section 4.1.1).
_PRIORITY = 14
#: Most bytes of a line. Any log daemon takes 1024 (RFC 3164, section 4.1).
_LONGEST = 1000


def result_line(
    job: int, user: str, size: int, seconds: float, code: int = 0, problem: str = ""
) -> str:
    """Return the line about a stage: ``size`` bytes came to this node, the exit code and why. Pure.

    >>> result_line(17, "alice", 1000, 0.5)
    'job=17 user=alice bytes=1000 seconds=0.500 code=0'
    """
    told = f"job={job} user={user} bytes={size} seconds={seconds:.3f} code={code}"
    # The lines below the first are for the user alone.
    return f"{told}: {problem.partition(chr(10))[0]}" if problem else told


def log(text: str) -> None:
    """Log ``text`` as one line of ``slurm-stage``. It is lost if nobody takes it at once.

    The C library's syslog() would wait for a log daemon that is behind, and the job with it.
    """
    line = f"<{_PRIORITY}>slurm-stage: {printable(text)}".encode(errors="replace")[:_LONGEST]
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.connect(_LOG_SOCKET)
        sender.send(line)
