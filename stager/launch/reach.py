"""Ask hosts over ssh until all answer: mpiexec would fail, or wait for ever, if one does not.

Each is asked whether it has the Python of the ranks. A host that refuses for a reason that time
does not mend ends the wait. To open a connection costs ssh more time than all that it does then, so
mpiexec uses those over which hosts were asked: ssh keeps one open for other processes that name the
same socket (ControlMaster in ssh_config(5)).
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stager.base.errors import LaunchError
from stager.base.text import printable
from stager.launch.job import fold, search_path

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import BinaryIO

    Tell = Callable[[list[str], float], None]
    from collections.abc import Iterator

#: Hosts that are asked at once; seconds between two questions to one, and for the answer to one.
_FAN_OUT, _PAUSE, _PATIENCE = 64, 1.0, 20.0
#: Seconds between two reports of who has not answered.
_PERIOD = 5.0
#: Bytes of an answer that are looked at.
_LONGEST = 4096
#: What ssh says (ssh(1)) where it would say the same again, and what to do then.
_FINAL = (
    (re.compile(r"Permission denied"), "let your key log in there (ssh-copy-id HOST)"),
    (re.compile(r"Host key verification failed"), "accept its host key (ssh HOST)"),
)
_REMEDY = "try ssh HOST true, leave it out, or wait longer (--wait SECONDS)"
#: The exit code of ``test`` that says no.
_NO = 1


class _Refused(Exception):
    """A host answered, but will never do what is asked."""


async def _ask(argv: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return nothing if the command ends with 0, else why not. Raise _Refused if that is final.

    What it says goes to memory, not to a pipe: a process that it leaves behind, as ssh does to
    share a connection, would keep a pipe open.
    """
    try:
        with open(os.memfd_create("answer"), "rb") as said:
            code = await _exit_code(argv, environment, said)
            said.seek(max(0, os.fstat(said.fileno()).st_size - _LONGEST))
            text = said.read(_LONGEST).decode(errors="replace")
    except OSError as error:
        raise LaunchError(f"{argv[0]} cannot be started: {error.strerror}") from None
    return "it does not answer" if code is None else judge(code, text, by_ssh=_is_ssh(argv[0]))


async def _exit_code(
    argv: Sequence[str], environment: Mapping[str, str], said: BinaryIO
) -> int | None:
    """Return the exit code of a command whose stderr is ``said``; None if it does not end in time.

    It has been killed then. Raise OSError if it cannot be started.
    """
    asked = await asyncio.create_subprocess_exec(
        *argv, env=environment, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL, stderr=said,
    )  # fmt: skip
    try:
        return await asyncio.wait_for(asked.wait(), _PATIENCE)
    except TimeoutError:
        return None
    finally:
        if asked.returncode is None:
            with suppress(ProcessLookupError):
                asked.kill()
            await asked.wait()


def _is_ssh(program: str) -> bool:
    return os.path.basename(program) == "ssh"


def judge(code: int, said: str, *, by_ssh: bool) -> str:
    """Return nothing if a host answered, else why it did not. Pure.

    ``code`` and ``said`` are the exit code and the messages of the agent; ssh ends with that of the
    command on the host, or with 255. Raise _Refused if asking again is in vain.
    """
    if code == 0:
        return ""
    lines = [line for line in said.splitlines() if line.strip()]
    why = printable(lines[-1].strip().rstrip(".").rpartition(": ")[2]) if lines else ""
    for pattern, remedy in _FINAL:
        if pattern.search(said):
            raise _Refused(f"{why}; {remedy}")
    if code == _NO and (by_ssh or not lines):  # a host may greet with some lines
        raise _Refused(
            f"{sys.executable} is not there; install slurm-stage there as on this host, at the "
            "same path"
        )
    return why or f"it ended with code {code}"


def wait_for(
    hosts: Sequence[str],
    agent: Sequence[str],
    environment: Mapping[str, str],
    limit: float,
    tell: Tell,
) -> None:
    """Return when all ``hosts`` have answered.

    ``agent`` is ssh, or what stands in for it, with its options. ``tell`` is called every few
    seconds with the hosts that have not answered, and the seconds so far. Raise LaunchError if one
    has not after ``limit`` seconds, or at once if it never will.
    """
    wait = _Wait(hosts, agent, environment, limit)
    if hosts:
        asyncio.run(wait.run(tell))
    problem = f"no answer within {limit:g} s"
    failed = wait.refused or {
        host: f"{problem} ({why}); {_REMEDY}" if why else f"{problem}; {_REMEDY}"
        for host, why in wait.silent.items()
    }
    if failed:
        raise LaunchError(_grouped({host: failed[host] for host in hosts if host in failed}))


class _Wait:
    """Asks hosts, again and again, and knows which have not answered, and why."""

    def __init__(
        self,
        hosts: Sequence[str],
        agent: Sequence[str],
        environment: Mapping[str, str],
        limit: float,
    ) -> None:
        self.silent = dict.fromkeys(hosts, "")
        self.refused: dict[str, str] = {}
        self._agent = agent
        self._environment = environment
        self._begun = time.monotonic()
        self._limit = limit
        self._slots = asyncio.Semaphore(_FAN_OUT)

    async def run(self, tell: Tell) -> None:
        """Ask until all have answered, one never will, or the time is over."""
        asked = [asyncio.create_task(self._ask_until_answer(host)) for host in self.silent]
        teller = asyncio.create_task(self._tell(tell))
        try:
            async with asyncio.timeout(self._limit):
                await _first_error(asked)
        except (TimeoutError, _Refused):
            pass
        finally:
            for task in (*asked, teller):
                task.cancel()
            await asyncio.gather(*asked, teller, return_exceptions=True)

    async def _tell(self, tell: Tell) -> None:
        while True:
            await asyncio.sleep(_PERIOD)
            tell(list(self.silent), time.monotonic() - self._begun)

    async def _ask_until_answer(self, host: str) -> None:
        argv = [*self._agent, host, "test", "-x", sys.executable]
        while True:
            async with self._slots:
                try:
                    why = await _ask(argv, self._environment)
                except _Refused as refused:
                    self.refused[host] = str(refused)
                    raise
            if not why:
                del self.silent[host]
                return
            self.silent[host] = why
            await asyncio.sleep(_PAUSE)


async def _first_error(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait for all tasks. If one raises, wait a moment for others that do, and raise the same."""
    done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    if others:
        more, _ = await asyncio.wait(others, timeout=_PAUSE)
        done |= more
    for task in done:
        task.result()


def _grouped(hosts: Mapping[str, str]) -> str:
    """Return a line for each different text, with its hosts; HOST in it becomes the first of them.

    All but the first are indented, as lines of one message.

    >>> _grouped({"n1": "no answer; try ssh HOST true", "n2": "no answer; try ssh HOST true"})
    'n[1-2]: no answer; try ssh n1 true'
    """
    named: dict[str, list[str]] = {}
    for host, why in hosts.items():
        named.setdefault(why, []).append(host)
    return "\n  ".join(
        f"{fold(names)}: {why.replace('HOST', names[0])}" for why, names in named.items()
    )


def ssh_agent(named: str) -> list[str]:
    """Return the command that stage.toml names, found in PATH; ssh must not ask for a password.

    Raise LaunchError if it is not there.
    """
    program, *options = shlex.split(named)
    path = shutil.which(program, path=search_path(program))
    if path is None:
        raise LaunchError(
            f"{program} is not installed here, by which other hosts are reached; install it, or "
            "name another program in stage.toml (agent in [launch])",
            os.uname().nodename,
        )
    return [path, *(("-o", "BatchMode=yes") if _is_ssh(path) else ()), *options]


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
