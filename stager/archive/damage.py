"""Why can an archive or a compressed file not be read: what is its user told?"""

from __future__ import annotations

import lzma
import struct
import zipfile
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stager.base.errors import SourceError, SpaceError, StageError, write_traceback

if TYPE_CHECKING:
    from collections.abc import Iterator


class DamagedError(Exception):
    """The archive or file cannot be read any further, for this problem."""


class UnsupportedError(Exception):
    """It is undamaged, but not to be read here: why, and what can be done."""


#: What is raised for damaged data, also by the libraries; bz2 raises an OSError without a number.
#: Anything else may be a fault of this program.
_SIGNS_OF_DAMAGE = (
    DamagedError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, struct.error,
    OSError, EOFError, ValueError, LookupError, OverflowError, NotImplementedError,
)  # fmt: skip


@contextmanager
def explained(name: str, what: str, verb: str) -> Iterator[None]:
    """Turn whatever ends the reading of ``name`` into a StageError, besides an error of the disk.

    ``what`` it is and the ``verb`` for what is done with it are for the message: archive, unpack.
    """
    try:
        yield
    except StageError:
        raise
    except MemoryError:
        raise SpaceError(
            f"{name}: too little memory to {verb} it; request more for the job (--mem)"
        ) from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise SourceError(f"{name} cannot be {verb}ed: {_why(error, what)}") from None


def _why(error: Exception, what: str) -> str:
    if isinstance(error, UnsupportedError):
        return str(error)
    if isinstance(error, _SIGNS_OF_DAMAGE):
        problem = str(error) or "it ends early"
        remedy = "get an undamaged copy of it, or create it again"
        return f"the {what} is damaged ({problem}); {remedy}"
    write_traceback()
    return f"{error!r}; show this output to the administrator: it may be a fault of slurm-stage"
