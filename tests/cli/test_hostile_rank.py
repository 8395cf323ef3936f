"""``stagectl stage`` fails and publishes nothing if one of its ranks is not of this stage.

The ranks are real, started by mpiexec; one of them, or all, run a changed program.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from stager.launch import mpiexec

if TYPE_CHECKING:
    from tests.support.desk import Desk
    from tests.support.stagectl import Ran

#: Starts a rank after ``change`` was run, which sees whether the rank is the ``hostile`` one.
RANK = """
import os, mpi4py
mpi4py.rc(initialize=False, finalize=True, thread_level="funneled")
from stager.base import digest
from stager.wire import channel, forward
from stager.base.digest import Digest
hostile = os.environ["OMPI_COMM_WORLD_RANK"] == "1"
Channel, sign = channel.Channel, channel.Channel._sign
{change}
from stager.rank.__main__ import main
main()
"""
#: Changes what the hostile rank sends from its sixth exchange on.
LATER = """
def other(self, kind, message):
    frame = sign(self, kind, message)
    return {frame} if hostile and self._number >= 6 else frame
Channel._sign = other
"""
REMEDY = (
    "another process there, or the network, interfered; tell the administrator, and use nodes that "
    "no other job shares (--exclusive)"
)
NOT_SIGNED = f"a message that claims to come from {{}} was not signed by this stage: {REMEDY}"


def stage(desk: Desk, monkeypatch: pytest.MonkeyPatch, change: str, *options: str) -> Ran:
    """Stage to three nodes by ranks with a ``change``; return what was printed."""
    program = RANK.format(change=change)
    monkeypatch.setattr(mpiexec, "RANK", (sys.executable, "-I", "-c", program))
    with desk.config.open("a") as config:
        config.write('[transfer]\nchunk = "128KiB"\nalgorithm = "chain"\n')
    value = f"{desk.source}:/nvme/img.sqsh"
    return desk.stagectl("stage", "--local", "3", "--local-root", desk.nodes, *options, value)


def assert_nothing_is_published(desk: Desk) -> None:
    assert [path for path in desk.nodes.rglob("*") if path.is_file() and path.name != "lock"] == []


#: The hostile rank sends its first message again and again.
REPEATED = """
first = []
def again(self, kind, message):
    first.append(sign(self, kind, message))
    return first[0] if hostile else first[-1]
Channel._sign = again
"""


@pytest.mark.parametrize(
    "change",
    [
        LATER.format(frame="bytes(len(frame))"),
        LATER.format(frame="frame[:-1] + b'!'"),
        LATER.format(frame="frame[:16] + b'\\x10' + frame[17:]"),
        REPEATED,
    ],
    ids=["zeros", "another message", "a length of 2**60", "a repeated message"],
)
def test_messages_that_this_stage_did_not_sign_end_it(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    ran = stage(desk, monkeypatch, change)
    assert (ran.code, ran.out) == (8, "")
    problem = NOT_SIGNED.format("node2")
    first = ran.err.splitlines()[0]
    # Whichever rank finds it first reports it.
    assert first in {
        f"stage: staging ended early: node{number}: {problem}; submit again" for number in (1, 2, 3)
    }
    assert ran.err.count(problem) == 1
    assert "Traceback" not in ran.err
    assert_nothing_is_published(desk)


#: The hostile rank has the key of another stage.
OTHER_KEY = """
begin = Channel.__init__
if hostile:
    Channel.__init__ = lambda self, comm, key, node: begin(self, comm, bytes(32), node)
"""


def test_a_rank_with_another_key_is_no_rank_of_this_stage(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = stage(desk, monkeypatch, OTHER_KEY)
    assert (ran.code, ran.out) == (8, "")
    # To the hostile rank itself, all others are strangers.
    first = ran.err.splitlines()[0]
    assert first in {
        f"stage: staging ended early: node{number}: {NOT_SIGNED.format(name)}; submit again"
        for number, name in ((1, "rank 1"), (3, "rank 1"), (2, "rank 0"))
    }
    assert_nothing_is_published(desk)


#: The hostile rank passes on other bytes than it received. On all ranks any two files have the same
#: plain digest, as two texts that somebody made for that.
OTHER_BYTES = """
Digest.hexdigest = lambda self, size: 32 * "0"
send = forward.PointToPoint.send
def pass_on(self, index, message):
    if not hostile or index != 2:
        return send(self, index, message)
    changed = bytearray(message)
    changed[1000] ^= 1
    return send(self, index, memoryview(changed))
forward.PointToPoint.send = pass_on
"""


def test_other_bytes_with_the_same_plain_digest_are_not_published(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stage(desk, monkeypatch, OTHER_BYTES) == (
        7,
        "",
        "stage: node3: /nvme/img.sqsh: the bytes received differ from those sent; submit again\n",
    )
    assert_nothing_is_published(desk)


def test_without_the_keyed_digest_they_would_be_published(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = OTHER_BYTES + "digest.KeyedDigest.hexdigest = lambda self: ''\n"
    assert stage(desk, monkeypatch, change).code == 0
    assert desk.copy(2).read_bytes() == desk.source.read_bytes()
    assert desk.copy(3).read_bytes() != desk.source.read_bytes()


@pytest.mark.parametrize("option", ["--verbose", "--json"])
def test_the_key_is_in_nothing_that_is_printed_or_written(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr(os, "urandom", lambda size: size * b"\x5a")
    change = """
import json
key = json.loads(os.environ["STAGE_REQUEST"])["key"]
assert key == 32 * "5a" and not any(key in word for word in sys.orig_argv), sys.orig_argv
"""
    ran = stage(desk, monkeypatch, f"import sys{change}", option)
    assert ran.code == 0, ran.err
    written = [path.read_bytes() for path in desk.nodes.rglob("*") if path.is_file()]
    assert len(written) >= 6  # three copies and their records
    for text in (ran.out.encode(), ran.err.encode(), *written):
        assert 8 * b"5a" not in text
        assert 8 * b"\x5a" not in text
