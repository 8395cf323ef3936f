"""Read lists of hosts: hostfiles of MPI libraries and schedulers, and lists such as ``n[1-4]``.

What is read here becomes arguments of mpiexec and ssh, so a host must look like one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stager.base.errors import UsageError
from stager.base.text import printable
from stager.launch import job

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

#: Returns the text of a file. Raises OSError or UnicodeError.
Read = Callable[[str], str]

#: The most hosts, and characters of the longest name (RFC 1035).
MOST_HOSTS, _LONGEST_NAME = 65_536, 253
#: A name or an IPv4 address. The first character keeps options of ssh from being taken for one.
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
#: What may stand behind a host: Open MPI's ``slots=2``, and the ``:2`` of MPICH.
_SETTING = re.compile(r"[A-Za-z_-]+=\S*")
_RANKS = re.compile(r":[0-9]+$")
#: A range in a list of hosts, such as the ``1-4`` of ``n[1-4]``.
_RANGE = re.compile(r"([0-9]{1,18})-([0-9]{1,18})")


#: Characters of a hostfile that are read: MOST_HOSTS lines with long names.
_LONGEST_FILE = 16 << 20


@dataclass(frozen=True, slots=True)
class Hosts:
    """Hosts on which ranks are to be started, each once, and what named them."""

    names: tuple[str, ...]
    #: What the user knows it by: an option, a variable.
    origin: str
    #: The program by which mpiexec starts its part on another host; empty for the site's.
    agent: tuple[str, ...] = ()
    #: Variables of the job's environment that mpiexec or this program needs.
    variables: Mapping[str, str] = field(default_factory=dict)


def read_text(path: str) -> str:
    """Return the text of the file, up to a limit: the `Read` of all but tests."""
    with open(path, encoding="ascii") as file:
        return file.read(_LONGEST_FILE)


def read_hostfile(path: str, origin: str, read: Read) -> tuple[str, ...]:
    """Return the hosts in the file ``path``, which ``origin`` names.

    Raise UsageError if it cannot be read, names no host, or has a line that is none of a hostfile.
    """
    try:
        text = read(path)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a text"
        raise UsageError(f"{_named(path, origin)} cannot be read: {why}; check the path") from None
    return parse_hostfile(text, _named(path, origin))


def from_variable(
    environment: Mapping[str, str], variable: str, prefixes: tuple[str, ...], read: Read
) -> Hosts | None:
    """Return the hosts in the file that ``variable`` names, None if it names none.

    The scheduler's own agent in the place of ssh needs the variables that begin with one of the
    ``prefixes``. Raise UsageError as `read_hostfile` does.
    """
    path = environment.get(variable)
    if not path:
        return None
    needed = {name: value for name, value in environment.items() if name.startswith(prefixes)}
    return Hosts(read_hostfile(path, variable, read), variable, variables=needed)


def parse_hostfile(text: str, where: str) -> tuple[str, ...]:
    """Return the hosts in the ``text`` of a hostfile, in their order, each once.

    A line has a host, or several as ``n[1-4]``, and how many ranks it takes, which is ignored:
    ``n1 slots=2`` of Open MPI, ``n1:2`` of MPICH. Behind ``#`` is a comment. Raise UsageError,
    which names the file as ``where``.

    >>> parse_hostfile("n1 slots=2\\nn2:2\\n# n3\\nn1\\n", "the hostfile")
    ('n1', 'n2')
    """
    found: dict[str, None] = {}
    left = MOST_HOSTS
    for number, line in enumerate(text.splitlines(), 1):
        host, *settings = line.partition("#")[0].split() or [""]
        if not all(map(_SETTING.fullmatch, settings)):
            raise UsageError(
                f"{where}, line {number}: {printable(line)} is not a host with its slots; write "
                "one host on each line, such as n1 or n1 slots=2"
            )
        if host:
            names = _unfolded(_RANKS.sub("", host), f"{where}, line {number}", left)
            if len(names) > 1:  # a scheduler names a host alone once for each of its ranks
                left -= len(names)
            found.update(dict.fromkeys(names))
        if len(found) > MOST_HOSTS:
            raise _too_many(where)
    if not found:
        raise UsageError(f"{where} names no host; write one host on each line")
    return tuple(found)


def parse_list(text: str, where: str) -> tuple[str, ...]:
    """Return the hosts of a list such as ``n[1-4],login``. Raise UsageError."""
    return tuple(_unfolded(text, where))


def parse_lines(lines: Iterable[str], where: str) -> tuple[str, ...]:
    """Return the hosts of a list with one on each line. Raise UsageError."""
    return parse_hostfile("\n".join(lines), where)


def _unfolded(text: str, where: str, most: int = MOST_HOSTS) -> list[str]:
    """Return the hosts of a list, which are counted before they are made. Raise UsageError."""
    names = [text]
    if "[" in text or "," in text:
        size = 1
        for first, last in _RANGE.findall(text):
            size *= max(1, int(last) - int(first) + 1)
        if size > most:
            raise _too_many(where)
        # A '@' would name a group of the site's, which a command may look up.
        names = job.unfold(text) if "@" not in text else [text]
    for name in names:
        if not _HOST.fullmatch(name) or len(name) > _LONGEST_NAME:
            raise UsageError(
                f"{where}: {printable(name[:_LONGEST_NAME])} is not the name of a host; names have "
                "letters, digits, '.', '-' and '_', and do not begin with '-'"
            )
    return names


def _too_many(where: str) -> UsageError:
    return UsageError(f"{where} names more than {MOST_HOSTS} hosts; name fewer")


def _named(path: str, origin: str) -> str:
    return printable(f"the hostfile {path}" if origin == path else f"{path} ({origin})")
