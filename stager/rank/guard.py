"""A line from each rank to the next: where one dies, however it dies, all end.

Neither MPI over TCP nor Slurm tells of a rank whose slurmstepd was killed: the others would wait
for it for ever. The kernel tells, by the end of a connection. A rank says goodbye before it ends.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Seconds within which a neighbour's line must be there; without one there is no watch over it, as
#: where a firewall lets MPI through and nothing else.
_PATIENCE = 5.0
#: Bytes by which a neighbour proves to be one, bytes by which it is told that it is believed, and
#: the one by which a rank takes its leave.
_TOKEN_SIZE, _PROOF_SIZE, _GOODBYE = 16, 16, b"."
#: Seconds of silence after which the kernel asks if the other side is there, between two such
#: questions, and how many of them: a node that lost its power says nothing.
_KEEPALIVE = (30, 10, 6)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a rank listens, what it wants to be told and what it answers; ``node`` is its name."""

    node: str
    host: str
    port: int
    token: bytes
    proof: bytes


class Guard:
    """One rank's end of two lines; ``lost`` is told the node of a neighbour that is gone.

    Raises OSError where it cannot listen.
    """

    def __init__(self, node: str, lost: Callable[[str], None]) -> None:
        self._lost = lost
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=dual)
        self._listener.settimeout(_PATIENCE)
        port = self._listener.getsockname()[1]
        token, proof = os.urandom(_TOKEN_SIZE), os.urandom(_PROOF_SIZE)
        self.address = Address(node, socket.gethostname(), port, token, proof)
        self._lines: list[socket.socket] = []
        self._left = False
        self._lock = threading.Lock()
        self._set_up = threading.Semaphore(0)

    def watch(self, ring: Sequence[Address], rank: int) -> None:
        """Watch the neighbours of ``rank``, by two threads, from the return on; or do without."""
        before, behind = ring[rank - 1], ring[(rank + 1) % len(ring)]
        lines = ((before, self._await), (behind, lambda: self._reach(behind)))
        for neighbour, line in lines:
            hold = threading.Thread(target=self._hold, args=(neighbour.node, line), daemon=True)
            hold.start()
        for _ in lines:
            self._set_up.acquire()
        self._listener.close()

    def leave(self) -> None:
        """Take leave of the neighbours: from now on nobody is missed."""
        with self._lock:
            self._left = True
            for line in self._lines:
                with suppress(OSError):
                    line.send(_GOODBYE)

    def _hold(self, node: str, reach: Callable[[], socket.socket]) -> None:
        """Have a line to the neighbour, and hear of its end."""
        try:
            line = self._keep(reach())
        except OSError:  # a network that does not let ranks meet so
            return
        finally:
            self._set_up.release()
        said = b""
        with suppress(OSError):
            said = line.recv(1)
        if said != _GOODBYE and not self._left:
            self._lost(node)

    def _reach(self, behind: Address) -> socket.socket:
        """A line to the rank behind, which has answered that it holds the other end."""
        line = socket.create_connection((behind.host, behind.port), _PATIENCE)
        line.sendall(behind.token)
        if line.recv(_PROOF_SIZE, socket.MSG_WAITALL) != behind.proof:
            line.close()
            raise ConnectionError
        return line

    def _await(self) -> socket.socket:
        """The line of the rank before; others may knock, and are sent away."""
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            line, _ = self._listener.accept()
            line.settimeout(_PATIENCE / 2)
            with suppress(OSError):
                if line.recv(_TOKEN_SIZE, socket.MSG_WAITALL) == self.address.token:
                    line.sendall(self.address.proof)
                    return line
            line.close()
        raise TimeoutError

    def _keep(self, line: socket.socket) -> socket.socket:
        line.settimeout(None)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        for option, value in zip(options, _KEEPALIVE, strict=True):
            line.setsockopt(socket.IPPROTO_TCP, option, value)
        with self._lock:
            self._lines.append(line)
        return line
