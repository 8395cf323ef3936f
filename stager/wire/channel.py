"""Exchange signed messages among the ranks of one stage.

Whoever reaches a rank's port can try to speak as another rank: MPI libraries do not authenticate
their peers. So each message is signed with the stage's key, which only its own ranks know. The
signature covers the number of the exchange, its kind and the sender, so a message that is repeated,
held back, or passed on as another rank's is refused as well.

Each rank first sends one frame of fixed size, which is signed as a whole. A message that is short
is in the frame; of a longer one the frame has the length and a digest. So nothing is allocated, and
no message is read, before it is known that a rank of this stage sent it.
"""

from __future__ import annotations

import time
from _blake2 import blake2b  # hashlib is slow to import: it loads OpenSSL
from _operator import _compare_digest  # hmac, which has it, imports hashlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from mpi4py import MPI

from stager.base.codec import TEXT
from stager.base.errors import LaunchError
from stager.wire.layout import KEY_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stager.base.codec import Codec

T = TypeVar("T")

#: Bytes of a frame: most messages are in it, so that one call of MPI behind the barrier is enough.
FRAME = 512
#: Bytes of the parts of a frame: the signature, the message's length, then the message or, of a
#: longer one, its digest.
_SIGNATURE, _LENGTH, _DIGEST = 16, 8, 32
_CONTENT = FRAME - _SIGNATURE - _LENGTH
#: Most bytes that one rank may send to all: what it says about each item of a request.
MOST_OF_A_RANK = 64 << 20
#: Most bytes that all ranks together may send to all: MPI counts them by 31 bits, and each rank
#: holds them all.
MOST_OF_ALL = 1 << 30
#: Most bytes that one rank may send when it alone sends: the listing of a folder, of which a
#: million files take 200 MiB. A table on the disk may have as many (`store.cache`).
MOST_OF_ONE = 4 << 30
#: Bytes of such a message that travel at a time, since MPI counts them by 31 bits.
_PIECE = 1 << 28
#: Seconds for which a rank that waits for others looks without a pause, then its first and its
#: longest pause between two looks.
_SPIN, _FIRST_NAP, _LONGEST_NAP = 200e-6, 50e-6, 500e-6
#: The kinds of exchange.
_ALLGATHER, _BCAST = b"allgather", b"bcast"
#: What to do where somebody interferes. The launcher adds "submit again".
_REMEDY = (
    "another process there, or the network, interfered; tell the administrator, and use nodes that "
    "no other job shares (--exclusive)"
)
#: What to do where MPI itself fails.
_MPI_REMEDY = (
    "the network, or interface or environment in [launch] of stage.toml, may be at fault; tell the "
    "administrator (stagectl doctor in a job of two nodes)"
)


class _Frame(NamedTuple):
    """What a rank's frame says: the length of its message, and the message or its digest."""

    length: int
    content: memoryview

    @property
    def is_long(self) -> bool:
        """Whether the message follows the frame."""
        return self.length > _CONTENT


class Channel:
    """Signed messages among the ranks of ``comm``, of which this one runs on ``node``.

    All methods are collective, and so is making the channel. They raise LaunchError if a message
    was not signed with the ``key``, is too long, or is not what was expected. The ranks do not
    agree on that error: whoever meets it must end all of them.
    """

    def __init__(self, comm: MPI.Intracomm, key: bytes, node: str) -> None:
        if len(key) != KEY_SIZE:
            raise ValueError(f"a key has {KEY_SIZE} bytes, not {len(key)}")
        self._comm = comm
        self._key = key
        #: The number of the exchange: it is the same on all ranks, and no two have the same.
        self._number = 0
        #: The node of each rank, as it said itself; empty until all have.
        self.nodes: Sequence[str] = ()
        self.nodes = self.allgather(node, TEXT)

    def allgather(self, value: T, codec: Codec[T]) -> list[T]:
        """Send ``value`` to all ranks, and return the values of all in rank order."""
        messages = self.allgather_bytes(codec.encode(value))
        return [self._decode(codec, message, rank) for rank, message in enumerate(messages)]

    def bcast(self, value: T, codec: Codec[T], root: int = 0) -> T:
        """Return the ``value`` of rank ``root``; that of the others does not matter."""
        sent = codec.encode(value) if self._comm.rank == root else b""
        return self._decode(codec, self.bcast_bytes(sent, root), root)

    def allgather_bytes(self, message: bytes) -> list[memoryview]:
        """Send ``message`` to all ranks, and return the messages of all in rank order."""
        self._number += 1
        signed, received = self._sign(_ALLGATHER, message), bytearray(FRAME * self._comm.size)
        with self._clear_errors():
            meet(self._comm)
            self._comm.Allgather(signed, received)
        frames = [
            self._verify(_ALLGATHER, rank, memoryview(received)[rank * FRAME :][:FRAME])
            for rank in range(self._comm.size)
        ]
        lengths = [frame.length if frame.is_long else 0 for frame in frames]
        if not any(lengths):
            return [frame.content[: frame.length] for frame in frames]
        return self._allgather_rest(message, frames, lengths)

    def _allgather_rest(
        self, message: bytes, frames: Sequence[_Frame], lengths: Sequence[int]
    ) -> list[memoryview]:
        """Return the messages of all ranks, of which some are longer than a frame."""
        for rank, length in enumerate(lengths):
            self._check_length(length, MOST_OF_A_RANK, self._name(rank))
        self._check_length(sum(lengths), MOST_OF_ALL, "all nodes together")
        rest = memoryview(bytearray(sum(lengths)))
        mine = message if lengths[self._comm.rank] else b""
        with self._clear_errors():
            self._comm.Allgatherv([mine, MPI.BYTE], [rest, list(lengths), MPI.BYTE])
        messages: list[memoryview] = []
        for rank, frame in enumerate(frames):
            if frame.is_long:
                messages.append(self._check_digest(rank, frame, rest[: frame.length]))
                rest = rest[frame.length :]
            else:
                messages.append(frame.content[: frame.length])
        return messages

    def bcast_bytes(self, message: bytes, root: int = 0) -> memoryview:
        """Return the ``message`` of rank ``root``; that of the others does not matter."""
        self._number += 1
        sends = self._comm.rank == root
        received = bytearray(self._sign(_BCAST, message) if sends else FRAME)
        with self._clear_errors():
            meet(self._comm)
            self._comm.Bcast(received, root)
        frame = self._verify(_BCAST, root, memoryview(received))
        if not frame.is_long:
            return frame.content[: frame.length]
        self._check_length(frame.length, MOST_OF_ONE, self._name(root))
        whole = memoryview(message) if sends else memoryview(bytearray(frame.length))
        for begin in range(0, frame.length, _PIECE):
            with self._clear_errors():
                self._comm.Bcast([whole[begin : begin + _PIECE], MPI.BYTE], root)
        return self._check_digest(root, frame, whole)

    def fresh_key(self) -> bytes:
        """Return a key that all ranks share, and that no other call returns."""
        self._number += 1
        return blake2b(_word(self._number), key=self._key, digest_size=KEY_SIZE).digest()

    def _sign(self, kind: bytes, message: bytes) -> bytes:
        content = message
        if len(message) > _CONTENT:
            content = blake2b(message, digest_size=_DIGEST).digest()
        rest = _word(len(message)) + content.ljust(_CONTENT, b"\0")
        return self._signature(kind, self._comm.rank, rest) + rest

    def _signature(self, kind: bytes, sender: int, rest: bytes | memoryview) -> bytes:
        signature = blake2b(key=self._key, digest_size=_SIGNATURE, person=kind)
        signature.update(_word(self._number) + _word(sender))
        signature.update(rest)
        return signature.digest()

    def _verify(self, kind: bytes, sender: int, frame: memoryview) -> _Frame:
        """Return what a frame says. Raise LaunchError unless its sender signed it."""
        expected = self._signature(kind, sender, frame[_SIGNATURE:])
        if not _compare_digest(expected, frame[:_SIGNATURE]):
            raise self._not_signed(sender)
        rest = frame[_SIGNATURE:]
        return _Frame(int.from_bytes(rest[:_LENGTH], "big"), rest[_LENGTH:])

    def _check_digest(self, sender: int, frame: _Frame, message: memoryview) -> memoryview:
        expected = blake2b(message, digest_size=_DIGEST).digest()
        if not _compare_digest(expected, frame.content[:_DIGEST]):
            raise self._not_signed(sender)
        return message

    def _not_signed(self, sender: int) -> LaunchError:
        return LaunchError(
            f"a message that claims to come from {self._name(sender)} was not signed by this "
            f"stage: {_REMEDY}"
        )

    def _check_length(self, length: int, most: int, sender: str) -> None:
        if length > most:
            raise LaunchError(
                f"{sender} would send {length} bytes to the other nodes, but {most} are allowed; "
                "stage fewer items in one job, or an archive instead of a folder"
            )

    def _decode(self, codec: Codec[T], message: memoryview, sender: int) -> T:
        try:
            return codec.decode(message)
        except ValueError as error:
            raise self.unreadable(sender, error) from None

    def unreadable(self, sender: int, error: ValueError) -> LaunchError:
        """Return the error for a message that was signed but cannot be read."""
        return LaunchError(
            f"a message from {self._name(sender)} cannot be read ({error}); tell the "
            "administrator: the nodes may have different versions of slurm-stage"
        )

    def _name(self, rank: int) -> str:
        return self.nodes[rank] if self.nodes else f"rank {rank}"

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        """Turn an error of MPI into a LaunchError."""
        try:
            yield
        except MPI.Exception as error:
            raise interrupted(error) from None


def meet(comm: MPI.Intracomm) -> None:
    """Return once all ranks of ``comm`` have called this. Collective.

    A rank that waits in a blocking call of MPI spins, on a core that another process may need. Here
    it sleeps, unless the others come at once.
    """
    barrier = comm.Ibarrier()
    begun, pause = time.monotonic(), _FIRST_NAP
    # The first test may only receive what lets the second go on.
    while not (barrier.Test() or barrier.Test()):
        if time.monotonic() - begun > _SPIN:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_NAP)


def interrupted(error: MPI.Exception) -> LaunchError:
    """Return the error for a message that MPI could not receive, or not send."""
    if error.Get_error_class() == MPI.ERR_TRUNCATE:
        return LaunchError(f"MPI received what no rank of this stage sent ({error}): {_REMEDY}")
    return LaunchError(f"MPI could not pass a message between the nodes ({error}): {_MPI_REMEDY}")


def refuse_pickle() -> None:
    """Let MPI's methods for Python objects raise: what they receive could run any code."""

    def refuse(*_: object, **__: object) -> bytes:
        raise RuntimeError("ranks exchange no Python objects; use the channel")

    MPI.pickle.__init__(refuse, refuse)  # type: ignore[misc]


def _word(number: int) -> bytes:
    return number.to_bytes(8, "big")
