"""Watch between ranks: each holds a connection to the next, and ends when it breaks.

Neither MPI over TCP nor Slurm reports a rank whose slurmstepd was killed: the other ranks would
wait for it for ever. The kernel reports it, by closing the rank's connections. Before a rank ends
normally it sends a goodbye, so that its neighbours do not miss it.

Where a connection cannot be made, `launch.health` still finds out that a node has failed.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from _operator import _compare_digest  # hmac, which has it, is slow to import
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stager.base.codec import row_of
from stager.base.interfaces import NEAR

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType
    from typing import Self

#: Seconds that the start of a stage waits for the connections, for example where a firewall lets
#: only MPI through. Meanwhile, and afterwards, the ranks go on trying for _PATIENCE.
_START_PATIENCE, _PATIENCE = 5.0, 60.0
#: Seconds between two attempts to connect.
_PAUSE = 0.5
#: Seconds in which who connects must send the token, and how many may be about to: strangers can
#: connect too, but must not keep the neighbour out or fill the memory.
_TOKEN_PATIENCE, _MOST_PENDING = 2.0, 64
#: Bytes by which the connecting rank proves that it is the neighbour, and by which the listening
#: rank confirms it; and the byte that a rank sends before it ends.
_TOKEN_SIZE, _PROOF_SIZE, _GOODBYE = 16, 16, b"."
#: How often the kernel probes a silent neighbour before it gives it up.
_PROBES = 6


@dataclass(frozen=True, slots=True)
class Address:
    """Where the rank on ``node`` listens, the token that it expects and the proof it answers."""

    node: str
    host: str
    port: int
    token: bytes
    proof: bytes


ADDRESS = row_of(Address)


class Guard:
    """One rank's connections to its two neighbours in the ring of ranks.

    ``on_loss`` is called, in a thread, with the node of a neighbour whose connection broke, or
    whose machine has not answered for ``silence`` seconds; ``on_unwatched`` with the node of a
    neighbour to which there is no connection when the start has waited for it long enough. The
    neighbours connect to the address ``host``; without one, to that of this node's name.

    Raise OSError if this rank cannot listen.
    """

    def __init__(
        self,
        node: str,
        on_loss: Callable[[str], None],
        on_unwatched: Callable[[str], None] = lambda _: None,
        silence: float = 90,
        host: str = "",
    ) -> None:
        self._on_loss = on_loss
        self._on_unwatched = on_unwatched
        self._silence = silence
        self._listener, host = listen(host)
        port = self._listener.getsockname()[1]
        token, proof = os.urandom(_TOKEN_SIZE), os.urandom(_PROOF_SIZE)
        self.address = Address(node, host, port, token, proof)
        self._connections: list[socket.socket] = []
        self._has_left = False
        self._lock = threading.Lock()

    def watch(self, ring: Sequence[Address], rank: int) -> None:
        """Connect to the neighbours of ``rank``, and watch each in a thread.

        Return when both are connected, or cannot be reached for now.
        """
        previous, following = ring[rank - 1], ring[(rank + 1) % len(ring)]
        started = [
            self._start(previous.node, self._accept_previous),
            self._start(following.node, lambda deadline: self._connect_to(following, deadline)),
        ]
        deadline = time.monotonic() + _START_PATIENCE
        for node, tried, connected in started:
            tried.wait(max(0.0, deadline - time.monotonic()))
            if not connected.is_set():
                self._on_unwatched(node)

    def leave(self) -> None:
        """Say goodbye to the neighbours; from now on no loss is reported on either side."""
        with self._lock:
            self._has_left = True
            for connection in self._connections:
                _say_goodbye(connection)

    def _start(
        self, node: str, connect: Callable[[float], socket.socket]
    ) -> tuple[str, threading.Event, threading.Event]:
        """Connect to the neighbour on ``node`` and watch it, in a thread.

        Return its node, and what is set after the first attempt and when there is a connection.
        """
        tried, connected = threading.Event(), threading.Event()

        def run() -> None:
            deadline = time.monotonic() + _PATIENCE
            while not connected.is_set() and not self._has_left and time.monotonic() < deadline:
                try:
                    connection = self._add(connect(deadline))
                    connected.set()
                except ConnectionAbortedError:  # the neighbour has too many strangers before it
                    time.sleep(_PAUSE)
                except OSError:  # the network lets no connection through
                    tried.set()
                    time.sleep(_PAUSE)
            tried.set()
            if connected.is_set():
                self._watch(node, connection)

        threading.Thread(target=run, daemon=True).start()
        return node, tried, connected

    def _watch(self, node: str, connection: socket.socket) -> None:
        """Wait for the end of the connection."""
        received = b""
        with suppress(OSError):
            received = connection.recv(1)
        if received != _GOODBYE and not self._has_left:
            self._on_loss(node)

    def _connect_to(self, following: Address, deadline: float) -> socket.socket:
        """Connect to the next rank.

        Raise OSError if that fails, ConnectionAbortedError if no proof comes.
        """
        patience = max(_PAUSE, deadline - time.monotonic())
        connection = socket.create_connection((following.host, following.port), patience)
        with suppress(OSError):
            connection.sendall(following.token)
            if _compare_digest(connection.recv(_PROOF_SIZE, socket.MSG_WAITALL), following.proof):
                return connection
        connection.close()
        raise ConnectionAbortedError

    def _accept_previous(self, deadline: float) -> socket.socket:
        """Accept the previous rank, and close connections of strangers. Raise OSError."""
        with self._listener, Entrance(self._listener, self.address.token) as entrance:
            connection = entrance.admit(deadline)
        connection.sendall(self.address.proof)
        return connection

    def _add(self, connection: socket.socket) -> socket.socket:
        connection.settimeout(None)
        # Probes find a node that lost its power: it does not close its connections.
        between = max(1, int(self._silence / _PROBES))
        for level, option, value in (
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, between),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, between),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._silence * 1000)),
        ):
            connection.setsockopt(level, option, value)
        with self._lock:
            self._connections.append(connection)
            if self._has_left:
                _say_goodbye(connection)
        return connection


class Entrance:
    """Finds among all who connect to ``listener`` the one who sends ``token``."""

    def __init__(self, listener: socket.socket, token: bytes) -> None:
        self._listener = listener
        self._token = token
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        #: The connections without a token as yet, the oldest first, and when each must have it.
        self._pending: deque[tuple[socket.socket, float]] = deque()

    def __enter__(self) -> Self:
        self._listener.setblocking(False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._selector.close()
        for connection, _ in self._pending:
            connection.close()

    def admit(self, deadline: float) -> socket.socket:
        """Return the connection that has sent the token. Raise TimeoutError at the deadline."""
        while (now := time.monotonic()) < deadline:
            self._close_overdue(now)
            until = min(deadline, self._pending[0][1]) if self._pending else deadline
            for key, _ in self._selector.select(max(0.0, until - now)):
                found = self._accept() if key.fileobj is self._listener else self._read(key.fileobj)
                if found:
                    return found
        raise TimeoutError

    def _accept(self) -> socket.socket | None:
        """Take the next connection; the neighbour has usually sent its token already."""
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it is gone again
            return None
        connection.setblocking(False)
        if len(self._pending) == _MOST_PENDING:
            self._drop(self._pending[0][0])
        self._pending.append((connection, time.monotonic() + _TOKEN_PATIENCE))
        self._selector.register(connection, selectors.EVENT_READ)
        return self._read(connection)

    def _read(self, connection: object) -> socket.socket | None:
        """Return the connection if it has sent the token; close it if it sent anything else."""
        assert isinstance(connection, socket.socket)
        try:
            received = connection.recv(_TOKEN_SIZE)
        except BlockingIOError:
            return None
        except OSError:
            received = b""
        if _compare_digest(received, self._token):
            self._forget(connection)
            connection.settimeout(_TOKEN_PATIENCE)
            return connection
        self._drop(connection)
        return None

    def _close_overdue(self, now: float) -> None:
        while self._pending and self._pending[0][1] <= now:
            self._drop(self._pending[0][0])

    def _drop(self, connection: socket.socket) -> None:
        self._forget(connection)
        connection.close()

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._pending = deque(one for one in self._pending if one[0] is not connection)


def listen(host: str = "") -> tuple[socket.socket, str]:
    """Listen at ``host``, else at the address of this node's name; return also that address.

    If the name has no address by which neighbours can reach it, listen at all addresses. Raise
    OSError.
    """
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, 0), family=family), host
    name = socket.gethostname()
    with suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
            host = str(address[0])
            if not host.startswith(NEAR):
                return socket.create_server((host, 0), family=family), host
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=dual), name


def _say_goodbye(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.send(_GOODBYE)
