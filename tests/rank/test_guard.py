"""A rank that dies is reported by its neighbours; one that said goodbye is not."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from stager.rank.guard import Entrance, listen

if TYPE_CHECKING:
    from collections.abc import Iterator

#: A rank that does nothing but watch until a line on stdin makes it leave.
RANK = """
import json, os, sys
from stager.rank.guard import Address, Guard

def lost(node):
    sys.stdout.write(f"lost {node}\\n")  # in one: two threads may report the same loss at once
    sys.stdout.flush()
    os._exit(1)

guard = Guard(sys.argv[1], lost, lambda node: print("unwatched", node, flush=True))
own = guard.address
secrets = [own.token.hex(), own.proof.hex()]
print(json.dumps([own.node, own.host, own.port, *secrets]))
sys.stdout.flush()
ring = [Address(*one[:3], *map(bytes.fromhex, one[3:])) for one in json.loads(sys.stdin.readline())]
guard.watch(ring, int(sys.argv[1]))
print("watching", flush=True)
sys.stdin.readline()
guard.leave()
"""


class Ring:
    """Processes that watch each other, named by their numbers."""

    def __init__(self, stack: ExitStack, size: int) -> None:
        self.ranks = [stack.enter_context(self._start(rank)) for rank in range(size)]
        self.addresses = [json.loads(self.read(rank)) for rank in self.ranks]

    @staticmethod
    def _start(rank: int) -> subprocess.Popen[str]:
        line = [sys.executable, "-c", RANK, str(rank)]
        return subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @staticmethod
    def read(rank: subprocess.Popen[str]) -> str:
        assert rank.stdout
        return rank.stdout.readline()

    def tell(self, text: str, *ranks: subprocess.Popen[str]) -> None:
        """Write a line to these ranks, or to all."""
        for rank in ranks or self.ranks:
            assert rank.stdin
            rank.stdin.write(f"{text}\n")
            rank.stdin.flush()

    def watch(self) -> None:
        """Let the ranks connect to each other; none of them may say that it could not."""
        self.tell(json.dumps(self.addresses))
        assert [self.read(rank) for rank in self.ranks] == ["watching\n"] * len(self.ranks)

    def ends(self) -> list[tuple[int, str]]:
        """Return the exit code of each rank and what it printed."""
        codes = [rank.wait(20) for rank in self.ranks]
        outputs = [rank.stdout.read() for rank in self.ranks if rank.stdout]
        return list(zip(codes, outputs, strict=True))


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
    # Of two ranks, both connections lead to the killed one.
    assert "lost 1" in [line for _, text in (first, *others) for line in text.splitlines()]


@pytest.mark.parametrize("size", [2, 3, 7])
def test_ranks_that_say_goodbye_are_not_reported(stack: ExitStack, size: int) -> None:
    ring = Ring(stack, size)
    ring.watch()
    ring.tell("leave")
    assert ring.ends() == [(0, "")] * size


@pytest.mark.parametrize("sent", [b"?" * 16, b"?"])
def test_the_connection_of_a_stranger_is_closed(stack: ExitStack, sent: bytes) -> None:
    ring = Ring(stack, 3)
    with socket.create_connection(ring.addresses[0][1:3]) as stranger:
        stranger.sendall(sent)
        ring.watch()
        assert stranger.recv(1) == b""
    ring.tell("leave")
    assert ring.ends() == [(0, "")] * 3


@pytest.mark.parametrize("count", [2, 100])
def test_idle_connections_of_strangers_keep_no_neighbour_out(stack: ExitStack, count: int) -> None:
    ring = Ring(stack, 3)
    for address in ring.addresses:
        for _ in range(count):
            stack.enter_context(socket.create_connection(address[1:3]))
    ring.watch()
    ring.tell("leave")
    assert ring.ends() == [(0, "")] * 3


def test_a_neighbour_that_answers_without_the_proof_is_not_watched(stack: ExitStack) -> None:
    """Another program that listens there and closes the connection must not end a stage."""
    ring = Ring(stack, 2)
    with socket.create_server(("localhost", 0)) as other:
        elsewhere = [[node, *other.getsockname(), *rest] for node, _, _, *rest in ring.addresses]
        ring.tell(json.dumps(elsewhere))
        for _ in ring.ranks:
            line, _ = other.accept()
            line.sendall(b"?" * 16)
            line.close()
        for rank, neighbour in zip(ring.ranks, (1, 0), strict=True):
            said = [f"unwatched {neighbour}\n"] * 2 + ["watching\n"]
            assert [ring.read(rank) for _ in said] == said
    ring.tell("leave")
    assert ring.ends() == [(0, "")] * 2


def test_a_neighbour_that_comes_late_is_watched_after_all(stack: ExitStack) -> None:
    ring = Ring(stack, 2)
    with socket.create_server(("localhost", 0)) as other:
        nobody = other.getsockname()
    first, second = ring.ranks
    # The first rank cannot reach the second, and hears nothing of it while the start waits.
    refused = [[node, *nobody, *rest] for node, _, _, *rest in ring.addresses]
    ring.tell(json.dumps(refused), first)
    said = ["unwatched 1\n", "unwatched 1\n", "watching\n"]
    assert [ring.read(first) for _ in said] == said
    ring.tell(json.dumps(ring.addresses), second)
    said = ["unwatched 0\n", "watching\n"]
    assert [ring.read(second) for _ in said] == said
    second.kill()
    assert first.wait(20) == 1
    assert ring.read(first) == "lost 1\n"


def test_strangers_hold_no_more_than_so_many_connections() -> None:
    listener, host = listen()
    address = host, listener.getsockname()[1]
    with ExitStack() as stack, listener, Entrance(listener, b"?" * 16) as entrance:
        lines = [stack.enter_context(socket.create_connection(address)) for _ in range(100)]
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(TimeoutError):
            entrance.admit(time.monotonic() + 0.5)
        assert len(os.listdir("/proc/self/fd")) - before == 64
        assert lines[35].recv(1) == b""  # the oldest had to go
        lines[36].sendall(b"?" * 16)
        with entrance.admit(time.monotonic() + 5) as found:
            assert found.getpeername()[1] == lines[36].getsockname()[1]


def test_who_sends_no_token_is_soon_sent_away() -> None:
    listener, host = listen()
    idle = socket.create_connection((host, listener.getsockname()[1]))
    with idle, listener, Entrance(listener, b"?" * 16) as entrance:
        with pytest.raises(TimeoutError):
            entrance.admit(time.monotonic() + 2.5)
        assert idle.recv(1) == b""
