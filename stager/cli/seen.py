"""Look for the sources of directives on this node, before a job looks for them on its own."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import struct
import time
from typing import TYPE_CHECKING, NamedTuple

from stager.base.child import LateAnswerError, answer
from stager.base.errors import SourceError
from stager.launch.url_file import content
from stager.source.location import is_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

#: Seconds for looking at all sources.
_LIMIT = 2.0
#: What is told of one path: the number of an error, 0 for none, and whether it is a folder.
_ANSWER = struct.Struct("!H?")


def contents() -> Callable[[str], str]:
    """Return what reads files as `url_file.content`, but for `_LIMIT` in all; then OSError."""
    deadline = time.monotonic() + _LIMIT

    def read(path: str) -> str:
        try:
            left = deadline - time.monotonic()
            told = answer(lambda output: _tell_content(path, output), left) if left > 0 else b""
        except LateAnswerError:
            told = b""
        if not told:
            raise TimeoutError(errno.ETIMEDOUT, f"no answer for {_LIMIT:g} s")
        text, problem, number = json.loads(told)
        if number:
            raise OSError(number, os.strerror(number))
        if problem:
            raise SourceError(problem)
        return str(text)

    return read


def _tell_content(path: str, output: int) -> None:
    text, problem, number = "", "", 0
    try:
        text = content(path)
    except SourceError as error:
        problem = error.message
    except OSError as error:
        number = error.errno or errno.EIO
    os.write(output, json.dumps((text, problem, number)).encode())


class Seen(NamedTuple):
    """What is at a path: why this user cannot read it here, if so, and whether it is a folder."""

    problem: str
    is_folder: bool = False


def missing(sources: Iterable[str]) -> list[str]:
    """Return the paths that are not in a folder which this node sees; none if it does not answer.

    A name with a ``*`` is looked for in the folder above it.
    """
    paths = (source.rstrip("/") for source in sources if not is_url(source))
    folders = {path: os.path.dirname(re.split("[*?]", path)[0]) for path in paths}
    seen = look([*folders, *folders.values()])
    absent, unknown = Seen(os.strerror(errno.ENOENT)), Seen("")
    return [
        path
        for path, folder in folders.items()
        if seen.get(path) == absent and seen.get(folder, unknown).is_folder
    ]


def look(sources: Iterable[str]) -> dict[str, Seen]:
    """Look at paths on this node for `_LIMIT` seconds, as this user. URLs are left out.

    If a filesystem gives no answer, the paths after the first one there are left out, too.
    """
    paths = [source for source in dict.fromkeys(sources) if not is_url(source)]

    def tell(output: int) -> None:
        for path in paths:
            os.write(output, _ANSWER.pack(*_look_at(path)))

    try:
        answers = answer(tell, _LIMIT) if paths else b""
    except LateAnswerError as error:
        answers = error.so_far
    whole = len(answers) // _ANSWER.size
    told = _ANSWER.iter_unpack(answers[: whole * _ANSWER.size])
    found = {
        path: Seen(os.strerror(number) if number else "", is_folder)
        for path, (number, is_folder) in zip(paths, told, strict=False)
    }
    if whole < len(paths):
        found[paths[whole]] = Seen(f"no answer for {_LIMIT:g} s")
    return found


def _look_at(path: str) -> tuple[int, bool]:
    """Return the number of the error with which a path cannot be read, and if it is a folder."""
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
    except OSError as error:
        return error.errno or 0, False
    except ValueError:  # a null byte
        return errno.EINVAL, False
    return 0 if os.access(path, os.R_OK) else errno.EACCES, is_folder
