"""Ranks that die are missed by their neighbours, and those that take their leave are not."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

#: A rank that does nothing but watch, until it is told to leave.
RANK = """
import json, os, sys
from stager.rank.guard import Address, Guard

def lost(node):
    print("lost", node, flush=True)
    os._exit(1)

guard = Guard(sys.argv[1], lost)
told = guard.address
secrets = [told.token.hex(), told.proof.hex()]
print(json.dumps([told.node, "localhost", told.port, *secrets]))
sys.stdout.flush()
ring = [Address(*one[:3], *map(bytes.fromhex, one[3:])) for one in json.loads(sys.stdin.readline())]
guard.watch(ring, int(sys.argv[1]))
assert len(guard._connections) == int(sys.argv[2])
print("watching", flush=True)
sys.stdin.readline()
guard.leave()
"""


class Ring:
    """Processes that watch each other, named by their numbers."""

    def __init__(self, stack: ExitStack, size: int, lines: int = 2) -> None:
        self.ranks = [stack.enter_context(self._start(rank, lines)) for rank in range(size)]
        self.addresses = [json.loads(self._read(rank)) for rank in self.ranks]

    @staticmethod
    def _start(rank: int, lines: int) -> subprocess.Popen[str]:
        line = [sys.executable, "-c", RANK, str(rank), str(lines)]
        return subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @staticmethod
    def _read(rank: subprocess.Popen[str]) -> str:
        assert rank.stdout
        return rank.stdout.readline()

    def tell(self, text: str) -> None:
        for rank in self.ranks:
            assert rank.stdin
            rank.stdin.write(f"{text}\n")
            rank.stdin.flush()

    def watch(self) -> None:
        self.tell(json.dumps(self.addresses))
        assert [self._read(rank) for rank in self.ranks] == ["watching\n"] * len(self.ranks)

    def ends(self) -> list[tuple[int, str]]:
        """How each has ended, and what it said."""
        codes = [rank.wait(20) for rank in self.ranks]
        said = [rank.stdout.read() for rank in self.ranks if rank.stdout]
        return list(zip(codes, said, strict=True))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as kept:
        yield kept


@pytest.mark.parametrize("size", [2, 3, 7])
def test_where_a_rank_is_killed_all_end_and_its_neighbours_name_it(
    stack: ExitStack, size: int
) -> None:
    ring = Ring(stack, size)
    ring.watch()
    ring.ranks[1].kill()
    first, killed, *others = ring.ends()
    assert killed == (-9, "")
    assert {code for code, _ in (first, *others)} == {1}
    # Where there are two, both lines lead to the one that is gone.
    assert "lost 1" in [line for _, text in (first, *others) for line in text.splitlines()]


@pytest.mark.parametrize("size", [2, 3, 7])
def test_ranks_that_take_their_leave_are_not_missed(stack: ExitStack, size: int) -> None:
    ring = Ring(stack, size)
    ring.watch()
    ring.tell("leave")
    assert ring.ends() == [(0, "")] * size


def test_a_stranger_who_knocks_is_sent_away(stack: ExitStack) -> None:
    ring = Ring(stack, 3)
    addresses: list[Any] = ring.addresses
    with socket.create_connection(("localhost", addresses[0][2])) as stranger:
        stranger.sendall(b"?" * 16)
        ring.watch()
        assert stranger.recv(1) == b""
    ring.tell("leave")
    assert ring.ends() == [(0, "")] * 3


def test_who_answers_without_the_proof_is_not_watched(stack: ExitStack) -> None:
    """Something else that listens there, and hangs up, is no reason to end a stage."""
    ring = Ring(stack, 2, lines=0)
    with socket.create_server(("localhost", 0)) as other:
        for address in ring.addresses:
            address[2] = other.getsockname()[1]
        ring.tell(json.dumps(ring.addresses))
        for _ in ring.ranks:
            line, _ = other.accept()
            line.sendall(b"?" * 16)
            line.close()
        assert [ring._read(rank) for rank in ring.ranks] == ["watching\n"] * 2
    ring.tell("leave")
    assert ring.ends() == [(0, "")] * 2
