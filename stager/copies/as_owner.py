"""Carry out root's command about one user's copies, in a process of that user.

Root touches no path that a user named. What the process answers is judged as what comes from
another node; one that does not answer in time is left alone.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import replace

from stager.base.child import answer_as
from stager.base.errors import LaunchError, PolicyRefusal
from stager.copies.upkeep import Command, NodeResult, Refused, carry_out
from stager.disk.cache import RECORD_LIMIT
from stager.root.as_user import groups_of

#: Seconds for all that one user's copies need; the removal of a million files may take a minute.
_LIMIT = 120.0
#: The most bytes of an answer.
_LONGEST = 32 << 20


def carry_out_for(user: int, command: Command, disk: str, limit: float = _LIMIT) -> NodeResult:
    """Carry out ``command`` as the ``user`` on the node whose disk is seen at ``disk``.

    Raise PolicyRefusal unless this process is root's.
    """
    check_may_ask(user)

    def act(output: int) -> None:
        result = carry_out(replace(command, job=0), disk)
        with open(output, "wb") as file:
            file.write(zlib.compress(json.dumps(result.to_wire()).encode()))

    try:
        # To unpin a copy, its record is written.
        told = answer_as(user, *groups_of(user), act, limit, file_size=RECORD_LIMIT)
        answer = zlib.decompressobj().decompress(told, _LONGEST)
        return NodeResult.from_wire(json.loads(answer))
    except (zlib.error, ValueError, TypeError, KeyError, RecursionError):
        text = (
            f"what a process of uid {user} answered cannot be read, and some of it may be done; "
            "stagectl status --user shows what is left; name single copies, then try again"
        )
    except OSError:
        text = (
            f"a process that looks at the copies of uid {user} as this user did not answer within "
            f"{limit:g} s; look for a filesystem of that user that does not answer, or for a "
            "process of that user that stops it; then try again"
        )
    return NodeResult(refused=[Refused(LaunchError.code, text)])


def check_may_ask(user: int) -> None:
    """Raise PolicyRefusal if this process may not ask about the copies of ``user``."""
    if os.getuid() not in (0, user):
        raise PolicyRefusal(
            f"only root may use the copies of another user (uid {user}); run this as root, or "
            "leave out --user"
        )
