"""Watch between ranks: each holds a connection to the next, and ends when it breaks.

Neither MPI over TCP nor Slurm reports a rank whose slurmstepd was killed: the other ranks would
wait for it for ever. The kernel reports it, by closing the rank's connections. Before a rank ends
normally it sends a goodbye, so that its neighbours do not miss it.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stager.wire.codec import BYTES, NUMBER, TEXT, record_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Seconds in which the connections to both neighbours must be made. A neighbour that cannot be
#: reached is not watched, for example where a firewall lets only MPI through.
_PATIENCE = 5.0
#: Bytes by which the connecting rank proves that it is the neighbour, and by which the listening
#: rank confirms it; and the byte that a rank sends before it ends.
_TOKEN_SIZE, _PROOF_SIZE, _GOODBYE = 16, 16, b"."
#: Seconds of silence before the kernel probes the other side, seconds between probes, and their
#: number: a node that lost its power does not close its connections.
_KEEPALIVE = (30, 10, 6)


@dataclass(frozen=True, slots=True)
class Address:
    """Where the rank on ``node`` listens, the token that it expects and the proof it answers."""

    node: str
    host: str
    port: int
    token: bytes
    proof: bytes


ADDRESS = record_of(Address, node=TEXT, host=TEXT, port=NUMBER, token=BYTES, proof=BYTES)


class Guard:
    """One rank's connections to its two neighbours in the ring of ranks.

    ``on_loss`` is called, in a thread, with the node of a neighbour whose connection broke. Raise
    OSError if this rank cannot listen.
    """

    def __init__(self, node: str, on_loss: Callable[[str], None]) -> None:
        self._on_loss = on_loss
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=dual)
        self._listener.settimeout(_PATIENCE)
        port = self._listener.getsockname()[1]
        token, proof = os.urandom(_TOKEN_SIZE), os.urandom(_PROOF_SIZE)
        self.address = Address(node, socket.gethostname(), port, token, proof)
        self._connections: list[socket.socket] = []
        self._has_left = False
        self._lock = threading.Lock()
        self._attempts_done = threading.Semaphore(0)

    def watch(self, ring: Sequence[Address], rank: int) -> None:
        """Connect to the neighbours of ``rank``, and watch each in a thread.

        Return when both are connected, or found to be unreachable.
        """
        previous, following = ring[rank - 1], ring[(rank + 1) % len(ring)]
        neighbours = (
            (previous, self._accept_previous),
            (following, lambda: self._connect_to(following)),
        )
        for neighbour, connect in neighbours:
            arguments = (neighbour.node, connect)
            threading.Thread(target=self._watch, args=arguments, daemon=True).start()
        for _ in neighbours:
            self._attempts_done.acquire()
        self._listener.close()

    def leave(self) -> None:
        """Say goodbye to the neighbours; from now on no loss is reported on either side."""
        with self._lock:
            self._has_left = True
            for connection in self._connections:
                with suppress(OSError):
                    connection.send(_GOODBYE)

    def _watch(self, node: str, connect: Callable[[], socket.socket]) -> None:
        """Connect to the neighbour on ``node``, and wait for the end of the connection."""
        try:
            connection = self._add(connect())
        except OSError:  # the network lets no connection through
            return
        finally:
            self._attempts_done.release()
        received = b""
        with suppress(OSError):
            received = connection.recv(1)
        if received != _GOODBYE and not self._has_left:
            self._on_loss(node)

    def _connect_to(self, following: Address) -> socket.socket:
        """Connect to the next rank. Raise OSError if something else answers at its address."""
        connection = socket.create_connection((following.host, following.port), _PATIENCE)
        connection.sendall(following.token)
        if connection.recv(_PROOF_SIZE, socket.MSG_WAITALL) != following.proof:
            connection.close()
            raise ConnectionError
        return connection

    def _accept_previous(self) -> socket.socket:
        """Accept the previous rank, and close connections of strangers. Raise OSError."""
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            connection, _ = self._listener.accept()
            connection.settimeout(_PATIENCE / 2)
            with suppress(OSError):
                if connection.recv(_TOKEN_SIZE, socket.MSG_WAITALL) == self.address.token:
                    connection.sendall(self.address.proof)
                    return connection
            connection.close()
        raise TimeoutError

    def _add(self, connection: socket.socket) -> socket.socket:
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        for option, value in zip(options, _KEEPALIVE, strict=True):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        with self._lock:
            self._connections.append(connection)
        return connection
