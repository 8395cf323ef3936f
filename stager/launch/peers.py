"""Choose the library that authenticates the connections between ranks (``prolog/peers``)."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from stager.base import paths
from stager.base.errors import NOT_LOADABLE, LaunchError

if TYPE_CHECKING:
    from stager.request.policy import Policy

_KEY_BYTES = 16
#: How a library begins (elf(5)).
_ELF = b"\x7fELF"


def library_for(nodes: int, policy: Policy) -> str | None:
    """Return the library that the ranks on so many ``nodes`` preload, None if they need none.

    An installation by pip alone has none. Raise LaunchError if that for a site lacks it, or if this
    user cannot load it: the loader would go on without.
    """
    if nodes < 2 or not policy.launch.authenticate:
        return None
    library = os.path.join(sys.prefix, paths.PEERS_LIBRARY)
    if _is_loadable(library):
        return library
    of_a_site = (library, os.path.join(sys.prefix, paths.SITE_SCRIPT))
    if any(map(_may_be_there, of_a_site)):
        raise LaunchError(library + NOT_LOADABLE)
    return None


def _may_be_there(path: str) -> bool:
    """Whether ``path`` exists, or lies in a folder that this user may not look into."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    return True


def _is_loadable(library: str) -> bool:
    with suppress(OSError), open(library, "rb") as file:
        return file.read(len(_ELF)) == _ELF
    return False


def peer_key() -> dict[str, str]:
    """Return the variable with a new key, for the ranks of one stage alone."""
    return {paths.PEERS_KEY: os.urandom(_KEY_BYTES).hex()}
