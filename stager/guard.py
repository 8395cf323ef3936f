"""A line from each rank to the next: where one dies, however it dies, all end.

Neither MPI over TCP nor Slurm tells of a rank whose slurmstepd was killed: the others would wait
for it for ever. The kernel tells, by the end of a connection. A rank says goodbye before it ends.
"""

from __future__ import annotations

import os
import select
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
_PATIENCE = 2.0
#: Bytes that prove a neighbour to be one, and the one by which a rank takes its leave.
_TOKEN_SIZE, _GOODBYE = 16, b"."
#: Seconds of silence after which the kernel asks if the other side is there, between two such
#: questions, and how many of them: a node that lost its power says nothing.
_KEEPALIVE = (30, 10, 6)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a rank listens, and what it wants to be told; ``node`` is for messages."""

    node: str
    host: str
    port: int
    token: bytes


class Guard:
    """One rank's end of two lines; ``lost`` is told the node of a neighbour that is gone."""

    def __init__(self, node: str, lost: Callable[[str], None]) -> None:
        self._lost = lost
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=dual)
        self._listener.settimeout(_PATIENCE)
        port = self._listener.getsockname()[1]
        self.address = Address(node, socket.gethostname(), port, os.urandom(_TOKEN_SIZE))
        self._lines: dict[socket.socket, str] = {}
        self._left = False
        self._set_up = threading.Event()
        self._lock = threading.Lock()

    def watch(self, ring: Sequence[Address], rank: int) -> None:
        """Watch the neighbours of ``rank``, in a thread, from the return on; or do without."""
        before, behind = ring[rank - 1], ring[(rank + 1) % len(ring)]
        threading.Thread(target=lambda: self._run(before, behind), daemon=True).start()
        self._set_up.wait()

    def leave(self) -> None:
        """Take leave of the neighbours: from now on nobody is missed."""
        with self._lock:
            self._left = True
            for line in self._lines:
                with suppress(OSError):
                    line.send(_GOODBYE)

    def _run(self, before: Address, behind: Address) -> None:
        with suppress(OSError):  # a network that does not let ranks meet so
            line = socket.create_connection((behind.host, behind.port), _PATIENCE)
            line.sendall(behind.token)
            self._add(line, behind.node)
        with suppress(OSError):
            self._add(self._accept(), before.node)
        self._listener.close()
        self._set_up.set()
        while self._lines:
            ready, _, _ = select.select(list(self._lines), [], [])
            for line in ready:
                self._hear(line)

    def _accept(self) -> socket.socket:
        """The line of the rank before; others may knock, and are sent away."""
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            line, _ = self._listener.accept()
            line.settimeout(1.0)
            with suppress(OSError):
                if line.recv(_TOKEN_SIZE, socket.MSG_WAITALL) == self.address.token:
                    return line
            line.close()
        raise TimeoutError

    def _add(self, line: socket.socket, node: str) -> None:
        line.settimeout(None)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        for option, value in zip(options, _KEEPALIVE, strict=True):
            line.setsockopt(socket.IPPROTO_TCP, option, value)
        with self._lock:
            self._lines[line] = node
            if self._left:
                line.send(_GOODBYE)

    def _hear(self, line: socket.socket) -> None:
        try:
            said = line.recv(1)
        except OSError:
            said = b""
        with self._lock:
            node = self._lines.pop(line)
        if said != _GOODBYE and not self._left:
            self._lost(node)
