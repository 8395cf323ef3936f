"""Look for the sources of directives on this node, before a job looks for them on its own."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from stager.base.child import LateAnswerError, answer
from stager.source.location import is_url

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: Seconds for looking at all sources.
_LIMIT = 2.0
#: Bytes of the number of an error, 0 for none.
_NUMBER = 2


def unseen(sources: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each path that this user cannot read on this node, and why. URLs are not looked at.

    If a filesystem gives no answer, the paths behind it are not looked at.
    """
    paths = [source for source in dict.fromkeys(sources) if not is_url(source)]

    def look(output: int) -> None:
        for path in paths:
            os.write(output, _error_of(path).to_bytes(_NUMBER, "big"))

    try:
        numbers = answer(look, _LIMIT) if paths else b""
    except LateAnswerError as error:
        numbers = error.so_far
    for at, path in enumerate(paths):
        number = int.from_bytes(numbers[at * _NUMBER : (at + 1) * _NUMBER], "big")
        if at * _NUMBER == len(numbers):
            yield path, f"no answer for {_LIMIT:.0f} s"
            return
        if number:
            yield path, os.strerror(number)


def _error_of(path: str) -> int:
    """Return the number of the error with which a path cannot be read, 0 for none."""
    try:
        os.stat(path)
    except OSError as error:
        return error.errno or 0
    except ValueError:  # a null byte
        return errno.EINVAL
    return 0 if os.access(path, os.R_OK) else errno.EACCES
