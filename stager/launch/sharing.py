"""Let mpiexec reach hosts by the connections over which they were asked (`reach`).

To open a connection costs ssh more time than all that it does then. It keeps one open for other
processes that name the same socket (ControlMaster in ssh_config(5)).
"""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

#: The most hosts whose connections are kept: each has a process here. Open MPI starts its part on
#: no more hosts from this one, but in a tree.
_MOST_HOSTS = 64
#: Seconds after which a connection that nobody uses ends, if this process was killed.
_KEPT = 10
#: Seconds in which ssh must end where it does not connect.
_PATIENCE = 5.0
#: Hosts of which it is asked at once.
_AT_ONCE = 8
#: A path that is one word to mpiexec: Open MPI splits the agent at ':' and at blanks.
_PLAIN = re.compile(r"[\w/.-]+", re.ASCII)
#: Sockets are named after hosts as these are named here: for two names, ssh may connect to one
#: address by two ways.
_PREFIX = "ssh-"
#: Characters that ssh adds to the name of a socket until it is ready.
_SUFFIX = 17


@dataclass(frozen=True, slots=True)
class Agents:
    """ssh, or what stands in for it, with its options: to ``ask`` hosts, and for mpiexec."""

    ask: tuple[str, ...]
    start: tuple[str, ...]


@contextmanager
def sharing(
    agent: Sequence[str], hosts: Sequence[str], folder: str, environment: Mapping[str, str]
) -> Iterator[Agents]:
    """Yield the agents for ``hosts``. At the end the connections that they share are closed.

    The sockets are in ``folder``, which no other user may enter. Both agents are ``agent`` if
    connections cannot be shared, or are shared by the user's own settings.
    """
    plain = tuple(agent)
    if not _can_share(plain, hosts, folder, environment):
        yield Agents(plain, plain)
        return
    path = "-o", f"ControlPath={folder}/{_PREFIX}%n"
    keep = "-o", "ControlMaster=auto", "-o", f"ControlPersist={_KEPT}"
    try:
        yield Agents((*plain, *path, *keep), (*plain, *path))
    finally:
        _close(plain[0], folder, environment)


def _can_share(
    agent: Sequence[str], hosts: Sequence[str], folder: str, environment: Mapping[str, str]
) -> bool:
    if os.path.basename(agent[0]) != "ssh" or not 0 < len(hosts) <= _MOST_HOSTS:
        return False
    if not _PLAIN.fullmatch(folder) or not _takes_sockets(folder, max(map(len, hosts))):
        return False
    return all(map(shares_nothing_yet, _settings(agent, hosts, environment)))


def _takes_sockets(folder: str, length: int) -> bool:
    """Return whether ssh can make sockets in the folder: else it would not even connect.

    Their names have up to ``length`` characters. ssh makes each under another name, and links it.
    """
    path = f"{folder}/{_PREFIX}{'s' * (length + _SUFFIX)}"
    with suppress(OSError), socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        os.link(path, f"{folder}/linked")
        os.unlink(path)
        os.unlink(f"{folder}/linked")
        return True
    return False


def shares_nothing_yet(settings: str) -> bool:
    """Return whether ssh would share no connection by itself. Pure.

    ``settings`` are what ``ssh -G`` prints, nothing if it failed. A connection that the user has
    opened, perhaps by a second factor, may be the only way to a host.

    >>> shares_nothing_yet("user alice\\ncontrolmaster false\\n")
    True
    >>> shares_nothing_yet("controlmaster false\\ncontrolpath /home/alice/.ssh/n1\\n")
    False
    """
    values = dict(line.partition(" ")[::2] for line in settings.splitlines())
    return values.get("controlmaster") == "false" and "controlpath" not in values


def _settings(
    agent: Sequence[str], hosts: Sequence[str], environment: Mapping[str, str]
) -> list[str]:
    """Return ssh's settings for each host; nothing for one of which it does not tell them."""

    def of_host(host: str) -> str:
        with suppress(OSError, subprocess.SubprocessError):
            return subprocess.run(
                [*agent, "-G", host], env=environment, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, errors="replace", timeout=_PATIENCE, check=True,
            ).stdout  # fmt: skip
        return ""

    from concurrent.futures import ThreadPoolExecutor  # slow to import

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(of_host, hosts))


def _close(ssh: str, folder: str, environment: Mapping[str, str]) -> None:
    """End the processes that keep connections open; one that does not answer ends by itself."""
    with suppress(OSError):
        told = [_tell_to_end(ssh, path, environment) for path in _sockets(folder)]
        for one in told:
            try:
                one.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()


def _sockets(folder: str) -> list[str]:
    with os.scandir(folder) as entries:
        return [
            entry.path
            for entry in entries
            if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode)
        ]


def _tell_to_end(ssh: str, path: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    # It wants the name of a host, but goes by the socket.
    return subprocess.Popen(
        [ssh, "-F", "none", "-S", path, "-O", "exit", "host"], env=environment,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
