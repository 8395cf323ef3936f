"""What a process says of its own progress: a count, and what it does."""

from __future__ import annotations

import threading

from stager.base.telemetry import Activity, Kind, about, count, counted, current, doing, wait_for


def test_what_is_done_is_counted() -> None:
    before = counted()
    count()
    assert counted() == before + 1


def test_what_a_thread_does_ends_with_the_block() -> None:
    about("/nvme/data")
    assert current() == (Kind.WAIT, "/nvme/data")
    with doing(Kind.STEP):
        with doing(Kind.READ, "/shared/data"):
            assert current() == (Kind.READ, "/shared/data")
        assert current() == (Kind.STEP, "/nvme/data")
        wait_for(Kind.SEND)
        assert current() == (Kind.SEND, "/nvme/data")
    assert current() == (Kind.WAIT, "/nvme/data")
    about("")


def test_of_several_threads_the_one_that_the_others_wait_for_is_named() -> None:
    inside, over = threading.Barrier(3), threading.Event()

    def act(kind: Kind, what: str) -> None:
        with doing(kind, what):
            inside.wait()
            over.wait()

    for kind, what in ((Kind.WRITE, "/nvme/data"), (Kind.READ, "/shared/data")):
        threading.Thread(target=act, args=(kind, what)).start()
    with doing(Kind.RECEIVE):
        inside.wait()
        assert current() == Activity(Kind.READ, "/shared/data")
    over.set()
