"""Ranks take messages of their own stage, and refuse all that others may send in their place."""

from __future__ import annotations

import pickle
import time
import tracemalloc
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import strategies as st
from mpi4py import MPI

from stager.base.codec import NUMBER, TEXT, Codec, list_of
from stager.base.errors import LaunchError
from stager.wire import channel as module
from stager.wire.channel import FRAME, Channel, interrupted, meet, refuse_pickle
from stager.wire.layout import KEY_SIZE
from tests.support.examples import drawn

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = bytes(range(KEY_SIZE))
#: Bytes of a message around the size that is in a frame; others follow it.
SIZES = [0, 1, FRAME - 25, FRAME - 24, FRAME - 23, 3 * FRAME, 100_000]
REMEDY = (
    "another process there, or the network, interfered; tell the administrator, and use nodes that "
    "no other job shares (--exclusive)"
)


@pytest.fixture
def channel(comm: MPI.Intracomm) -> Channel:
    return Channel(comm, KEY, f"n{comm.rank}")


def message(rank: int, size: int) -> bytes:
    return bytes((rank + i) % 251 for i in range(size))


def test_each_rank_says_on_which_node_it_runs(comm: MPI.Intracomm, channel: Channel) -> None:
    assert list(channel.nodes) == [f"n{rank}" for rank in range(comm.size)]


@pytest.mark.parametrize("size", SIZES)
def test_messages_of_any_size_reach_all_ranks(
    comm: MPI.Intracomm, channel: Channel, size: int
) -> None:
    for _ in range(2):
        found = channel.allgather_bytes(message(comm.rank, size))
        assert found == [message(rank, size) for rank in range(comm.size)]
    for root in range(comm.size):
        assert channel.bcast_bytes(message(comm.rank, size), root) == message(root, size)


def test_short_and_long_messages_go_together(comm: MPI.Intracomm, channel: Channel) -> None:
    sizes = [SIZES[(rank + 3) % len(SIZES)] for rank in range(comm.size)]
    found = channel.allgather_bytes(message(comm.rank, sizes[comm.rank]))
    assert found == [message(rank, sizes[rank]) for rank in range(comm.size)]


def test_a_long_message_travels_in_pieces(
    comm: MPI.Intracomm, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE", 1000)
    assert channel.bcast_bytes(message(comm.rank, 4567)) == message(0, 4567)


def test_values_reach_all_ranks(comm: MPI.Intracomm, channel: Channel) -> None:
    assert channel.allgather([comm.rank] * 300, list_of(NUMBER)) == [
        [rank] * 300 for rank in range(comm.size)
    ]
    last = comm.size - 1
    assert channel.bcast(f"from {comm.rank}", TEXT, last) == f"from {last}"


@pytest.mark.parametrize("kind", ["allgather", "bcast"])
def test_a_rank_that_waits_for_others_leaves_them_the_core(
    comm: MPI.Intracomm, channel: Channel, kind: str
) -> None:
    last = comm.size - 1
    comm.Barrier()
    if comm.rank == last:
        time.sleep(0.5)
    before = time.thread_time()
    if kind == "bcast":
        channel.bcast_bytes(b"", last)
    else:
        channel.allgather_bytes(b"")
    assert time.thread_time() - before < 0.25


def test_keys_are_fresh_and_equal_on_all_ranks(comm: MPI.Intracomm, channel: Channel) -> None:
    keys = [channel.fresh_key() for _ in range(3)]
    assert len(set(keys)) == 3
    assert [bytes(one) for one in channel.allgather_bytes(keys[0])] == [keys[0]] * comm.size


@pytest.mark.parametrize("key", [b"", bytes(KEY_SIZE - 1)])
def test_a_stage_without_a_whole_key_is_refused(comm: MPI.Intracomm, key: bytes) -> None:
    with pytest.raises(ValueError, match=r"^a key has 32 bytes, not \d+$"):
        Channel(comm, key, "n1")


# Hostile ranks


def expect(comm: MPI.Intracomm, text: str, exchange: Callable[[], object]) -> None:
    """Run ``exchange`` on all ranks; all but the last must raise LaunchError with ``text``."""
    try:
        exchange()
    except LaunchError as error:
        problem = error.message
    else:
        problem = ""
    if comm.rank < comm.size - 1:
        assert problem == text
    comm.Barrier()


def not_signed(comm: MPI.Intracomm) -> str:
    return (
        f"a message that claims to come from n{comm.size - 1} was not signed by this stage: "
        f"{REMEDY}"
    )


def send_raw(comm: MPI.Intracomm, frame: bytes) -> None:
    """Take part in an allgather of frames with any bytes."""
    meet(comm)
    comm.Allgather(bytearray(frame), bytearray(FRAME * comm.size))


def attack(
    comm: MPI.Intracomm, channel: Channel, frame: Callable[[], bytes], text: str | None = None
) -> None:
    """Let the last rank send ``frame`` where the others exchange messages."""
    is_hostile = comm.size > 1 and comm.rank == comm.size - 1

    def exchange() -> None:
        if is_hostile:
            send_raw(comm, frame())
        else:
            channel.allgather(comm.rank, NUMBER)

    expect(comm, not_signed(comm) if text is None else text, exchange)


def signed(
    channel: Channel, ahead: int = 1, kind: bytes = b"allgather", text: bytes = b"1"
) -> bytes:
    """Return a frame of this rank for the exchange that is so many ``ahead``."""
    channel._number += ahead
    frame = channel._sign(kind, text)
    channel._number -= ahead
    return frame


def test_a_message_that_is_signed_with_another_key(comm: MPI.Intracomm, channel: Channel) -> None:
    def frame() -> bytes:
        channel._key = bytes(KEY_SIZE)
        return signed(channel)

    attack(comm, channel, frame)


def test_the_same_message_with_the_right_key_is_taken(
    comm: MPI.Intracomm, channel: Channel
) -> None:
    attack(comm, channel, lambda: signed(channel), "")


@pytest.mark.parametrize("ahead", [0, 2, 1000])
def test_a_message_that_is_repeated_or_held_back(
    comm: MPI.Intracomm, channel: Channel, ahead: int
) -> None:
    attack(comm, channel, lambda: signed(channel, ahead))


def test_a_message_of_another_kind_of_exchange(comm: MPI.Intracomm, channel: Channel) -> None:
    attack(comm, channel, lambda: signed(channel, kind=b"bcast"))


def test_a_message_that_another_rank_sent(comm: MPI.Intracomm, channel: Channel) -> None:
    class Other:
        rank = 0

    def frame() -> bytes:
        channel._comm = Other()  # type: ignore[assignment]
        return signed(channel)

    attack(comm, channel, frame)


@pytest.mark.parametrize("length", [1 << 60, (1 << 64) - 1, 5, 0])
def test_a_length_that_the_sender_did_not_sign(
    comm: MPI.Intracomm, channel: Channel, length: int
) -> None:
    def frame() -> bytes:
        text = signed(channel)
        return text[:16] + length.to_bytes(8, "big") + text[24:]

    attack(comm, channel, frame)


@pytest.mark.parametrize("size", [0, 1, 100, FRAME - 1])
def test_a_message_that_is_cut(comm: MPI.Intracomm, channel: Channel, size: int) -> None:
    """The last rank sends fewer bytes than the others expect."""
    if comm.size == 1:
        return
    others, whole = comm.size - 1, b"x" * (FRAME - 24)
    # As Allgather's messages would be for a rank at the end of the chain.
    if comm.rank == others:
        for rank in range(others):
            comm.Send(bytearray(signed(channel, text=whole)[:size]), rank)
    else:
        frame = bytearray(FRAME)
        comm.Recv(frame, others)
        channel._number += 1
        with pytest.raises(LaunchError) as refused:
            channel._verify(b"allgather", others, memoryview(frame))
        assert refused.value.message == not_signed(comm)
    comm.Barrier()


def test_a_message_that_is_longer_than_expected(comm: MPI.Intracomm) -> None:
    # Of two ranks: a rank that fails passes nothing on, and others would wait until it ends them.
    pair = comm.Split(0 if comm.rank < 2 else 1)
    assert isinstance(pair, MPI.Intracomm)
    channel = Channel(pair, KEY, "n")
    if pair.size == 2 and pair.rank == 0 and comm.rank == 0:
        meet(pair)
        pair.Bcast(bytearray(FRAME + 1))
    elif comm.rank == 1:
        with pytest.raises(LaunchError) as refused:
            channel.bcast_bytes(b"")
        assert refused.value.message.startswith("MPI received what no rank of this stage sent (")
        assert refused.value.message.endswith(f"truncated): {REMEDY}")
    comm.Barrier()
    pair.Free()


def test_what_fails_in_mpi_itself_is_no_interference() -> None:
    told = interrupted(MPI.Exception(MPI.ERR_INTERN)).message
    assert told == (
        "MPI could not pass a message between the nodes (MPI_ERR_INTERN: internal error): the "
        "network, or interface or environment in [launch] of stage.toml, may be at fault; tell the "
        "administrator (stagectl doctor in a job of two nodes)"
    )


def test_a_length_that_is_signed_is_still_bounded(
    comm: MPI.Intracomm, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Channel._sign

    def sign(self: Channel, kind: bytes, text: bytes) -> bytes:
        if comm.rank < comm.size - 1:
            return real(self, kind, text)
        rest = (1 << 60).to_bytes(8, "big") + bytes(FRAME - 24)
        return self._signature(kind, comm.rank, rest) + rest

    monkeypatch.setattr(Channel, "_sign", sign)
    last = comm.size - 1
    text = (
        f"n{last} would send {1 << 60} bytes to the other nodes, but {{}} are allowed; stage fewer "
        "items in one job, or an archive instead of a folder"
    )
    expect(comm, text.format(module.MOST_OF_A_RANK), lambda: channel.allgather(1, NUMBER))
    expect(comm, text.format(module.MOST_OF_ONE), lambda: channel.bcast(1, NUMBER, last))


def test_all_ranks_together_may_not_send_too_much(
    comm: MPI.Intracomm, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_OF_ALL", 999 * comm.size)
    with pytest.raises(LaunchError) as refused:
        channel.allgather_bytes(bytes(1000))
    assert refused.value.message == (
        f"all nodes together would send {1000 * comm.size} bytes to the other nodes, but "
        f"{999 * comm.size} are allowed; stage fewer items in one job, or an archive instead of a "
        "folder"
    )


@pytest.mark.parametrize("root", [False, True])
def test_a_long_message_other_than_its_frame_announced(
    comm: MPI.Intracomm, channel: Channel, monkeypatch: pytest.MonkeyPatch, root: bool
) -> None:
    real = Channel._sign

    def sign(self: Channel, kind: bytes, text: bytes) -> bytes:
        changed = b"other" + text[5:]
        return real(self, kind, changed if comm.rank == comm.size - 1 else text)

    monkeypatch.setattr(Channel, "_sign", sign)

    def exchange() -> object:
        if root:
            return channel.bcast_bytes(bytes(5000), comm.size - 1)
        return channel.allgather_bytes(bytes(5000))

    expect(comm, not_signed(comm), exchange)


def test_before_the_nodes_are_known_a_rank_is_named(comm: MPI.Intracomm) -> None:
    key = KEY if comm.rank < comm.size - 1 or comm.size == 1 else bytes(KEY_SIZE)
    if comm.size == 1:
        return
    with pytest.raises(LaunchError) as refused:
        Channel(comm, key, f"n{comm.rank}")
    # The last rank, whose key is another one, does not know the others.
    other = 0 if comm.rank == comm.size - 1 else comm.size - 1
    assert refused.value.message == (
        f"a message that claims to come from rank {other} was not signed by this stage: {REMEDY}"
    )


def test_a_signed_message_of_another_shape_is_refused(
    comm: MPI.Intracomm, channel: Channel
) -> None:
    with pytest.raises(LaunchError) as refused:
        channel.allgather("text" if comm.rank == comm.size - 1 else 1, TEXT_OR_NUMBER)
    assert refused.value.message == (
        f"a message from n{comm.size - 1} cannot be read (it is not int); tell the "
        "administrator: the nodes may have different versions of slurm-stage"
    )


#: Sends anything and expects a number.
TEXT_OR_NUMBER: Codec[Any] = Codec(lambda value: value, NUMBER.from_data)


#: Bits to change, and from which byte on.
ANY_CHANGE = st.tuples(
    st.binary(min_size=1, max_size=FRAME).filter(any) | st.just(b"\xff" * FRAME),
    st.integers(0, FRAME - 1),
)


def test_any_change_of_a_frame_is_refused(comm: MPI.Intracomm, channel: Channel) -> None:
    def frame(changes: bytes, at: int) -> bytes:
        text = bytearray(signed(channel))
        for offset, change in enumerate(changes, at):
            text[offset % FRAME] ^= change
        return bytes(text)

    for changes, at in drawn(comm, ANY_CHANGE):
        tracemalloc.start()
        attack(comm, channel, partial(frame, changes, at))
        assert tracemalloc.get_traced_memory()[1] < FRAME * comm.size + 100_000
        tracemalloc.stop()
        channel._number = 1


class Danger:
    """An object whose pickle runs code where it is loaded."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return pytest.fail, ("code of a message was run",)


def test_pickled_objects_are_refused_on_both_sides(comm: MPI.Intracomm) -> None:
    before = MPI.pickle.PROTOCOL
    refuse_pickle()
    try:
        refusal = pytest.raises(RuntimeError, match=r"^ranks exchange no Python objects; use the")
        for send in (
            lambda: comm.allgather(1),
            lambda: comm.gather(1),
            lambda: comm.isend(1, 0),
            lambda: MPI.pickle.dumps(1),
            lambda: MPI.pickle.dumps_oob(1),
            lambda: MPI.pickle.loads(pickle.dumps(Danger())),
            lambda: MPI.pickle.loads_oob(pickle.dumps(Danger()), []),
        ):
            with refusal:
                send()
    finally:
        MPI.pickle.__init__(pickle.dumps, pickle.loads, before)  # type: ignore[misc]
